"""How often a node reads the stages that it does not deal with, neither its own nor the next, and how much of them.

In a large swarm it needs to know only that each far stage is served, by some examples, and now and then the number. It
follows a few peers of each and reads their records again before they end. One stage after another it reads one place
whole, and draws there the peers that it follows from then on. What is read therefore does not grow with the number of
stages. A followed peer is asked whether it is there. If a stage were shown whole, few of it would have been asked, and
it would seem poor.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from noloco_node.directory.buckets import READ_AGAIN_AT_LAST, Place
from noloco_node.directory.records import SERVING, LiveRecord
from noloco_node.directory.store import Esteem
from noloco_node.identity.peer_id import PeerId

TURN = 0.9
"""One far stage after another has a place of it read whole, every so many record lives."""
IDLE_AGAIN = 0.4
"""A place of a stage with no known peer at work is read whole again after so many record lives."""
ROOT_TURNS = 4
"""Level 0 is read as well as a bucket only after at least so many turns of a stage."""
COUNTS = 4
"""So many latest buckets of a far stage make its number: as many turns ago it had another."""
MOST_ROWS, LEAST_ROWS = 16, 3
"""The most and the fewest rows that are followed of one far stage."""
ROWS = 48
"""So many rows are followed of all far stages together, as long as each has the least."""


def rows_of_each(far: int) -> int:
    """How many are followed of each of so many far stages."""
    return max(LEAST_ROWS, min(MOST_ROWS, ROWS // max(1, far)))


def idle_again(life: float) -> float:
    """Seconds between two looks at a whole place of a stage of which nobody is at work."""
    return IDLE_AGAIN * life


def few_again(life: float) -> float:
    """Seconds after which the rows of followed peers are read again; records live `life` seconds."""
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
    """The peers to follow, at most `most` of these rows, and the share of all rows for which they speak.

    They are drawn at random from all. If none among them is at work, they are drawn from those that are, and speak for
    themselves alone. That a stage is served matters more than the others on their way there.
    """

    def some(among: Sequence[PeerId]) -> tuple[PeerId, ...]:
        return tuple(sorted(rng.sample(among, min(most, len(among)))))

    drawn = some(sorted(rows))
    busy = [peer for peer in sorted(rows) if at_work(rows[peer], standing(peer))]
    return (drawn, 1.0) if not busy or set(busy).intersection(drawn) else (some(busy), len(busy) / len(rows))


class FarTurns:
    """The stages that are far at a look, the stage whose turn it is, and the places where only followed peers are
    read."""

    def __init__(self) -> None:
        self.stages: Sequence[int] = ()
        """Those that are far."""
        self.followed: set[Place] = set()
        """The places where at this look only newer records of followed peers are wanted."""
        self._last: int | None = None
        """The last stage that had its turn."""
        self._at = 0.0
        """When that was, DHT time, seconds."""

    def begin(self, far: Sequence[int], now: float, life: float) -> int | None:
        """Begin a look at which these stages are far, with nothing wanted of them yet.

        Returns the stage whose turn it is; None if the last turn was a moment ago.
        """
        self.stages, self.followed = far, set()
        if not far or 0.0 <= now - self._at < turn_again(life):
            return None
        self._at = now
        self._last = next((stage for stage in far if self._last is not None and stage > self._last), far[0])
        return self._last

    def root_again(self, usual: float, life: float) -> float:
        """Seconds between two looks at level 0 of a far stage that lies above it; `usual` for nodes that deal with
        it."""
        return max(usual, ROOT_TURNS * len(self.stages) * turn_again(life))
