"""A node's way through a run, from top to bottom: enter, choose a stage, rest while paused, obtain a state, train,
leave.

Each step calls down, into what it is made of, and gives the next one what it has. Which stage a node serves is asked of
`stage_lifecycle`, where its state comes from of `first_state`; it trains and leaves in a `Stay`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from noloco_node import __version__, ambient
from noloco_node.accounting.receipts import open_receipts
from noloco_node.aio import cancel_and_wait
from noloco_node.bootstrap.hello import held_out_loss, serve_hello
from noloco_node.bootstrap.spec_fetch import RunHasEnded, serve_spec
from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.own_paths import join_line
from noloco_node.config.run_spec import RunSpec, check_microbatch_bytes
from noloco_node.data.reading import Reader, open_samples
from noloco_node.data.samples import Position, Samples
from noloco_node.directory.records import DirectoryView
from noloco_node.directory.summary import SwarmSummary, outlook_of
from noloco_node.identity.addresses import to_hand_out
from noloco_node.identity.peer_id import PeerId
from noloco_node.model.stage import Stage, build_stage
from noloco_node.node import start_checks
from noloco_node.node.checkpointing import CheckpointKeeper
from noloco_node.node.claiming import open_run, unusable_checkpoints
from noloco_node.node.first_state import obtain_state
from noloco_node.node.interrupts import Interrupts, PauseSwitch
from noloco_node.node.network import Agree, Entrance, network
from noloco_node.node.replica import Replica
from noloco_node.node.stage_lifecycle import BeginsFrom, stays_of
from noloco_node.node.stay import NodeParts, Stay, save_what_was_not, stopped_event
from noloco_node.sizing.devices import peak_of
from noloco_node.sizing.preflight import note_on_passes
from noloco_node.storage.checkpoint import CheckpointFolder
from noloco_node.storage.run_folder import RunFolder
from noloco_node.telemetry.events import Doing, NodeStarted, NodeStopped, P2pdRestarted, Reachability
from noloco_node.telemetry.of_node import Telemetry
from noloco_node.training.compute_device import check_device, describe_device, device_name, free_cached_memory, idle_gpu
from noloco_node.training.compute_thread import ComputeThread
from noloco_node.training.placing import on_its_device

logger = logging.getLogger(__name__)


Show = Callable[[RunSpec, SwarmSummary], None]
"""Shows a run and its swarm to a person; called on a thread of its own, before anything is built."""


@dataclass(frozen=True, slots=True)
class Departure:
    """With what a node sets out: its settings and folder, and how it finds out which run it takes part in."""

    agree: Agree
    settings: NodeSettings
    folder: RunFolder
    run: str | None
    """The run that the settings name; None for a node that asks its peers."""
    show: Show | None
    started: float
    """On the monotonic clock, seconds."""
    opened: asyncio.Event
    """Set once the folder is this run's."""


async def travel(departure: Departure, telemetry: Telemetry, interrupts: Interrupts) -> NodeStopped:
    """The whole way; the last event says how it ended. Raises UserError for what its user can change."""
    async with _enter(departure, telemetry, interrupts) as node:
        stage = await _choose(node, departure.show)
        while True:
            await _rest(node, stage, interrupts)
            try:
                async with _obtain(node, stage, interrupts) as stay:
                    in_vain, stopped = stay is None, None
                    if stay is not None:
                        await stay.train()
                        stopped = await stay.leave(departure.started)
            except RunHasEnded:
                if node.stays.moving is not None:
                    return _ended_between_two_stages(node, departure.started)
                if not node.was_paused:
                    raise
                return _ended_without_this_node("while this node was paused", departure.started)
            del stay  # two stages may be more than the memory holds
            if stopped is not None:
                return stopped
            interrupts.moves_on()
            if node.paused:
                continue
            stage = await node.stays.back() if in_vain else node.stays.departs()


