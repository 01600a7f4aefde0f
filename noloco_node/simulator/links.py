"""The network between the nodes of a simulation: which nodes reach each other, and how long bytes take.

Transfers share capacity: each has an equal part of every pipe that it goes through, the least part counts.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Protocol

from noloco_node.aio import Pulse
from noloco_node.identity.peer_id import PeerId
from noloco_node.transport.memory import Parcel
from noloco_node.transport.pacing import SMALL_BYTES


@dataclass(eq=False)
class Pipe:
    """One direction of a node's link. `capacity` is in bytes a second."""

    capacity: float
    flows: dict[_Flow, None] = field(default_factory=dict["_Flow", None], repr=False)


@dataclass(eq=False)
class _Flow:
    pipes: tuple[Pipe, ...]
    left: float
    done: asyncio.Future[None]
    rate: float = 0.0
    since: float = 0.0
    timer: asyncio.TimerHandle | None = None


class Pipes:
    """Carries bytes through pipes on the running loop.

    What a transfer with a narrower other pipe does not use is not given to others: TCP does a little better.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._context = copy_context()
        """Neither end's: a machine that is halted must not hold others' transfers up."""

    async def carry(self, octets: float, *pipes: Pipe) -> None:
        """Return when so many bytes went through all the `pipes`."""
        if octets <= SMALL_BYTES:  # it takes its time at full rate: a request without tensors among transfers
            await asyncio.sleep(octets / min(pipe.capacity for pipe in pipes))
            return
        flow = _Flow(pipes, octets, self._loop.create_future(), since=self._loop.time())
        for pipe in pipes:
            pipe.flows[flow] = None
        self._share(pipes)
        try:
            await flow.done
        finally:
            if flow.timer is not None:
                flow.timer.cancel()
            for pipe in pipes:
                pipe.flows.pop(flow, None)
            self._share(pipes)

    def resize(self, pipe: Pipe, capacity: float) -> None:
        """Change a pipe's capacity, also for what is under way."""
        pipe.capacity = capacity
        self._share((pipe,))

    def _share(self, pipes: tuple[Pipe, ...]) -> None:
        """Give each transfer that goes through one of these its rate anew."""
        now = self._loop.time()
        for flow in {flow: None for pipe in pipes for flow in pipe.flows}:
            rate = min(pipe.capacity / len(pipe.flows) for pipe in flow.pipes)
            if rate == flow.rate:
                continue
            flow.left = max(0.0, flow.left - flow.rate * (now - flow.since))
            flow.since, flow.rate = now, rate
            if flow.timer is not None:
                flow.timer.cancel()
            flow.timer = self._loop.call_later(flow.left / rate, _arrive, flow, context=self._context)


def _arrive(flow: _Flow) -> None:
    if not flow.done.done():
        flow.done.set_result(None)


LinkSeconds = Callable[[PeerId, PeerId, int], float]
"""A function that gives the seconds in which so many bytes go from one peer to another."""


class LinkModel(Protocol):
    """How long bytes take from one peer to another."""

    async def carry(self, source: PeerId, target: PeerId, octets: float) -> None:
        """Return when so many are there."""
        ...

    def slow(self, peer: PeerId, times: float) -> None:
        """Let all to and from `peer` take so many times as long; 1 is as it was."""
        ...

    def round_trip(self, one: PeerId, other: PeerId) -> float:
        """Seconds there and back, without what the bytes take."""
        ...


class PlainWay:
    """Implements `LinkModel`: as long as `seconds` says; transfers know nothing of each other."""

    def __init__(self, seconds: LinkSeconds) -> None:
        self._seconds = seconds
        self._slowed: dict[PeerId, float] = {}

    async def carry(self, source: PeerId, target: PeerId, octets: float) -> None:
        """See `LinkModel.carry`."""
        slowed = max(self._slowed.get(source, 1.0), self._slowed.get(target, 1.0))
        await asyncio.sleep(self._seconds(source, target, math.ceil(octets)) * slowed)

    def slow(self, peer: PeerId, times: float) -> None:
        """See `LinkModel.slow`."""
        self._slowed[peer] = times

    def round_trip(self, one: PeerId, other: PeerId) -> float:
        """See `LinkModel.round_trip`."""
        return self._seconds(one, other, 0) + self._seconds(other, one, 0)


