"""How often a node looks at the stages that it does not deal with, neither its own nor the next, and how much it reads.

Of a large swarm it must know of them no more than that each is served, by some for example, and now and then how many
there are: a few rows of each, again before they end, and of one stage after another all rows of a place. Of these as
few are shown: those that are seen are asked whether they are there, and a stage would seem poor of which all were seen
and few have answered. So what is read does not go with the number of stages.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from noloco_node.directory.asked_key import SALT_BYTES, Few
from noloco_node.directory.bucket_turns import READ_AGAIN_AT_LAST
from noloco_node.directory.buckets import Place

TURN = 0.8
"""Of a record's life, between two far stages of which a place is read whole."""
MOST_ROWS, LEAST_ROWS = 16, 2
"""Of one far stage."""
ROWS = 48
"""Of all of them together, as far as each has the least."""


def rows_of_each(far: int) -> int:
    """How many rows are read of each of so many far stages: a power of two."""
    share = max(LEAST_ROWS, min(MOST_ROWS, ROWS // max(1, far)))
    return 1 << (share.bit_length() - 1)


def few_again(life: float) -> float:
    """Seconds after which a few rows are read again, where records live so long."""
    return READ_AGAIN_AT_LAST * life


def turn_again(life: float) -> float:
    """Seconds between two far stages of which a place is read whole."""
    return TURN * life


class FarTurns:
    """Which stages are far at a look, whose turn it is, and which few rows of which places are read."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._last: int | None = None
        """The stage whose turn was last."""
        self._at = 0.0
        """When that was, DHT time, seconds."""
        self._salts: dict[int, bytes] = {}
        """By stage: of the few rows that are read until its next turn. Drawn anew each time, so that nobody can seek an
        id for it."""
        self._few: dict[Place, Few] = {}
        self.stages: Sequence[int] = ()
        """Those that are far."""

    def begin(self, far: Sequence[int], now: float, life: float) -> int | None:
        """A look begins, at which these stages are far, and nothing is wanted of them yet. Of which of them a place is
        read whole; of none, where the last turn was a moment ago."""
        self.stages, self._few = far, {}
        if not far or 0.0 <= now - self._at < turn_again(life):
            return None
        self._at = now
        self._last = next((stage for stage in far if self._last is not None and stage > self._last), far[0])
        self._salts.pop(self._last, None)
        return self._last

    def want_few(self, place: Place) -> None:
        """Only a few rows are read of this place at this look."""
        self._few[place] = self.shown_of(place.stage)

    def shown_of(self, stage: int) -> Few:
        """Which rows of a far stage a view shows, also where all were read, until its next turn."""
        if stage not in self._salts:
            self._salts[stage] = self._rng.randbytes(SALT_BYTES)
        return Few(rows_of_each(len(self.stages)), self._salts[stage])

    def few_of(self, place: Place) -> Few | None:
        """Which rows of a place are read at this look; None where all are."""
        return self._few.get(place)
