"""Whose microbatches this node has trained, and how far their origins were: pure bookkeeping, bounded in memory.

What a microbatch says of its origin is the word of whoever sent it. So it is kept by the sender, whom the link
authenticates, and a sender is one voice however many origins it names, an origin one however often it is named.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median_low

from noloco_node.swarm.peer_id import PeerId

SENDERS_REMEMBERED = 256
ORIGINS_OF_A_SENDER = 64
"""Of more, those heard of last."""


@dataclass(frozen=True, slots=True)
class DrawnBy:
    """Who drew a microbatch, and its clock (tokens) then."""

    origin: PeerId
    clock: float


@dataclass(frozen=True, slots=True)
class OriginSeen:
    """What one sender's last microbatch of one origin said. Times are seconds on a clock that never goes back."""

    sender: PeerId
    origin: PeerId
    clock: float
    """Tokens. The last word and no maximum: a moment's lie does not stay."""
    rose_at: float
    """When it was last above the one before it."""
    seen_at: float


class OriginsSeen:
    """The latest clock of each origin by each previous-stage peer that sent a microbatch which was then trained."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._by_sender: OrderedDict[PeerId, OrderedDict[PeerId, OriginSeen]] = OrderedDict()

    def saw(self, drawn: DrawnBy, sender: PeerId) -> None:
        """A microbatch that `sender` sent was trained here."""
        now = self._now()
        heard = self._by_sender.setdefault(sender, OrderedDict())
        before = heard.get(drawn.origin)
        rose_at = now if before is None or drawn.clock > before.clock else before.rose_at
        heard[drawn.origin] = OriginSeen(sender, drawn.origin, drawn.clock, rose_at, now)
        heard.move_to_end(drawn.origin)
        self._by_sender.move_to_end(sender)
        if len(heard) > ORIGINS_OF_A_SENDER:
            heard.popitem(last=False)
        if len(self._by_sender) > SENDERS_REMEMBERED:
            self._by_sender.popitem(last=False)

    def latest(self, within: float = math.inf) -> list[OriginSeen]:
        """All that was heard in the last `within` seconds."""
        since = self._now() - within
        return [seen for heard in self._by_sender.values() for seen in heard.values() if seen.seen_at >= since]

    def median_clock(self, within: float = math.inf) -> float | None:
        """Where the origins are (tokens): the low median over senders of each one's low median over origins, so that
        a minority of either moves it no further than to another's word. None where nothing was heard."""
        by_sender: dict[PeerId, list[float]] = {}
        for seen in self.latest(within):
            by_sender.setdefault(seen.sender, []).append(seen.clock)
        return median_low(median_low(clocks) for clocks in by_sender.values()) if by_sender else None

    def furthest_clock(self, lead: float, within: float = math.inf) -> float | None:
        """The furthest clock of an origin (tokens) that is believed: at most `lead` beyond the median. None where
        nothing was heard."""
        middle = self.median_clock(within)
        if middle is None:
            return None
        return max(seen.clock for seen in self.latest(within) if seen.clock <= middle + lead)
