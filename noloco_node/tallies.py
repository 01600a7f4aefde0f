"""What a node keeps of others in few numbers: bounded tables, turns, budgets, moving averages, rests after failures.

A key costs a stranger nothing, so nothing may grow with the keys it uses.
"""

from __future__ import annotations

import math
import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, NamedTuple, TypeVar

MOST_PEERS = 4096
"""A table has so many entries if it is told no other number: a key costs a stranger nothing."""
FEW_PEERS = 128
"""A table that is searched for each microbatch, or holds much for each peer, has so many."""
EXAMINED = 32
"""Where all places are taken, so many are examined for one to give up."""
LATEST = 1 / 8
"""The latest value has this weight in a moving average. A liar's eight answers, or a bad minute, then move it by two
thirds."""
RECENT = 16
"""The number of latest values that are kept of what has a usual value, and of happenings that are shown. A few odd ones
cannot move their median or mean far."""
QUIET_PAUSES = 2.0
"""Somebody has fallen silent after so many times its usual pause: by chance one pause is longer than the last."""
SLACK = 1.5
"""What is up to so many times the usual, or the least, counts as no worse."""
MUCH_MORE = 2.0
"""One has much more than others of its kind with more than so many times what these have."""


def moved(usual: float | None, latest: float, weight: float = LATEST) -> float:
    """What is usual after the `latest` value; that value itself where there was none before."""
    return latest if usual is None else usual + weight * (latest - usual)


class Doubling(NamedTuple):
    """Pauses that double, in seconds unless their owner counts otherwise."""

    first: float
    longest: float

    def after(self, earlier: int) -> float:
        """The pause after so many earlier ones in a row; none of them, or less than none: the first."""
        doublings = min(max(0, earlier), sys.float_info.max_exp - 1)  # one more, and Python has no such number
        return min(self.longest, self.first * 2.0**doublings)

    def about(self, earlier: int, rng: random.Random) -> float:
        """That, by half shorter or longer: where many fail at once they do not all come back at once."""
        return self.after(earlier) * rng.uniform(0.5, 1.5)


BANS = Doubling(60.0, 3600.0)
"""Seconds for which a peer is shut out, one time after the other."""


class Rest(NamedTuple):
    """How often somebody failed in a row, and until when it is left alone. Times are seconds of one clock."""

    times: int = 0
    until: float = -math.inf

    def holds(self, now: float) -> bool:
        """Whether it lasts still."""
        return now < self.until

    def again(self, pauses: Doubling, now: float, *, at_least: float = 0.0) -> Rest:
        """The rest after one more failure now, of `at_least` so many seconds."""
        return Rest(self.times + 1, now + max(at_least, pauses.after(self.times)))

    def ban(self, now: float) -> Rest:
        """The rest of a peer that is shut out now, twice as long as the last time.

        The count begins anew after a time without a ban as long as the longest.
        """
        return (Rest() if now - self.until >= BANS.longest else self).again(BANS, now)


NO_REST = Rest()
"""The rest of a peer that has not failed: none."""


K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
T = TypeVar("T")


class PeerTable(OrderedDict[K, V]):
    """At most `most` entries, by peer or by what else strangers can make up: what was set longest ago goes first.

    It is read like any dictionary. What is in use without being set anew is kept by `move_to_end`.
    """

    def __init__(self, most: int | None = None, forgotten: Callable[[K, V], object] | None = None) -> None:
        """`most` is `MOST_PEERS` if it is None. `forgotten` is called with each entry that has to go."""
        super().__init__()
        self._most = MOST_PEERS if most is None else most
        self._forgotten = forgotten

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._most:
            gone = self.popitem(last=False)
            if self._forgotten is not None:
                self._forgotten(*gone)


class PeerTimes(PeerTable[K, float]):
    """Until when something holds for a peer: `times[peer] = until`. All times are seconds of one clock."""

    def holds(self, key: K, now: float) -> bool:
        """Whether it holds still."""
        return now < self.get(key, now)

    def expire(self, now: float) -> None:
        """Forget peers from the oldest entry on, up to the first that it still holds for. If it holds equally long for
        all, these are all that have expired. Otherwise some stay until those before them expire."""
        while self and next(iter(self.values())) <= now:
            self.popitem(last=False)


