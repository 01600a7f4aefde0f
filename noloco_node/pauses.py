"""The one moving average, the one rest and the one ban: what is usual, and how long to wait after a failure."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

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
