"""The daemon on one screen: build the parts, start them, stop them in order."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import signal
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from noloco_node import __version__
from noloco_node.config.load import OwnData
from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import RunSpec, check_microbatch_bytes
from noloco_node.data.walk import WindowWalk
from noloco_node.data.windows import load_windows
from noloco_node.errors import ExitCode, UserError
from noloco_node.model.stage import Stage, build_stage
from noloco_node.replica import Replica, Samples
from noloco_node.stays import BeginsFrom, Stays, stays_of
from noloco_node.storage.run_folder import RunFolder
from noloco_node.storage.weights import save_stage
from noloco_node.swarm.dht_directory import join_directory
from noloco_node.swarm.directory import Directory, DirectoryView
from noloco_node.swarm.hello import check_same_run, serve_hello
from noloco_node.swarm.identity import Identity, IdentityLock, load_or_create_identity
from noloco_node.swarm.libp2p_transport import Libp2pTransport
from noloco_node.swarm.outlook import Outlook, outlook_of
from noloco_node.swarm.p2p_daemon import PrivateP2P, running_p2p
from noloco_node.swarm.peer_addresses import parse_address
from noloco_node.swarm.spec_fetch import fetch_run_spec, serve_spec
from noloco_node.swarm.transport import PeerId, Transport
from noloco_node.telemetry.events import AnyEvent, EventFile, NodeStarted, NodeStopped
from noloco_node.telemetry.logging import NodeLog, configure_logging
from noloco_node.telemetry.metrics import Metrics
from noloco_node.training.compute_thread import ComputeThread

logger = logging.getLogger(__name__)

FIRST_LOOK_SECONDS = 10.0
LOOK_AGAIN_SECONDS = 0.3

Emit = Callable[[AnyEvent], None]


Agree = Callable[[Transport, tuple[str, ...]], Awaitable[RunSpec]]
"""How a node and the peers at the addresses that it joined come to the same RunSpec."""

Show = Callable[[RunSpec, Outlook], None]
"""Shows a run and its swarm to a person; called on a thread of its own, before anything is built."""


async def run_node(spec: RunSpec, settings: NodeSettings) -> NodeStopped:
    """Run one daemon to the run's end, or until SIGINT or SIGTERM. Leaves no process, socket or thread behind.

    Raises UserError for everything that the person who started it can change.
    """

    async def agree(transport: Transport, joined: tuple[str, ...]) -> RunSpec:
        await check_same_run(transport, spec, joined)
        return spec

    return await _run(agree, settings, None)


async def join_node(own: OwnData, settings: NodeSettings, show: Show) -> NodeStopped:
    """`run_node` for the run that the initial peers serve: its RunSpec comes from one of them, and is shown."""

    async def agree(transport: Transport, joined: tuple[str, ...]) -> RunSpec:
        return await fetch_run_spec(transport, joined, own, reads_text=settings.stage in ("auto", 0))

    return await _run(agree, settings, show)


async def _run(agree: Agree, settings: NodeSettings, show: Show | None) -> NodeStopped:
    started = time.monotonic()
    folder = RunFolder.create(settings.run_folder)
    with _telemetry(folder, settings) as (emit, metrics_address), _interruptible() as interrupts:
        try:
            stopped = await _live(agree, settings, folder, emit, metrics_address, interrupts, started, show)
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
) -> NodeStopped:
    check_device(settings.device)
    torch.set_num_threads(settings.torch_threads)
    async with _network(agree, settings, folder) as (spec, daemon, transport, directory):
        if show is not None:
            view = await _look_around(directory, settings, daemon.own_id)
            await asyncio.to_thread(show, spec, outlook_of(view, directory.now(), spec.inner.target_tokens))
        await _look_around(directory, settings, daemon.own_id)
        stays = await stays_of(spec, settings, transport, directory)
        stage_index = stays.stage = await stays.first_stage()
        serve_hello(transport, spec, lambda: stays.stage)
        serve_spec(transport, spec)
        async with _compute_thread() as thread:
            place = _Place(spec, settings, daemon, transport, directory, thread, stays, emit, metrics_address)
            while True:
                async with _replica(place, stage_index) as replica:
                    if replica is None:
                        stage_index = stays.back()
                        continue
                    interrupts.graceful(replica.stop)
                    life = _run_while_p2pd_lives(replica, daemon, stays)
                    await run_and_save(life, _saving(place, replica, folder, interrupts))
                    if not _moves_on(stays, interrupts):
                        return _stopped(
                            "interrupted" if replica.stop.is_set() else "target_reached",
                            "",
                            started,
                            outer_rounds=replica.worker.progress.outer_rounds,
                            partners=replica.partners,
                            final_weights=str(folder.final.relative_to(folder.path)),
                        )
                stage_index = stays.departs()


@dataclass(frozen=True, slots=True)
class _Place:
    """What every stay of a node stands on."""

    spec: RunSpec
    settings: NodeSettings
    daemon: PrivateP2P
    transport: Transport
    directory: Directory
    thread: ComputeThread
    stays: Stays
    emit: Emit
    metrics_address: str | None


@contextlib.asynccontextmanager
async def _replica(place: _Place, stage_index: int) -> AsyncGenerator[Replica | None]:
    """A replica of the stage with the state to begin with, or None where this node came from another stage in vain."""
    spec, stays = place.spec, place.stays
    async with contextlib.AsyncExitStack() as stack:
        async with stays.arriving(stage_index):
            stage, samples = await asyncio.to_thread(_prepare, spec, stage_index, place.daemon.own_id)
            replica = Replica(
                spec,
                place.settings,
                stage,
                place.transport,
                place.directory,
                place.thread,
                samples=samples,
                emit=place.emit,
                ledger=stays.ledger,
                guards=lambda: stays.copies.guards,
            )
            replica.serve()
            stack.callback(replica.close)
            origin = await stays.begin(replica)
        if origin is not None:
            moved = stays.arrived(replica, origin)
            place.emit(moved or _started_event(spec, stage, place.daemon, place.metrics_address, origin))
        yield None if origin is None else replica


@contextlib.asynccontextmanager
async def _network(
    agree: Agree, settings: NodeSettings, folder: RunFolder
) -> AsyncGenerator[tuple[RunSpec, PrivateP2P, Libp2pTransport, Directory]]:
    """Identity, p2pd, transport, the run and its directory; all gone at the end of the block, whatever ends it."""
    path: Path = settings.identity or folder.identity
    with IdentityLock(path):
        identity: Identity = load_or_create_identity(path)
        async with running_p2p(settings, identity) as daemon:
            if out_of_reach(settings, daemon.joined_peers):
                logger.warning(
                    "host is %s: other machines cannot reach this node; --host 0.0.0.0 --port N lets them",
                    settings.host,
                )
            transport = Libp2pTransport(daemon)
            await transport.start()
            try:
                spec = await agree(transport, daemon.joined_peers)
                directory = await join_directory(daemon, identity, spec.run_id, spec.stages)
                try:
                    yield spec, daemon, transport, directory
                finally:
                    await directory.close()
            finally:
                await transport.close()


def out_of_reach(settings: NodeSettings, joined: Sequence[str]) -> bool:
    """Whether this node joined others elsewhere and listens where only its own machine reaches it."""
    hosts = [parse_address(address).host for address in joined]
    return not settings.announce and _is_loopback(settings.host) and not all(map(_is_loopback, hosts))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def _look_around(directory: Directory, settings: NodeSettings, own: PeerId) -> DirectoryView:
    """The directory as it is; where this node joined others, as soon as it shows one of them, within a few seconds."""
    loop = asyncio.get_running_loop()
    until = loop.time() + (FIRST_LOOK_SECONDS if settings.initial_peers else 0.0)
    while True:
        view, now = await directory.refresh(), directory.now()
        live = (record for stage in range(len(view.stages)) for record in view.live(stage, now))
        if any(record.peer_id != own for record in live) or loop.time() >= until:
            return view
        # The directory gives no sign of a change: asking again is the only way.
        await asyncio.sleep(LOOK_AGAIN_SECONDS)


def _prepare(spec: RunSpec, stage_index: int, own: PeerId) -> tuple[Stage, Samples | None]:
    """Build the stage and, on stage 0, read the text. Runs off the event loop."""
    stage = build_stage(spec.model, stage_index)
    check_microbatch_bytes(spec, stage.hidden_size)
    if stage_index > 0:
        return stage, None
    windows = load_windows(spec.data, stage.vocab_size)
    walk = WindowWalk(windows.train_count, spec.data.seed, own)
    samples = Samples(
        draw=lambda: walk.take(spec.inner.microbatch_windows),
        train=windows.train,
        validation=windows.validation,
        held_out=windows.validation_indices(spec.evaluation.windows),
    )
    return stage, samples


async def _run_while_p2pd_lives(replica: Replica, daemon: PrivateP2P, stays: Stays) -> None:
    """Run the replica, and end it with an error when p2pd dies under it: then nobody can be reached any more."""

    async def watch() -> None:
        status = await daemon.wait_until_dead()
        raise UserError(
            ExitCode.P2P_DAEMON,
            f"p2pd died with status {status}; its last words:\n  {daemon.last_output()}",
            "start the node again; if it happens again, look for a lack of memory or of open files",
        )

    try:
        async with asyncio.TaskGroup() as group:
            beside = [group.create_task(watch()), group.create_task(stays.accompany(replica))]
            await replica.run()
            for task in beside:
                task.cancel()
    except* UserError as errors:
        raise errors.exceptions[0] from None


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


def _moves_on(stays: Stays, interrupts: Interrupts) -> bool:
    return stays.move is not None and not interrupts.asked


def _saving(
    place: _Place, replica: Replica, folder: RunFolder, interrupts: Interrupts
) -> Callable[[], Awaitable[None]]:
    """What saves the final weights; those of a stage that this node only leaves for another are with its fellows."""

    async def save() -> None:
        if not _moves_on(place.stays, interrupts):
            await _save(place.spec, replica, folder)

    return save


async def _save(spec: RunSpec, replica: Replica, folder: RunFolder) -> None:
    """Write the final slow and fast weights under their names in the whole model."""
    slow, fast = (
        {replica.full_names[local]: weight for local, weight in weights.items()}
        for weights in await replica.worker.named_weights()
    )
    progress = replica.worker.progress
    await asyncio.to_thread(
        save_stage,
        folder.final,
        run_id=spec.run_id,
        cut=replica.cut,
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
        self.asked = False
        """A signal has come."""
        self.cancelled_by_signal = False

    def graceful(self, stop: asyncio.Event) -> None:
        """From now on the first signal sets `stop`; at once where it has come already."""
        self._stop = stop
        if self.asked:
            stop.set()

    def on_signal(self) -> None:
        """A signal has come."""
        if self._stop is not None and not self.asked:
            self.asked = True
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
    configure_logging(settings.log_level, log)

    def emit(event: AnyEvent) -> None:
        events.write(event)
        metrics.observe(event)
        log.observe(event)

    try:
        address = None
        if settings.metrics_port is not None:
            address = metrics.serve(settings.metrics_host, settings.metrics_port)
        yield emit, address
    finally:
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
    spec: RunSpec, stage: Stage, daemon: PrivateP2P, metrics_address: str | None, origin: BeginsFrom
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
        origin=origin,
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
