"""The daemon on one screen: build the parts, start them, stop them in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import signal
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from typing import Literal

import torch
from rich.console import Console

from noloco_node import __version__, start_checks
from noloco_node.checkpointing import CheckpointKeeper
from noloco_node.config.load import OwnData
from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import RunSpec, check_microbatch_bytes
from noloco_node.data.samples import Samples
from noloco_node.data.walk import WindowWalk
from noloco_node.data.windows import load_windows
from noloco_node.errors import ExitCode, UserError
from noloco_node.model.stage import Stage, build_stage
from noloco_node.network import Agree, network
from noloco_node.replica import Replica
from noloco_node.storage.checkpoint import Checkpoint, CheckpointFolder
from noloco_node.storage.run_folder import RunFolder
from noloco_node.storage.weights import save_stage
from noloco_node.swarm.directory import Directory, DirectoryView
from noloco_node.swarm.hello import check_same_run, serve_hello
from noloco_node.swarm.membership import choose_stage
from noloco_node.swarm.outlook import Outlook, outlook_of
from noloco_node.swarm.p2p_daemon import PrivateP2P
from noloco_node.swarm.receipts import open_receipts
from noloco_node.swarm.spec_fetch import fetch_run_spec, serve_spec
from noloco_node.swarm.transport import PeerId, Transport
from noloco_node.telemetry.display import DownloadBar
from noloco_node.telemetry.events import AnyEvent, EventFile, NodeStarted, NodeStopped
from noloco_node.telemetry.logging import NodeLog, configure_logging
from noloco_node.telemetry.metrics import Metrics
from noloco_node.training.compute_thread import ComputeThread

logger = logging.getLogger(__name__)

FIRST_LOOK_SECONDS = 10.0
LOOK_AGAIN_SECONDS = 0.3

Emit = Callable[[AnyEvent], None]


Show = Callable[[RunSpec, Outlook], None]
"""Shows a run and its swarm to a person; called on a thread of its own, before anything is built."""


async def run_node(spec: RunSpec, settings: NodeSettings) -> NodeStopped:
    """Run one daemon to the run's end, or until SIGINT or SIGTERM. Leaves no process, socket or thread behind.

    Raises UserError for everything that the person who started it can change.
    """

    async def agree(transport: Transport, joined: tuple[str, ...]) -> RunSpec:
        await check_same_run(transport, spec, joined)
        return spec

    return await _run(agree, settings, None, spec.run_id)


async def join_node(own: OwnData, settings: NodeSettings, show: Show) -> NodeStopped:
    """`run_node` for the run that the initial peers serve: its RunSpec comes from one of them, and is shown."""

    async def agree(transport: Transport, joined: tuple[str, ...]) -> RunSpec:
        return await fetch_run_spec(transport, joined, own, reads_text=settings.stage in ("auto", 0))

    return await _run(agree, settings, show, None)


async def _run(agree: Agree, settings: NodeSettings, show: Show | None, run: str | None) -> NodeStopped:
    started = time.monotonic()
    folder = RunFolder.create(settings.run_folder)
    with _telemetry(folder, settings) as (emit, metrics_address), _interruptible() as interrupts:
        try:
            stopped = await _live(agree, settings, folder, emit, metrics_address, interrupts, started, show, run)
        except asyncio.CancelledError:
            if not interrupts.cancelled_by_signal:
                raise
            stopped = _stopped("interrupted", "before the work under way was finished", started)
        except UserError as error:
            emit(_stopped("failed", error.message, started))
            raise
        emit(stopped)
        return stopped


async def _live(
    agree: Agree,
    settings: NodeSettings,
    folder: RunFolder,
    emit: Emit,
    metrics_address: str | None,
    interrupts: Interrupts,
    started: float,
    show: Show | None,
    run: str | None,
) -> NodeStopped:
    check_device(settings.device)
    torch.set_num_threads(settings.torch_threads)
    checkpoints = CheckpointFolder(folder.checkpoints, settings.checkpoints_kept)
    async with network(agree, settings, folder, run=run) as net:
        spec, settings, transport, directory = net.spec, net.settings, net.transport, net.directory
        own = net.daemon.own_id
        saved = await asyncio.to_thread(_open_run, folder, checkpoints, spec, settings)
        view: DirectoryView | None = None
        if show is not None or (settings.stage == "auto" and saved is None):
            view = await _look_around(directory, settings, own)
        # Before anything is shown: that takes a while, in which the records of the view grow old.
        now = directory.now()
        stage_index = _stage_to_serve(spec, settings, view, now, saved)
        if show is not None and view is not None:
            await asyncio.to_thread(show, spec, outlook_of(view, now, spec.inner.target_tokens))
        start_checks.report(await asyncio.to_thread(start_checks.for_a_stage, spec, stage_index, folder))
        serve_hello(transport, spec, lambda: stage_index)
        serve_spec(transport, spec)
        stage, samples = await asyncio.to_thread(_prepare, spec, stage_index, own, saved)
        async with _compute_thread() as thread:
            replica = Replica(spec, settings, stage, transport, directory, thread, samples=samples, emit=emit)
            with CheckpointKeeper(replica, checkpoints, emit, settings) as keeper:
                if saved is not None:
                    await keeper.resume(saved)
                receipts = await open_receipts(
                    folder.contribution,
                    spec.run_id,
                    stage_index,
                    transport,
                    replica.ledger,
                    lambda: replica.worker.progress,
                )
                replica.serve()
                donor = await net.beside(replica.become_current(saved and saved.standing.progress.clock))
                emit(_started_event(spec, stage, net.daemon, metrics_address, donor, saved))
                saved = None  # it holds a copy of everything
                interrupts.graceful(replica.stop)
                life = net.beside(receipts.beside(replica.run()), keeper.run())
                await run_and_save(life, lambda: _save(spec, stage, replica, folder, keeper))
            reason = "interrupted" if replica.stop.is_set() else "target_reached"
            if reason == "target_reached":
                folder.mark_ended(spec.run_id, spec.name)
            return _stopped(
                reason,
                "",
                started,
                outer_rounds=replica.worker.progress.outer_rounds,
                partners=replica.partners,
                final_weights=str(folder.final.relative_to(folder.path)),
            )


def _open_run(
    folder: RunFolder, checkpoints: CheckpointFolder, spec: RunSpec, settings: NodeSettings
) -> Checkpoint | None:
    """Take the folder for this run; its newest checkpoint that can be gone on from. Raises UserError (RUN_FOLDER) where
    it holds another run, or where the run has come to its end there and no peer to go on with is named."""
    ended = folder.claim(spec.run_id, spec.name)
    if ended and not settings.initial_peers:
        raise UserError(
            ExitCode.RUN_FOLDER,
            f"run '{spec.name}' ({spec.run_id}) has come to its end in '{folder.path}': "
            f"its weights are in {folder.final}",
            "name another folder with --run-folder to train it anew",
        )
    return checkpoints.newest(spec.run_id, None if settings.stage == "auto" else settings.stage)


def _stage_to_serve(
    spec: RunSpec, settings: NodeSettings, view: DirectoryView | None, now: float, saved: Checkpoint | None
) -> int:
    if settings.stage != "auto":
        if not 0 <= settings.stage < spec.stages:
            raise UserError(
                ExitCode.CONFIG,
                f"node.stage is {settings.stage}, but the run has stages 0 to {spec.stages - 1}",
                "name one of those, or `auto`",
            )
        return settings.stage
    if saved is not None:
        return saved.standing.stage
    assert view is not None, "who chooses has looked"
    return choose_stage(view, spec.stages, now, random.Random())


async def _look_around(directory: Directory, settings: NodeSettings, own: PeerId) -> DirectoryView:
    """The directory without this node's own former record; where this node joined others, as soon as it shows one of
    them, within a few seconds."""
    loop = asyncio.get_running_loop()
    until = loop.time() + (FIRST_LOOK_SECONDS if settings.initial_peers else 0.0)
    while True:
        view, now = (await directory.refresh()).without(own), directory.now()
        if any(view.live(stage, now) for stage in range(len(view.stages))) or loop.time() >= until:
            return view
        # The directory gives no sign of a change: asking again is the only way.
        await asyncio.sleep(LOOK_AGAIN_SECONDS)


def _prepare(spec: RunSpec, stage_index: int, own: PeerId, saved: Checkpoint | None) -> tuple[Stage, Samples | None]:
    """Build the stage and, on stage 0, read the text. Runs off the event loop."""
    stage = build_stage(spec.model, stage_index)
    check_microbatch_bytes(spec, stage.hidden_size)
    if stage_index > 0:
        return stage, None
    windows = load_windows(spec.data, stage.vocab_size)
    walk = _walk(windows.train_count, spec.data.seed, own, saved)
    samples = Samples(
        draw=lambda: walk.take(spec.inner.microbatch_windows),
        train=windows.train,
        validation=windows.validation,
        held_out=windows.validation_indices(spec.evaluation.windows),
        position=lambda: walk.position,
    )
    return stage, samples


def _walk(count: int, seed: int, own: PeerId, saved: Checkpoint | None) -> WindowWalk:
    if saved is not None:
        try:
            return WindowWalk.at(count, seed, own, saved.standing.walk)
        except ValueError as error:
            logger.warning("the walk through the text begins anew, the text has changed: %s", error)
    return WindowWalk(count, seed, own)


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


def check_device(name: str) -> None:
    """Raise UserError (CONFIG) where `node.device` is no device of this machine that torch can compute on."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise _no_device(name, "torch knows no such device") from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise _no_device(name, "torch finds no CUDA device")
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise _no_device(name, f"this machine has CUDA devices 0 to {count - 1}")
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise _no_device(name, f"it cannot be computed on ({reason})") from None


