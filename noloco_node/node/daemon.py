"""The daemon on one screen: build the parts, start them, stop them in order."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from noloco_node import __version__, ambient
from noloco_node.accounting.receipts import Receipts, open_receipts
from noloco_node.bootstrap.hello import check_same_run, held_out_loss, serve_hello
from noloco_node.bootstrap.spec_fetch import fetch_run_spec, serve_spec
from noloco_node.config.data_spec import NOT_READ
from noloco_node.config.load import OwnRun
from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import RunSpec, check_microbatch_bytes
from noloco_node.data.prepared import check_text_here
from noloco_node.data.reading import Reader, open_samples
from noloco_node.data.samples import Position, Samples
from noloco_node.data.shared_turns import SharedTurns
from noloco_node.directory.records import DirectoryView, PeerState
from noloco_node.directory.summary import SwarmSummary, outlook_of
from noloco_node.errors import ExitCode, UserError
from noloco_node.identity.peer_id import PeerId
from noloco_node.model.stage import Stage, build_stage
from noloco_node.model.weights_check import with_own_weights
from noloco_node.node import start_checks
from noloco_node.node.checkpointing import CheckpointKeeper
from noloco_node.node.custody import last_of_stage, unusable_checkpoints
from noloco_node.node.interrupts import Interrupts, interruptible
from noloco_node.node.network import Agree, Entrance, Network, network
from noloco_node.node.replica import Replica
from noloco_node.node.stage_lifecycle import BeginsFrom, StageLifecycle, stays_of
from noloco_node.storage.checkpoint import Checkpoint, CheckpointFolder
from noloco_node.storage.run_folder import RunFolder
from noloco_node.storage.weights import save_stage
from noloco_node.telemetry.events import AnyEvent, NodeStarted, NodeStopped, P2pdRestarted, Reachability
from noloco_node.telemetry.of_node import Telemetry, telemetry_of
from noloco_node.telemetry.web import WebServer
from noloco_node.training.compute_device import check_device, describe_device, device_name, peak_flop_per_second
from noloco_node.training.compute_thread import ComputeThread
from noloco_node.training.placing import on_its_device

logger = logging.getLogger(__name__)

Emit = Callable[[AnyEvent], None]


Show = Callable[[RunSpec, SwarmSummary], None]
"""Shows a run and its swarm to a person; called on a thread of its own, before anything is built."""


async def run_node(spec: RunSpec, settings: NodeSettings, web: WebServer | None = None) -> NodeStopped:
    """Run one daemon to the run's end, or until SIGINT or SIGTERM. Leaves no process, socket or thread behind. It shows
    itself on `web`, where that is given (`early_pages`), or opens its own.

    Raises UserError for everything that the person who started it can change.
    """

    async def agree(door: Entrance) -> RunSpec:
        await check_same_run(door.transport, spec, door.daemon.joined_peers)
        return spec

    await ambient.elsewhere(_check_folder, RunFolder(settings.run_folder), spec, settings)  # before anything is written
    return await _run(agree, settings, None, spec.run_id, web)


async def join_node(own: OwnRun, settings: NodeSettings, show: Show, web: WebServer | None = None) -> NodeStopped:
    """`run_node` for the run that the initial peers serve: its RunSpec comes from one of them, and is shown."""

    async def agree(door: Entrance) -> RunSpec:
        joined, reads_text = door.daemon.joined_peers, settings.stage in ("auto", 0)
        spec = await fetch_run_spec(
            door.transport,
            joined,
            own.data,
            reads_text=reads_text,
            met_in=door.known.run,
            brings_state=RunFolder(settings.run_folder).checkpoints.is_dir(),
        )
        spec = await ambient.elsewhere(with_own_weights, spec, own.model.from_pretrained)
        if reads_text:
            await ambient.elsewhere(check_text_here, spec.data)  # before a stage is chosen, announced and built
        return spec

    return await _run(agree, settings, show, None, web)


async def _run(
    agree: Agree, settings: NodeSettings, show: Show | None, run: str | None, web: WebServer | None
) -> NodeStopped:
    started = ambient.monotonic()
    folder, opened = RunFolder.create(settings.run_folder), asyncio.Event()

    def last_word(stopped: NodeStopped) -> None:
        """Not into the diary of a run that this node only stumbled into."""
        if opened.is_set() or folder.may_be_of(run):
            emit(stopped)

    with folder.lock(), telemetry_of(folder.events, settings, web) as telemetry, interruptible() as interrupts:
        emit, interrupts.told = telemetry.emit, telemetry.ends
        try:
            stopped = await _live(agree, settings, folder, telemetry, interrupts, started, show, run, opened)
        except asyncio.CancelledError:
            if not interrupts.cancelled_by_signal:
                raise
            stopped = _stopped("interrupted", "before the work under way was finished", started)
        except UserError as error:
            last_word(_stopped("failed", error.message, started))
            raise
        last_word(stopped)
        return stopped


async def _live(
    agree: Agree,
    settings: NodeSettings,
    folder: RunFolder,
    telemetry: Telemetry,
    interrupts: Interrupts,
    started: float,
    show: Show | None,
    run: str | None,
    opened: asyncio.Event,
) -> NodeStopped:
    check_device(settings.device)
    logger.info("%s", describe_device(settings.device))
    torch.set_num_threads(settings.torch_threads)
    emit = telemetry.emit
    checkpoints = CheckpointFolder(folder.checkpoints, settings.checkpoints_kept)
    async with network(agree, settings, folder, run=run) as net, _compute_thread() as thread:
        spec = net.spec
        saved = await ambient.elsewhere(_open_run, folder, checkpoints, spec, net.settings)
        opened.set()
        if saved is None and (warning := unusable_checkpoints(checkpoints)) is not None:
            emit(warning)
        await ambient.elsewhere(net.known.save, spec.run_id)  # the folder is this run's now
        stays = await _choose(net, saved, show)
        stays.emit = emit
        checks = partial(start_checks.for_a_stage, spec, net.settings, stays.stage, folder, moves=stays.may_move)
        start_checks.report(await ambient.elsewhere(checks))
        net.reach.tell(lambda now: emit(Reachability(way=now.way.value, words=now.words())))
        net.supervisor.on_restart = lambda cause: emit(P2pdRestarted(cause=cause, restarts=net.supervisor.restarts))
        serve_hello(net.transport, spec, lambda: stays.stage, held_out=lambda: held_out_loss(telemetry.evaluation))
        serve_spec(net.transport, spec)
        place = _Place(net, folder, checkpoints, thread, stays, telemetry, saved)
        del saved  # it holds a copy of everything, and is `place`'s to let go of
        stage_index = stays.stage
        while True:
            async with _stay(place, stage_index) as stay:
                in_vain = stay is None
                stopped = None if stay is None else await _train(place, stay, interrupts, started)
            del stay  # two stages may be more than the memory holds
            if stopped is not None:
                return stopped
            stage_index = stays.back() if in_vain else stays.departs()


@dataclass(slots=True)
class _Place:
    """What every stay of a node stands on."""

    net: Network
    folder: RunFolder
    checkpoints: CheckpointFolder
    thread: ComputeThread
    stays: StageLifecycle
    telemetry: Telemetry
    saved: Checkpoint | None
    """What the first stay goes on from."""

    @property
    def emit(self) -> Emit:
        """Takes every event of the node."""
        return self.telemetry.emit


@dataclass(frozen=True, slots=True)
class _Stay:
    """A replica with what accompanies it."""

    replica: Replica
    keeper: CheckpointKeeper
    receipts: Receipts


async def _choose(net: Network, saved: Checkpoint | None, show: Show | None) -> StageLifecycle:
    """Look who serves what, choose and announce this node's stage, and show the run to who wants to see it."""
    stays = await stays_of(net.spec, net.settings, net.transport, net.directory)
    view: DirectoryView | None = None
    if show is not None or (saved is None and net.settings.stage == "auto"):
        view = await stays.look_around()
    # Before anything is shown: that takes a while, in which the records of the view grow old.
    now = net.directory.now()
    stays.stage = await stays.first_stage(saved and saved.standing.stage)
    if show is not None and view is not None:
        await ambient.elsewhere(show, net.spec, outlook_of(view, now, net.spec.inner.target_tokens))
    return stays


