"""The network between the nodes of a simulation: which nodes reach each other, and how long bytes take.

Transfers share capacity: each has an equal part of every pipe that it goes through, the least part counts.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Protocol

from noloco_node.aio import Pulse
from noloco_node.identity.peer_id import PeerId
from noloco_node.transport.errors import PeerUnreachable, Refused
from noloco_node.transport.interface import TransportLimits
from noloco_node.transport.memory import Parcel

FIRST_OCTETS = 256 << 10
"""The bytes of a new stream's window."""
MOST_OCTETS = 16 << 20
READ_OCTETS = 32 << 10
"""p2pd reads so many bytes of a message at a time."""
QUICK_TRIPS = 4.0
KEPT_SECONDS = TransportLimits().idle_seconds / 2
"""Callers keep a stream that nobody uses for so many seconds."""


@dataclass(slots=True)
class StreamWindow:
    """One direction of one stream. Positions are bytes since it was opened.

    Moments are those of arrival. For a grant it is the moment at which bytes can be there that leave when the sender
    hears of it.
    """

    said_at: float
    """When the receiver spoke last, or the stream was opened."""
    size: int = FIRST_OCTETS
    read: int = 0
    """Bytes that have come, all of which are read at once."""
    said: int = 0
    """The bytes of them that the receiver has spoken of."""
    allowed: int = FIRST_OCTETS
    """The sender may go so far."""
    _granted: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    """On the way to the sender: from when on it counts, and as far as the sender may go then."""

    def room(self, octets: int, begun: int, now: float) -> int:
        """How many of `octets` can come before the receiver speaks or the sender must wait for it: none where it must
        wait. `begun` is where their message began."""
        while self._granted and self._granted[0][0] <= now:
            self.allowed = self._granted.pop(0)[1]
        due = self.said + self.size // 2 - begun
        speaks = begun + READ_OCTETS * -(-due // READ_OCTETS)
        return min(octets, self.allowed - self.read, speaks - self.read)

    def came(self, octets: int, round_trip: float, now: float) -> None:
        """So many more are there; the round trip is in seconds."""
        self.read += octets
        grant = self.read - self.said
        if grant < self.size // 2:
            return
        if now - self.said_at < QUICK_TRIPS * round_trip and self.size < MOST_OCTETS:
            grant, self.size = self.size, 2 * self.size
        self.said, self.said_at = self.read, now
        before = self._granted[-1][1] if self._granted else self.allowed
        self._granted.append((now + round_trip, before + grant))

    @property
    def goes_on_at(self) -> float:
        """When a sender goes on that must wait."""
        return self._granted[0][0]


class KeptStream:
    """One stream, a window each way."""

    def __init__(self, now: float) -> None:
        self._opened = now
        self._windows: dict[PeerId, StreamWindow] = {}

    def towards(self, peer: PeerId) -> StreamWindow:
        """That of the direction to `peer`."""
        if peer not in self._windows:
            self._windows[peer] = StreamWindow(self._opened)
        return self._windows[peer]


class KeptStreams:
    """The streams that one peer keeps to another. As nodes do it lends the one that was given back last."""

    def __init__(self) -> None:
        self._idle: list[tuple[float, KeptStream]] = []

    def take(self, now: float) -> KeptStream:
        """One that is kept, or a new one."""
        while self._idle and now - self._idle[0][0] >= KEPT_SECONDS:
            self._idle.pop(0)
        return self._idle.pop()[1] if self._idle else KeptStream(now)

    def give_back(self, stream: KeptStream, now: float) -> None:
        """It may be lent again."""
        self._idle.append((now, stream))


SMALL_OCTETS = 16_384
"""A message of no more bytes takes its time at full rate and slows nobody down: a request without tensors among
transfers."""


@dataclass(eq=False)
class Pipe:
    """One direction of a node's link. `capacity` is in bytes a second."""

    capacity: float
    flows: dict[_Flow, None] = field(default_factory=dict["_Flow", None], repr=False)


@dataclass(eq=False)
class _Flow:
    pipes: tuple[Pipe, ...]
    most: float
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

    async def carry(self, octets: float, *pipes: Pipe, most: float = float("inf")) -> None:
        """Return when so many bytes went through all the `pipes`, at `most` bytes a second."""
        if octets <= SMALL_OCTETS:
            await asyncio.sleep(octets / min(most, *(pipe.capacity for pipe in pipes)))
            return
        flow = _Flow(pipes, most, octets, self._loop.create_future(), since=self._loop.time())
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
            rate = min(flow.most, *(pipe.capacity / len(pipe.flows) for pipe in flow.pipes))
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

STALL_SECONDS = 0.2
"""A lost packet is sent again after at least so many seconds."""
SEGMENT_OCTETS = 1460
MATHIS = 1.22
"""A stream that loses the share p of its segments brings about 1.22 / sqrt(p) of them in a round trip. This is the law
of Mathis and others (1997)."""


class LinkModel(Protocol):
    """How long bytes take from one peer to another."""

    async def carry(self, source: PeerId, target: PeerId, octets: float, window: StreamWindow | None = None) -> None:
        """Return when so many are there, which `window` may hold up."""
        ...

    def slow(self, peer: PeerId, times: float) -> None:
        """Let all to and from `peer` take so many times as long; 1 is as it was."""
        ...

    def via(self, source: PeerId, target: PeerId) -> Sequence[PeerId]:
        """Peers in between, which carry it."""
        ...

    def round_trip(self, one: PeerId, other: PeerId) -> float:
        """Seconds there and back, without what the bytes take."""
        ...


class PlainWay:
    """Implements `LinkModel`: as long as `seconds` says; transfers know nothing of each other."""

    def __init__(self, seconds: LinkSeconds) -> None:
        self._seconds = seconds
        self._slowed: dict[PeerId, float] = {}

    async def carry(self, source: PeerId, target: PeerId, octets: float, window: StreamWindow | None = None) -> None:
        """See `LinkModel.carry`; no window holds anything up."""
        del window
        slowed = max(self._slowed.get(source, 1.0), self._slowed.get(target, 1.0))
        await asyncio.sleep(self._seconds(source, target, math.ceil(octets)) * slowed)

    def slow(self, peer: PeerId, times: float) -> None:
        """See `LinkModel.slow`."""
        self._slowed[peer] = times

    def via(self, source: PeerId, target: PeerId) -> Sequence[PeerId]:
        """See `LinkModel.via`."""
        del source, target
        return ()

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
    loss: float = 0.0
    """Share of its packets that are lost, either way."""
    relay: PeerId | None = None
    """The relay of a node that nobody can dial: all goes through it, and counts on its links as well."""


class SharedWay:
    """Implements `LinkModel`: a round trip by the regions at both ends, and up- and downlinks that transfers share.

    Loss is stalls. A small message that is lost comes `STALL_SECONDS` and a round trip later. A transfer is held to
    what a stream brings at that loss. `seconds[a][b]` is the round trip from region to region.
    """

    def __init__(self, seconds: Sequence[Sequence[float]], rng: random.Random) -> None:
        self._seconds = seconds
        self._rng = rng
        self._pipes = Pipes()
        self._ends: dict[PeerId, Attachment] = {}
        self._up: dict[PeerId, Pipe] = {}
        self._down: dict[PeerId, Pipe] = {}
        self._slowed: dict[PeerId, float] = {}

    def attach(self, peer: PeerId, end: Attachment) -> None:
        """From now on it is there."""
        self._ends[peer] = end
        self._up[peer], self._down[peer] = Pipe(end.up), Pipe(end.down)

    def relayed(self, peer: PeerId) -> bool:
        """Whether nobody can dial it."""
        return self._ends[peer].relay is not None

    def slow(self, peer: PeerId, times: float) -> None:
        """See `LinkModel.slow`."""
        end = self._ends[peer]
        self._slowed[peer] = times
        self._pipes.resize(self._up[peer], end.up / times)
        self._pipes.resize(self._down[peer], end.down / times)

    def round_trip(self, one: PeerId, other: PeerId) -> float:
        """See `LinkModel.round_trip`."""
        return self._trip([one, *self.via(one, other), other])

    def _trip(self, stops: Sequence[PeerId]) -> float:
        slowed = max(self._slowed.get(stops[0], 1.0), self._slowed.get(stops[-1], 1.0))
        regions = [self._ends[stop].region for stop in stops]
        return slowed * sum(self._seconds[here][there] for here, there in itertools.pairwise(regions))

    def via(self, source: PeerId, target: PeerId) -> Sequence[PeerId]:
        """See `LinkModel.via`: the relays of those that nobody can dial, unless they are its ends."""
        relays = (self._ends[source].relay, self._ends[target].relay)
        if relays == (None, None):
            return ()
        return tuple(dict.fromkeys(relay for relay in relays if relay not in (None, source, target)))

    async def carry(self, source: PeerId, target: PeerId, octets: float, window: StreamWindow | None = None) -> None:
        """See `LinkModel.carry`."""
        between = self.via(source, target)
        if between:
            stops = [source, *between, target]
            pipes = [pipe for one, other in itertools.pairwise(stops) for pipe in (self._up[one], self._down[other])]
        else:  # most of what is carried, and this is asked for each message
            stops, pipes = (source, target), (self._up[source], self._down[target])
        trip = self._trip(stops)
        loss = 1.0 - math.prod(1.0 - self._ends[stop].loss for stop in stops)
        stall = STALL_SECONDS + trip if loss and self._rng.random() < loss else 0.0
        most = MATHIS * SEGMENT_OCTETS / (trip * math.sqrt(loss)) if loss and trip else math.inf
        await asyncio.sleep(trip / 2 + stall)
        if window is None or octets <= SMALL_OCTETS:
            await self._pipes.carry(octets, *pipes, most=most)
        else:
            await self._carry_by_parts(math.ceil(octets), pipes, most, window, trip)

    async def _carry_by_parts(
        self, left: int, pipes: Sequence[Pipe], most: float, window: StreamWindow, trip: float
    ) -> None:
        begun, loop = window.read, asyncio.get_running_loop()
        while left:
            part = window.room(left, begun, loop.time())
            if not part:
                await asyncio.sleep(window.goes_on_at - loop.time())
                continue
            await self._pipes.carry(part, *pipes, most=most)
            window.came(part, trip, loop.time())
            left -= part


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
        """Bytes that each peer sent, by method; of a relay, what it carried is `relay`."""
        self.received: defaultdict[PeerId, Counter[str]] = defaultdict(Counter)
        self.lost: Callable[[PeerId], bool] = lambda _: False
        """Whether a peer is dead: no relay carries then."""
        self._streams: dict[tuple[PeerId, PeerId], KeptStreams] = defaultdict(KeptStreams)
        self._side: dict[PeerId, int] = {}
        self._together = Pulse()

    def part(self, *sides: Iterable[PeerId]) -> None:
        """Cut all links between the peers of different `sides`; those that no side names are together, so where none is
        named everybody reaches everybody again."""
        self._side = {peer: number for number, side in enumerate(sides, 1) for peer in side}
        self._together.fire()

    def apart(self, one: PeerId, other: PeerId) -> bool:
        """Whether nothing goes between them now."""
        return self._side.get(one, 0) != self._side.get(other, 0)

    async def open(self, source: PeerId, target: PeerId) -> None:
        """See `Carrier.open`: streams of a connection open with what is sent."""
        if any(map(self.lost, self.way.via(source, target))):
            raise PeerUnreachable(f"the relay of {source} or {target} is gone")
        await self._reached(source, target)

    @contextmanager
    def lend(self, caller: PeerId, target: PeerId) -> Generator[KeptStream]:
        """See `Carrier.lend`: the one that was given back last, as nodes lend them."""
        kept = self._streams[caller, target]
        stream = kept.take(asyncio.get_running_loop().time())
        try:
            yield stream
        except Refused:
            kept.give_back(stream, asyncio.get_running_loop().time())
            raise
        kept.give_back(stream, asyncio.get_running_loop().time())

    async def carry(self, source: PeerId, target: PeerId, parcel: Parcel, stream: object = None) -> None:
        """See `Carrier.carry`."""
        octets = self.weigh(parcel)
        self.count(source, target, parcel.method, octets)
        await self._reached(source, target)
        window = stream.towards(target) if isinstance(stream, KeptStream) else None
        await self.way.carry(source, target, octets, window)
        await self._reached(source, target)

    def count(self, source: PeerId, target: PeerId, method: str, octets: float) -> None:
        """Write down what goes."""
        self.sent[source][method] += round(octets)
        self.received[target][method] += round(octets)
        for relay in self.way.via(source, target):
            self.sent[relay]["relay"] += round(octets)

    async def _reached(self, source: PeerId, target: PeerId) -> None:
        while self._side and self.apart(source, target):
            await self._together.wait()
