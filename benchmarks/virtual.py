"""The swarms of these benchmarks in virtual time: real nodes on paced devices, each behind one line."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from noloco_node.config.experiments import SimSpec
from noloco_node.config.load import Config
from noloco_node.simulator.course import exchange_arithmetic
from noloco_node.simulator.links import Attachment, Links, SharedWay
from noloco_node.simulator.loop import in_virtual_time
from noloco_node.simulator.node import peer_of
from noloco_node.simulator.quadratic import Quadratic, weigh_as
from noloco_node.simulator.world import World
from noloco_node.sizing.footprint import Footprint, footprint_of
from noloco_node.training.compute_thread import Priority

T = TypeVar("T")

STEP_SECONDS = 0.0002
"""Of a device, for an inner step."""
DOWNLINK = 1.25e9
"""Bytes a second. Nobody's downlink is the limit."""


@dataclass(frozen=True)
class VirtualSwarm:
    """What stands in for the daemons."""

    config: Config
    layout: Sequence[int]
    """The stage of each node."""
    operation: Callable[[int, Priority], float]
    """Seconds of the device of a node of this stage for a forward or a backward."""
    uplink: float
    """Bytes a second of each node."""
    round_trip: float
    downlink: float = DOWNLINK

    def watched(self, watch: Callable[[World], Awaitable[T]], seed: int) -> T:
        """What `watch` comes to, from when all nodes were started."""
        footprint = footprint_of(self.config.run)
        arithmetic = exchange_arithmetic(footprint, SimSpec().exchange_seconds)
        return in_virtual_time(lambda: self._watched(watch, footprint, seed), seed=seed, elsewhere_seconds=arithmetic)

    async def _watched(self, watch: Callable[[World], Awaitable[T]], footprint: Footprint, seed: int) -> T:
        run = self.config.run
        way = SharedWay([[self.round_trip]])
        links = Links(way, weigh_as(footprint, run.outer.codec))
        settings = self.config.node.model_copy(update={"seed": seed, "reassign": "never"})
        learning = Quadratic(seed)

        def device(number: int) -> Callable[[Priority], float]:
            stage = self.layout[number]
            return lambda work: STEP_SECONDS if work is Priority.STEP else self.operation(stage, work)

        async with World(run, settings, learning=learning, device=device, links=links, seed=seed) as world:
            for number, stage in enumerate(self.layout):
                way.attach(peer_of(number), Attachment(0, self.uplink, self.downlink))
                world.start(stage)
            return await watch(world)