@contextlib.asynccontextmanager
async def _stay(place: _Place, stage_index: int) -> AsyncGenerator[_Stay | None]:
    """A replica of the stage with the state to begin with, or None where this node came from another stage in vain."""
    net, stays, spec = place.net, place.stays, place.net.spec
    saved, place.saved = place.saved, None
    async with contextlib.AsyncExitStack() as stack:
        async with stays.arriving(stage_index):
            walk = stays.ledger.walk if saved is None else saved.standing.walk
            ahead = net.settings.prefetch_bytes
            stage, samples = await ambient.elsewhere(_prepare, spec, stage_index, net.daemon.own_id, walk, ahead)
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
                guards=lambda: stays.copies.guards,
                relayed=net.relayed,
            )
            stack.callback(replica.close)
            replica.heed_relays(lambda: net.reach.relayed)
            stack.enter_context(place.telemetry.showing(replica.books.surroundings))
            keeper = stack.enter_context(CheckpointKeeper(replica, place.checkpoints, place.emit, net.settings))
            if saved is not None:
                await keeper.resume(saved)
            clock, resumed, saved = saved and saved.standing.progress.clock, saved is not None, None
            receipts = await open_receipts(
                place.folder.contribution,
                spec.run_id,
                stage_index,
                net.transport,
                replica.pipeline.ledger,
                lambda: replica.worker.progress,
            )
            stack.callback(receipts.close)
            replica.serve()
            holders = net.known.holders(spec.run_id, stage_index)
            origin = await net.beside(stays.begin(replica, clock, place.checkpoints, holders))
        if origin is not None:
            place.emit(stays.arrived(replica, origin) or _started_event(place, stage, origin, resumed=resumed))
        yield None if origin is None else _Stay(replica, keeper, receipts)