def _no_device(name: str, reason: str) -> UserError:
    return UserError(
        ExitCode.CONFIG,
        f"node.device is '{name}', but {reason}",
        "set node.device to cpu, cuda, or cuda:N with the number of a GPU of this machine",
    )


async def _save(spec: RunSpec, stage: Stage, replica: Replica, folder: RunFolder, keeper: CheckpointKeeper) -> None:
    """Take a last checkpoint, and write the final slow and fast weights under their names in the whole model."""
    await keeper.save()
    slow, fast = (
        {replica.full_names[local]: weight for local, weight in weights.items()}
        for weights in await replica.worker.named_weights()
    )
    progress = replica.worker.progress
    await asyncio.to_thread(
        save_stage,
        folder.final,
        run_id=spec.run_id,
        cut=stage.cut,
        clock=progress.clock,
        outer_rounds=progress.outer_rounds,
        slow=slow,
        fast=fast,
    )


class Interrupts:
    """SIGINT and SIGTERM: the first asks for an orderly end, the second (or one before training) cancels at once."""

    def __init__(self) -> None:
        self._main = asyncio.current_task()
        self._stop: asyncio.Event | None = None
        self.cancelled_by_signal = False

    def graceful(self, stop: asyncio.Event) -> None:
        """From now on the first signal sets `stop`."""
        self._stop = stop

    def on_signal(self) -> None:
        """A signal has come."""
        if self._stop is not None and not self._stop.is_set():
            logger.info("stopping: finishing what is under way; once more to leave at once")
            self._stop.set()
        elif self._main is not None:
            self.cancelled_by_signal = True
            self._main.cancel()


