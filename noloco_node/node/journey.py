"""A node's way through a run, from top to bottom: enter, choose a stage, obtain a state, train, leave.

Each step calls down, into what it is made of, and gives the next one what it has: which stage a node serves is asked of
`stage_lifecycle`, where its state comes from of `first_state`, and a stay of it is a `Replica`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from noloco_node import __version__, ambient
from noloco_node.accounting.receipts import Receipts, open_receipts
from noloco_node.aio import cancel_and_wait
from noloco_node.bootstrap.hello import held_out_loss, serve_hello
from noloco_node.bootstrap.spec_fetch import RunHasEnded, serve_spec
from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.own_paths import join_line
from noloco_node.config.run_spec import RunSpec, check_microbatch_bytes
from noloco_node.data.reading import Reader, open_samples
from noloco_node.data.samples import Position, Samples
from noloco_node.data.shared_turns import SharedTurns
from noloco_node.directory.records import DirectoryView, PeerState
from noloco_node.directory.signed_end import near_from
from noloco_node.directory.summary import SwarmSummary, outlook_of
from noloco_node.errors import UserError
from noloco_node.identity.peer_id import PeerId
from noloco_node.model.stage import Stage, build_stage
from noloco_node.node import start_checks
from noloco_node.node.checkpointing import CheckpointKeeper
from noloco_node.node.checks import ClockWatch
from noloco_node.node.claiming import open_run
from noloco_node.node.custody import (
    BACK,
    final_lacks,
    last_of_stage,
    unusable_checkpoints,
)
from noloco_node.node.first_state import obtain_state
from noloco_node.node.interrupts import Interrupts, PauseSwitch
from noloco_node.node.network import Agree, Entrance, Network, network
from noloco_node.node.replica import Replica
from noloco_node.node.stage_lifecycle import BeginsFrom, StageLifecycle, stays_of
from noloco_node.sizing.devices import peak_of
from noloco_node.storage.checkpoint import Checkpoint, CheckpointFolder
from noloco_node.storage.run_folder import RunFolder
from noloco_node.storage.weights import save_stage
from noloco_node.telemetry.events import AnyEvent, Doing, NodeStarted, NodeStopped, P2pdRestarted, Reachability, Warned
from noloco_node.telemetry.of_node import Telemetry
from noloco_node.telemetry.words import as_trained
from noloco_node.training.compute_device import (
    check_device,
    describe_device,
    device_name,
    free_cached_memory,
    idle_gpu,
)
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
    """The run that the settings name; None for who asks its peers."""
    show: Show | None
    started: float
    """On the monotonic clock, seconds."""
    opened: asyncio.Event
    """Set once the folder is this run's."""


@dataclass(slots=True)
class _Place:
    """What every stay of a node stands on."""

    net: Network
    folder: RunFolder
    checkpoints: CheckpointFolder
    thread: ComputeThread
    telemetry: Telemetry
    stays: StageLifecycle
    pause: PauseSwitch
    saved: Checkpoint | None
    """What the first stay goes on from."""
    started: bool = False
    """It has told that it is up."""
    paused: bool = False
    """A pause has ended the last stay, and this node is to come back to its stage."""
    was_paused: bool = False
    """It has trained, and a pause ended that stay."""
    kept: bool = False
    """A stay that a pause has ended goes on from this node's newest checkpoint."""
    refused: UserError | None = None
    """Why this node leaves, where its invitation has ended."""

    @property
    def emit(self) -> Callable[[AnyEvent], None]:
        """Takes every event of the node."""
        return self.telemetry.emit


@dataclass(frozen=True, slots=True)
class _Stay:
    """A replica with what accompanies it."""

    replica: Replica
    parameters: int
    """Of its stage."""
    keeper: CheckpointKeeper
    receipts: Receipts


async def travel(departure: Departure, telemetry: Telemetry, interrupts: Interrupts) -> NodeStopped:
    """The whole way; the last event says how it ended. Raises UserError for what the person who started it can
    change."""
    async with _enter(departure, telemetry, interrupts) as place:
        stage = await _choose(place, departure.show)
        while True:
            await _rest(place, stage, interrupts)
            try:
                async with _obtain(place, stage, interrupts) as stay:
                    in_vain, stopped = stay is None, None
                    if stay is not None:
                        await _train(place, stay, interrupts)
                        stopped = await _leave(place, stay, interrupts, departure.started)
            except RunHasEnded:
                if place.stays.moving is not None:
                    return _ended_between_two_stages(place, departure.started)
                if not place.was_paused:
                    raise
                return _ended_without_this_node("while this node was paused", departure.started)
            del stay  # two stages may be more than the memory holds
            if stopped is not None:
                return stopped
            interrupts.moves_on()
            if place.paused:
                continue
            stage = await place.stays.back() if in_vain else place.stays.departs()


