"""What a node keeps of others in few numbers: bounded tables, budgets, moving averages, and rests after failures.

A key costs a stranger nothing, so nothing may grow with the keys it uses.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

MOST_PEERS = 4096
"""A table has so many entries if it is told no other number: a key costs a stranger nothing."""
FEW_PEERS = 128
"""A table that is searched for each microbatch, or holds much for each peer, has so many."""
LATEST = 1 / 8
"""The latest value has this weight in a moving average. A liar's eight answers, or a bad minute, then move it by two
thirds."""
RECENT = 16
"""The number of latest values that are kept of what has a usual value. A few odd ones cannot move their median or mean
far."""
QUIET_PAUSES = 2.0
"""Somebody has fallen silent after so many times its usual pause: by chance one pause is longer than the last."""
_MOST_DOUBLED = 64


def moved(usual: float | None, latest: float, weight: float = LATEST) -> float:
    """What is usual after the `latest` value; that value itself where there was none before."""
    return latest if usual is None else usual + weight * (latest - usual)


class Doubling(NamedTuple):
    """Pauses that double, in seconds unless their owner counts otherwise."""

    first: float
    longest: float

    def after(self, earlier: int) -> float:
        """The pause after so many earlier ones in a row; none of them, or less than none: the first."""
        return min(self.longest, self.first * 2.0 ** min(max(0, earlier), _MOST_DOUBLED))

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