@contextlib.contextmanager
def _interruptible() -> Generator[Interrupts]:
    loop = asyncio.get_running_loop()
    interrupts = Interrupts()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupts.on_signal)
    try:
        yield interrupts
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


@contextlib.contextmanager
def _telemetry(folder: RunFolder, settings: NodeSettings) -> Generator[tuple[Emit, str | None]]:
    """Event file, metrics and log, fed by the same events; and the address of `/metrics`, if it is served."""
    log, metrics, events = NodeLog(), Metrics(), EventFile(folder.events)
    metrics.watch_process(asyncio.get_running_loop())
    bar = DownloadBar(Console(stderr=True))
    configure_logging(settings.log_level, log)

    def emit(event: AnyEvent) -> None:
        events.write(event)
        metrics.observe(event)
        bar.observe(event)
        log.observe(event)

    try:
        address = None
        if settings.metrics_port is not None:
            address = metrics.serve(settings.metrics_host, settings.metrics_port)
        yield emit, address
    finally:
        bar.close()
        metrics.stop()
        events.close()


@contextlib.asynccontextmanager
async def _compute_thread() -> AsyncGenerator[ComputeThread]:
    thread = ComputeThread()
    try:
        yield thread
    finally:
        await thread.close()


def _started_event(
    spec: RunSpec,
    stage: Stage,
    daemon: PrivateP2P,
    metrics_address: str | None,
    donor: PeerId | None,
    saved: Checkpoint | None,
) -> NodeStarted:
    return NodeStarted(
        peer_id=daemon.own_id,
        stage=stage.cut.index,
        stages=spec.stages,
        run_id=spec.run_id,
        run_name=spec.name,
        version=__version__,
        pid=os.getpid(),
        addresses=daemon.visible_addresses(),
        metrics_address=metrics_address,
        parameters=sum(parameter.numel() for parameter in stage.parameters()),
        origin="peer" if donor is not None else "seed" if saved is None else "checkpoint",
        resumed=saved is not None,
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
        seconds=time.monotonic() - started,
    )
