"""How the nodes of a crowd see each other: all of everybody, or by buckets. Everybody looks at the same ticks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from noloco_node.directory.buckets import (
    HELD,
    KEPT,
    MOST_LEVEL,
    PREFIX_BITS,
    Estimate,
    Flags,
    Floats,
    Ints,
    bucket_of,
    drawn_again,
    draws,
    estimated,
    has_a_place,
    held_again,
    level_behind,
)
from noloco_node.directory.far_stages import few_again, rows_of_each, turn_again
from noloco_node.directory.sampled_view import WHOLE, root_again
from noloco_node.directory.store import MOST_RECORDS
from noloco_node.identity.peer_id import PeerId
from noloco_node.placement.balancing import Server
from noloco_node.simulator.bucket_arrays import NONE, StageLevels
from noloco_node.simulator.crowd_nodes import Nodes
from noloco_node.simulator.crowd_records import RENEWALS, Records

NEAR = 2
"""A node's own stage and the next."""
DRAWN_FROM = 1024
"""If everybody is seen, one is drawn from so many as from all."""


class WholeDirectory(Records):
    """Everybody reads everything at every look."""

    def __init__(self, nodes: Nodes, rng: np.random.Generator) -> None:
        super().__init__(nodes, rng)
        self._seen: list[list[int]] = [[] for _ in range(self.stages)]
        self._many = [0] * self.stages

    def tick(self) -> None:
        """See `CrowdDirectory.tick`."""
        nodes, now = self.nodes, self.nodes.agenda.now
        who = self.due()
        nodes.expires[0, who] = now + self.life
        self.sort()
        self.note_written(0, self.column[who])
        self._many = self.counts(0).tolist()
        self._seen = [self._drawn(self.rows(column, 0, 0)) for column in range(self.columns)]
        for stage in range(self.stages):
            side = self.column[nodes.alive_row] // self.stages
            self.note_read(0, stage + self.stages * side)
        serving = np.flatnonzero(nodes.serving_row)
        self.note_error(np.array(self._many, float)[self.column[serving]], serving)

    def _drawn(self, rows: list[int]) -> list[int]:
        return self.rng.choice(rows, DRAWN_FROM, replace=False).tolist() if len(rows) > DRAWN_FROM else rows

    def replicas(self, i: int) -> int:
        """See `CrowdDirectory.replicas`."""
        return max(1, self._many[int(self.column[i])])

    def servers(self, i: int) -> list[Server]:
        """See `CrowdDirectory.servers`."""
        first = int(self.column[i]) // self.stages * self.stages
        columns = range(first, first + self.stages)
        return [server for column in columns for server in self.others_of(i, column, 0, (0,), None)]

    def seen(self, i: int, ahead: int) -> Sequence[PeerId]:
        """See `CrowdDirectory.seen`."""
        peer = self.nodes.peer
        return [peer[j] for j in self._seen[int(self.column[i]) + ahead] if j != i]