async def _train(place: _Place, stay: _Stay, interrupts: Interrupts, started: float) -> NodeStopped | None:
    """One stay, to its end: None where the node moves on."""
    replica, folder, spec = stay.replica, place.folder, place.net.spec
    interrupts.graceful(replica.stop)
    leaving = (PeerState.FINISHING, PeerState.DRAINING)
    work = stay.receipts.beside(replica.run(), replica.context.moved, lambda: replica.membership.state in leaving)
    farewell = _say_if_last(place, replica, interrupts)
    life = place.net.beside(work, stay.keeper.run(), place.stays.accompany(replica), farewell)
    await run_and_save(life, _saving(place, stay, interrupts))
    if _moves_on(place.stays, interrupts):
        return None
    await place.stays.give_up_move()
    reason = "interrupted" if replica.stop.is_set() else "target_reached"
    if reason == "target_reached":
        folder.mark_ended(spec.run_id, spec.name)
    return _stopped(
        reason,
        "",
        started,
        outer_rounds=replica.worker.progress.outer_rounds,
        partners=replica.outer_steps.partners,
        final_weights=str(folder.final.relative_to(folder.path)),
    )


async def _say_if_last(place: _Place, replica: Replica, interrupts: Interrupts) -> None:
    """Once this node is told to leave: say so where its stage is left without a replica."""
    await replica.stop.wait()
    if interrupts.asked:
        warning = last_of_stage(
            replica.membership, place.net.transport.acquaintances.answers, place.net.spec.guard_copies
        )
        if warning is not None:
            place.emit(warning)


