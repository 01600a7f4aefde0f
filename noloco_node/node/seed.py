"""A seed: a light node without a stage. It holds the directory together, shows the swarm to its watchers, and
relays only where its owner says so.

It trains with nobody, so it asks the origins themselves whether they are at work, and so learns the end of the run. A
record alone decides nothing, since a key costs nothing. One record of a free key without a process had a seed forget
an ended run for good.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Literal

from noloco_node import ambient
from noloco_node.aio import Heartbeat
from noloco_node.bootstrap.hello import check_same_run, serve_hello
from noloco_node.bootstrap.spec_fetch import fetch_run_spec, serve_spec
from noloco_node.config.load import OwnData
from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import RunSpec
from noloco_node.directory.dht import DhtDirectory
from noloco_node.directory.health_checks import HealthChecks
from noloco_node.directory.live_estimate import is_there
from noloco_node.directory.records import SERVING, Directory, PeerRecord
from noloco_node.directory.signed_end import SignedEnd
from noloco_node.errors import UserError
from noloco_node.identity.addresses import to_hand_out
from noloco_node.node.interrupts import Interrupts, interruptible
from noloco_node.node.network import Entrance, directory_of, entrance, keep_life, supervisor, warn_of_host
from noloco_node.node.way_out import WayOut
from noloco_node.observer import Onlooker
from noloco_node.storage.run_folder import RunFolder
from noloco_node.telemetry.logging import NodeLog, configure_logging
from noloco_node.telemetry.swarm_metrics import SwarmPages
from noloco_node.telemetry.web import WebServer
from noloco_node.transport.interface import Transport
from noloco_node.trust.admission import Access, Introduction, own_access
from noloco_node.trust.lives import LifeWatch, OwnLife, agree_birth
from noloco_node.trust.screened_directory import ScreenedDirectory

LOOKS_A_LIFE = 3
"""Looks within the life of a record, so that no last word is missed."""


class LastWords:
    """Follows the origins of a run. `end` gets what they say; `keep` is told once that the run has come to its end."""

    def __init__(
        self, transport: Transport, directory: Directory, spec: RunSpec, end: SignedEnd, keep: Callable[[], None]
    ) -> None:
        self._transport = transport
        self._directory = directory
        self._end = end
        self._keep = keep
        self._life = spec.limits.record_seconds
        self.checks = HealthChecks(
            transport, directory, spec.run_id, lambda: None, self._life, self._introduced, self._judge, ambient.chance()
        )
        """Asks the origins that records introduce whether they are there."""

    @property
    def over(self) -> bool | None:
        """Whether the run is over; None where this seed has never seen an origin at work."""
        return self._end.ended or (False if self._end.origins else None)

    async def run(self) -> None:
        """Look again and again, and ask the origins, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.checks.run())
            while True:
                await self.look()
                await asyncio.sleep(self._life / LOOKS_A_LIFE)

    async def look(self) -> None:
        await self._directory.refresh()
        self.checks.look()
        self._judge()

    def _introduced(self) -> list[PeerRecord]:
        view, now = self._directory.view, self._directory.now()
        own = self._transport.peer_id
        return [record for record in view.live(0, now) if record.peer_id != own] if view.stages else []

    def _judge(self) -> None:
        known = self._transport.peer_stats
        self._end.look(lambda record: record.state in SERVING and is_there(known, record))
        if self._end.known and not self._end.ended:
            self._end.ended = True
            self._keep()


logger = logging.getLogger(__name__)

ANY_RUN = "any"
"""Stands for the run in the file of peers seen before, where a seed serves no run of its own."""

NO_RUN = "a seed of any run: it holds their records, and knows of none what its nodes do; name a run's CONFIG to see it"
"""What its page says where it knows no run."""

Collects = Callable[[RunSpec, Path, Transport, Directory, Callable[[], bool]], Coroutine[Any, Any, None]]
"""Collects a run's weights into a folder until the run is over: a room above this one does it."""

SeedBegins = Literal["anew", "among_others", "after_the_end"]
"""A seed that no peer has let in begins a swarm, but for one whose folder says that the run has come to its end."""

_Tell = Callable[[RunSpec | None, list[str], SeedBegins, bool], None]
"""Told the run, if there is one, the addresses of the seed, and whether it collects the model, once it is up."""


async def run_seed(
    spec: RunSpec | None,
    settings: NodeSettings,
    tell: _Tell,
    way_out: WayOut | None = None,
    collects: Collects | None = None,
) -> None:
    """Hold the directory together until SIGINT or SIGTERM, which end at once what has only begun. Leaves no process and
    no socket behind; where its `way_out` takes too long, the process ends.

    With a RunSpec, or where initial peers give it theirs, it also hands that out, so that strangers can join a run by
    the seed's address alone; without, it serves whatever runs come by. `collects` makes the run's model in its folder
    while others train. Raises UserError as a node does.
    """
    folder = RunFolder.create(settings.run_folder)
    with folder.lock(), interruptible(way_out) as interrupts:
        try:
            await _run(spec, settings, folder, tell, interrupts, collects)
        except asyncio.CancelledError:
            if not interrupts.cancelled_by_signal:
                raise


