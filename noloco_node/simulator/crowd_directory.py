"""How the nodes of a crowd see each other: all of everybody, or by buckets. Everybody looks at the same ticks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from noloco_node.directory.bucket_arrays import NONE, Flags, Floats, Ints, StageLevels
from noloco_node.directory.buckets import (
    KEPT,
    MOST_LEVEL,
    PREFIX_BITS,
    Estimate,
    bucket_of,
    estimated,
    level_behind,
)
from noloco_node.directory.sampled_view import (
    HELD,
    READ_AGAIN,
    RENEWED_SECONDS,
    SAMPLED_AGAIN,
    SETTLED,
    places_of,
    root_again,
    shown_of,
)
from noloco_node.directory.store import MOST_RECORDS, Esteem
from noloco_node.identity.peer_id import PeerId
from noloco_node.placement.balancing import Server, sample_error
from noloco_node.simulator.crowd_nodes import Nodes

RENEWALS = 3
"""Of a record within its life."""
NEAR = 2
"""A node's own stage and the next."""
SEEN_AT_ONCE = MOST_RECORDS
"""Most that one sees of a stage whose records still lie at level 0: no holder keeps more under a key."""
DRAWN_FROM = 1024
"""Where everybody is seen, of whom one is drawn as of all."""
LOTS = 8
"""By which the places of a crowded bucket are drawn: nodes that share one see the same part of it."""


class CrowdDirectory(Protocol):
    """What the other parts ask of it."""

    error: float
    """Relative rms error of the nodes' counts of their own stage, as of the last tick."""

    def tick(self) -> None:
        """Everybody looks."""
        ...

    def replicas(self, i: int) -> int:
        """How many live at a node's own stage, as it sees it."""
        ...

    def seen(self, i: int, ahead: int) -> Sequence[PeerId]:
        """Peers of a node's own stage (`ahead` 0; itself left out) or of the next (1) that it sees."""
        ...

    def servers(self, i: int) -> list[Server]:
        """What a node sees of the others of each stage, those of a bucket as one."""
        ...

    def holder_bytes(self) -> Floats:
        """Bytes that each node has given and taken as a holder of keys, so far."""
        ...

    def forget_bytes(self) -> None:
        """Holders begin to count anew."""
        ...

    def forget(self, i: int) -> None:
        """A node goes to another stage: its view begins anew, and its record there is gone."""
        ...


