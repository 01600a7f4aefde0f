"""A look at a run from outside: connected to its nodes, with their RunSpec and directory, and no node of it."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path

from noloco_node.bootstrap.spec_fetch import fetch_run_spec
from noloco_node.config.load import OwnData
from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import RunSpec
from noloco_node.directory.dht import DhtDirectory, join_directory
from noloco_node.libp2p.supervisor import Supervisor
from noloco_node.node import start_checks
from noloco_node.node.network import Entrance, entrance, supervisor
from noloco_node.storage.run_folder import RunFolder
from noloco_node.trust.admission import Introduction, own_access


@dataclass(frozen=True, slots=True)
class Outside:
    """The parts that an onlooker is built from."""

    spec: RunSpec
    door: Entrance
    directory: DhtDirectory
    supervisor: Supervisor


@contextlib.asynccontextmanager
async def looking_on(settings: NodeSettings, *, as_guest: bool = False) -> AsyncGenerator[Outside]:
    """Look at the run that the peers at `settings.initial_peers` serve: publishes nothing, has no place in the
    directory, and leaves nothing behind. The peer id is one made for the purpose, but for a guest's.

    `as_guest`: be let in as the run's access demands it, with `settings.invitation` and `settings.identity`, so that
    its nodes give more than their hello. Raises UserError as a node that joins does, where no peer answers, none gives
    a RunSpec, or the run does not admit a guest.
    """
    with tempfile.TemporaryDirectory(prefix="noloco-look-") as made:
        kept = settings.identity if as_guest else None
        own = settings.model_copy(update={"run_folder": Path(made), "identity": kept})
        async with entrance(own, RunFolder(own.run_folder), run=None, may_found=False) as door:
            joined = door.daemon.joined_peers
            spec = await fetch_run_spec(door.transport, joined, OwnData(), reads_text=False)
            start_checks.report(await start_checks.among_peers(door.transport, joined))
            if as_guest:
                access = own_access(spec, settings.invitation, door.identity.peer_id)
                if access.proof is not None:
                    door.transport.introduce_with(Introduction(door.transport, access.proof).show)
            directory = await join_directory(
                door.daemon,
                door.identity,
                spec.run_id,
                spec.stages,
                peer_stats=door.transport.peer_stats,
                record_seconds=spec.limits.record_seconds,
                only_asks=True,
            )
            try:
                yield Outside(spec, door, directory, supervisor(door.daemon, directory, door.known, own))
            finally:
                await directory.close()
