"""One node of a simulation: a whole replica on a machine of its own, from its start to its end, at one stage or
several.

Its device does real arithmetic in virtual time, in the order of the compute thread, and takes as long as a model says.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from torch import Tensor

from noloco_node import ambient
from noloco_node.bootstrap.hello import serve_hello
from noloco_node.bootstrap.spec_fetch import RunHasEnded
from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import RunSpec
from noloco_node.directory.dht import DhtDirectory
from noloco_node.identity.keys import Identity, identity_of_seed
from noloco_node.identity.peer_id import PeerId
from noloco_node.node.checkpointing import CheckpointKeeper
from noloco_node.node.first_state import obtain_state
from noloco_node.node.replica import Replica
from noloco_node.node.stage_lifecycle import StageLifecycle
from noloco_node.simulator.directory import SimulatedDht, SimulatedP2P, address_of
from noloco_node.simulator.invariants import left_open
from noloco_node.simulator.loop import Machine
from noloco_node.simulator.quadratic import Quadratic
from noloco_node.sizing.footprint import Footprint
from noloco_node.sizing.memory import Memory
from noloco_node.storage.checkpoint import Checkpoint, CheckpointFailed, CheckpointFolder, KeptStanding, Written
from noloco_node.telemetry.events import AnyEvent
from noloco_node.training.compute_thread import (
    OWN,
    CallOrder,
    Compute,
    DeviceLoad,
    DeviceWaits,
    Priority,
    QueueTurn,
    attempt,
    settle,
)
from noloco_node.training.frozen_state import FrozenState
from noloco_node.training.host_copies import Ahead, UnderWay
from noloco_node.transport.memory import MemoryNetwork, MemoryTransport
from noloco_node.transport.pacing import line_of

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    priority: Priority
    work: Callable[[], Any]
    future: asyncio.Future[Any]
    asked: float
    waits: DeviceWaits | None


class SimulatedDevice(Compute):
    """`seconds` says what a kind of work takes. A call takes effect when its time is over, on the loop's own thread.

    Must be made and closed inside a running loop.
    """

    def __init__(self, seconds: Callable[[Priority], float]) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._seconds = seconds
        self._order: CallOrder[_Call] = CallOrder()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def waiting(self) -> int:
        """See `Compute.waiting`."""
        return len(self._order)

    @property
    def load(self) -> DeviceLoad:
        """See `Compute.load`."""
        return DeviceLoad(self._order.forwards, self.busy_seconds)

    async def run(
        self,
        priority: Priority,
        work: Callable[[], T | UnderWay[T]],
        turn: QueueTurn = OWN,
        waits: DeviceWaits | None = None,
        ahead: Ahead | None = None,
    ) -> T:
        """See `Compute.run`. It has no memory of its own that anything could come to."""
        del ahead
        future: asyncio.Future[T] = self._loop.create_future()
        self._order.put(priority, _Call(priority, work, future, self._loop.time(), waits), turn)
        if self._idle.is_set():
            self._idle.clear()
            self._loop.call_soon(self._next)
        return await future

    async def close(self) -> None:
        """See `Compute.close`."""
        await self._idle.wait()

    def _next(self) -> None:
        while len(self._order):
            call = self._order.take()
            if not call.future.cancelled():
                if call.waits is not None:
                    call.waits.seconds += self._loop.time() - call.asked
                seconds = self._seconds(call.priority)
                self._loop.call_later(seconds, self._finish, call, seconds)
                return
        self._idle.set()

    def _finish(self, call: _Call, seconds: float) -> None:
        self._worked(call.priority, seconds)
        settle(call.future, *attempt(call.work))
        self._next()


logger = logging.getLogger(__name__)

Condition = Literal["running", "ended", "failed", "killed"]
"""`ended`: it left in order, at the run's end or told to; `failed`: its own code gave up."""


@cache
def identity_of(number: int) -> Identity:
    """The key of the node with this number, the same in every simulation."""
    return identity_of_seed(hashlib.sha256(f"node {number}".encode()).digest())


def peer_of(number: int) -> PeerId:
    """The id of the node with this number."""
    return identity_of(number).peer_id


ENDLESS = Memory(0, 1 << 62)
"""A simulated machine holds any stage: free memory on the simulating machine must not change a course."""


