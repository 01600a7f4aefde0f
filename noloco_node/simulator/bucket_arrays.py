"""`StageLevel` for many nodes at once, for a simulation of more nodes than one can step one by one.

It takes the same decisions on rows of arrays (tests hold them equal). Node i of a call is row i of what it is told.
"""

from __future__ import annotations

import numpy as np

from noloco_node.directory.buckets import (
    CONFIRMED_AGAIN,
    CONFIRMING,
    CROWDED,
    FALL,
    HIGHER_TOO,
    KEPT,
    LEAST_OF_MIDDLE,
    LOOKED_BACK,
    LOWER,
    MOST_LEVEL,
    MOST_OF_MIDDLE,
    PREFIX_BITS,
    RAISE,
    TARGET,
    UNNAMED,
    Estimate,
    Flags,
    Floats,
    Ints,
    estimated,
)

NONE = -1
"""This value stands for no candidate, and for a count that there is not yet."""


class StageLevels:
    """`StageLevel` of `many` nodes, each for a stage of its own choice."""

    def __init__(self, many: int, rng: np.random.Generator) -> None:
        self._rng = rng
        self.level = np.zeros(many, np.int64)
        self._counts = np.full((many, KEPT), NONE, np.int64)
        """The counts of records in the buckets that make the estimate, the latest last; NONE where there is none."""
        self._count_levels = np.zeros((many, KEPT), np.int64)
        self._count_buckets = np.full((many, KEPT), UNNAMED, np.int64)
        self._here = np.full((many, LOOKED_BACK), NONE, np.int64)
        self._here_buckets = np.full((many, LOOKED_BACK), NONE, np.int64)
        self._turn = np.zeros(many, np.int64)
        self._first = rng.integers(0, 1 << LOOKED_BACK, many)
        self._stride = rng.integers(0, 1 << (LOOKED_BACK - 1), many) * 2 + 1
        self.candidate = np.full(many, NONE, np.int64)
        self._votes = np.full((many, CONFIRMING), NONE, np.int64)
        self._halfway = np.zeros(many, np.bool_)
        self._spoken = np.full(many, MOST_LEVEL, np.int64)
        self._highest = np.full(many, MOST_LEVEL, np.int64)
        self._doubted_for = np.zeros(many, np.int64)

    def forget(self, who: Ints) -> None:
        """These nodes begin anew."""
        self.level[who], self._turn[who], self._doubted_for[who] = 0, 0, 0
        self._counts[who], self._here[who], self._votes[who], self.candidate[who] = NONE, NONE, NONE, NONE
        self._spoken[who], self._highest[who] = MOST_LEVEL, MOST_LEVEL

    def estimates(self, who: Ints) -> Floats:
        """Numbers of `StageLevel.estimate`; 0 where nothing was read."""
        counts, levels = self._counts[who], self._count_levels[who]
        known = counts != NONE
        bounded = np.where(levels > 0, np.minimum(counts, CROWDED), counts)
        densities = np.where(known, bounded * np.exp2(levels), np.inf)
        middle = _middle(densities, known)[:, None]
        densities = np.clip(densities, LEAST_OF_MIDDLE * middle, MOST_OF_MIDDLE * middle)
        number = np.where(known, densities, 0.0).sum(1) / np.maximum(1, known.sum(1))
        last = np.where(known[:, -1], counts[:, -1] * np.exp2(levels[:, -1]), 0.0)
        return np.where(self.level[who] == 0, last, number)

    def estimate(self, i: int) -> Estimate:
        """`StageLevel.estimate` of one node, with its error."""
        rows = zip(self._counts[i].tolist(), self._count_levels[i].tolist(), strict=True)
        known = [(count, level) for count, level in rows if count != NONE]
        if not known:
            return Estimate(0.0, 1.0)
        if self.level[i] == 0:
            count, level = known[-1]
            return Estimate(float(count << level))
        known = [(min(count, CROWDED) if level else count, level) for count, level in known]
        densities = [float(count << level) for count, level in known]
        return estimated(densities, [count for count, _ in known], 1 << int(self.level[i]))

    def fullness(self, who: Ints) -> Floats:
        """See `StageLevel.fullness`."""
        ordered, many = self._latest(who)
        upper = np.take_along_axis(ordered, np.minimum(many // 2, LOOKED_BACK - 1)[:, None], 1)[:, 0]
        full = upper.astype(np.float64)
        none = many == 0
        full[none] = self.estimates(who[none]) / np.exp2(self.level[who[none]])
        return full

    def _latest(self, who: Ints) -> tuple[Ints, Ints]:
        """See `StageLevel._latest`: records in rows, the emptiest first, and how many of each row are some."""
        here, buckets = self._here[who], self._here_buckets[who]
        known = here != NONE
        for later in range(1, LOOKED_BACK):
            known[:, :later] &= buckets[:, :later] != buckets[:, later : later + 1]
        return np.sort(np.where(known, here, np.iinfo(np.int64).max), 1), known.sum(1)

    def next_buckets(self, who: Ints) -> tuple[Ints, Ints]:
        """Levels and buckets to read next; of a few none comes twice before all have come, nor twice in a row."""
        level, candidate = self.level[who], self.candidate[who]
        turn = (self._first[who] + self._turn[who] * self._stride[who]) & ((1 << level) - 1)
        self._turn[who] += 1
        drawn = (self._rng.random(len(who)) * np.exp2(level)).astype(np.int64)
        bucket = np.where(level > LOOKED_BACK, drawn, turn)
        far = 1 + (self._rng.random(len(who)) * (np.exp2(np.maximum(candidate, 1)) - 1)).astype(np.int64)
        far = np.where(candidate == 1, (self._votes[who] != NONE).sum(1) & 1, far)
        confirming = candidate != NONE
        return np.where(confirming, candidate, level), np.where(confirming, far, bucket)

    def levels_to_write(self, who: Ints, prefixes: Ints) -> list[tuple[Ints, Flags]]:
        """`levels_to_write`: some levels, and which of the nodes write there."""
        level = self.level[who]
        higher = (self.fullness(who) >= HIGHER_TOO * TARGET) & (level < MOST_LEVEL)
        first = (level > 1) & (prefixes >> (PREFIX_BITS - level) == 0)
        every = np.ones(len(who), np.bool_)
        return [(level, every), (level - 1, level > 0), (level + 1, higher), (np.zeros_like(level), first)]

    def look_behind(self, who: Ints, level_behind: Ints) -> None:
        """`took` of level 0, as far as it tells levels far above; `level_behind` of what lies there, by node."""
        self._doubted_for[who] = np.maximum(0, self._doubted_for[who] - 1)
        behind = np.minimum(self._highest[who], level_behind)
        goes = (behind - 1 > self.level[who]) & (self.candidate[who] == NONE) & (self._doubted_for[who] == 0)
        self._hear_of(who[goes], behind[goes])

    def took(self, who: Ints, level: Ints, bucket: Ints, count: Ints) -> None:
        """See `StageLevel.took`, after `look_behind` where the level is 0. No node comes twice."""
        votes = (level == self.candidate[who]) & ((bucket != 0) | (level == 1))
        here = ~votes & (level == self.level[who])
        self._vote(who[votes], count[votes])
        self._count(who[here], level[here], bucket[here], count[here])

    def _vote(self, who: Ints, count: Ints) -> None:
        _append(self._votes, who, count)
        done = who[self._votes[who, 0] != NONE]
        votes, level = self._votes[done], self.candidate[done]
        self.candidate[done] = NONE
        if not len(done):
            return
        middle: Floats = np.asarray(np.median(votes, axis=1), np.float64)
        between = self._halfway[done]
        full: Floats = np.where(between | (level == 1), votes.min(1), middle)
        real = full >= np.where(between & (level > 1), TARGET, LOWER * TARGET)
        self._go_to(done[real], level[real])
        counted = real & (level > 1)
        unnamed = np.full(int(counted.sum()), UNNAMED, np.int64)
        for number in range(CONFIRMING):
            self._keep(done[counted], level[counted], unnamed, votes[counted, number])
        spoken, own = self._spoken[done], self.level[done]
        below = ~real & (level == spoken) & ~between & (level - 1 > own)
        self._consider(done[below], level[below] - 1)
        halfway = (own + level) // 2
        again = ~real & ~below & (own < halfway)
        self._consider(done[again], halfway[again], between=True)
        doubts = ~real & ~below & ~again & ((level > 1) | between | (self.fullness(done) <= RAISE * TARGET))
        self._doubted_for[done[doubts]] = CONFIRMED_AGAIN
        self._highest[done[doubts]] = np.where(spoken - 3 > own, spoken - 2, MOST_LEVEL)[doubts]

    def _keep(self, who: Ints, level: Ints, bucket: Ints, count: Ints) -> None:
        _append(self._counts, who, count)
        _append(self._count_levels, who, level)
        _append(self._count_buckets, who, bucket)

    def _count(self, who: Ints, level: Ints, bucket: Ints, count: Ints) -> None:
        self._drop(who, level[:, None], bucket[:, None])
        self._keep(who, level, bucket, count)
        _append(self._here, who, count)
        _append(self._here_buckets, who, bucket)
        self._decide(who)

    def _drop(self, who: Ints, level: Ints, bucket: Ints) -> None:
        """What says nothing beside a new look; see `buckets._still_counts`."""
        rows, of, number = self._counts[who], self._count_levels[who], self._count_buckets[who]
        known = rows != NONE
        own = known & (of == level) & (number != UNNAMED)
        enough = np.count_nonzero(own, axis=1)[:, None] >= np.minimum(LOOKED_BACK, np.exp2(level))
        beside = (of == level) | (of == 0) | ((np.abs(of - level) == 1) & (rows < CROWDED))
        stays: Flags = known & (level > 0) & ((own & (number != bucket)) | (~own & ~enough & beside))
        drops = np.flatnonzero((stays != known).any(1))
        if not len(drops):
            return
        order = np.argsort(stays[drops], axis=1, kind="stable")  # those that stay move to the end, in their order
        rows = np.where(stays, rows, NONE)
        for table, values in ((self._counts, rows), (self._count_levels, of), (self._count_buckets, number)):
            table[who[drops]] = np.take_along_axis(values[drops], order, 1)

    def _decide(self, who: Ints) -> None:
        ordered, many = self._latest(who)
        enough = (self.level[who] == 0) | ((self._here[who, 0] != NONE) & (many > 1))
        who, ordered, many = who[enough], ordered[enough], many[enough]
        lower_middle = np.take_along_axis(ordered, ((many - 1) // 2)[:, None], 1)[:, 0]
        upper_middle = np.take_along_axis(ordered, (many // 2)[:, None], 1)[:, 0]
        level = self.level[who]
        up = (lower_middle > RAISE * TARGET) & (level < MOST_LEVEL)
        down = (upper_middle < LOWER * TARGET) & (level > 0)
        fall = np.minimum(FALL, np.maximum(1, np.log2(TARGET / np.maximum(upper_middle, 1)).astype(np.int64)))
        asks = who[up & (self.level[who] == 0) & (self.candidate[who] == NONE)]
        self._hear_of(asks, 1)
        up &= self.level[who] > 0
        self._go_to(who[up], level[up] + 1)
        self._go_to(who[down], np.maximum(0, level - fall)[down])

    def _hear_of(self, who: Ints, level: Ints | int) -> None:
        self._spoken[who] = level
        self._consider(who, level)

    def _consider(self, who: Ints, level: Ints | int, *, between: bool = False) -> None:
        """See `StageLevel._consider`."""
        self.candidate[who], self._votes[who], self._halfway[who] = level, NONE, between

    def _go_to(self, who: Ints, level: Ints) -> None:
        self.level[who], self._highest[who] = level, MOST_LEVEL
        self._turn[who] = 0
        self._here[who] = NONE


def _append(rows: Ints, who: Ints, value: Ints) -> None:
    """The oldest goes, the latest comes last."""
    kept = rows[who]
    kept[:, :-1] = kept[:, 1:]
    kept[:, -1] = value
    rows[who] = kept


def _middle(values: Floats, known: Flags) -> Floats:
    """Medians of the known values of each row (the others are infinite); 0 where there is none."""
    many = known.sum(1)
    ordered = np.sort(values, 1)
    lower = np.take_along_axis(ordered, (np.maximum(many, 1) - 1)[:, None] // 2, 1)[:, 0]
    upper = np.take_along_axis(ordered, np.minimum(many // 2, values.shape[1] - 1)[:, None], 1)[:, 0]
    return np.where(many > 0, (lower + upper) / 2, 0.0)