class Budget:
    """`most` at once, refilled by `a_second`. The clock gives seconds, or what else a budget grows with, and never goes
    back."""

    def __init__(self, most: float, a_second: float, clock: Callable[[], float]) -> None:
        self._most, self._a_second, self._clock = most, a_second, clock
        self._left, self._since = most, clock()

    @property
    def left(self) -> float:
        """What may be had now."""
        now = self._clock()
        self._left = min(self._most, self._left + (now - self._since) * self._a_second)
        self._since = now
        return self._left

    def spend(self, amount: float = 1.0) -> None:
        """Take `amount` away; may be more than is left, which then has to be made up for."""
        self._left = self.left - amount


class PeerBudgets(Generic[K]):
    """One budget a peer; those used longest ago are forgotten first."""

    def __init__(self, most: float, a_second: float, clock: Callable[[], float]) -> None:
        self._most, self._a_second, self._clock = most, a_second, clock
        self._budgets = PeerTable[K, Budget]()

    def of(self, peer: K) -> Budget:
        """The budget of `peer`, a full one where it was not met before."""
        budget = self._budgets.get(peer)
        if budget is None:
            budget = self._budgets[peer] = Budget(self._most, self._a_second, self._clock)
        else:
            self._budgets.move_to_end(peer)
        return budget


class FairQueue(Generic[T]):
    """Start-time fair queueing: sources that wait get equal cost, and a source alone gets everything.

    The next item is of the source whose last work began the longest ago, counted in cost. A source with nothing waiting
    for a while neither saves anything up nor owes anything.
    """

    def __init__(self) -> None:
        self._now = 0.0
        """Cost at which the source stood that was served last."""
        self._latest = 0.0
        """Cost at which the source stands that has had most."""
        self._waiting: dict[str, _Line[T]] = {}
        """Sources with something waiting."""
        self._stood: dict[str, float] = {}
        """Cost at which other sources stand, if they have had more than the source that was served last."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, sources: Sequence[str], cost: float, item: T) -> None:
        """Let an item wait, on the account of `sources[0]`, within it on that of the next."""
        line = self._waiting.get(sources[0])
        if line is None:
            if len(self._waiting) + len(self._stood) >= FEW_PEERS:
                self._stood = {}
            line = self._waiting[sources[0]] = _Line(max(self._stood.pop(sources[0], 0.0), self._now))
        self._count += 1
        if len(sources) > 1:
            line.parts = line.parts or FairQueue()
            line.parts.push(sources[1:], cost, item)
        else:
            line.items.append((cost, item))

    def pop(self) -> T:
        """The next item. IndexError where none waits."""
        return self.take()[1]

    def first(self) -> T:
        """The item that would be next now. IndexError where none waits."""
        return self._next()[1].first()

    def take(self) -> tuple[float, T]:
        """The next item and its cost. IndexError where none waits."""
        source, line = self._next()
        self._now = line.stands_at
        cost, item = line.take()
        self._count -= 1
        line.stands_at += cost
        self._latest = max(self._latest, line.stands_at)
        if not len(line):
            del self._waiting[source]
            self._stood[source] = line.stands_at
            if not self._waiting:  # nobody has to wait for anybody: all begin anew
                self._now = self._latest
                self._stood.clear()
        return cost, item

    def _next(self) -> tuple[str, _Line[T]]:
        if not self._waiting:
            raise IndexError("nothing waits")
        if len(self._waiting) > 1:
            return min(self._waiting.items(), key=lambda waiting: waiting[1].stands_at)
        return next(iter(self._waiting.items()))


class _Line(Generic[T]):
    """What one source has waiting, by itself or by its parts."""

    __slots__ = ("items", "parts", "stands_at")

    def __init__(self, stands_at: float) -> None:
        self.stands_at = stands_at
        self.items: list[tuple[float, T]] = []
        self.parts: FairQueue[T] | None = None

    def __len__(self) -> int:
        return len(self.items) + (len(self.parts) if self.parts else 0)

    def take(self) -> tuple[float, T]:
        return self.items.pop(0) if self.items or self.parts is None else self.parts.take()

    def first(self) -> T:
        return self.items[0][1] if self.items or self.parts is None else self.parts.first()