class _Records:
    """What both have in common: who has published what, and the order of a stage's records by their hash."""

    def __init__(self, nodes: Nodes, rng: np.random.Generator) -> None:
        self.nodes = nodes
        self.rng = rng
        self.settings = nodes.settings.directory
        self.life = self.settings.record_seconds
        self.stages = nodes.settings.work.stages
        self.error = 0.0
        self.renew_at = np.full(nodes.most, -math.inf)
        """When each publishes its record next; of those that never have, before all time."""
        self.column = np.zeros(nodes.most, np.int64)
        """A node's stage; of those that are cut off, beyond all stages of the others."""
        self.columns = self.stages
        self.order = np.zeros(0, np.int64)
        self.keys = np.zeros(0, np.int64)
        self._edges: dict[int, Ints] = {}
        self._sums: dict[int, Ints] = {}
        self._strengths: dict[int, tuple[Floats, Floats]] = {}
        self._speeds = np.zeros(0)
        self._peers: dict[tuple[int, int, int], tuple[PeerId, ...]] = {}
        """Of buckets that somebody has asked for since the last tick."""
        self._parts: dict[tuple[int, int], tuple[PeerId, ...]] = {}
        """The same of parts of level 0, by column."""
        self._shown: dict[tuple[int, int, int, bytes], tuple[PeerId, ...]] = {}
        """The same of crowded buckets, by lot."""
        self.read: dict[int, Floats] = {}
        self.written: dict[int, Floats] = {}

    def due(self) -> Ints:
        """Who publishes its record now: they live, have come to their stage, and have not done so for a third of a
        life. Those who do it for the first time, all at the start, come again each at a time of its own."""
        nodes, now = self.nodes, self.nodes.agenda.now
        who = np.flatnonzero(nodes.serving_row & (self.renew_at <= now))
        part = np.where(np.isneginf(self.renew_at[who]), self.rng.random(len(who)), 1.0)
        self.renew_at[who] = now + part * (self.life / RENEWALS)
        return who

    def sort(self) -> None:
        """Who has a record that lives, in order of stage and hash, those who are cut off by themselves."""
        nodes, now, many = self.nodes, self.nodes.agenda.now, len(self.nodes)
        self.column[:many], self.columns = nodes.stage_row[:many], self.stages
        if nodes.apart is not None:
            self.column[:many] += self.stages * (nodes.region_row[:many] == nodes.apart)
            self.columns = 2 * self.stages
        who = np.flatnonzero((nodes.expires[:, :many] > now).any(0))
        keys = (self.column[who] << PREFIX_BITS) | nodes.prefix[who]
        order = np.argsort(keys, kind="stable")
        self.order, self.keys = who[order], keys[order]
        self._edges, self._sums, self._strengths = {}, {}, {}
        self._peers, self._parts, self._shown = {}, {}, {}
        self._speeds = nodes.speed_row[self.order]

    def edges(self, level: int) -> Ints:
        """Where the buckets of a level begin among the sorted, those of all stages one after another."""
        if level not in self._edges:
            starts = np.arange((self.columns << level) + 1, dtype=np.int64) << (PREFIX_BITS - level)
            self._edges[level] = np.searchsorted(self.keys, starts)
        return self._edges[level]

    def counts(self, level: int) -> Ints:
        """Records in each bucket of a level, by stage and bucket."""
        if level not in self._sums:
            lives = self.nodes.expires[level, self.order] > self.nodes.agenda.now
            self._sums[level] = np.diff(np.concatenate(([0], np.cumsum(lives)))[self.edges(level)])
        return self._sums[level]

    def strengths_at(self, level: int) -> tuple[Floats, Floats]:
        """Sums of the speeds of those who have records in each bucket of a level, and of their squares."""
        if level not in self._strengths:
            lives = self.nodes.expires[level, self.order] > self.nodes.agenda.now
            edges, speeds = self.edges(level), self._speeds * lives
            sums, squares = (np.concatenate(([0.0], np.cumsum(each)))[edges] for each in (speeds, speeds * speeds))
            self._strengths[level] = np.diff(sums), np.diff(squares)
        return self._strengths[level]

    def others_of(
        self, i: int, column: int, level: int, buckets: Sequence[int], number: Estimate | None
    ) -> list[Server]:
        """What a node sees in these buckets of a stage, each as one server; they stand for so many, or for themselves
        alone where there is no `number`."""
        speeds, squares = self.strengths_at(level)
        own = (
            bucket_of(int(self.nodes.prefix[i]), level) if column == self.column[i] and self.nodes.serving[i] else NONE
        )
        seen, total, squared, servers = 0, 0.0, 0.0, list[tuple[str, float]]()
        for bucket in buckets:
            place, speed = (column << level) + bucket, self.nodes.speed[i] if bucket == own else 0.0
            here = int(self.counts(level)[place])
            shown = places_of(here) if level else here
            part = shown / here if here else 1.0
            strength = part * max(0.0, float(speeds[place]) - speed)
            seen += shown - (bucket == own)
            total, squared = total + strength, squared + part * (float(squares[place]) - speed * speed)
            servers.append((f"bucket {bucket} of stage {column}", max(strength, 1e-9)))
        each, error, stage = 1.0, 0.0, column % self.stages
        if number is not None:
            each = max(1.0, number.number / max(1, seen))
            error = sample_error(seen, total, squared, each * max(1, seen), number.error)
        return [Server(PeerId(name), stage, strength, stands_for=each, error=error) for name, strength in servers]

    def forget(self, i: int) -> None:
        """See `CrowdDirectory.forget`."""
        column, prefix = int(self.column[i]), int(self.nodes.prefix[i])
        for level in np.flatnonzero(self.nodes.expires[:, i]).tolist():
            self._peers.pop((column, level, bucket_of(prefix, level)), None)
            if level == 0:
                self._parts.clear()
        self._shown.clear()
        self.nodes.expires[:, i] = 0.0

    def peers(self, column: int, level: int, bucket: int) -> tuple[PeerId, ...]:
        """Their ids, for all who hold that bucket the same."""
        place = column, level, bucket
        found = self._peers.get(place)
        if found is None:
            peer = self.nodes.peer
            found = self._peers[place] = tuple([peer[j] for j in self.rows(column, level, bucket)])
        return found

    def shown(self, column: int, level: int, bucket: int, i: int) -> tuple[PeerId, ...]:
        """Those of them that one node has in its view: of a crowded bucket a part, as another is drawn now and then. It
        takes them for strangers alike."""
        every = self.peers(column, level, bucket)
        if places_of(len(every)) == len(every):
            return every
        lot = f"{i % LOTS} {int(self.nodes.agenda.now / RENEWED_SECONDS)}".encode()
        place = column, level, bucket, lot
        if place not in self._shown:
            self._shown[place] = tuple(shown_of(every, lot, lambda _: Esteem.HEARSAY))
        return self._shown[place]

    def part(self, column: int, i: int) -> tuple[PeerId, ...]:
        """Who lies at level 0, as one node sees them: all, or of more than holders keep each so-manieth."""
        every = self.peers(column, 0, 0)
        parts = max(1, math.ceil(len(every) / SEEN_AT_ONCE))
        place = column, i % parts
        if place not in self._parts:
            self._parts[place] = every[i % parts :: parts]
        return self._parts[place]

    def rows(self, column: int, level: int, bucket: int) -> list[int]:
        """Nodes whose records live in a bucket."""
        edges, place = self.edges(level), (column << level) + bucket
        who = self.order[edges[place] : edges[place + 1]]
        found: list[int] = who[self.nodes.expires[level, who] > self.nodes.agenda.now].tolist()
        return found

    def note_read(self, level: int, place: Ints) -> None:
        """Buckets of a level were read, by column and bucket: count their bytes."""
        octets = (self.counts(level)[place] + 1.0).astype(np.float64) * float(self.settings.record_bytes)
        self._note(self.read, level, place, octets, "directory read")

    def note_written(self, level: int, place: Ints) -> None:
        """Records were written there, to each of the holders."""
        octets = np.full(len(place), float(self.settings.record_bytes * self.settings.holders))
        self._note(self.written, level, place, octets, "directory written")

    def _note(self, table: dict[int, Floats], level: int, place: Ints, octets: Floats, kind: str) -> None:
        keys = self.stages << level
        before = table[level] if level in table else np.zeros(keys)
        table[level] = before + np.bincount(place % keys, octets, minlength=keys).astype(np.float64)
        self.nodes.count(kind, float(octets.sum()))

    def forget_bytes(self) -> None:
        """Holders begin to count anew."""
        self.read, self.written = {}, {}

    def holder_bytes(self) -> Floats:
        """See `CrowdDirectory.holder_bytes`: each key has its holders, drawn as the hash of a key draws them, which
        share its readers and all take what is written."""
        living = np.array(self.nodes.living())
        held = np.zeros(len(living))
        for table in (self.read, self.written):
            for octets in table.values():
                for _ in range(self.settings.holders):
                    places = self.rng.integers(0, len(living), len(octets))
                    held += np.bincount(places, octets / self.settings.holders, minlength=len(living))
        return held

    def note_error(self, number: Floats, who: Ints) -> None:
        """Of what these take for the number of their own stage."""
        true = np.bincount(self.column[self.nodes.serving_row], minlength=self.columns)
        of = true[self.column[who]]
        known = of > 0
        self.error = float(np.sqrt(np.mean((number[known] / of[known] - 1.0) ** 2))) if known.any() else math.nan