@contextlib.asynccontextmanager
async def _enter(departure: Departure, telemetry: Telemetry, interrupts: Interrupts) -> AsyncGenerator[_Place]:
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
    async with (
        network(agree, settings, folder, run=departure.run) as net,
        _compute_thread() as thread,
    ):
        with interrupts.leaving():
            saved = await ambient.elsewhere(open_run, folder, checkpoints, net.spec, net.settings, net.life.birth)
            departure.opened.set()
            if saved is None and (warning := unusable_checkpoints(checkpoints)) is not None:
                emit(warning)
            await ambient.elsewhere(net.known.save, net.spec.run_id)  # the folder is this run's now
            stays = await stays_of(net.spec, net.settings, net.transport, net.directory)
            place = _Place(net, folder, checkpoints, thread, telemetry, stays, pause, saved)
            del saved  # it holds a copy of everything, and is `place`'s to let go of
            _look_back(place)
            yield place


def _look_back(place: _Place) -> None:
    """What this node's earlier life, or its stay before a pause, tells of the run's end."""
    spec, signed, saved = place.net.spec, place.stays.signed, place.saved
    for peer, held in place.net.known.holders(spec.run_id, 0):
        signed.seen_at_work(peer, held.seen)
    signed.kept_in(place.folder, spec, saved and saved.standing.progress.clock)


async def _rest(place: _Place, stage: int, interrupts: Interrupts) -> None:
    """While this node is to rest: be seen as paused at the stage, and do nothing. Afterwards it begins as a node that
    is started again does: from its checkpoint, or from a stage peer's state where it has fallen behind."""
    net, pause, ended_a_stay = place.net, place.pause, place.paused
    place.paused = False
    if pause.rests:
        await ambient.elsewhere(free_cached_memory, net.settings.device)
        if not ended_a_stay:  # else its replica has said so
            place.emit(_paused_event(pause.why()))
        interrupts.at_rest = True
        async with place.stays.resting(stage):
            await net.beside(pause.ends(), pause.keep(), net.invitation.raised_at_its_end())
        interrupts.at_rest = False
    if place.kept:
        place.kept = False
        place.saved = await ambient.elsewhere(place.checkpoints.newest, net.spec.run_id, stage)
    if ended_a_stay:
        place.was_paused |= place.started
        place.stays.near = False  # others have gone on since
        _look_back(place)


def _paused_event(why: str) -> Doing:
    return Doing(what="paused", detail=why, since=ambient.wall())


async def _choose(place: _Place, show: Show | None) -> int:
    """Look who serves what, choose this node's stage, show the run to who wants to see it, and be there for others."""
    net, stays, saved = place.net, place.stays, place.saved
    view: DirectoryView | None = None
    if show is not None or (saved is None and net.settings.stage == "auto"):
        view = await stays.look_around()
    # Before anything is shown: that takes a while, in which the records of the view grow old.
    now = net.directory.now()
    stage = stays.stage = await stays.first_stage(saved and saved.standing.stage)
    if show is not None and view is not None:
        await ambient.elsewhere(show, net.spec, outlook_of(view, now, net.spec.inner.target_tokens))
    stays.emit = net.invitation.emit = net.lives.emit = place.emit
    checks = partial(start_checks.for_a_stage, net.spec, net.settings, stage, place.folder, moves=stays.may_move)
    start_checks.report(await ambient.elsewhere(checks))
    net.reach.tell(lambda now: place.emit(Reachability(way=now.way.value, words=now.words())))
    net.supervisor.on_restart = lambda cause: place.emit(P2pdRestarted(cause=cause, restarts=net.supervisor.restarts))
    stays.signed.serve()
    serve_hello(
        net.transport,
        net.spec,
        lambda: stays.stage,
        over=lambda: stays.over,
        held_out=lambda: held_out_loss(place.telemetry.evaluation),
        birth=lambda: net.life.birth,
    )
    serve_spec(net.transport, net.spec)
    return stage


@contextlib.asynccontextmanager
async def _obtain(place: _Place, stage_index: int, interrupts: Interrupts) -> AsyncGenerator[_Stay | None]:
    """A replica of the stage with the state to begin with, or None where this node came from another stage in vain."""
    stays, resumed = place.stays, place.saved is not None
    async with contextlib.AsyncExitStack() as stack:
        with interrupts.leaving():
            async with stays.arriving(stage_index):
                stay, clock = await _enter_stage(place, stage_index, stack)
                origin = await _first_state(place, stay.replica, clock)
            place.kept = place.paused and resumed
            if origin is not None:
                moved = stays.arrived(stay.replica, origin)
                if moved is not None or not place.started:
                    place.emit(moved or _started_event(place, stay, origin, resumed=resumed))
                place.started = True
            yield None if origin is None else stay


