"""The surroundings of one replica: the directory as this node trusts it, the answering peers, and their shared text."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from noloco_node.data.samples import Samples
from noloco_node.directory.health_checks import SWEEP_SECONDS, HealthChecks
from noloco_node.directory.membership import Membership, OwnFigures
from noloco_node.directory.records import Directory
from noloco_node.directory.records_call import serve_records
from noloco_node.directory.shared_text import SharedText
from noloco_node.identity.addresses import peers_at
from noloco_node.participant import Participant, ReplicaContext
from noloco_node.transport.interface import Withdraw
from noloco_node.trust.filtered_directory import ScreenedDirectory


class Neighbourhood(Participant):
    """`describe` gives the figures for this replica's record; `on_change` is called after every look."""

    def __init__(
        self,
        context: ReplicaContext,
        directory: Directory,
        samples: Samples | None,
        describe: Callable[[], OwnFigures],
        on_change: Callable[[], None],
    ) -> None:
        self._context = context
        self._directory = directory
        spec, transport, life = context.spec, context.transport, context.spec.limits.record_seconds
        shared = None if samples is None else samples.shared
        text = shared and SharedText(shared, directory, transport.peer_id, life, context.emit)
        self.membership = Membership(
            ScreenedDirectory(directory, transport.conduct),
            transport.peer_stats,
            transport.peer_id,
            context.stage,
            spec.stages,
            life,
            describe,
            on_change,
            self._ask_all,
            text,
        )
        self.checks = HealthChecks(
            transport,
            directory,
            spec.run_id,
            lambda: context.stage,
            life,
            self.membership.others,
            on_change,
            random.Random(f"roll/{context.settings.seed}/{transport.peer_id}"),
            entrances=peers_at(context.settings.initial_peers),
        )

    async def _ask_all(self) -> None:
        """Before it serves; from then on the health check asks by itself."""
        await self.checks.sweep(SWEEP_SECONDS)

    def serve(self) -> tuple[Withdraw, ...]:
        """Tell records to peers that ask, at once: a joiner asks before anybody trains."""
        context = self._context
        return (serve_records(context.transport, context.spec.run_id, self._directory, lambda: context.stage),)

    async def run(self) -> None:
        """Announce this replica, read the directory, check on peers."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.membership.run())
            group.create_task(self.checks.run())
