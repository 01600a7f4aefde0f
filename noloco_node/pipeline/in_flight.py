"""How many microbatches an origin keeps under way: as few as keep the devices at work, never more than a step's share.

More of them hide the time that a microbatch is away. Each one beyond the first makes a gradient staler, and if no
device is free they only wait in queues. An origin sees two things. The rate at which microbatches end, for each number
under way, shows from where on another one brings nothing to itself. The part of its way that a microbatch waits for
devices shows from where on another one only takes a place from other origins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from noloco_node import ambient
from noloco_node.aio import Pulse
from noloco_node.config.node_settings import AUTO_AIM, AUTO_MOST
from noloco_node.tallies import RECENT, moved

FIRST = 2
FRESH = 40
"""A rate is believed for at most so many windows; then that number is tried again. It is never believed for longer than
the origin had been watching when it was seen. The first windows tell only of a swarm that is beginning."""
ENOUGH_WAITING = 2.0
"""If so many own microbatches wait for devices on average, the devices that limit the pipeline are at work. If more
than one beyond them waits, they take places from other origins: nothing is won, since the others do the same."""


@dataclass(frozen=True, slots=True)
class Rate:
    """At which microbatches ended while so many were under way."""

    a_second: float
    window: int
    """Number of the window in which it was seen."""


def of_use(kept: int, waiting: float) -> int:
    """Microbatches that may be of use under way, where `kept` are, of which `waiting` wait for devices."""
    if waiting > ENOUGH_WAITING + 1.0:
        return max(1, kept - 1)
    return kept if waiting >= ENOUGH_WAITING else kept + 1


def next_limit(rates: dict[int, Rate], window: int, most: int) -> int:
    """Microbatches to keep under way in the next window.

    It is the least number, up to `most`, that brings nearly as much as the best does. A neighbour of it that was not
    tried of late is tried.
    """
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
    """Tell whether a microbatch had better be drawn after the next inner step: its gradient is then of the weights that
    it changes.

    `missing` counts microbatches until that step; all of them must be under way. `waiting` is the part of its way that
    a microbatch waits for devices and links. It may be drawn later by so much and be back no later. In that time the
    same part of those `under_way` come back.
    """
    return 0 < missing <= min(under_way, waiting * under_way)


class InFlight:
    """The limit that one origin keeps to. `setting` is a number, or `auto`.

    `share` says how many microbatches a step of this replica has now, `missing` how many its next step still lacks.
    `changed` fires when one may be drawn that could not before.
    """

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
        """Tell whether the drawer of this number, from 0, may draw now beside so many under way."""
        if self._released:
            return True
        return number < self.limit and not holds_back(self._missing(), under_way, self._waiting)

    def release(self) -> None:
        """Nobody waits for the limit any more: no more is drawn."""
        self._released = True
        self.changed.fire()

    def carried(self, seconds: float, waited: float, link_wait: float = 0.0) -> None:
        """A microbatch was trained `seconds` after it was drawn. One rate is measured over `RECENT` of them, or over
        three times the number under way if that is more.

        `waited` counts the seconds that it waited for devices once its forward had begun. Until then it takes nobody's
        place and is of the newest weights. `link_wait` counts the seconds that it waited for its link. Such a
        microbatch could have been drawn later, but its place is not useless. While links wait for each other at random,
        one more fills what would be empty.
        """
        if seconds > 0.0:
            self._waiting = moved(self._waiting, (waited + link_wait) / seconds)
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
        if self._count >= max(RECENT, 3 * self._kept):
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