async def _enter_stage(place: _Place, stage_index: int, stack: contextlib.AsyncExitStack) -> tuple[_Stay, float | None]:
    """A replica that serves, with what accompanies it, and the clock of the checkpoint that it goes on from. That
    checkpoint holds a whole state: it is `place`'s no more, and nobody's once this returns."""
    net, stays, spec = place.net, place.stays, place.net.spec
    saved, place.saved = place.saved, None
    walk = stays.ledger.walk if saved is None else saved.standing.walk
    stage, samples = await ambient.elsewhere(_prepare, spec, stage_index, net.daemon.own_id, walk)
    if samples is not None:
        stack.push_async_callback(ambient.elsewhere, samples.close)
    replica = Replica(
        spec,
        net.settings,
        await on_its_device(spec, net.settings, stage, place.thread),
        net.transport,
        net.directory,
        place.thread,
        samples=samples,
        emit=place.emit,
        ledger=stays.ledger,
        standby_of=lambda: stays.copies.standby_of,
        relayed=net.relayed,
        signed=stays.signed,
    )
    stack.callback(replica.close)
    replica.heed_relays(lambda: net.reach.relayed)
    stack.enter_context(place.telemetry.showing(replica.books.surroundings))
    keeper = stack.enter_context(_keeper(place, replica))
    if saved is not None:
        await keeper.resume(saved)
        if place.started:
            replica.books.write()  # the time until now was that of the pause
    ledger, progress = replica.pipeline.ledger, lambda: replica.worker.progress
    receipts = await open_receipts(place.folder.contribution, spec.run_id, stage_index, net.transport, ledger, progress)
    stack.callback(receipts.close)
    replica.serve()
    parameters = sum(parameter.numel() for parameter in stage.parameters())
    return _Stay(replica, parameters, keeper, receipts), None if saved is None else saved.standing.progress.clock


async def _first_state(place: _Place, replica: Replica, clock: float | None) -> BeginsFrom | None:
    """Where the replica's state comes from; None where it got none, or where this node is to rest first."""
    net = place.net
    holders = net.known.holders(net.spec.run_id, replica.stage)
    try:
        obtaining = obtain_state(replica, place.stays, clock, place.checkpoints, holders)
        until_paused = _unless_paused(place, obtaining)
        return await net.beside(until_paused, place.pause.keep(), net.invitation.raised_at_its_end())
    except RunHasEnded:
        await _save_what_was_not(place, replica, clock)
        raise


async def _unless_paused(place: _Place, obtaining: Coroutine[Any, Any, BeginsFrom | None]) -> BeginsFrom | None:
    """What `obtaining` brings. None where this node is to rest before that: what was copied so far is let go."""
    tasks = asyncio.create_task(obtaining), asyncio.create_task(place.pause.begins())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            return tasks[0].result()
    finally:
        await cancel_and_wait(tasks)
    place.paused = True
    if place.pause.rests:
        place.emit(_paused_event(place.pause.why()))
    return None


def _keeper(place: _Place, replica: Replica) -> CheckpointKeeper:
    net = place.net
    return CheckpointKeeper(replica, place.checkpoints, place.emit, net.settings, lambda: net.life.birth)


async def _train(place: _Place, stay: _Stay, interrupts: Interrupts) -> None:
    """One stay, to its end, and what is kept of it."""
    replica = stay.replica
    place.net.lives.worked = lambda: replica.worker.last_trained.at > 0.0
    interrupts.graceful(replica.stop)
    replica.on_leaving = interrupts.leaves
    leaving = (PeerState.FINISHING, PeerState.DRAINING)
    work = stay.receipts.beside(replica.run(), replica.context.moved, lambda: replica.membership.state in leaving)
    farewell = _say_if_last(place, stay, interrupts)
    companions = (
        stay.keeper.run(),
        place.stays.accompany(replica),
        farewell,
        place.thread.ends_when_lost(),
        ClockWatch(place.net.transport, place.emit).keep(),
        _say_if_shared(place, replica),
        _stop_when_refused(place, replica, interrupts),
        _rest_when_told(place, replica),
        place.pause.keep(),
    )
    life = place.net.beside(work, *companions)
    await run_and_save(life, _saving(place, stay, interrupts))


