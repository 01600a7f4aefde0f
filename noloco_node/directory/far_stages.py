"""How often a node looks at the stages that it does not deal with, neither its own nor the next, and how much it reads.

Of a large swarm it must know of them no more than that each is served, by some for example, and now and then how many
there are: it follows a few of each, whose records it reads again before they end, and of one stage after another it
reads a place whole, and draws there whom it follows from then on. So what is read does not go with the number of
stages. Who is followed is asked whether it is there; of a stage that were shown whole few would have been asked, and it
would seem poor.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from noloco_node.directory.bucket_turns import READ_AGAIN_AT_LAST
from noloco_node.directory.buckets import Place
from noloco_node.directory.records import SERVING, LiveRecord
from noloco_node.directory.store import Esteem
from noloco_node.identity.peer_id import PeerId

TURN = 0.9
"""Of a record's life, between two far stages of which a place is read whole."""
IDLE_AGAIN = 0.4
"""The same where nobody of it is known to be at work."""
ROOT_TURNS = 4
"""Turns of a stage, at the least, between two at which level 0 is read as well as a bucket."""
COUNTS = 4
"""The latest buckets of a far stage that make its number: as many turns ago it had another."""
MOST_ROWS, LEAST_ROWS = 16, 3
"""Of one far stage, that are followed."""
ROWS = 48
"""Of all of them together, as far as each has the least."""


def rows_of_each(far: int) -> int:
    """How many are followed of each of so many far stages."""
    return max(LEAST_ROWS, min(MOST_ROWS, ROWS // max(1, far)))


def idle_again(life: float) -> float:
    """Seconds between two looks at a whole place of a stage of which nobody is at work."""
    return IDLE_AGAIN * life


def few_again(life: float) -> float:
    """Seconds after which the rows of those that are followed are read again, where records live so long."""
    return READ_AGAIN_AT_LAST * life


def turn_again(life: float) -> float:
    """Seconds between two far stages of which a place is read whole."""
    return TURN * life


def at_work(row: LiveRecord, esteem: Esteem) -> bool:
    """Whether this is one that serves its stage, and that has not failed to answer."""
    return row.record.state in SERVING and esteem > Esteem.SILENT


def drawn_of(
    rows: Mapping[PeerId, LiveRecord], most: int, rng: random.Random, standing: Callable[[PeerId], Esteem]
) -> tuple[tuple[PeerId, ...], float]:
    """Who is followed of these, `most`, and for which share of all they speak. They are drawn at random from all; where
    nobody among them is at work, from those that are, who speak for themselves alone: that a stage is served matters
    more than who else is on the way there."""

    def some(among: Sequence[PeerId]) -> tuple[PeerId, ...]:
        return tuple(sorted(rng.sample(among, min(most, len(among)))))

    drawn = some(sorted(rows))
    busy = [peer for peer in sorted(rows) if at_work(rows[peer], standing(peer))]
    return (drawn, 1.0) if not busy or set(busy).intersection(drawn) else (some(busy), len(busy) / len(rows))


class FarTurns:
    """Which stages are far at a look, whose turn it is, and of which places only those are read that are followed."""

    def __init__(self) -> None:
        self.stages: Sequence[int] = ()
        """Those that are far."""
        self.followed: set[Place] = set()
        """Where nothing is wanted at this look but newer records of those that are followed."""
        self._last: int | None = None
        """The stage whose turn was last."""
        self._at = 0.0
        """When that was, DHT time, seconds."""

    def begin(self, far: Sequence[int], now: float, life: float) -> int | None:
        """A look begins, at which these stages are far, and nothing is wanted of them yet. Whose turn it is; nobody's,
        where the last was a moment ago."""
        self.stages, self.followed = far, set()
        if not far or 0.0 <= now - self._at < turn_again(life):
            return None
        self._at = now
        self._last = next((stage for stage in far if self._last is not None and stage > self._last), far[0])
        return self._last

    def root_again(self, usual: float, life: float) -> float:
        """Seconds between two looks at level 0 of one that lies above it, where they are `usual` for who deals with
        it."""
        return max(usual, ROOT_TURNS * len(self.stages) * turn_again(life))
