"""How fast a node gives its state away: by what that costs its own training.

A joiner's download competes with the donor's microbatches for the uplink, the event loop and the cores. How much, no
setting can know, so it is measured: the donor gives for some windows, pauses for one, and compares how many tokens it
trained a second in both.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

KEPT_SHARE = 0.95
"""Share of its undisturbed pace that a donor keeps: half of what it may lose at most, since measures are noisy."""
SLOWEST, FASTEST = 0.1, 1.5
"""Bounds of one change of the rate, as factors."""
FIRST_RATE = 8e6
HIGHEST_RATE = 4e9
WINDOW_SECONDS = 4.0
GIVING_WINDOWS = 2
"""Windows of giving before one of silence."""
WEIGHT = 0.4
"""Of a new window in the mean of its kind."""


def next_rate(rate: float, *, giving: float, quiet: float, lowest: float) -> float:
    """Bytes a second from now on, where this node trained `giving` tokens a second while it gave `rate`, and `quiet`
    while it gave nothing.

    What is lost is taken to be in proportion to the rate, so this is the rate at which 1 - KEPT_SHARE is lost, reached
    in bounded steps. Never below `lowest`, or the joiner would take the donor for dead.
    """
    lost = quiet - giving
    factor = FASTEST
    if lost > 0.0:
        factor = min(FASTEST, max(SLOWEST, (1.0 - KEPT_SHARE) * quiet / lost))
    return max(lowest, min(HIGHEST_RATE, factor * rate))


class DonorRate:
    """Paces the chunks that a node gives. `trained()` is a count of tokens that only rises; `tend` must be called every
    second or two, also while nothing is given."""

    def __init__(
        self,
        trained: Callable[[], int],
        *,
        lowest: float,
        window: float = WINDOW_SECONDS,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rate = max(lowest, FIRST_RATE)
        """Bytes a second."""
        self._lowest = lowest
        self._window = window
        self._trained = trained
        self._now = now
        self._free_at = self._quiet_until = 0.0
        self._giving: float | None = None
        self._quiet: float | None = None
        self._windows = 0
        self._begin_window()

    def _begin_window(self) -> None:
        self._since, self._tokens, self._taken = self._now(), self._trained(), 0

    async def take(self, size: int) -> None:
        """Wait until `size` bytes may be given; who comes first goes first."""
        now = self._now()
        start = max(now, self._free_at, self._quiet_until)
        self._free_at = start + size / self.rate
        if start > now:
            await asyncio.sleep(start - now)
        self._taken += size

    def tend(self) -> None:
        """Close the window if it is over and set the rate anew; after some windows of giving be silent for one."""
        now = self._now()
        elapsed = now - self._since
        if elapsed < self._window:
            return
        pace = (self._trained() - self._tokens) / elapsed
        if self._taken:
            self._giving = _mean(self._giving, pace)
            self._windows += 1
        else:
            self._quiet = _mean(self._quiet, pace)
        if self._giving is not None and self._quiet is not None:
            rate = next_rate(self.rate, giving=self._giving, quiet=self._quiet, lowest=self._lowest)
            if rate < self.rate or self._windows >= GIVING_WINDOWS:  # down at once, up after a second look
                self.rate, self._giving = rate, None
        if self._windows >= GIVING_WINDOWS:
            self._windows, self._giving = 0, None
            self._quiet_until = now + self._window
        self._begin_window()


def _mean(old: float | None, new: float) -> float:
    return new if old is None else old + WEIGHT * (new - old)
