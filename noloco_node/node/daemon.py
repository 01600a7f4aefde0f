"""The daemon: where it gets its run from, its folder locked, its events opened, and how each way of ending is told."""

from __future__ import annotations

import asyncio
import logging

from noloco_node import ambient
from noloco_node.bootstrap.hello import check_same_run
from noloco_node.bootstrap.spec_fetch import TextNotNamed, fetch_run_spec
from noloco_node.config.load import OwnRun
from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import RunSpec
from noloco_node.data.prepared import check_text_here
from noloco_node.errors import UserError
from noloco_node.model.pretrained import with_own_weights
from noloco_node.node.claiming import check_folder
from noloco_node.node.interrupts import interruptible
from noloco_node.node.journey import Departure, Show, travel
from noloco_node.node.network import Agree, Entrance
from noloco_node.node.stay import stopped_event
from noloco_node.node.way_out import WayOut
from noloco_node.storage.checkpoint import CheckpointFolder
from noloco_node.storage.run_folder import RunFolder
from noloco_node.telemetry.events import NodeStopped
from noloco_node.telemetry.of_node import telemetry_of
from noloco_node.telemetry.web import WebServer

logger = logging.getLogger(__name__)


async def run_node(
    spec: RunSpec, settings: NodeSettings, web: WebServer | None = None, way_out: WayOut | None = None
) -> NodeStopped:
    """Run one daemon to the run's end, or until SIGINT or SIGTERM. It leaves no process, socket or thread behind. It
    shows itself on `web` if that is given (`early_pages`), or opens its own. If its `way_out` takes too long, the
    process ends. Raises UserError for everything that the user that started it can change."""

    async def agree(door: Entrance) -> RunSpec:
        await check_same_run(door.transport, spec, door.daemon.joined_peers)
        return spec

    await ambient.elsewhere(check_folder, RunFolder(settings.run_folder), spec, settings)  # before anything is written
    return await _run(agree, settings, None, spec.run_id, web, way_out)


async def join_node(
    own: OwnRun, settings: NodeSettings, show: Show, web: WebServer | None = None, way_out: WayOut | None = None
) -> NodeStopped:
    """`run_node` for the run that the initial peers serve: its RunSpec comes from one of them, and is shown."""

    async def agree(door: Entrance) -> RunSpec:
        reads_text = settings.stage in ("auto", 0)
        try:
            spec = await fetch(door, reads_text=reads_text)
        except TextNotNamed as error:
            if error.stages == 1:
                raise
            if settings.stage == 0 or await ambient.elsewhere(_saved_stage, settings) == 0:
                error.remedy += "; a node of a later stage, such as --stage 1, needs none"
                raise
            spec = await fetch(door, reads_text=False)
            logger.warning("stage 0 is left to others: %s; to serve it, too, %s", error.message, error.remedy)
        spec = await ambient.elsewhere(with_own_weights, spec, own.model.from_pretrained)
        if reads_text and spec.data.is_here:
            await ambient.elsewhere(check_text_here, spec.data)  # before a stage is chosen, announced and built
        return spec

    async def fetch(door: Entrance, *, reads_text: bool) -> RunSpec:
        return await fetch_run_spec(
            door.transport,
            door.daemon.joined_peers,
            own.data,
            reads_text=reads_text,
            met_in=door.known.run,
            brings_state=await ambient.elsewhere(_has_a_checkpoint, settings),
        )

    return await _run(agree, settings, show, None, web, way_out)


async def _run(
    agree: Agree,
    settings: NodeSettings,
    show: Show | None,
    run: str | None,
    web: WebServer | None,
    way_out: WayOut | None,
) -> NodeStopped:
    started = ambient.monotonic()
    folder, opened = RunFolder.create(settings.run_folder), asyncio.Event()
    departure = Departure(agree, settings, folder, run, show, started, opened)

    def last_word(stopped: NodeStopped) -> None:
        """Not into the diary of a run that this node only stumbled into."""
        nonlocal told
        if not told and (opened.is_set() or folder.may_be_of(run)):
            told = True
            emit(stopped)

    def given_up(words: str) -> None:
        last_word(stopped_event("failed", words, started))

    told, bound = False, settings.leave_seconds
    with (
        folder.lock(),
        telemetry_of(folder.events, settings, web) as telemetry,
        interruptible(way_out, bound) as interrupts,
    ):
        emit, interrupts.told = telemetry.emit, telemetry.ends
        if way_out is not None:
            way_out.say = given_up
        try:
            stopped = await travel(departure, telemetry, interrupts)
        except asyncio.CancelledError:
            if not interrupts.cancelled_by_signal:
                raise
            when = "while it was paused" if interrupts.at_rest else "before the work under way was finished"
            stopped = stopped_event("interrupted", when, started)
        except UserError as error:
            last_word(stopped_event("failed", error.message, started))
            raise
        last_word(stopped)
        return stopped


def _checkpoints(settings: NodeSettings) -> CheckpointFolder:
    return CheckpointFolder(RunFolder(settings.run_folder).checkpoints, settings.checkpoints_kept)


def _has_a_checkpoint(settings: NodeSettings) -> bool:
    return _checkpoints(settings).holds_any


def _saved_stage(settings: NodeSettings) -> int | None:
    """The stage that this node's newest checkpoint is of."""
    found = _checkpoints(settings).newest_whole()
    return None if found is None else found[1].stage
