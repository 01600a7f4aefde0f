"""A stage's records by buckets: the keys a node writes and reads if the stage is too large to be read whole.

A bucket holds the peers whose hash begins with the same bits; the number of bits is the level. Each node finds the
level alone, from the fullness of the buckets that it reads, so that some 64 records lie in each. Level 0 is the one key
of the whole stage: up to about 64 replicas every node sees all others there.

A record lies at its owner's level and at the levels beside it. Otherwise nodes of different levels would not see each
other, and each side would take itself for the whole stage. The nodes of bucket 0 write at level 0 as well, so that key
always shows some 64 nodes of a stage of any size. Newcomers, swarms that meet, and askers whether the stage is served
at all read it. The zeros at the beginning of those nodes' hashes tell the level that they come from.

The last part says when a node reads another bucket of a stage, and when that bucket takes the place of one that it
holds.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Collection, Sequence
from functools import lru_cache
from itertools import accumulate
from statistics import median
from typing import NamedTuple

from noloco_node.identity.peer_id import PeerId
from noloco_node.tallies import RECENT, PeerTable

TARGET = 64
"""The wanted number of records in a bucket."""
RAISE, LOWER = 1.5, 0.4375
"""A bucket is too full above the first multiple of the target, and too empty below the second. Between a level's bounds
lies more than a factor of two, or nodes would go up and down. It is less than four, or a stage of some sizes would suit
two levels that do not write where the other reads."""
MOST_LEVEL = 20
"""The highest level; it is enough for 64 million replicas of a stage."""
PREFIX_BITS = 32
BEHIND = 12
"""The number of records of a first bucket that speak of its level. A bucket may for good hold far fewer than the others
of its level."""
BEYOND_CHANCE = (3.5, 2.0)
"""Records speak of a level if they are so many standard deviations beyond what so small a stage has by chance. If
nothing lies beyond the first, the second is enough: beside sixty that came at once a first bucket is hidden."""
LOOKED_BACK = 4
"""The number of latest looks that decide on the level: three of four must be too full, or too empty. No bucket decides
alone."""
CROWDED = 2 * TARGET
"""A bucket with so many records is crowded: somebody sought ids for it. It counts for no more than so many."""
CONFIRMED_AGAIN = 2 * LOOKED_BACK
"""A level that was not confirmed is left alone for so many looks at level 0."""
LEAST_OF_MIDDLE, MOST_OF_MIDDLE = 0.625, 1.375
"""A bucket counts for at least and at most these multiples of the middle bucket. By chance three of a thousand buckets
of 64 lie beyond. For others somebody sought ids, or kept records from being found."""


class Place(NamedTuple):
    """A bucket: one key of the directory."""

    stage: int
    level: int
    bucket: int


@lru_cache(maxsize=16_384)
def prefix_of(peer: PeerId) -> int:
    """The first 32 bits of the hash that names a peer's buckets."""
    return int.from_bytes(hashlib.sha256(peer.encode()).digest()[: PREFIX_BITS // 8], "big")


def bucket_of(prefix: int, level: int) -> int:
    """The bucket at a level of a peer with this prefix."""
    return prefix >> (PREFIX_BITS - level)


def levels_to_write(prefix: int, level: int, fullness: float) -> tuple[int, ...]:
    """The levels at which a node writes its record after it has found `level`, and so many records in its buckets."""
    levels = [level]
    if level > 0:
        levels.append(level - 1)
    if 2.0 * fullness >= RAISE * TARGET and level < MOST_LEVEL:  # two of the next level make one that is too full
        levels.append(level + 1)
    if level > 1 and bucket_of(prefix, level) == 0:
        levels.append(0)
    return tuple(sorted(levels))


def level_behind(prefixes: Collection[int]) -> int:
    """The level, from 2 on, of the first bucket among the records found at level 0; 0 if there is none.

    All of level 1 write at level 0. Of records that lie there by chance half as many have one more leading zero. Of a
    first bucket as many have, down to its level. The result is the highest level with more records than chance
    explains.
    """
    if len(prefixes) < BEHIND:
        return 0
    zeros = [0] * (PREFIX_BITS + 1)
    for prefix in prefixes:
        zeros[PREFIX_BITS - prefix.bit_length()] += 1
    found = list(accumulate(reversed(zeros)))[::-1]
    for deviations in BEYOND_CHANCE:
        for level in range(MOST_LEVEL, 1, -1):
            before = found[level - 1]
            if 2 * found[level] - before >= max(BEHIND, deviations * math.sqrt(before)):
                return level
    return 0


def bounded_mean(densities: Sequence[float]) -> float:
    """The number that some buckets speak for: their mean, which each moves by at most its share of 0.375 of the middle.

    Of four buckets that are all read the middle alone would be off by 4 to 5 %, for every node alike.
    """
    middle = median(densities)
    least, most = LEAST_OF_MIDDLE * middle, MOST_OF_MIDDLE * middle
    return sum(min(most, max(least, density)) for density in densities) / len(densities)


class StageLevel:
    """One node's view of one stage: its level, and what its buckets say of the number. `took` is told what was found
    where.

    No bucket decides alone: of the latest looks each bucket counts once. A bucket is looked at again only after all
    others of a few, and never twice in a row. Otherwise one of two buckets would by chance be most of the latest looks.
    """

    def __init__(self, rng: random.Random, level: int = 0) -> None:
        self._rng = rng
        self.level = level
        self._counts = PeerTable[int, int](RECENT)
        """The records of the buckets of this level that were read, the latest last."""
        self._looks = 0
        """Those at buckets of this level."""
        self._before = 0.0
        """The number as it was known when this level was come to."""
        self._turn: list[int] = []
        self._candidate: int | None = None
        self._votes: list[int] = []
        self._doubted_for = 0

    @property
    def number(self) -> float:
        """An estimate of the records of the stage; exact at level 0."""
        counts = self._counts.values()
        if len(counts) < min(LOOKED_BACK, 1 << self.level):
            return self._before
        return bounded_mean([float(min(count, CROWDED) << self.level if self.level else count) for count in counts])

    @property
    def fullness(self) -> float:
        """Records that the middle one of the latest buckets of this level held."""
        latest = self._latest
        return latest[len(latest) // 2] if latest else self.number / (1 << self.level)

    @property
    def _latest(self) -> list[int]:
        """Records of the buckets that were looked at last, each as it was last seen, the emptiest first."""
        return sorted(list(self._counts.values())[-LOOKED_BACK:])

    @property
    def confirming(self) -> bool:
        """Whether level 0 speaks of a level far above, of which some buckets are read next."""
        return self._candidate is not None

    def next_bucket(self) -> tuple[int, int]:
        """Level and bucket to read next."""
        if self._candidate == 1:
            return 1, len(self._votes) & 1
        if self._candidate is not None:
            return self._candidate, self._rng.randrange(1, 1 << self._candidate)
        if self.level > LOOKED_BACK:
            return self.level, self._rng.randrange(1 << self.level)
        if not self._turn:
            self._turn = list(range(1 << self.level))
            self._rng.shuffle(self._turn)
            if self._counts and self._turn[-1] == next(reversed(self._counts)):
                self._turn.reverse()
        return self.level, self._turn.pop()

    def took(self, level: int, bucket: int, prefixes: Collection[int]) -> None:
        """These records were found in a bucket."""
        if level == 0:
            self._look_behind(prefixes)
        if level == self._candidate and (bucket or level == 1):
            self._vote(len(prefixes))
        elif level == self.level:
            self._counts[bucket] = len(prefixes)
            self._looks += 1
            self._decide()

    def _look_behind(self, prefixes: Collection[int]) -> None:
        self._doubted_for = max(0, self._doubted_for - 1)
        behind = level_behind(prefixes)
        if behind - 1 > self.level and self._candidate is None and not self._doubted_for:
            self._consider(behind)

    def _vote(self, count: int) -> None:
        """A level far above is real if most of its buckets are as full as that. If it is not, those below it are tried.

        Ids that were sought for one bucket say nothing of the others, and records that lie at level 0 alone are
        nobody's. A first bucket is now and then fuller than others by chance, and speaks of a level too high.
        """
        self._votes.append(count)
        if len(self._votes) < LOOKED_BACK or self._candidate is None:
            return
        level, votes = self._candidate, self._votes
        self._candidate, self._votes = None, []
        if (min(votes) if level == 1 else median(votes)) >= LOWER * TARGET:
            # At the first level of all few write yet when a stage grows quickly, and all were just seen.
            self._go_to(level, None if level == 1 else bounded_mean([float(vote << level) for vote in votes]))
        elif level - 2 > self.level:
            self._consider(level - 1)
        elif level > 1 or self.fullness <= RAISE * TARGET:
            self._doubted_for = CONFIRMED_AGAIN

    def _decide(self) -> None:
        ordered = self._latest
        if self._looks < (1 if self.level == 0 else LOOKED_BACK) or len(ordered) < min(2, 1 << self.level):
            return
        lower_middle, upper_middle = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
        if lower_middle > RAISE * TARGET and self.level == 0:
            if self._candidate is None:
                self._consider(1)
        elif lower_middle > RAISE * TARGET and self.level < MOST_LEVEL:
            self._go_to(self.level + 1)  # nodes with full buckets write there; beyond it nobody does
        elif upper_middle < LOWER * TARGET and self.level > 0:
            down = int(math.log2(TARGET / max(upper_middle, 1)))
            self._go_to(max(0, self.level - max(1, down)))

    def _consider(self, level: int) -> None:
        """Read some of its buckets before it is gone to."""
        self._candidate, self._votes = level, []

    def _go_to(self, level: int, number: float | None = None) -> None:
        self._before = self.number if number is None else number
        self.level, self._turn, self._looks = level, [], 0
        self._counts.clear()


HELD = 2
"""A node holds so many buckets of a stage."""
RENEWED_SECONDS = 120.0
"""After so many seconds a held bucket is exchanged for another: a quarter of the view in a minute."""
READ_AGAIN, READ_AGAIN_AT_LAST = 0.4, 0.5
"""A held bucket is read again after the first part of a record's life, or at most the second if buckets are full. A
record is renewed at a third of its life. Once the number has settled, a bucket is read for it after the second, and
all nodes near a whole stage's key are asked as often."""
SETTLED = LOOKED_BACK
"""A node that has come to a level reads so many of its buckets at once, one at each look."""


def drawn_again(fullness: float, life: float) -> float:
    """Seconds between two buckets that are read for the number alone; `fullness` is the number of records in a bucket.

    The fuller buckets are, the more rarely they are read, so that as many records come in a second.
    """
    return READ_AGAIN_AT_LAST * life * _times_full(fullness)


def held_again(fullness: float, life: float) -> float:
    """Seconds between two reads of a held bucket; all records that are shown must be read again before they end."""
    return life * min(READ_AGAIN * _times_full(fullness), READ_AGAIN_AT_LAST)


def _times_full(fullness: float) -> float:
    return min(max(fullness / TARGET, 1.0), RAISE)


def draws(drawn_here: int, *, confirming: bool, has_place: bool, since: float, again: float) -> bool:
    """Tell whether a node reads a bucket for the number now.

    It has read `drawn_here` buckets of its level and may be `confirming` that it leaves the level. `has_place` says
    that it would hold the next bucket (`has_a_place`). It drew the last one `since` seconds ago and usually draws one
    `again` after so many seconds.
    """
    return drawn_here < SETTLED or confirming or has_place or since >= again


def has_a_place(level: int, held: int, since: float) -> bool:
    """Tell whether a bucket drawn at a level is held from now on.

    The node holds `held` buckets and has exchanged one of them `since` seconds ago. If all places are taken, the eldest
    goes, unless there are no other buckets.
    """
    return held < HELD or (since >= RENEWED_SECONDS and (1 << level) > HELD)