@contextlib.asynccontextmanager
async def _enter(departure: Departure, telemetry: Telemetry, interrupts: Interrupts) -> AsyncGenerator[NodeParts]:
    """Onto the network, to agreement on the run, and into the folder."""
    settings, folder, emit = departure.settings, departure.folder, telemetry.emit
    check_device(settings.device)
    logger.info("%s", describe_device(settings.device))
    if idle := idle_gpu(settings.device):
        logger.warning("THIS MACHINE'S GPU LIES IDLE, and the processor trains: %s; %s", *idle)
    torch.set_num_threads(settings.torch_threads)
    checkpoints = CheckpointFolder(folder.checkpoints, settings.checkpoints_kept)

    async def agree(door: Entrance) -> RunSpec:
        with interrupts.leaving(only_failed=True):
            return await departure.agree(door)

    pause = PauseSwitch(settings.working_hours)
    interrupts.word = pause.told
    async with network(agree, settings, folder, run=departure.run) as net, _compute_thread() as thread:
        with interrupts.leaving():
            saved = await ambient.elsewhere(open_run, folder, checkpoints, net.spec, net.settings, net.life.birth)
            departure.opened.set()
            emit(Doing(what="joining", detail="preparing its stage", since=ambient.wall()))
            if saved is None and (warning := unusable_checkpoints(checkpoints)) is not None:
                emit(warning)
            await ambient.elsewhere(net.known.save, net.spec.run_id)  # the folder is this run's now
            stays = await stays_of(net.spec, net.settings, net.transport, net.directory)
            node = NodeParts(net, folder, checkpoints, thread, telemetry, stays, pause, saved)
            del saved  # it holds a copy of everything, and is `node`'s to let go of
            _look_back(node)
            yield node


def _look_back(node: NodeParts) -> None:
    """What this node's earlier life, or its stay before a pause, tells of the run's end."""
    spec, signed, saved = node.net.spec, node.stays.signed, node.saved
    for peer, held in node.net.known.holders(spec.run_id, 0):
        signed.seen_at_work(peer, held.seen)
    signed.kept_in(node.folder, spec, saved and saved.standing.progress.clock)


async def _rest(node: NodeParts, stage: int, interrupts: Interrupts) -> None:
    """While this node is to rest: be seen as paused at the stage, and do nothing. Afterwards it begins as a node that
    is started again does: from its checkpoint, or from a stage peer's state where it has fallen behind."""
    net, pause, ended_a_stay = node.net, node.pause, node.paused
    node.paused = False
    if pause.rests:
        await ambient.elsewhere(free_cached_memory, net.settings.device)
        if not ended_a_stay:  # else its replica has said so
            logger.info("%s", pause.why())
            node.emit(_paused_event(pause.why()))
        interrupts.at_rest = True
        async with node.stays.resting(stage):
            await net.beside(pause.ends(), pause.keep(), net.invitation.raised_at_its_end())
        interrupts.at_rest = False
    if ended_a_stay:
        if node.saved is None:  # it lies on the disk
            node.saved = await ambient.elsewhere(node.checkpoints.newest, net.spec.run_id, stage)
        node.was_paused |= node.started
        node.stays.near = False  # others have gone on since
        _look_back(node)


def _paused_event(why: str) -> Doing:
    return Doing(what="paused", detail=why, since=ambient.wall())


