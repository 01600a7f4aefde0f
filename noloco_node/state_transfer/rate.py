"""How fast a node gives its state away: by what that costs its own training.

A joiner's download competes with the donor's microbatches for the uplink, the event loop and the cores. No setting can
know by how much, so it is measured. The donor gives for some windows, pauses for one, and compares how many tokens it
trained a second in both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from noloco_node import ambient
from noloco_node.config.run_spec import LimitsSpec
from noloco_node.pauses import moved
from noloco_node.training.fair_queue import FairQueue
from noloco_node.training.progress import LastTrained

KEPT_SHARE = 0.95
"""A donor keeps this share of its undisturbed pace beside a joiner: half of what it may lose at most, since measures
are noisy."""
KEPT_BESIDE_EXPORTS = 0.985
"""A donor keeps this share of its pace if only copies of the model are given, which may take long. All nodes of all
stages give theirs at once, and each is slowed by the others as well. It cannot tell that from its own undisturbed
pace."""
SLOWEST, FASTEST = 0.1, 1.5
"""One change of the rate is at least and at most so large, as factors."""
CLIMB = 3.0
"""The upper factor until something has been lost: most joiners of a node on a wide line cost it nothing."""
FIRST_RATE = 2e6
"""Bytes per second that are given until a window has told what they cost: they should not fill a home's line."""
LEAST_CHUNKS, LEAST_OF_EXPORTS = 4.0, 2.0
"""Each joiner, and each exporter, gets at least so many chunks within a progress deadline, however much that costs."""
HIGHEST_RATE = 4e9
WINDOW_SECONDS = 4.0
GIVING_WINDOWS = 2
"""So many windows of giving come before one of silence."""
MOST_WINDOWS, MOST_SILENT = 2, 5
"""A window of giving, and one of silence, lasts at most so many times its usual length, until it holds a whole
microbatch."""
OF_BEFORE = 0.1
"""At most this share of a pace's time may lie before its window."""


def next_rate(
    rate: float, given: float, lost: float, lowest: float, kept: float = KEPT_SHARE, *, fastest: float = FASTEST
) -> float:
    """Bytes a second at which the share `kept` of the pace would be left, reached in bounded steps from `rate`.

    Where `given` bytes a second went out, the share `lost` was missing. Never below `lowest`, or the joiner would take
    the donor for dead.
    """
    factor = fastest
    if lost > 0.0:
        factor = min(fastest, max(SLOWEST, (1.0 - kept) * given / lost / rate))
    return max(lowest, min(HIGHEST_RATE, factor * rate))


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
        self._lowest, self._places = lowest, places
        self._window = window
        self._trained = trained
        self._now = now
        self.free_at = self.quiet_until = 0.0
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue()
        self._giving = False
        """Somebody's turn has come, and is not over."""
        self._lost = self._given = 0.0
        """Moving averages over windows of giving: the share of the pace that was missing, and bytes a second."""
        self._climbing = True
        """Nothing has been lost yet."""
        self._quiet: float | None = None
        self._windows = 0
        self._workless: LastTrained | None = None
        """What was trained when a whole silence had shown no work: until there is some, another would show nothing."""
        self._begin_window()

    def _begin_window(self) -> None:
        self._since, self._before, self._taken = self._now(), self._trained(), 0
        self._first: LastTrained | None = None
        """The first end of a microbatch in this window."""
        self._hurried = False
        self._read: set[str] = set()

    async def take_patiently(self, size: int, reader: str) -> None:
        """Wait as `take` does, for a transfer that may take long: see KEPT_BESIDE_EXPORTS."""
        await self.take(size, reader, hurried=False)

    async def take(self, size: int, reader: str = "", *, hurried: bool = True) -> None:
        """Wait until `size` bytes may be given to `reader`; all waiting readers get as much as each other."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.push((reader,), float(size), turn)
        if not self._giving:
            self._next_turn()
        try:
            await turn
            wait = self.wait()
            while wait > 0.0:
                await asyncio.sleep(wait)
                wait = self.wait()
            self.free_at = max(self._now(), self.free_at) + size / self.rate
            self._taken += size
            self._hurried |= hurried
            self._read.add(reader)
        finally:
            if not turn.cancelled():
                self._next_turn()

    def wait(self) -> float:
        """Seconds until something may be given. A window of silence is closed before: what leaves as soon as it is over
        would count as given in it."""
        if self._silent:
            self.tend()
        return max(self.free_at, self.quiet_until) - self._now()

    @property
    def _silent(self) -> bool:
        """This window is one of silence."""
        return self.quiet_until > self._since

    def _next_turn(self) -> None:
        self._giving = False
        while len(self._waiting) and not self._giving:
            turn = self._waiting.pop()
            if not turn.done():
                self._giving = True
                turn.set_result(None)

    def tend(self) -> None:
        """Close the window if it is over and set the rate anew; after some windows of giving be silent for one."""
        now, ended = self._now(), self._trained()
        if not self._before.at:  # nothing had been trained when the window began
            self._begin_window()
            return
        if self._first is None and ended.at > self._before.at:
            self._first = ended
        if now < self._since + self._window or now < self.quiet_until:
            return
        pace = self._pace(ended)
        if pace is None and now < self._since + (MOST_SILENT if self._silent else MOST_WINDOWS) * self._window:
            if self._silent:
                self.quiet_until = now + self._window / 4.0
            return
        self._note(self._taken / (now - self._since), pace)
        if self._silent and ended == self._before:
            self._workless = ended
        if self._windows >= GIVING_WINDOWS:
            self._windows = 0
            if ended != self._workless:
                self.quiet_until = now + self._window
        self._begin_window()

    def _pace(self, ended: LastTrained) -> float | None:
        """Tokens a second between the ends of two microbatches; None if there are no two. Seconds of an unfinished one
        would pass for slowness. The first end is the last one before the window if that is hardly longer than the
        window, else one in it. Work before the window belongs to another kind of window."""
        begun = self._before
        if self._since - begun.at > OF_BEFORE * (ended.at - begun.at):
            begun = self._first
        if begun is None or ended.at <= begun.at:
            return None
        return (ended.tokens - begun.tokens) / (ended.at - begun.at)

    def _note(self, given: float, pace: float | None) -> None:
        if given and pace is not None and self._quiet:
            self._windows += 1
            self._learn(given, 1.0 - pace / self._quiet)
        elif given:  # it has no work, or never was silent: silence will tell
            self._windows = GIVING_WINDOWS
        else:
            self._quiet = None if pace is None else moved(self._quiet, pace)

    def _learn(self, given: float, lost: float) -> None:
        self._lost, self._given = moved(self._lost, lost), moved(self._given, given)
        kept, share = (KEPT_SHARE, 1.0) if self._hurried else (KEPT_BESIDE_EXPORTS, LEAST_OF_EXPORTS / LEAST_CHUNKS)
        lowest = share * self._lowest * max(1, min(self._places, len(self._read)))
        self._climbing = self._climbing and lost <= 1.0 - kept
        fastest = CLIMB if self._climbing else FASTEST
        rate = next_rate(self.rate, self._given, self._lost, lowest, kept, fastest=fastest)
        if rate < self.rate / 2.0:  # so far off that all was lost, perhaps at much less: it would say too little
            self._lost = self._given = 0.0
        if rate < self.rate or self._windows >= GIVING_WINDOWS:  # down at once, up after a second look
            self.rate = rate


def least_rate(limits: LimitsSpec, chunks: float = LEAST_CHUNKS) -> float:
    """Bytes a second with which a reader gets so many chunks in a progress deadline."""
    return chunks * limits.chunk_bytes / limits.exchange_progress_seconds