async def _leave(place: _Place, stay: _Stay, interrupts: Interrupts, started: float) -> NodeStopped | None:
    """How the node ends; None where it only moves on to another stage. Raises UserError (NOT_ADMITTED) where it leaves
    since its invitation has ended: the run goes on without it, so that nothing is marked as ended."""
    if _moves_on(place, interrupts):
        return None
    if _rests(place, stay, interrupts):
        place.paused, place.kept = True, place.saved is None
        return None
    await place.stays.give_up_move()
    if place.refused is not None and not interrupts.asked:
        interrupts.leaves(place.refused.exit_code)
        raise place.refused
    replica, folder, spec = stay.replica, place.folder, place.net.spec
    reason = "interrupted" if replica.stop.is_set() else "target_reached"
    if reason == "target_reached":
        place.stays.signed.own()
        folder.mark_ended(spec.run_id, spec.name)
    return stopped_event(
        reason,
        "",
        started,
        outer_rounds=replica.worker.progress.outer_rounds,
        partners=replica.outer_steps.partners,
        final_weights=str(folder.final.relative_to(folder.path)),
    )


def _ended_between_two_stages(place: _Place, started: float) -> NodeStopped:
    """How a node ends that had left its state to its stage peers, who have come to the run's end without it."""
    spec = place.net.spec
    place.folder.mark_ended(spec.run_id, spec.name)
    return _ended_without_this_node("while this node was between two stages", started)


def _ended_without_this_node(when: str, started: float) -> NodeStopped:
    logger.warning("the run has come to its end %s", when)
    return stopped_event("target_reached", f"the run has come to its end {when}", started)


async def _stop_when_refused(place: _Place, replica: Replica, interrupts: Interrupts) -> None:
    """Leave in order once the node's invitation has ended and peers refuse it: alone it would train to an end that is
    none of the run's."""
    place.refused = error = await place.net.invitation.ends()
    logger.warning("%s: leaving, with everything saved", error.message)
    interrupts.leaves(error.exit_code)
    replica.stop.set()


async def _rest_when_told(place: _Place, replica: Replica) -> None:
    """Leave for a rest once this node is to; not at the run's end, which it is about to leave by."""
    said = False
    while not replica.stop.is_set():
        await place.pause.begins()
        if replica.course.run_goes_on():
            replica.rest(place.pause.why())
        elif not said:
            said = True
            logger.warning("not paused: the run comes to its end here, and this node leaves with everything saved")
        # The run may go on after all.
        await replica.context.moved.wait(1.0)


async def _say_if_shared(place: _Place, replica: Replica) -> None:
    """Say so where another node turns out to run with this one's identity."""
    await replica.membership.twin.seen.wait()
    key = place.net.settings.identity or place.folder.identity
    detail = (
        f"ANOTHER NODE RUNS WITH THIS NODE'S IDENTITY ({place.net.daemon.own_id}), as where a folder or a disk was "
        "copied: each of them takes what was meant for the other, and one may get no work at all. Stop one of them, "
        f"remove its key (here {key}), and start it again: it makes one of its own"
    )
    place.emit(Warned(what="identity_shared", detail=detail))


async def _say_if_last(place: _Place, stay: _Stay, interrupts: Interrupts) -> None:
    """Once this node is told to leave, or its invitation has ended: say so where its stage is left without a
    replica."""
    replica = stay.replica
    await replica.stop.wait()
    if interrupts.asked or place.refused is not None or replica.rests:
        warning = last_of_stage(
            replica.membership,
            place.net.transport.peer_stats.answers,
            place.net.spec.standby_copies,
            kept=not stay.keeper.failing,
            back="resume it soon" if replica.rests else BACK,
        )
        if warning is not None:
            place.emit(warning)


def _prepare(spec: RunSpec, stage_index: int, own: PeerId, position: Position) -> tuple[Stage, Samples | None]:
    """Build the stage and, on stage 0, read the text from `position` on. Runs off the event loop."""
    stage = build_stage(spec.model, stage_index)
    check_microbatch_bytes(spec, stage.cut_width)
    _spare_the_collector()
    if stage_index > 0:
        return stage, None
    reader = Reader(own, spec.inner.microbatch_windows, spec.evaluation.windows)

    def turns(count: int, begin: Position) -> SharedTurns:
        return SharedTurns(count, spec.data.seed, own, spec.limits.record_seconds, random.Random(f"slots/{own}"), begin)

    return stage, open_samples(spec.data, stage.vocab_size, reader, position, turns)