class BucketDirectory(Records):
    """By buckets, as `directory.buckets` decides and as often as `directory.sampled_view` says; the same ticks for all,
    each at its own turn."""

    def __init__(self, nodes: Nodes, rng: np.random.Generator) -> None:
        super().__init__(nodes, rng)
        most = nodes.most
        self.levels = [StageLevels(most, rng) for _ in range(NEAR)]
        self.number = np.ones((NEAR, most))
        self._held = np.full((NEAR, most, HELD), NONE, np.int64)
        self._held_at = np.full((NEAR, most), -math.inf)
        self._drawn_at = np.full((NEAR, most), -math.inf)
        self._drawn_here = np.zeros((NEAR, most), np.int64)
        self._tick = 0
        self._whole = True
        self._few = rows_of_each(self.stages - NEAR)
        self._behind_of = np.zeros(self.stages, np.int64)
        self._replicas = [1] * most
        """The `number` of each node's own stage as of the last tick, as the count that a node goes by."""

    def tick(self) -> None:
        """See `CrowdDirectory.tick`."""
        self._publish()
        self.sort()
        self._tick += 1
        everybody = np.flatnonzero(self.nodes.alive_row)
        behind = np.array([self._behind(column) for column in range(self.columns)])
        for ahead in range(NEAR):
            who = everybody[self.nodes.stage_row[everybody] + ahead < self.stages]
            self._look(ahead, who, behind)
        self._behind_of = behind
        self._look_further(everybody)
        self._replicas = np.maximum(1, np.rint(self.number[0])).astype(np.int64).tolist()
        serving = np.flatnonzero(self.nodes.serving_row)
        self.note_error(self.number[0, serving], serving)

    def replicas(self, i: int) -> int:
        """See `CrowdDirectory.replicas`."""
        return self._replicas[i]

    def servers(self, i: int) -> list[Server]:
        """See `CrowdDirectory.servers`: the held buckets of the own stage and the next, and for the others a bucket
        drawn anew. The latter comes with the number that some more buckets speak for."""
        first, own = int(self.column[i]) // self.stages * self.stages, self.nodes.stage[i]
        found: list[Server] = []
        for stage in range(self.stages):
            ahead, column, draw = stage - own, first + stage, self.nodes.rng
            held = [b for b in self._held[ahead, i].tolist() if b != NONE] if 0 <= ahead < NEAR else []
            level = int(self.levels[ahead].level[i]) if held else max(0, int(self._behind_of[column]) - 1)
            many = 1 << level
            far = not 0 <= ahead < NEAR
            if (level and not held) or (far and not self._whole):
                counts = self.counts(level)
                drawn = [int(counts[(column << level) + b]) for b in draw.sample(range(many), min(KEPT, many))]
                number = estimated([float(n << level) for n in drawn], drawn, many) if level else Estimate(drawn[0])
                few = self._few if far else MOST_RECORDS
                found += self.others_of(i, column, level, (draw.randrange(many),), number, few)
            elif held and len(held) < many:
                found += self.others_of(i, column, level, held, self.levels[ahead].estimate(i))
            else:
                found += self.others_of(i, column, level, held or (0,), None)
        return found

    def forget(self, i: int) -> None:
        """See `CrowdDirectory.forget`."""
        super().forget(i)
        self._held[:, i], self._drawn_here[:, i], self.number[:, i] = NONE, 0, 1.0
        self._replicas[i] = 1
        for levels in self.levels:
            levels.forget(np.array([i]))

    def seen(self, i: int, ahead: int) -> Sequence[PeerId]:
        """See `CrowdDirectory.seen`."""
        column, level = int(self.column[i]) + ahead, int(self.levels[ahead].level[i])
        held = [bucket for bucket in self._held[ahead, i].tolist() if bucket != NONE] if level else []
        parts = [self.shown(column, level, bucket, i) for bucket in held] if held else [self.part(column, i)]
        others = sum(parts[1:], parts[0])
        if ahead or (held and bucket_of(int(self.nodes.prefix[i]), level) not in held):
            return others
        own = self.nodes.peer[i]
        return [peer for peer in others if peer != own]

    def _publish(self) -> None:
        nodes, who = self.nodes, self.due()
        ends = nodes.agenda.now + self.life
        for level, writes in self.levels[0].levels_to_write(who, nodes.prefix[who]):
            nodes.expires[level[writes], who[writes]] = ends
            for at in np.unique(level[writes]).tolist():
                some = who[writes][level[writes] == at]
                place = (self.column[some] << at) + (nodes.prefix[some] >> (PREFIX_BITS - at))
                self.note_written(at, place)
                if at:
                    self.note_sought(place, self.life / RENEWALS)

    def _behind(self, column: int) -> int:
        """What level 0 says; holders keep so many records, and the eldest of these."""
        rows = sorted(self.rows(column, 0, 0))[:MOST_RECORDS]
        return level_behind(self.nodes.prefix[rows].tolist())

    def _look(self, ahead: int, who: Ints, behind: Ints) -> None:
        levels, now = self.levels[ahead], self.nodes.agenda.now
        stage = self.column[who] + ahead
        before = levels.level[who].copy()
        above = before > 0
        root = ~above | self._root_turn(who, before)
        # a node that sees both halves of a stage is told nothing of those at level 0
        halves = (before == 1) & (self._held[ahead, who] != NONE).all(1)
        self.note_looked(stage[~above], self.settings.look_seconds)
        self.note_read(0, stage[root & above & ~halves])
        levels.look_behind(who[root], behind[stage[root]])
        # a node at level 0 that reads a bucket of another level has read level 0 as well
        besides = ~above & (levels.candidate[who] != NONE)
        nowhere = np.zeros(int(besides.sum()), np.int64)
        levels.took(who[besides], nowhere, nowhere, np.minimum(self.counts(0)[stage[besides]], MOST_RECORDS))
        drawn_here, since = self._drawn_here[ahead, who], now - self._drawn_at[ahead, who]
        confirming, again = levels.candidate[who] != NONE, drawn_again(levels.fullness(who), self.life)
        looks = ~above | draws(drawn_here, confirming, self._has_a_place(ahead, who), since, again)
        who, stage, above, before = who[looks], stage[looks], above[looks], before[looks]
        level, bucket = levels.next_buckets(who)
        count = np.zeros(len(who), np.int64)
        for at in np.unique(level).tolist():
            some = level == at
            place = (stage[some] << at) + bucket[some]
            count[some] = self.counts(at)[place]
            if at:
                self.note_read(at, place)
                self.note_sought(place, again[looks][some] * (1 << at))
        levels.took(who, level, bucket, np.minimum(count, MOST_RECORDS))
        self._drawn_at[ahead, who] = now
        self._drawn_here[ahead, who] += 1
        self.number[ahead, who] = levels.estimates(who)
        self._hold(ahead, who, bucket, levels.level[who] != before, above & (level == before))

    def _hold(self, ahead: int, who: Ints, bucket: Ints, moved: Flags, taken: Flags) -> None:
        """What was drawn at a node's level takes the place of the older one that it holds, where its time has come."""
        now = self.nodes.agenda.now
        gone = who[moved]
        self._held[ahead, gone], self._drawn_here[ahead, gone] = NONE, 0
        some, drawn = who[taken & ~moved], bucket[taken & ~moved]
        held = self._held[ahead, some]
        takes = self._has_a_place(ahead, some) & (held != drawn[:, None]).all(1)
        some = some[takes]
        self._held[ahead, some] = np.stack([held[takes, 1], drawn[takes]], 1)
        self._held_at[ahead, some] = now

    def _has_a_place(self, ahead: int, who: Ints) -> Flags:
        held = np.count_nonzero(self._held[ahead, who] != NONE, axis=1).astype(np.int64)
        since = self.nodes.agenda.now - self._held_at[ahead, who]
        return has_a_place(self.levels[ahead].level[who], held, since)

    def _look_further(self, who: Ints) -> None:
        """What is held is read again, and the stages that are not near."""
        nodes = self.nodes
        for ahead in range(NEAR):
            levels = self.levels[ahead]
            near = who[(levels.level[who] > 0) & (nodes.stage_row[who] + ahead < self.stages)]
            near = near[self._turn(near, held_again(levels.fullness(near), self.life))]
            level = levels.level[near]
            for at in np.unique(level).tolist():
                some = near[level == at]
                for held in self._held[ahead, some].T:
                    known = held != NONE
                    place = ((self.column[some] + ahead) << at)[known] + held[known]
                    self.note_read(at, place)
                    self.note_sought(place, held_again(levels.fullness(some[known]), self.life))
        self._whole = len(self.order) <= WHOLE and not any(levels.level[who].any() for levels in self.levels)
        if self._whole:
            for columns in self._far_of(who):
                self.note_looked(columns, self.settings.look_seconds)
            return
        few, turn = who[self._turn(who, few_again(self.life))], who[self._turn(who, turn_again(self.life))]
        for columns in self._far_of(few):
            self._look_far(columns, self._few, few_again(self.life))
        own = nodes.stage_row[turn]
        near = np.where(own + NEAR <= self.stages, NEAR, self.stages - own)
        drawn = (self.rng.random(len(turn)) * (self.stages - near)).astype(np.int64)
        drawn += near * (drawn >= own)  # by turns, and here by chance: one of those that are far
        for stage, columns in enumerate(self._far_of(turn)):
            self._look_far(columns[drawn[self._is_far(turn, stage)] == stage], MOST_RECORDS, math.inf)

    def _is_far(self, who: Ints, stage: int) -> Flags:
        own = self.nodes.stage_row[who]
        return (own > stage) | (own + NEAR <= stage)

    def _far_of(self, who: Ints) -> list[Ints]:
        """The columns of each stage's nodes for which it is far."""
        first = self.column[who] // self.stages * self.stages
        return [(first + stage)[self._is_far(who, stage)] for stage in range(self.stages)]

    def _look_far(self, columns: Ints, most: int, after: float) -> None:
        """Read so many rows of some bucket of each of these columns, or of level 0 if there is no level above it. The
        same was read `after` seconds ago."""
        levels = np.maximum(0, self._behind_of[columns] - 1)
        for at in np.unique(levels).tolist():
            some = columns[levels == at]
            drawn = (self.rng.random(len(some)) * (1 << at)).astype(np.int64)
            place = (some << at) + drawn
            self.note_read(at, place, most)
            self.note_sought(place, after)

    def _root_turn(self, who: Ints, level: Ints) -> Flags:
        """See `sampled_view.root_again`."""
        seconds = np.array([root_again(max(1, each), self.life) for each in range(MOST_LEVEL + 1)])
        ticks = np.maximum(1, np.round(seconds / self.settings.look_seconds)).astype(np.int64)[level]
        return (who + self._tick) % ticks == 0

    def _turn(self, who: Ints, seconds: float | Floats) -> Flags:
        """The nodes whose turn it is, for what comes once in so many seconds."""
        ticks = np.maximum(1, np.ceil(np.asarray(seconds) / self.settings.look_seconds - 1e-9)).astype(np.int64)
        return (who + self._tick) % ticks == 0
