"""How fast a node gives its state away: by what that costs its own training.

A joiner's download competes with the donor's microbatches for the uplink, the event loop and the cores. How much, no
setting can know, so it is measured: the donor gives for some windows, pauses for one, and compares how many tokens it
trained a second in both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from noloco_node import ambient
from noloco_node.config.run_spec import LimitsSpec
from noloco_node.training.fair_queue import FairQueue
from noloco_node.training.progress import LastTrained

KEPT_SHARE = 0.95
"""Share of its undisturbed pace that a donor keeps beside a joiner: half of what it may lose at most, since measures
are noisy."""
KEPT_BESIDE_EXPORTS = 0.985
"""The same where only copies of the model are given, which may take long. All nodes of all stages give theirs at once,
and each is slowed by the others as well, which it cannot tell from its own undisturbed pace."""
SLOWEST, FASTEST = 0.1, 1.5
"""Bounds of one change of the rate, as factors."""
CLIMB = 3.0
"""The upper one until something has been lost: most who join a node on a wide line cost it nothing."""
FIRST_RATE = 2e6
"""What is given until a window has told what that costs: it should not fill a home's line."""
LEAST_CHUNKS, LEAST_OF_EXPORTS = 4.0, 2.0
"""That each joiner gets within a progress deadline, and each who exports, however much that costs."""
HIGHEST_RATE = 4e9
WINDOW_SECONDS = 4.0
GIVING_WINDOWS = 2
"""Windows of giving before one of silence."""
MOST_WINDOWS, MOST_SILENT = 2, 5
"""Times as long as a window one of giving, and one of silence, lasts at most: until it holds a whole microbatch."""
OF_BEFORE = 0.1
"""Share of a pace's time that may lie before its window."""
QUIET_WEIGHT = 0.25
"""Of a new window of silence in their mean."""
REMEMBERED = 0.97
"""What a window of giving counts for when the next has come."""
SURPRISE = 0.2
"""Share of the pace: where a window loses so much more than those before explain, they are forgotten."""


class Cost:
    """What giving a byte a second costs, as a share of the undisturbed pace, by the windows of giving so far.

    Least squares through the origin, older windows fading: a window at a high rate says more than one at a low rate.
    What does not fit at all, as a line that others now fill, makes it begin anew.
    """

    def __init__(self) -> None:
        self._lost = self._given = 0.0

    def note(self, given: float, lost: float) -> None:
        """A window in which `given` bytes a second went out and the share `lost` of the pace was missing."""
        if self._given > 0.0 and lost - given * self._lost / self._given > SURPRISE:
            self._lost = self._given = 0.0
        self._lost = REMEMBERED * self._lost + given * lost
        self._given = REMEMBERED * self._given + given * given

    def next_rate(self, rate: float, lowest: float, kept: float = KEPT_SHARE, *, fastest: float = FASTEST) -> float:
        """Bytes a second at which the share `kept` of the pace would be left, reached in bounded steps from `rate`.

        Never below `lowest`, or the joiner would take the donor for dead.
        """
        factor = fastest
        if self._lost > 0.0:
            factor = min(fastest, max(SLOWEST, (1.0 - kept) * self._given / self._lost / rate))
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
        self._cost = Cost()
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
        """As of the first end of a microbatch in this window."""
        self._hurried = False
        self._read: set[str] = set()

    async def take_patiently(self, size: int, reader: str) -> None:
        """As `take`, for what may take long: see KEPT_BESIDE_EXPORTS."""
        await self.take(size, reader, hurried=False)

    async def take(self, size: int, reader: str = "", *, hurried: bool = True) -> None:
        """Wait until `size` bytes may be given to `reader`: of those who wait, each gets as much as the others."""
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
        """Tokens a second between the ends of two microbatches: seconds of an unfinished one would pass for slowness.
        From the last one before the window where that is hardly longer than the window, else between two in it: what
        was worked on before it was in another kind of window. None where there are no two."""
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
        elif pace is None or self._quiet is None:
            self._quiet = pace
        else:
            self._quiet += QUIET_WEIGHT * (pace - self._quiet)

    def _learn(self, given: float, lost: float) -> None:
        self._cost.note(given, lost)
        kept, share = (KEPT_SHARE, 1.0) if self._hurried else (KEPT_BESIDE_EXPORTS, LEAST_OF_EXPORTS / LEAST_CHUNKS)
        lowest = share * self._lowest * max(1, min(self._places, len(self._read)))
        self._climbing = self._climbing and lost <= 1.0 - kept
        rate = self._cost.next_rate(self.rate, lowest, kept, fastest=CLIMB if self._climbing else FASTEST)
        if rate < self.rate / 2.0:  # so far off that all was lost, perhaps at much less: it would say too little
            self._cost = Cost()
        if rate < self.rate or self._windows >= GIVING_WINDOWS:  # down at once, up after a second look
            self.rate = rate


def least_rate(limits: LimitsSpec, chunks: float = LEAST_CHUNKS) -> float:
    """Bytes a second with which a reader gets so many chunks in a progress deadline."""
    return chunks * limits.chunk_bytes / limits.exchange_progress_seconds
