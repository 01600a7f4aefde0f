"""How many microbatches an origin keeps under way: as few as keep the devices at work, never more than a step's share.

More of them hide the time that a microbatch is away; each one beyond the first makes a gradient staler, and where no
device is free they only wait in queues. An origin sees two things by itself: how long a microbatch is away for each
second that it takes here, which says how many could keep its own device at work (Little's law); and at what rate they
end for each number under way, which says from where on another one brings nothing.
"""

from __future__ import annotations

import math
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
"""Windows for which a rate is believed: then that number is tried again."""
ROOM = 2.0
"""Times what Little's law says are tried at the most: those that come back wait for those that begin, in whole swarms
twice as many were of use."""


@dataclass(frozen=True, slots=True)
class Rate:
    """At which microbatches ended while so many were under way."""

    a_second: float
    window: int
    """Number of the window in which it was seen."""


def next_limit(rates: dict[int, Rate], window: int, of_use: int) -> int:
    """Microbatches to keep under way in the next window: the least number that brings nearly as much as the best does,
    up to `of_use`, of which the own device could be at work all the time. A neighbour of it that was not tried of
    late is tried."""
    fresh = {n: each.a_second for n, each in rates.items() if window - each.window < FRESH and n <= of_use}
    if not fresh:
        return of_use
    best = max(fresh.values())
    least = min(n for n, rate in fresh.items() if rate >= AUTO_AIM * best)
    for other in (least + 1, least - 1):
        if 1 <= other <= of_use and other not in fresh:
            return other
    return least


class InFlight:
    """The limit that one origin keeps to. `setting` is a number, or `auto`; `share` says how many microbatches a step
    of this replica has now, `busy` for how many seconds its device has worked. `changed` fires when the limit may have
    changed."""

    def __init__(
        self,
        setting: int | Literal["auto"],
        share: Callable[[], int],
        busy: Callable[[], float],
        clock: Callable[[], float] = ambient.monotonic,
    ) -> None:
        self.most = AUTO_MOST if setting == "auto" else setting
        """The highest limit that there may be."""
        self.changed = Pulse()
        self._auto = setting == "auto"
        self._wanted = FIRST if self._auto else self.most
        self._share = share
        self._busy = busy
        self._clock = clock
        self._released = False
        self._rates: dict[int, Rate] = {}
        self._windows = 0
        self._begin()

    @property
    def limit(self) -> int:
        """Microbatches that may be under way now."""
        return min(self._wanted, max(1, self._share()), self.most) if self._auto else self.most

    def open_to(self, number: int) -> bool:
        """Whether whoever has this number, from 0, of those that draw may draw now."""
        return self._released or number < self.limit

    def release(self) -> None:
        """Nobody waits for the limit any more: no more is drawn."""
        self._released = True
        self.changed.fire()

    def carried(self, away: float) -> None:
        """A microbatch was trained, and was on its way to other stages and back for so many seconds."""
        if not self._auto:
            return
        if self._passed_over < self._kept:  # drawn under another limit
            self._passed_over += 1
            if self._passed_over == self._kept:
                self._began, self._busy_before = self._clock(), self._busy()
            return
        self._count += 1
        self._away += away
        if self._count >= max(WINDOW, 3 * self._kept):
            self._decide()
            self._begin()

    def _begin(self) -> None:
        self._kept = self.limit
        self._passed_over = self._count = 0
        self._away = 0.0
        self._began, self._busy_before = self._clock(), self._busy()

    def _decide(self) -> None:
        passed, own = self._clock() - self._began, self._busy() - self._busy_before
        if passed <= 0.0:
            return
        self._windows += 1
        self._rates[self._kept] = Rate(self._count / passed, self._windows)
        of_use = 1.0 + ROOM * self._away / own if own > 0.0 else math.inf
        self._wanted = next_limit(self._rates, self._windows, 1 + math.ceil(min(of_use, AUTO_MOST - 1)))
        self.changed.fire()