async def _run(
    spec: RunSpec | None,
    settings: NodeSettings,
    folder: RunFolder,
    tell: _Tell,
    interrupts: Interrupts,
    collects: Collects | None,
) -> None:
    log = NodeLog()
    configure_logging(settings.log_level, log, style=settings.log_format)
    run = None if spec is None else spec.run_id
    heartbeat = Heartbeat(asyncio.get_running_loop())
    pages = SwarmPages(heartbeat)
    web = WebServer(pages.answers())
    try:
        if settings.metrics_port is not None:
            logger.info("the swarm is shown at http://%s", web.start(settings.metrics_host, settings.metrics_port))
        async with entrance(settings, folder, run=run, may_found=not settings.initial_peers) as door:
            log.observe_seed(door.identity.peer_id)
            warn_of_host(settings, door.daemon.joined_peers)
            agreed = await _agree(spec, door)
            life = None if agreed is None else await _own_life(door, agreed, folder)
            async with directory_of(door, agreed) as directory:
                last, beside = None, list[Coroutine[Any, Any, None]]()
                begins: SeedBegins = "among_others" if door.daemon.joined_peers else "anew"
                if agreed is not None and life is not None:
                    screened = ScreenedDirectory(directory, Access(agreed), life=life)
                    end = SignedEnd(door.transport, screened, agreed)
                    last = last_words(door.transport, screened, folder, agreed, end)
                    end.serve()
                    begins = "after_the_end" if end.ended else begins
                    if collects is not None and _is_let_in(door, agreed, settings):
                        beside.append(collects(agreed, folder.path, door.transport, screened, lambda: end.ended))
                serve_hello(
                    door.transport,
                    agreed,
                    lambda: None,
                    over=lambda: None if last is None else last.over,
                    birth=lambda: None if life is None else life.birth,
                )
                if agreed is not None:
                    serve_spec(door.transport, agreed)
                tell(agreed, to_hand_out(door.daemon.visible_addresses()), begins, bool(beside))
                pages.records = lambda: directory.records_held
                with interrupts.leaving():
                    await _serve(door, directory, agreed, settings, interrupts, pages, last, life, beside)
    finally:
        web.stop()
        heartbeat.stop()


async def _agree(spec: RunSpec | None, door: Entrance) -> RunSpec | None:
    joined = door.daemon.joined_peers
    if spec is not None:
        await check_same_run(door.transport, spec, joined)
        return spec
    if not joined:
        return None
    return await fetch_run_spec(door.transport, joined, OwnData(), reads_text=False, met_in=door.known.run)


def _is_let_in(door: Entrance, spec: RunSpec, settings: NodeSettings) -> bool:
    """Whether the run's nodes give this seed their weights: in a run by invitation it shows its own. Raises UserError
    where that is no good."""
    try:
        access = own_access(spec, settings.invitation, door.identity.peer_id)
    except UserError as error:
        if settings.invitation is not None:
            raise
        logger.warning("THIS SEED COLLECTS NO MODEL: %s; %s", error.message, error.remedy)
        return False
    if access.proof is not None:
        door.transport.introduce_with(Introduction(door.transport, access.proof).show)
    return True


async def _own_life(door: Entrance, spec: RunSpec, folder: RunFolder) -> OwnLife:
    """The life of the run that this seed serves: the one in which it has seen nodes train, else that of its peers."""
    life = await agree_birth(door.transport, spec, door.daemon.joined_peers, _kept(folder, spec))
    keep_life(life, folder, spec)
    if life.settled:
        life.changed(life.birth)
    return life


def _kept(folder: RunFolder, spec: RunSpec) -> str | None:
    try:
        return folder.birth(spec.run_id)
    except UserError:  # it cannot be read
        return None


async def _serve(
    door: Entrance,
    directory: DhtDirectory,
    spec: RunSpec | None,
    settings: NodeSettings,
    interrupts: Interrupts,
    pages: SwarmPages,
    last: LastWords | None,
    life: OwnLife | None,
    beside: Sequence[Coroutine[Any, Any, None]],
) -> None:
    run = ANY_RUN if spec is None else spec.run_id
    companions = [door.known.keep(door.daemon, run, directory.neighbours), *beside]
    if spec is None or last is None or life is None:
        pages.detail = NO_RUN
    else:
        companions.append(last.run())
        lives = LifeWatch(life, door.transport, ScreenedDirectory(directory, Access(spec)), spec)
        lives.worked = lambda: last.over is not None
        companions.append(lives.keep())
        if settings.metrics_port is not None:
            pages.detail = "looking for the nodes of the run"
            companions.append(Onlooker(door.transport, directory, spec, over=bool(last.over)).run(pages.saw))
    interrupts.graceful(stop := asyncio.Event())
    await supervisor(door.daemon, directory, door.known, settings).beside(stop.wait(), *companions)


def last_words(
    transport: Transport, directory: Directory, folder: RunFolder, spec: RunSpec, end: SignedEnd
) -> LastWords:
    """Follows whether the run is over, as its origins say, and keeps that in the seed's folder, for its next life."""

    def keep() -> None:
        logger.info(
            "run '%s' has come to its end; nodes that trained to it and say so: %d", spec.name, len(end.records())
        )
        try:
            folder.mark_ended(spec.run_id, spec.name)
        except UserError as error:
            logger.warning("it is not written down that the run's end has come: %s", error.message)

    end.kept_in(folder, spec)
    return LastWords(transport, directory, spec, end, keep)
