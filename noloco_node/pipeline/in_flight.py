"""How many microbatches an origin keeps under way: as few as keep the devices at work, never more than a step's share.

More of them hide the time that a microbatch is away; each one beyond the first makes a gradient staler, and where no
device is free they only wait in queues. An origin sees two things: at what rate they end for each number under way,
which says from where on another one brings nothing to itself; and for how much of its way a microbatch waits for
devices, its own and others', which says from where on another one only takes a place from other origins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from noloco_node import ambient
from noloco_node.aio import Pulse
from noloco_node.config.node_settings import AUTO_AIM, AUTO_MOST

FIRST = 2
WINDOW = 12
"""Microbatches behind one rate; three times as many as are under way, where that is more."""
FRESH = 40
"""Windows for which a rate is believed at the most, and never for longer than had been watched when it was seen: then
that number is tried again. What the first windows say is of a swarm that is only beginning."""
ENOUGH_WAITING = 2.0
"""Own microbatches that wait for devices on their way, on average: with so many the devices that limit are at work."""
MOST_WAITING = 3.0
"""With more, places are taken from other origins and nothing is won: they do the same."""
LAST_ONE = 1 / 16
"""Part of one microbatch in what is taken for usual."""


@dataclass(frozen=True, slots=True)
class Rate:
    """At which microbatches ended while so many were under way."""

    a_second: float
    window: int
    """Number of the window in which it was seen."""


def of_use(kept: int, waiting: float) -> int:
    """Microbatches that may be of use under way, where `kept` are, of which `waiting` wait for devices."""
    if waiting > MOST_WAITING:
        return max(1, kept - 1)
    return kept if waiting >= ENOUGH_WAITING else kept + 1


def next_limit(rates: dict[int, Rate], window: int, most: int) -> int:
    """Microbatches to keep under way in the next window: the least number that brings nearly as much as the best does,
    of those up to `most`. A neighbour of it that was not tried of late is tried."""
    believed = {n: each.a_second for n, each in rates.items() if window - each.window < min(FRESH, 1 + each.window)}
    fresh = {n: rate for n, rate in believed.items() if n <= most}
    if not fresh:
        return most
    best = max(fresh.values())
    least = min(n for n, rate in fresh.items() if rate >= AUTO_AIM * best)
    for other in (least + 1, least - 1):
        if 1 <= other <= most and other not in fresh:
            return other
    return least


def holds_back(missing: float, under_way: int, waiting: float) -> bool:
    """Whether a microbatch had better be drawn after the next inner step than now: then its gradient is of the weights
    that it changes. `missing`: microbatches until that step, all of which must be under way; `waiting`: the part of
    its way for which one waits for devices and links. By so much it may be drawn later and be back no later, and while
    one waits so long that part of those `under_way` come back."""
    return 0 < missing <= min(under_way, waiting * under_way)


class InFlight:
    """The limit that one origin keeps to. `setting` is a number, or `auto`; `share` says how many microbatches a step
    of this replica has now, `missing` how many its next step still lacks. `changed` fires when one may be drawn that
    could not before."""

    def __init__(
        self,
        setting: int | Literal["auto"],
        share: Callable[[], int],
        missing: Callable[[], float],
        clock: Callable[[], float] = ambient.monotonic,
    ) -> None:
        self.most = AUTO_MOST if setting == "auto" else setting
        """The highest limit that there may be."""
        self.changed = Pulse()
        self._auto = setting == "auto"
        self._wanted = FIRST if self._auto else self.most
        self._share = share
        self._missing = missing
        self._clock = clock
        self._released = False
        self._waiting = 0.0
        self._rates: dict[int, Rate] = {}
        self._windows = 0
        self._begin()

    @property
    def limit(self) -> int:
        """Microbatches that may be under way now."""
        return min(self._wanted, max(1, self._share()), self.most) if self._auto else self.most

    def open_to(self, number: int, under_way: int) -> bool:
        """Whether whoever has this number, from 0, of those that draw may draw now, beside so many."""
        if self._released:
            return True
        return number < self.limit and not holds_back(self._missing(), under_way, self._waiting)

    def release(self) -> None:
        """Nobody waits for the limit any more: no more is drawn."""
        self._released = True
        self.changed.fire()

    def carried(self, seconds: float, waited: float, link_wait: float = 0.0) -> None:
        """A microbatch was trained, so many seconds after it was drawn, for which of them it waited for devices once
        its forward had begun: until then it takes nobody's place and is of the newest weights. `link_wait`: for how
        many it waited for its link. That says that it could have been drawn later, and not that its place brings
        nothing: while links wait for each other at random, one more fills what would be empty."""
        if seconds > 0.0:
            self._waiting += LAST_ONE * ((waited + link_wait) / seconds - self._waiting)
        if not self._auto:
            return
        if self._passed_over < self._kept:  # drawn under another limit
            self._passed_over += 1
            if self._passed_over == self._kept:
                self._began = self._clock()
            return
        self._count += 1
        self._seconds += seconds
        self._waited += waited
        if self._count >= max(WINDOW, 3 * self._kept):
            self._decide()
            self._begin()

    def _begin(self) -> None:
        self._kept = self.limit
        self._passed_over = self._count = 0
        self._seconds = self._waited = 0.0
        self._began = self._clock()

    def _decide(self) -> None:
        passed = self._clock() - self._began
        if passed <= 0.0:
            return
        self._windows += 1
        self._rates[self._kept] = Rate(self._count / passed, self._windows)
        waiting = self._kept * self._waited / self._seconds if self._seconds > 0.0 else 0.0
        self._wanted = next_limit(self._rates, self._windows, min(of_use(self._kept, waiting), self.most))
        self.changed.fire()