async def _choose(node: NodeParts, show: Show | None) -> int:
    """Look who serves what, choose this node's stage, show the run to who wants to see it, and be there for others."""
    net, stays, saved = node.net, node.stays, node.saved
    view: DirectoryView | None = None
    if show is not None or (saved is None and net.settings.stage == "auto"):
        view = await stays.look_around()
    # Before anything is shown: that takes a while, in which the records of the view grow old.
    now = net.directory.now()
    stage = stays.stage = await stays.first_stage(saved and saved.standing.stage)
    if show is not None and view is not None:
        await ambient.elsewhere(show, net.spec, outlook_of(view, now, net.spec.inner.target_tokens))
    stays.emit = net.invitation.emit = net.lives.emit = node.emit
    checks = partial(start_checks.for_a_stage, net.spec, net.settings, stage, node.folder)
    start_checks.report(await ambient.elsewhere(checks))
    net.reach.tell(lambda now: node.emit(Reachability(way=now.way.value, words=now.words())))
    net.supervisor.on_restart = lambda cause: node.emit(P2pdRestarted(cause=cause, restarts=net.supervisor.restarts))
    stays.signed.serve()
    serve_hello(
        net.transport,
        net.spec,
        lambda: stays.stage,
        over=lambda: stays.over,
        held_out=lambda: held_out_loss(node.telemetry.evaluation),
        birth=lambda: net.life.birth,
    )
    serve_spec(net.transport, net.spec)
    return stage


@contextlib.asynccontextmanager
async def _obtain(node: NodeParts, stage_index: int, interrupts: Interrupts) -> AsyncGenerator[Stay | None]:
    """A replica of the stage with the state to begin with, or None where this node came from another stage in vain."""
    stays, resumed = node.stays, node.saved is not None
    async with contextlib.AsyncExitStack() as stack:
        with interrupts.leaving():
            async with stays.arriving(stage_index):
                stay, clock = await _enter_stage(node, stage_index, interrupts, stack)
                origin = await _first_state(node, stay.replica, clock)
            if node.paused and resumed:  # the replica may be newer than the checkpoint, which `_enter_stage` let go
                node.saved = await stay.keeper.save_or_keep()
            if origin is not None:
                moved = stays.arrived(stay.replica, origin)
                if moved is not None or not node.started:
                    node.emit(moved or _started_event(node, stay, origin, resumed=resumed))
                node.started = True
            yield None if origin is None else stay


async def _enter_stage(
    node: NodeParts, stage_index: int, interrupts: Interrupts, stack: contextlib.AsyncExitStack
) -> tuple[Stay, float | None]:
    """A replica that serves, with what accompanies it, and the clock of the checkpoint that it goes on from. The
    checkpoint is taken from `node`, so that its memory is free once this returns."""
    net, stays, spec = node.net, node.stays, node.net.spec
    saved, node.saved = node.saved, None
    walk = stays.ledger.walk if saved is None else saved.standing.walk
    first, own = not node.started, net.daemon.own_id
    stage, samples = await ambient.elsewhere(_prepare, spec, stage_index, own, walk, first=first)
    if samples is not None:
        stack.push_async_callback(ambient.elsewhere, samples.close)
    replica = Replica(
        spec,
        net.settings,
        await on_its_device(spec, net.settings, stage, node.thread),
        net.transport,
        net.directory,
        node.thread,
        samples=samples,
        emit=node.emit,
        ledger=stays.ledger,
        standby_of=lambda: stays.copies.standby_of,
        relayed=net.relayed,
        signed=stays.signed,
    )
    stack.callback(replica.close)
    stack.enter_context(node.telemetry.showing(replica.books.surroundings))
    keeper = CheckpointKeeper(replica, node.checkpoints, node.emit, net.settings, lambda: net.life.birth)
    stack.enter_context(keeper)
    if saved is not None:
        await keeper.resume(saved)
        if node.started:
            replica.books.write()  # the time until now was that of the pause
    ledger, progress = replica.pipeline.ledger, lambda: replica.worker.progress
    receipts = await open_receipts(node.folder.contribution, spec.run_id, stage_index, net.transport, ledger, progress)
    stack.callback(receipts.close)
    replica.serve()
    stay = Stay(node, interrupts, replica, keeper, receipts)
    return stay, None if saved is None else saved.standing.progress.clock