class Disk(CheckpointFolder):
    """A node's checkpoints, on a disk that may be full."""

    def __init__(self, path: Path, kept: int) -> None:
        super().__init__(path, kept)
        self.full = False
        self.origins = dict[PeerId, float]()
        """See `SignedEnd.origins`."""
        self.refused = 0
        """Checkpoints that it took none of."""

    def write(self, standing: KeptStanding, tensors: Mapping[str, Tensor], state: FrozenState | None = None) -> Written:
        """See `CheckpointFolder.write`; told is the place from where the disks are, which no trace may hang on."""
        if self.full:
            self.refused += 1
            raise CheckpointFailed("No space left on device")
        written = super().write(standing, tensors, state)
        return replace(written, path=written.path.relative_to(self.path.parent))


class Node:
    """A replica with its machine, device, transport and place in the directory; without p2pd and receipts.

    `seconds` is what its device takes for each kind of work; `told` gets every event. It joins by the nodes
    `entrances`; without any it begins a swarm. It goes from stage to stage as a daemon does that did not choose its
    own, unless `node.reassign` is `never`. Its stays are those of `node.journey`, with the same lifecycle and
    checkpoints; without a disk it takes none.
    """

    def __init__(
        self,
        number: int,
        identity: Identity,
        stage: int,
        spec: RunSpec,
        settings: NodeSettings,
        footprint: Footprint,
        learning: Quadratic,
        network: MemoryNetwork,
        dht: SimulatedDht,
        seconds: Callable[[Priority], float],
        told: Callable[[Node, AnyEvent], None],
        machine: Machine,
        entrances: Sequence[PeerId] = (),
    ) -> None:
        self.number = number
        self.stage = stage
        self.identity = identity
        self.peer = identity.peer_id
        self.machine = machine
        self.condition: Condition = "running"
        self.error: BaseException | None = None
        """What it failed of."""
        self.replica: Replica | None = None
        """Its last one; closed once the node has left."""
        self.left_open: tuple[str, ...] = ()
        """What its replica held still when it had run to its end."""
        self.outside = 0.0
        """Seconds for which nobody let it into the directory."""
        self.ended_at = math.inf
        """When it ended by itself; seconds."""
        self.weights = ""
        """Hash of the weights with which it ended, slow and fast."""
        self.disk: Disk | None = None
        self.auto = False
        """It chooses its first stage."""
        self.told_to_leave = False
        self.set_out = False
        """It has left a stage for another, whether it came there or not."""
        self.lifecycle: StageLifecycle | None = None
        addresses = tuple(address_of(peer) for peer in entrances)
        self._entrances = entrances
        self._spec = spec
        self._settings = settings.model_copy(update={"initial_peers": addresses, "stage": stage})
        self._footprint = footprint
        self._learning = learning
        self._network = network
        self._dht = dht
        self._p2p: SimulatedP2P | None = None
        self.directory: DhtDirectory | None = None
        self._seconds = seconds
        self._told = told

    def emit(self, event: AnyEvent) -> None:
        """Tell an event; the dead tell nothing."""
        if self.condition == "running":
            self._told(self, event)

    def die(self, *, silent: bool = False) -> None:
        """It is gone from one moment to the next: nothing of what it still does is seen by anybody. Where it is
        `silent` nobody is told either that its connections have broken."""
        self.condition = "killed"
        if self._p2p is not None and not silent:
            self._p2p.die()

    async def live(self) -> None:
        """From the start to the end. Never raises but when cancelled: see `condition` and `error`."""
        try:
            await self._live()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self.condition, self.error = "failed", error
            logger.warning("node %d failed at %.3f s: %r", self.number, ambient.monotonic(), error, exc_info=error)
        else:
            self.condition, self.ended_at = "ended", ambient.monotonic()

    async def _live(self) -> None:
        device = SimulatedDevice(self._seconds)
        moves = "never" if self._settings.reassign == "never" else "always"
        settings = self._settings.model_copy(update={"reassign": moves, "stage": "auto" if self.auto else self.stage})
        async with self.network() as (transport, directory):
            try:
                stays = StageLifecycle(self._spec, settings, self._footprint, transport, directory, ENDLESS)
                self.lifecycle, saved = stays, None
                if self.disk is not None:
                    stays.signed.origins.update(self.disk.origins)
                    self.disk.origins = stays.signed.origins
                    wanted = None if self.auto else self.stage
                    saved = await ambient.elsewhere(self.disk.newest, self._spec.run_id, wanted)
                if saved is None and self.auto:
                    await stays.look_around()
                self.stage = stays.stage = await stays.first_stage(saved and saved.standing.stage)
                serve_hello(transport, self._spec, lambda: stays.stage, over=lambda: stays.over)
                stays.signed.serve()
                while not await self._stay(stays, saved, transport, directory, device):
                    saved = None
            finally:
                await device.close()

    async def _stay(
        self,
        stays: StageLifecycle,
        saved: Checkpoint | None,
        transport: MemoryTransport,
        directory: DhtDirectory,
        device: SimulatedDevice,
    ) -> bool:
        """One stay; whether it was the last. `stays.stage` is that of the next one."""
        async with AsyncExitStack() as stack:
            async with stays.arriving(self.stage):
                replica = self.replica = await self._replica(stays, saved, transport, directory, device)
                stack.callback(replica.close)
                keeper = None
                if self.disk is not None:
                    keeper = stack.enter_context(CheckpointKeeper(replica, self.disk, self.emit, self._settings))
                clock = None if saved is None else saved.standing.progress.clock
                first = None
                if saved is not None and keeper is not None:
                    _, weights = await replica.worker.slow_weights()
                    first = partial(_given, weights)
                    await keeper.resume(saved)
                replica.serve()
                folder = self.disk or CheckpointFolder(Path("nowhere"), 1)
                try:
                    origin = await obtain_state(replica, stays, clock, folder, first=first)
                except RunHasEnded:
                    if stays.moving is None:
                        raise
                    return True
            if origin is None:
                self.stage = await stays.back()
                return False
            moved = stays.arrived(replica, origin)
            if moved is not None:
                self.emit(moved)
            if self.told_to_leave:
                replica.stop.set()
            await self._train(stays, replica, keeper)
            if stays.move is not None and not self.told_to_leave:
                self.stage = stays.departs()
                self.set_out = True
                return False
            await stays.give_up_move()
            self.weights = await weights_of(replica)
            await transport.close()  # what others still wanted of it is no longer under way
            self.left_open = left_open(replica)
            return True

    async def _replica(
        self,
        stays: StageLifecycle,
        saved: Checkpoint | None,
        transport: MemoryTransport,
        directory: DhtDirectory,
        device: SimulatedDevice,
    ) -> Replica:
        spec, drawn = self._spec, stays.ledger.drawn if saved is None else saved.standing.ledger["drawn"]
        return Replica(
            spec,
            self._settings,
            await self._learning.place(spec, self.stage, device),
            transport,
            directory,
            device,
            samples=self._learning.samples(spec, self.number, drawn) if self.stage == 0 else None,
            emit=self.emit,
            ledger=stays.ledger,
            standby_of=lambda: stays.copies.standby_of,
            signed=stays.signed,
        )

    async def _train(self, stays: StageLifecycle, replica: Replica, keeper: CheckpointKeeper | None) -> None:
        async with asyncio.TaskGroup() as group:
            beside = [group.create_task(stays.accompany(replica))]
            if keeper is not None:
                beside.append(group.create_task(keeper.run()))
            await replica.run()
            for task in beside:
                task.cancel()
        if keeper is not None and (stays.move is None or self.told_to_leave):
            await keeper.save()

    @asynccontextmanager
    async def network(self) -> AsyncGenerator[tuple[MemoryTransport, DhtDirectory]]:
        """Join, and leave in the end."""
        line = line_of(self._settings.uplink_mbit, self._settings.downlink_mbit)
        transport = MemoryTransport(self._network, self.peer, line=line)
        self._p2p, began = self._dht.daemon(self.peer), ambient.monotonic()
        try:
            try:
                directory = await self._dht.join(self._p2p, self.identity, transport.peer_stats, self._entrances)
            finally:
                self.outside = ambient.monotonic() - began
            self.directory = directory
            try:
                yield transport, directory
            finally:
                await directory.close()
        finally:
            self._p2p.die()
            await transport.close()


async def weights_of(replica: Replica) -> str:
    """Hash of a replica's slow and fast weights."""
    digest = hashlib.sha256()
    for weights in await replica.worker.named_weights():
        for name in sorted(weights):
            digest.update(weights[name].numpy().tobytes())
    return digest.hexdigest()


async def _given(weights: Tensor) -> Tensor:
    return weights
