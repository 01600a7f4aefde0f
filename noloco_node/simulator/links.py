"""What lies between the nodes of a simulation: who reaches whom, and how long bytes take."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from noloco_node.aio import Pulse
from noloco_node.identity.peer_id import PeerId

Seconds = Callable[[PeerId, PeerId, int], float]
"""In which so many bytes go from one peer to another."""


def at_once(_source: PeerId, _target: PeerId, _octets: int) -> float:
    """Bytes take no time."""
    return 0.0


class Links:
    """Implements `Carrier`: bytes take the time that `seconds` says, times what either end is slowed by. Between
    peers that are apart they wait until these are together again, as on a connection that is cut and not closed."""

    def __init__(self, seconds: Seconds = at_once) -> None:
        self._seconds = seconds
        self._side: dict[PeerId, int] = {}
        self._slowed: dict[PeerId, float] = {}
        self._together = Pulse()

    def part(self, *sides: Iterable[PeerId]) -> None:
        """Cut all links between the peers of different `sides`; those that no side names are together."""
        self._side = {peer: number for number, side in enumerate(sides, 1) for peer in side}
        self._together.fire()

    def heal(self) -> None:
        """Everybody reaches everybody again."""
        self.part()

    def slow(self, peer: PeerId, times: float) -> None:
        """Let all that goes to and from `peer` take so many times as long; 1 is as it was."""
        self._slowed[peer] = times

    def apart(self, one: PeerId, other: PeerId) -> bool:
        """Whether nothing goes between them now."""
        return self._side.get(one, 0) != self._side.get(other, 0)

    async def open(self, source: PeerId, target: PeerId) -> None:
        """See `Carrier.open`: streams of a connection open with what is sent."""
        await self._reached(source, target)

    async def carry(self, source: PeerId, target: PeerId, octets: int) -> None:
        """See `Carrier.carry`."""
        await self._reached(source, target)
        slowed = max(self._slowed.get(source, 1.0), self._slowed.get(target, 1.0))
        await asyncio.sleep(self._seconds(source, target, octets) * slowed)
        await self._reached(source, target)

    async def _reached(self, source: PeerId, target: PeerId) -> None:
        while self.apart(source, target):
            await self._together.wait()
