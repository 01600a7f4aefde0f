"""A node's share of its line: what it may send and receive a second (`node.uplink_mbit`, `node.downlink_mbit`).

A token bucket for each direction, which all streams of the node share. What keeps the swarm together and is small never
waits: it is charged, and what comes next waits longer. All else goes piece by piece, in the order in which it asked.

Microbatches that take long to cross go two at a time. Equal ones that share a line evenly all end together: until then
nobody has any work of them, and after that the way out stands idle until their answers are back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from noloco_node import ambient

GOES_FIRST = ("hello", "records", "contribution")
"""Methods whose names begin so do not wait behind the training: without them a node is taken for dead."""
SMALL_BYTES = 16 * 1024
"""Up to so many bytes of a message of such a method do not wait."""
WIRE_SHARE = 1.05
"""Bytes on the line for each byte of a message: encryption, streams, TCP and IP, at full packets of 1,500 bytes."""
ANSWER_SHARE = 0.02
"""Bytes on the line back for each that goes one way: TCP confirms every second packet."""
SLICE_SECONDS = 0.02
"""A large message goes out in slices that the line takes so long for. A small one waits for one of them at most."""
LEAST_SLICE = SMALL_BYTES // 4
CREDIT_SECONDS = 0.25
"""The line may catch up on so much of what it was not used for: timers are late, and gaps would add up."""
BODIES_AT_ONCE = 2
"""The number of bodies that asked first and go out at once: while one waits for a round trip, the other has the
line."""
TURN_SECONDS = 10.0
"""The seconds after which the next body goes, too: a slow reader holds up nobody's line."""


class LineRate:
    """What goes one way, at most `rate` bytes a second of the line."""

    def __init__(self, rate: float, now: Callable[[], float] = ambient.monotonic) -> None:
        self.rate = rate
        self._now = now
        self._free_at = now()
        self._turn = asyncio.Lock()
        self.bodies = asyncio.Semaphore(BODIES_AT_ONCE)
        """Places for those that go now."""

    @property
    def slice_bytes(self) -> int:
        """The bytes of a large message that are written at once."""
        return max(LEAST_SLICE, int(self.rate * SLICE_SECONDS))

    def charge(self, count: float) -> None:
        """So many bytes go now, and wait for nothing."""
        self._free_at = max(self._free_at, self._now() - CREDIT_SECONDS) + count / self.rate

    async def take(self, count: float) -> None:
        """Wait for a turn, and until the line is free; then so many bytes may go."""
        async with self._turn:
            wait = self._free_at - self._now()
            while wait > 0.0:
                await asyncio.sleep(wait)
                wait = self._free_at - self._now()
            self.charge(count)


class BodyTurn:
    """The place of one large body among those that a line carries now. It has one between `come` and `over`."""

    def __init__(self, bodies: asyncio.Semaphore | None) -> None:
        """None for a body that need not wait."""
        self._bodies = bodies
        self._lapse: asyncio.TimerHandle | None = None

    async def come(self) -> None:
        """Wait for a place. Cancelling leaves none taken."""
        if self._bodies is not None:
            await self._bodies.acquire()
            self._lapse = asyncio.get_running_loop().call_later(TURN_SECONDS, self.over)

    def over(self) -> None:
        """The body has gone, or will not go. Harmless without a place."""
        if self._bodies is not None and self._lapse is not None:
            self._lapse.cancel()
            self._lapse = None
            self._bodies.release()


@dataclass(frozen=True, slots=True)
class Line:
    """Both directions; None where there is no bound. Sizes are those of messages, without what the wire adds."""

    up: LineRate | None = None
    down: LineRate | None = None

    def turn(self, *, waits: bool) -> BodyTurn:
        """The turn of a message; one that does not wait needs none, nor does any where the uplink has no bound."""
        return BodyTurn(self.up.bodies if waits and self.up is not None else None)

    async def send(self, count: int) -> None:
        """Wait until so many bytes may be sent."""
        if self.up is not None:
            await self.up.take(WIRE_SHARE * count)
        self._confirm(self.down, count)

    async def receive(self, count: int) -> None:
        """Wait until so many bytes may be read."""
        if self.down is not None:
            await self.down.take(WIRE_SHARE * count)
        self._confirm(self.up, count)

    def sent(self, count: int) -> None:
        """So many bytes go out now, and have not waited."""
        if self.up is not None:
            self.up.charge(WIRE_SHARE * count)

    def received(self, count: int) -> None:
        """So many bytes have come, and have not waited."""
        if self.down is not None:
            self.down.charge(WIRE_SHARE * count)

    def slices(self, parts: Sequence[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        """A large message, in the slices in which it goes out."""
        most = self.up.slice_bytes if self.up is not None else None
        for part in parts:
            if most is None or len(part) <= most:
                yield part
                continue
            view = memoryview(part)
            for start in range(0, len(view), most):
                yield view[start : start + most]

    @staticmethod
    def _confirm(back: LineRate | None, count: int) -> None:
        if back is not None:
            back.charge(ANSWER_SHARE * count)


UNBOUNDED = Line()


def at_once(method: str) -> int:
    """How many bytes of a message of this method do not wait."""
    return SMALL_BYTES if method.startswith(GOES_FIRST) else 0


def line_of(uplink_mbit: float | None, downlink_mbit: float | None) -> Line:
    """A line with these bounds, in Mbit/s."""
    return Line(*(None if mbit is None else LineRate(1e6 * mbit / 8.0) for mbit in (uplink_mbit, downlink_mbit)))
