"""Nodes of a simulation that may move, on machines that have no p2pd, no run folder and no receipts.

Their stays are those of `node.journey`, with the same lifecycle and checkpoints.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor

from noloco_node import ambient
from noloco_node.bootstrap.hello import serve_hello
from noloco_node.bootstrap.spec_fetch import RunHasEnded
from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import RunSpec
from noloco_node.identity.peer_id import PeerId
from noloco_node.node.checkpointing import CheckpointKeeper
from noloco_node.node.first_state import obtain_state
from noloco_node.node.replica import Replica
from noloco_node.node.stage_lifecycle import StageLifecycle
from noloco_node.simulator.directory import SimulatedDirectory
from noloco_node.simulator.invariants import left_open
from noloco_node.simulator.links import Links
from noloco_node.simulator.node import Node, SimulatedDevice, weights_of
from noloco_node.simulator.quadratic import Learning
from noloco_node.simulator.world import DeviceTimes, World
from noloco_node.sizing.footprint import Footprint
from noloco_node.sizing.memory import Memory
from noloco_node.storage.checkpoint import Checkpoint, CheckpointFailed, CheckpointFolder, KeptStanding, Written
from noloco_node.training.frozen_state import FrozenState
from noloco_node.transport.memory import MemoryTransport

KEPT = 2
ENDLESS = Memory(0, 1 << 62)
"""A simulated machine holds any stage: free memory on the simulating machine must not change a course."""


class Disk(CheckpointFolder):
    """A node's checkpoints, on a disk that may be full."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, KEPT)
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


class StayingNode(Node):
    """Goes from stage to stage as a daemon does that did not choose its own, unless `node.reassign` is `never`. Its
    world gives it what it needs for that; without a disk it takes no checkpoints."""

    footprint: Footprint
    stage: int
    disk: Disk | None = None
    auto = False
    """It chooses its first stage."""
    told_to_leave = False
    set_out = False
    """It has left a stage for another, whether it came there or not."""
    lifecycle: StageLifecycle | None = None

    async def _live(self) -> None:
        device = SimulatedDevice(self._seconds)
        moves = "never" if self._settings.reassign == "never" else "always"
        settings = self._settings.model_copy(update={"reassign": moves, "stage": "auto" if self.auto else self.stage})
        async with self.network() as (transport, directory):
            try:
                stays = StageLifecycle(self._spec, settings, self.footprint, transport, directory, ENDLESS)
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
        directory: SimulatedDirectory,
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
                folder = self.disk or CheckpointFolder(Path("nowhere"), KEPT)
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
        directory: SimulatedDirectory,
        device: SimulatedDevice,
    ) -> Replica:
        spec, drawn = self._spec, stays.ledger.drawn if saved is None else saved.standing.ledger["drawn"]
        return Replica(
            spec,
            self._settings,
            await self._learning.place(spec, self._settings, self.stage, device),
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


async def _given(weights: Tensor) -> Tensor:
    return weights


class StayingWorld(World):
    """A world of nodes that go where they are needed most, keep copies of other stages and bring lost ones back."""

    def __init__(
        self,
        spec: RunSpec,
        settings: NodeSettings,
        footprint: Footprint,
        *,
        device: DeviceTimes,
        learning: Learning,
        links: Links,
        seed: int,
    ) -> None:
        super().__init__(spec, settings, learning=learning, device=device, links=links, seed=seed)
        self._kind = StayingNode
        # a copy is refused that has not as many weights as its stage
        self._footprint = replace(footprint, parameters=learning.weights(footprint))

    def _outfit(self, node: Node) -> None:
        assert isinstance(node, StayingNode)
        node.footprint = self._footprint

    def stop(self, node: Node) -> None:
        """See `World.stop`."""
        assert isinstance(node, StayingNode)
        node.told_to_leave = True
        super().stop(node)