def _spare_the_collector() -> None:
    """What is loaded by now is not gone through again by a full collection, which would hold the event loop as long:
    0.27 s of CPU for the 412,000 objects of a node's libraries and a small stage, 6 µs afterwards."""
    gc.collect()
    gc.freeze()


async def run_and_save(run: Awaitable[None], save: Callable[[], Awaitable[None]]) -> None:
    """Await `run`, then save. Where it fails, what was trained so far is saved and its failure goes on.

    A failure of that rescue is logged, so that it does not take the first one's place. Nothing is saved on
    cancellation: it means to leave at once.
    """
    try:
        await run
    except Exception:
        try:
            await save()
            logger.info("the weights were saved as they are")
        except Exception:
            logger.exception("the weights could not be saved either")
        raise
    await save()


def _moves_on(place: _Place, interrupts: Interrupts) -> bool:
    return place.stays.move is not None and place.refused is None and not interrupts.asked


def _rests(place: _Place, stay: _Stay, interrupts: Interrupts) -> bool:
    return stay.replica.rested and place.refused is None and not interrupts.asked


def _saving(place: _Place, stay: _Stay, interrupts: Interrupts) -> Callable[[], Awaitable[None]]:
    """What saves the last checkpoint and the final weights; those of a stage that this node only leaves for another are
    with its stage peers."""

    async def save() -> None:
        if not _moves_on(place, interrupts):
            rests = _rests(place, stay, interrupts)
            if rests:
                place.saved = await stay.keeper.save_or_keep()
            else:
                await stay.keeper.save()
                await _save_weights(place, stay.replica)

    return save


async def _save_what_was_not(place: _Place, replica: Replica, clock: float | None) -> None:
    """The run has come to its end without this node, or just as its disk was full: its last checkpoint, at that `clock`
    (None: there is none), is all that it has of the run's end."""
    spec, final = place.net.spec, place.folder.final
    target = spec.inner.target_tokens
    if clock is None or not final_lacks(final, clock):
        return
    if clock > near_from(target, spec.max_lag_tokens):
        await _save_weights(place, replica)
        logger.info("the final weights were not here yet: those of the last checkpoint were saved to %s", final)
    else:
        logger.warning("the final weights are not here; the last checkpoint stands at %s", as_trained(clock, target))


async def _save_weights(place: _Place, replica: Replica) -> None:
    """Write the final slow and fast weights under their names in the whole model."""
    slow, fast = (
        {replica.full_names[local]: weight for local, weight in weights.items()}
        for weights in await replica.worker.named_weights()
    )
    progress = replica.worker.progress
    await ambient.elsewhere(
        save_stage,
        place.folder.final,
        run_id=place.net.spec.run_id,
        cut=replica.context.cut,
        clock=progress.clock,
        outer_rounds=progress.outer_rounds,
        slow=slow,
        fast=fast,
    )


@contextlib.asynccontextmanager
async def _compute_thread() -> AsyncGenerator[ComputeThread]:
    thread = ComputeThread()
    try:
        yield thread
    finally:
        await thread.close()


def _started_event(place: _Place, stay: _Stay, origin: BeginsFrom, *, resumed: bool) -> NodeStarted:
    spec, daemon, stage = place.net.spec, place.net.daemon, stay.replica.stage
    device = device_name(place.net.settings.device)
    return NodeStarted(
        peer_id=daemon.own_id,
        stage=stage,
        stages=spec.stages,
        run_id=spec.run_id,
        run_name=spec.name,
        version=__version__,
        pid=os.getpid(),
        addresses=daemon.visible_addresses(),
        metrics_address=place.telemetry.address,
        parameters=stay.parameters,
        outer_rounds=stay.replica.worker.progress.outer_rounds,
        origin=origin,
        resumed=resumed,
        device=device,
        peak_flop_per_second=peak_of(device, spec.inner.precision),
        flop_per_token=place.stays.flop_per_token(stage),
        codec=spec.outer.codec,
        invites=[join_line(spec, address) for address in daemon.visible_addresses()],
        founded=not place.net.settings.initial_peers,
    )


def stopped_event(
    reason: Literal["target_reached", "interrupted", "failed"],
    detail: str,
    started: float,
    *,
    outer_rounds: int = 0,
    partners: dict[str, int] | None = None,
    final_weights: str | None = None,
) -> NodeStopped:
    """The last event of a node, which began at `started` on the monotonic clock (seconds)."""
    return NodeStopped(
        reason=reason,
        detail=detail,
        outer_rounds=outer_rounds,
        partners=partners or {},
        final_weights=final_weights,
        seconds=ambient.monotonic() - started,
    )