def _check_folder(folder: RunFolder, spec: RunSpec, settings: NodeSettings) -> None:
    """Raise UserError (RUN_FOLDER) as `_open_run` says. Writes nothing."""
    if folder.judge(spec.run_id, spec.name) and not settings.initial_peers:
        raise UserError(
            ExitCode.RUN_FOLDER,
            f"run '{spec.name}' ({spec.run_id}) has come to its end in '{folder.path}': {_whose_weights(spec)} "
            f"in {folder.final}",
            "name another folder with --run-folder to train it anew",
        )


def _whose_weights(spec: RunSpec) -> str:
    if spec.stages == 1:
        return "its weights are"
    return f"the weights of this node's stage, one of {spec.stages}, which only together are the model, are"


def _open_run(
    folder: RunFolder, checkpoints: CheckpointFolder, spec: RunSpec, settings: NodeSettings
) -> Checkpoint | None:
    """Take the folder for this run; its newest checkpoint that can be gone on from. Raises UserError (RUN_FOLDER) where
    it holds another run, or where the run has come to its end there and no peer to go on with is named."""
    _check_folder(folder, spec, settings)
    folder.claim(spec.run_id, spec.name)
    folder.keep_spec(spec.agreed_json)
    if spec.data.own_tokenizer and spec.data.tokenizer != NOT_READ:
        folder.keep_tokenizer_place(Path(spec.data.tokenizer).expanduser().absolute())
    return checkpoints.newest(spec.run_id, None if settings.stage == "auto" else settings.stage)


def _prepare(
    spec: RunSpec, stage_index: int, own: PeerId, position: Position, prefetch_bytes: int
) -> tuple[Stage, Samples | None]:
    """Build the stage and, on stage 0, read the text from `position` on. Runs off the event loop."""
    stage = build_stage(spec.model, stage_index)
    check_microbatch_bytes(spec, stage.hidden_size)
    _spare_the_collector()
    if stage_index > 0:
        return stage, None
    reader = Reader(own, spec.inner.microbatch_windows, spec.evaluation.windows, prefetch_bytes)

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


def _moves_on(stays: StageLifecycle, interrupts: Interrupts) -> bool:
    return stays.move is not None and not interrupts.asked


def _saving(place: _Place, stay: _Stay, interrupts: Interrupts) -> Callable[[], Awaitable[None]]:
    """What saves the last checkpoint and the final weights; those of a stage that this node only leaves for another are
    with its stage peers."""

    async def save() -> None:
        if not _moves_on(place.stays, interrupts):
            await stay.keeper.save()
            await _save_weights(place, stay.replica)

    return save


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


def _started_event(place: _Place, stage: Stage, origin: BeginsFrom, *, resumed: bool) -> NodeStarted:
    spec, daemon = place.net.spec, place.net.daemon
    return NodeStarted(
        peer_id=daemon.own_id,
        stage=stage.cut.index,
        stages=spec.stages,
        run_id=spec.run_id,
        run_name=spec.name,
        version=__version__,
        pid=os.getpid(),
        addresses=daemon.visible_addresses(),
        metrics_address=place.telemetry.address,
        parameters=sum(parameter.numel() for parameter in stage.parameters()),
        origin=origin,
        resumed=resumed,
        device=device_name(place.net.settings.device),
        peak_flop_per_second=peak_flop_per_second(place.net.settings.device, spec.inner.precision),
        flop_per_token=place.stays.flop_per_token(stage.cut.index),
        codec=spec.outer.codec,
    )


def _stopped(
    reason: Literal["target_reached", "interrupted", "failed"],
    detail: str,
    started: float,
    *,
    outer_rounds: int = 0,
    partners: dict[str, int] | None = None,
    final_weights: str | None = None,
) -> NodeStopped:
    return NodeStopped(
        reason=reason,
        detail=detail,
        outer_rounds=outer_rounds,
        partners=partners or {},
        final_weights=final_weights,
        seconds=ambient.monotonic() - started,
    )
