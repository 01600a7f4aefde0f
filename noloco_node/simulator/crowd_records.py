"""The records that nodes of a crowd publish, what others find of them, and the bytes of their holders."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from noloco_node.directory.asked_key import MARK_BYTES
from noloco_node.directory.buckets import PREFIX_BITS, RENEWED_SECONDS, Estimate, Floats, Ints, bucket_of
from noloco_node.directory.dht import ALSO_ASKED, ALSO_TOLD, WALK_AGAIN
from noloco_node.directory.dht_node import BUCKET_SIZE, REPLICAS
from noloco_node.directory.dht_walk import (
    FEW_NEIGHBOURS,
    GLANCED,
    HOLDERS_SECONDS,
    MOST_BY_ONE,
    MOST_GLANCED,
    RELIABLE_ASKED,
)
from noloco_node.directory.sampled_view import places_of, shown_of
from noloco_node.directory.store import MOST_RECORDS, hearsay
from noloco_node.identity.peer_id import PeerId
from noloco_node.placement.balancing import Server, sample_error
from noloco_node.simulator.bucket_arrays import NONE
from noloco_node.simulator.crowd_nodes import Nodes

RENEWALS = 3
"""A record is renewed so many times within its life."""
ASKED_BYTES, NEIGHBOUR_BYTES = 80, 58
"""The bytes of a key in a request and of its place in the answer without records, and of a node that is named there."""
TWICE = 0.1
"""This share of the records of such looks also came by another one at the same moment (129 whole members)."""
SEEN_AT_ONCE = MOST_RECORDS
"""At most so many records are seen of a stage that still lies at level 0: no holder keeps more under a key."""
LOTS = 8
"""The places of a crowded bucket are drawn by so many lots: nodes that share one see the same part of it."""


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
        """The nodes of each stage that a node sees, those of a bucket as one."""
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


class Records:
    """What both kinds have in common: the published records, and the order of a stage's records by their hash."""

    def __init__(self, nodes: Nodes, rng: np.random.Generator) -> None:
        self.nodes = nodes
        self.rng = rng
        self.settings = nodes.settings.directory
        self.life = self.settings.record_seconds
        self.stages = nodes.settings.work.stages
        self.error = 0.0
        self.renew_at = np.full(nodes.most, -math.inf)
        """The time of each node's next record; for one that has none yet, before all time."""
        self.column = np.zeros(nodes.most, np.int64)
        """A node's stage; for a node that is cut off, beyond all stages of the others."""
        self.columns = self.stages
        self.order = np.zeros(0, np.int64)
        self.keys = np.zeros(0, np.int64)
        self._edges: dict[int, Ints] = {}
        self._sums: dict[int, Ints] = {}
        self._strengths: dict[int, tuple[Floats, Floats]] = {}
        self._speeds = np.zeros(0)
        self._peers: dict[tuple[int, int, int], tuple[PeerId, ...]] = {}
        """The peers of buckets that were asked for since the last tick."""
        self._parts: dict[tuple[int, int], tuple[PeerId, ...]] = {}
        """The peers of parts of level 0, by column."""
        self._shown: dict[tuple[int, int, int, bytes], tuple[PeerId, ...]] = {}
        """The peers shown of crowded buckets, by lot."""
        self.read: dict[int, Floats] = {}
        self.written: dict[int, Floats] = {}

    def due(self) -> Ints:
        """The nodes that publish their record now: they live, have come to their stage, and have not done so for a
        third of a life. Nodes that do it for the first time, all at the start, come again each at a time of its own."""
        nodes, now = self.nodes, self.nodes.agenda.now
        who = np.flatnonzero(nodes.serving_row & (self.renew_at <= now))
        part = np.where(np.isneginf(self.renew_at[who]), self.rng.random(len(who)), 1.0)
        self.renew_at[who] = now + part * (self.life / RENEWALS)
        return who

    def sort(self) -> None:
        """Sort the nodes with live records by stage and hash; those that are cut off come by themselves."""
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
        """The places where the buckets of a level begin among the sorted, those of all stages one after another."""
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
        """Sums of the speeds of the nodes with records in each bucket of a level, and of their squares."""
        if level not in self._strengths:
            lives = self.nodes.expires[level, self.order] > self.nodes.agenda.now
            edges, speeds = self.edges(level), self._speeds * lives
            sums, squares = (np.concatenate(([0.0], np.cumsum(each)))[edges] for each in (speeds, speeds * speeds))
            self._strengths[level] = np.diff(sums), np.diff(squares)
        return self._strengths[level]

    def others_of(
        self,
        i: int,
        column: int,
        level: int,
        buckets: Sequence[int],
        number: Estimate | None,
        most: int = MOST_RECORDS,
    ) -> list[Server]:
        """What a node sees in these buckets of a stage, at most `most` rows of each and each as one server. They stand
        for `number`, or for themselves alone if there is none."""
        speeds, squares = self.strengths_at(level)
        own = (
            bucket_of(int(self.nodes.prefix[i]), level) if column == self.column[i] and self.nodes.serving[i] else NONE
        )
        seen, total, squared, servers = 0, 0.0, 0.0, list[tuple[str, float]]()
        for bucket in buckets:
            place, speed = (column << level) + bucket, self.nodes.speed[i] if bucket == own else 0.0
            here = int(self.counts(level)[place])
            shown = min(places_of(here) if level else here, most)
            part = shown / here if here else 1.0
            if shown == most < here:
                drawn = self.nodes.speed_row[self.nodes.rng.sample(self.rows(column, level, bucket), most)]
                strength, square, speed = float(drawn.sum()), float((drawn * drawn).sum()), 0.0
            else:
                strength = part * max(0.0, float(speeds[place]) - speed)
                square = part * (float(squares[place]) - speed * speed)
            seen += shown - (bucket == own)
            total, squared = total + strength, squared + square
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
        """Their ids, the same for all nodes that hold that bucket."""
        place = column, level, bucket
        found = self._peers.get(place)
        if found is None:
            peer = self.nodes.peer
            found = self._peers[place] = tuple([peer[j] for j in self.rows(column, level, bucket)])
        return found

    def shown(self, column: int, level: int, bucket: int, i: int) -> tuple[PeerId, ...]:
        """The peers of a bucket that one node has in its view: of a crowded bucket a part, as another is drawn now and
        then. It takes all of them for strangers."""
        every = self.peers(column, level, bucket)
        if places_of(len(every)) == len(every):
            return every
        lot = f"{i % LOTS} {int(self.nodes.agenda.now / RENEWED_SECONDS)}".encode()
        place = column, level, bucket, lot
        if place not in self._shown:
            self._shown[place] = tuple(shown_of(every, lot, hearsay))
        return self._shown[place]

    def part(self, column: int, i: int) -> tuple[PeerId, ...]:
        """The nodes at level 0 that one node sees: all, or each so-manieth if holders keep fewer."""
        every = self.peers(column, 0, 0)
        parts = max(1, math.ceil(len(every) / SEEN_AT_ONCE))
        place = column, i % parts
        if place not in self._parts:
            self._parts[place] = every[i % parts :: parts]
        return self._parts[place]

    def rows(self, column: int, level: int, bucket: int) -> list[int]:
        """The nodes whose records live in a bucket."""
        edges, place = self.edges(level), (column << level) + bucket
        who = self.order[edges[place] : edges[place + 1]]
        found: list[int] = who[self.nodes.expires[level, who] > self.nodes.agenda.now].tolist()
        return found

    def note_read(self, level: int, place: Ints, most: int = MOST_RECORDS) -> None:
        """Count the bytes of reading buckets of a level, `most` rows of each, by column and bucket. The bytes for
        asking a second holder for what the first did not have are counted too."""
        rows = np.minimum(self.counts(level)[place], most).astype(np.float64)
        octets = rows * (self.settings.record_bytes + GLANCED * MARK_BYTES) + GLANCED * ASKED_BYTES
        self._note(self.read, level, place, octets, "directory read")

    def note_sought(self, place: Ints, after: float | Floats) -> None:
        """Count the bytes of finding the holders of these buckets anew; they were sought `after` seconds ago. Those
        nearest to the key are asked for others, a few at a time."""
        often = np.minimum(1.0, np.asarray(after) / HOLDERS_SECONDS)
        steps = max(0.0, math.log(max(1, len(self.order)) / BUCKET_SIZE**2, BUCKET_SIZE))
        asked = min(MOST_GLANCED, REPLICAS + GLANCED * steps)
        octets = asked * (ASKED_BYTES + MOST_BY_ONE * NEIGHBOUR_BYTES)
        self.nodes.count("directory read", octets * float(np.broadcast_to(often, place.shape).sum()))

    def note_looked(self, place: Ints, seconds: float) -> None:
        """Count the bytes of looks at level 0 of these columns, `seconds` after the last. Two holders were asked for
        what is new, and at some looks all nodes near, of which several say the same."""
        number = self.counts(0)[place].astype(np.float64)
        new = (1.0 + TWICE) * number * min(1.0, RENEWALS * seconds / self.life)
        walks, all_nodes = min(1.0, seconds / (WALK_AGAIN * self.life)), len(self.order)
        near = min(BUCKET_SIZE, all_nodes)
        besides = min(RELIABLE_ASKED + ALSO_ASKED, all_nodes) * (1.0 - near / max(1, all_nodes))
        walked = walks * (near + besides)
        asked = (GLANCED + walked) * (ASKED_BYTES + MARK_BYTES * number) + walked * FEW_NEIGHBOURS * NEIGHBOUR_BYTES
        self._note(self.read, 0, place, new * self.settings.record_bytes + asked, "directory read")

    def note_written(self, level: int, place: Ints) -> None:
        """Records were written there, to each of the holders and to some others."""
        one = float(self.settings.record_bytes) + ASKED_BYTES
        self._note(self.written, level, place, np.full(len(place), one * self.settings.holders), "directory written")
        self.nodes.count("directory written", one * ALSO_TOLD * len(place))

    def _note(self, table: dict[int, Floats], level: int, place: Ints, octets: Floats, kind: str) -> None:
        keys = self.stages << level
        before = table[level] if level in table else np.zeros(keys)
        table[level] = before + np.bincount(place % keys, octets, minlength=keys).astype(np.float64)
        self.nodes.count(kind, float(octets.sum()))

    def forget_bytes(self) -> None:
        """Holders begin to count anew."""
        self.read, self.written = {}, {}

    def holder_bytes(self) -> Floats:
        """See `CrowdDirectory.holder_bytes`. The holders of each key are drawn as its hash draws them. They share its
        readers and all take what is written."""
        living = np.array(self.nodes.living())
        held = np.zeros(len(living))
        for table in (self.read, self.written):
            for octets in table.values():
                for _ in range(self.settings.holders):
                    places = self.rng.integers(0, len(living), len(octets))
                    held += np.bincount(places, octets / self.settings.holders, minlength=len(living))
        return held

    def note_error(self, number: Floats, who: Ints) -> None:
        """Note the error of these nodes' numbers of their own stage."""
        true = np.bincount(self.column[self.nodes.serving_row], minlength=self.columns)
        of = true[self.column[who]]
        known = of > 0
        self.error = float(np.sqrt(np.mean((number[known] / of[known] - 1.0) ** 2))) if known.any() else math.nan