@dataclass(frozen=True, slots=True)
class Attachment:
    """How a node hangs on the network."""

    region: int
    up: float
    """Bytes a second that it can send; all of its streams share them."""
    down: float
    """Bytes a second that it can receive; all of its streams share them."""


class SharedWay:
    """Implements `LinkModel`: a round trip by the regions at both ends, and up- and downlinks that transfers share.

    `seconds[a][b]` is the round trip from region to region.
    """

    def __init__(self, seconds: Sequence[Sequence[float]]) -> None:
        self._seconds = seconds
        self._pipes = Pipes()
        self._ends: dict[PeerId, Attachment] = {}
        self._up: dict[PeerId, Pipe] = {}
        self._down: dict[PeerId, Pipe] = {}
        self._slowed: dict[PeerId, float] = {}

    def attach(self, peer: PeerId, end: Attachment) -> None:
        """From now on it is there."""
        self._ends[peer] = end
        self._up[peer], self._down[peer] = Pipe(end.up), Pipe(end.down)

    def slow(self, peer: PeerId, times: float) -> None:
        """See `LinkModel.slow`."""
        end = self._ends[peer]
        self._slowed[peer] = times
        self._pipes.resize(self._up[peer], end.up / times)
        self._pipes.resize(self._down[peer], end.down / times)

    def round_trip(self, one: PeerId, other: PeerId) -> float:
        """See `LinkModel.round_trip`."""
        slowed = max(self._slowed.get(one, 1.0), self._slowed.get(other, 1.0))
        return slowed * self._seconds[self._ends[one].region][self._ends[other].region]

    async def carry(self, source: PeerId, target: PeerId, octets: float) -> None:
        """See `LinkModel.carry`."""
        await asyncio.sleep(self.round_trip(source, target) / 2)
        await self._pipes.carry(octets, self._up[source], self._down[target])


def as_they_are(parcel: Parcel) -> float:
    """A parcel's bytes as they were sent in memory."""
    return parcel.octets


class Links:
    """Implements `Carrier`. Between peers that are apart bytes wait until these are together again, as on a
    connection that is cut and not closed. `weigh` says how many bytes a parcel stands for, where models of tensors are
    smaller than what they model."""

    def __init__(self, way: LinkModel | None = None, weigh: Callable[[Parcel], float] = as_they_are) -> None:
        self.way = way or PlainWay(lambda _source, _target, _octets: 0.0)
        self.weigh = weigh
        self.sent: defaultdict[PeerId, Counter[str]] = defaultdict(Counter)
        """Bytes that each peer sent, by method."""
        self.received: defaultdict[PeerId, Counter[str]] = defaultdict(Counter)
        self.lost: Callable[[PeerId], bool] = lambda _: False
        """Whether a peer is dead: nobody joins by it any more."""
        self.nowhere: set[PeerId] = set()
        """Peers whose machines are gone, although no connection to them has broken."""
        self._side: dict[PeerId, int] = {}
        self._together = Pulse()

    def part(self, *sides: Iterable[PeerId]) -> None:
        """Cut all links between the peers of different `sides`; those that no side names are together, so where none is
        named everybody reaches everybody again."""
        self._side = {peer: number for number, side in enumerate(sides, 1) for peer in side}
        self._together.fire()

    def apart(self, one: PeerId, other: PeerId) -> bool:
        """Whether nothing goes between them now."""
        gone = one in self.nowhere or other in self.nowhere
        return gone or self._side.get(one, 0) != self._side.get(other, 0)

    async def open(self, source: PeerId, target: PeerId) -> None:
        """See `Carrier.open`: streams of a connection open with what is sent."""
        await self._reached(source, target)

    async def carry(self, source: PeerId, target: PeerId, parcel: Parcel) -> None:
        """See `Carrier.carry`."""
        octets = self.weigh(parcel)
        self.count(source, target, parcel.method, octets)
        await self._reached(source, target)
        await self.way.carry(source, target, octets)
        await self._reached(source, target)

    def count(self, source: PeerId, target: PeerId, method: str, octets: float) -> None:
        """Write down what goes."""
        self.sent[source][method] += round(octets)
        self.received[target][method] += round(octets)

    async def _reached(self, source: PeerId, target: PeerId) -> None:
        while self._side and self.apart(source, target):
            await self._together.wait()
