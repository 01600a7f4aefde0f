"""How fast a node gives its state away: by what that costs its own training.

A joiner's download competes with the donor's microbatches for the uplink, the event loop and the cores. No setting can
know by how much, so it is measured: the donor gives for a while, is silent for a while, and compares its paces.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from noloco_node import ambient
from noloco_node.config.run_spec import LimitsSpec
from noloco_node.pauses import moved
from noloco_node.state_transfer.readers import WHOLE_SECONDS
from noloco_node.training.compute_thread import FairQueue
from noloco_node.training.progress import LastTrained

KEPT_SHARE = 0.97
"""A donor keeps this share of its undisturbed pace: in an export all stages give at once, and each slows the others."""
FIRST_RATE = 2e6
"""Bytes per second that are given until a measure has told what they cost: they should not fill a home's line."""
FASTER = 3.0
"""The rate rises by at most this factor at once, since what is given costs the training before it is measured."""
LEAST_CHUNKS = 2.0
"""Each reader gets at least so many chunks within a progress deadline, or it would take the donor for dead."""
SLOWEST_SHARE = 1.5
"""A copy may be read for so many times as long as it takes at its donor's least rate."""
WINDOW_SECONDS = 4.0
"""A silence lasts so long at least, and the giving before it twice as long."""
AT_ONCE = 0.1
"""A microbatch that ended so many windows before one began belongs to it: this is a small part of the measure."""
MOST_SILENT = 4
"""A silence without two finished microbatches ends after so many windows, before a reader's deadline does."""


def next_rate(rate: float, given: float, lost: float, lowest: float) -> float:
    """Bytes a second at which `KEPT_SHARE` of the pace would be left: down at once, up in bounded steps.

    Where `given` bytes a second went out, the share `lost` was missing. A rate that the readers did not take rises no
    further. Never below `lowest`.
    """
    factor = (1.0 - KEPT_SHARE) * given / lost / rate if lost > 0.0 else math.inf
    if factor > 1.0:
        factor = min(FASTER, math.sqrt(factor)) if given >= rate / FASTER else 1.0
    return max(lowest, factor * rate)


class DonorRate:
    """Paces the chunks that a node gives; readers take turns. `tend` must be called every second or two, also while
    nothing is given."""

    def __init__(
        self,
        trained: Callable[[], LastTrained],
        *,
        lowest: float,
        places: int = 1,
        window: float = WINDOW_SECONDS,
        now: Callable[[], float] = ambient.monotonic,
    ) -> None:
        """`lowest`: bytes a second that each joiner at `places` is given at least; `window` in seconds."""
        self.rate = max(lowest, FIRST_RATE)
        """Bytes a second."""
        self.giving = asyncio.Event()
        """It is cleared during a silence."""
        self._lowest, self._places, self._window = lowest, places, window
        self._trained = trained
        self._now = now
        self.free_at = 0.0
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue()
        self._busy = False
        """Somebody's turn has come, and is not over."""
        self._silent_pace: float | None = None
        """Tokens a second while nothing is given."""
        self._begin(giving=True)

    def _begin(self, *, giving: bool) -> None:
        self._since, self._before, self._taken = self._now(), self._trained(), 0
        at_once = self._since - self._before.at <= AT_ONCE * self._window
        self._first: LastTrained | None = self._before if at_once else None
        """The first end of a microbatch since then, or just before: the pace is measured from there."""
        self._readers: set[str] = set()
        if giving:
            self.giving.set()
        else:
            self.giving.clear()

    async def take(self, size: int, reader: str = "") -> None:
        """Wait until `size` bytes may be given to `reader`; all waiting readers get as much as each other."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.push((reader,), float(size), turn)
        if not self._busy:
            self._next_turn()
        try:
            await turn
            while not self.giving.is_set() or self.free_at > self._now():
                await self.giving.wait()
                await asyncio.sleep(self.free_at - self._now())
            self.free_at = max(self._now(), self.free_at) + size / self.rate
            self._taken += size
            self._readers.add(reader)
        finally:
            if not turn.cancelled():
                self._next_turn()

    def _next_turn(self) -> None:
        self._busy = False
        while len(self._waiting) and not self._busy:
            turn = self._waiting.pop()
            if not turn.done():
                self._busy = True
                turn.set_result(None)

    def tend(self) -> None:
        """After a while of giving set the rate anew and fall silent; after a silence give again."""
        now, ended, silent = self._now(), self._trained(), not self.giving.is_set()
        if self._first is None:
            self._first = ended if ended.at > self._before.at else None
        if self._first and ended.at - self._first.at >= self._window * (1 if silent else 2):
            pace = (ended.tokens - self._first.tokens) / (ended.at - self._first.at)
            if not self._taken:
                self._silent_pace = moved(self._silent_pace, pace)
            elif self._silent_pace:
                lowest = self._lowest * min(self._places, len(self._readers))
                given, lost = self._taken / (now - self._since), 1.0 - pace / self._silent_pace
                self.rate = next_rate(self.rate, given, lost, lowest)
            self._begin(giving=not self._taken)
        elif silent and now - self._since >= MOST_SILENT * self._window:
            self._begin(giving=True)


def least_rate(limits: LimitsSpec) -> float:
    """Bytes a second with which a reader gets so many chunks in a progress deadline."""
    return LEAST_CHUNKS * limits.chunk_bytes / limits.exchange_progress_seconds


def longest_reading(limits: LimitsSpec, size: int) -> float:
    """Seconds in which a copy of so many bytes is read: its donor holds it no longer, and no reader waits longer."""
    return max(WHOLE_SECONDS, SLOWEST_SHARE * size / least_rate(limits))