async def _first_state(node: NodeParts, replica: Replica, clock: float | None) -> BeginsFrom | None:
    """Where the replica's state comes from; None where it got none, or where this node is to rest first."""
    net = node.net
    holders = net.known.holders(net.spec.run_id, replica.stage)
    try:
        obtaining = obtain_state(replica, node.stays, clock, node.checkpoints, holders)
        until_paused = _unless_paused(node, obtaining)
        return await net.beside(until_paused, node.pause.keep(), net.invitation.raised_at_its_end())
    except RunHasEnded:
        await save_what_was_not(node, replica, clock)
        raise


async def _unless_paused(node: NodeParts, obtaining: Coroutine[Any, Any, BeginsFrom | None]) -> BeginsFrom | None:
    """What `obtaining` brings. None where this node is to rest before that: what was copied so far is let go."""
    tasks = asyncio.create_task(obtaining), asyncio.create_task(node.pause.begins())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            return tasks[0].result()
    finally:
        await cancel_and_wait(tasks)
    node.paused = True
    if node.pause.rests:
        node.emit(_paused_event(node.pause.why()))
    return None


def _prepare(
    spec: RunSpec, stage_index: int, own: PeerId, position: Position, *, first: bool = True
) -> tuple[Stage, Samples | None]:
    """Build the stage and, on stage 0, read the text from `position` on. Runs off the event loop."""
    stage = build_stage(spec.model, stage_index)
    check_microbatch_bytes(spec, stage.cut_width)
    spare_the_collector(first=first)
    if stage_index > 0:
        return stage, None
    windows = spec.inner.microbatch_windows, spec.evaluation.windows
    samples = open_samples(spec.data, stage.vocab_size, Reader(own, *windows), position)
    if (note := note_on_passes(spec, samples.tokens)) is not None:
        logger.warning("%s", note)
    return stage, samples


def spare_the_collector(*, first: bool) -> None:
    """What is loaded by now is not gone through again by a full collection, which would hold the event loop as long:
    0.27 s of CPU for the 412,000 objects of a node's libraries and a small stage, 6 µs afterwards. That is done before
    the `first` stay only: what is frozen is never freed, as the replica of each stay before a pause or a move was."""
    gc.collect()
    if first:
        gc.freeze()


@contextlib.asynccontextmanager
async def _compute_thread() -> AsyncGenerator[ComputeThread]:
    thread = ComputeThread()
    try:
        yield thread
    finally:
        await thread.close()


def _ended_between_two_stages(node: NodeParts, started: float) -> NodeStopped:
    """The run ended while this node moved between stages. Its state is with its former stage peers."""
    spec = node.net.spec
    node.folder.mark_ended(spec.run_id, spec.name)
    return _ended_without_this_node("while this node was between two stages", started)


def _ended_without_this_node(when: str, started: float) -> NodeStopped:
    logger.warning("the run has come to its end %s", when)
    return stopped_event("target_reached", f"the run has come to its end {when}", started)


def _started_event(node: NodeParts, stay: Stay, origin: BeginsFrom, *, resumed: bool) -> NodeStarted:
    spec, daemon, stage = node.net.spec, node.net.daemon, stay.replica.stage
    device = device_name(node.net.settings.device)
    return NodeStarted(
        peer_id=daemon.own_id,
        stage=stage,
        stages=spec.stages,
        run_id=spec.run_id,
        run_name=spec.name,
        version=__version__,
        pid=os.getpid(),
        addresses=daemon.visible_addresses(),
        metrics_address=node.telemetry.address,
        parameters=stay.replica.worker.outer.size,
        outer_steps_taken=stay.replica.worker.progress.outer_rounds,
        origin=origin,
        resumed=resumed,
        device=device,
        peak_flop_per_second=peak_of(device, spec.inner.precision),
        flop_per_token=node.stays.flop_per_token(stage),
        codec=spec.outer.codec,
        invites=[join_line(spec, address) for address in to_hand_out(daemon.visible_addresses())],
        founded=not node.net.settings.initial_peers,
    )
