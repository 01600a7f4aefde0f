"""How long to wait after something has failed again: twice as long each time."""

from __future__ import annotations

import random
from typing import NamedTuple

_MOST_DOUBLED = 64


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