class WholeDirectory(_Records):
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


class BucketDirectory(_Records):
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
        self._behind_of = np.zeros(self.stages, np.int64)
        self._replicas = [1] * most
        """`number` of each one's own stage as of the last tick, as the count that a node goes by."""

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
        """See `CrowdDirectory.servers`: of the own stage and the next those that it holds, of the others a bucket drawn
        anew, with the number that some more of them speak for."""
        first, own = int(self.column[i]) // self.stages * self.stages, self.nodes.stage[i]
        found: list[Server] = []
        for stage in range(self.stages):
            ahead, column, draw = stage - own, first + stage, self.nodes.rng
            held = [b for b in self._held[ahead, i].tolist() if b != NONE] if 0 <= ahead < NEAR else []
            level = int(self.levels[ahead].level[i]) if held else max(0, int(self._behind_of[column]) - 1)
            many = 1 << level
            if level and not held:
                counts = self.counts(level)
                drawn = [int(counts[(column << level) + b]) for b in draw.sample(range(many), min(KEPT, many))]
                number = estimated([float(n << level) for n in drawn], drawn)
                found += self.others_of(i, column, level, (draw.randrange(many),), number)
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
                self.note_written(at, (self.column[some] << at) + (nodes.prefix[some] >> (PREFIX_BITS - at)))

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
        self.note_read(0, stage[root])
        levels.look_behind(who[root], behind[stage[root]])
        # who is at level 0 and looks at a bucket of another level has read level 0 as well
        besides = ~above & (levels.candidate[who] != NONE)
        nowhere = np.zeros(int(besides.sum()), np.int64)
        levels.took(who[besides], nowhere, nowhere, np.minimum(self.counts(0)[stage[besides]], MOST_RECORDS))
        hurried = (self._drawn_here[ahead, who] < SETTLED) | (levels.candidate[who] != NONE)
        hurried |= (self._held[ahead, who] == NONE).any(1)
        draws = ~above | hurried | (now - self._drawn_at[ahead, who] >= SAMPLED_AGAIN * self.life)
        who, stage, above, before = who[draws], stage[draws], above[draws], before[draws]
        level, bucket = levels.next_buckets(who)
        count = np.zeros(len(who), np.int64)
        for at in np.unique(level).tolist():
            some = level == at
            place = (stage[some] << at) + bucket[some]
            count[some] = self.counts(at)[place]
            if at:
                self.note_read(at, place)
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
        free = (held == NONE).any(1) | (now - self._held_at[ahead, some] >= RENEWED_SECONDS)
        takes = free & (held != drawn[:, None]).all(1)
        some = some[takes]
        self._held[ahead, some] = np.stack([held[takes, 1], drawn[takes]], 1)
        self._held_at[ahead, some] = now

    def _look_further(self, who: Ints) -> None:
        """What is held is read again, and the stages that are not near."""
        nodes = self.nodes
        again = who[self._turn(who, READ_AGAIN)]
        for ahead in range(NEAR):
            near = again[nodes.stage_row[again] + ahead < self.stages]
            level = self.levels[ahead].level[near]
            for at in np.unique(level).tolist():
                some = near[level == at]
                for held in self._held[ahead, some].T if at else ():
                    known = held != NONE
                    self.note_read(at, ((self.column[some] + ahead) << at)[known] + held[known])
        self._look_far(again, 0)
        self._look_far(who[self._turn(who, SAMPLED_AGAIN)], 1)

    def _look_far(self, who: Ints, above: int) -> None:
        """These look at the stages that are not near: at level 0, or at a bucket where there is a level above it."""
        own, side = self.nodes.stage_row[who], self.column[who] // self.stages * self.stages
        for stage in range(self.stages):
            columns = (side + stage)[(own > stage) | (own + NEAR <= stage)]
            levels = np.maximum(0, self._behind_of[columns] - 1)
            if not above:
                self.note_read(0, columns[levels == 0])
                continue
            for at in np.unique(levels[levels > 0]).tolist():
                some = columns[levels == at]
                drawn = (self.rng.random(len(some)) * (1 << at)).astype(np.int64)
                self.note_read(at, (some << at) + drawn)

    def _root_turn(self, who: Ints, level: Ints) -> Flags:
        """See `sampled_view.root_again`."""
        seconds = np.array([root_again(max(1, each), self.life) for each in range(MOST_LEVEL + 1)])
        ticks = np.maximum(1, np.round(seconds / self.settings.look_seconds)).astype(np.int64)[level]
        return (who + self._tick) % ticks == 0

    def _turn(self, who: Ints, part: float) -> Flags:
        """Whose turn it is, of what comes once in a part of a record's life."""
        ticks = max(1, round(part * self.life / self.settings.look_seconds))
        return (who + self._tick) % ticks == 0


def directory_of(nodes: Nodes, rng: np.random.Generator) -> WholeDirectory | BucketDirectory:
    """As the settings say."""
    if nodes.settings.directory.view == "everybody":
        return WholeDirectory(nodes, rng)
    return BucketDirectory(nodes, rng)
