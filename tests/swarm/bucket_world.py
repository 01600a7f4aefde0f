"""Nodes that each find their level alone, over records that lie in buckets for a life: nothing but the decisions."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from noloco_node.directory.buckets import StageLevel, bucket_of, levels_to_write

LIFE, RENEWED, LOOK = 20.0, 6.0, 2.0
"""Seconds."""
HELD = 512
"""Records that a bucket's holders keep."""
ROOT_EVERY = 8
"""A node one above it reads level 0 after so many looks; twice as many for each further level."""


@dataclass
class BucketNode:
    """One node. `half` is the part of a divided network that it is in."""

    prefix: int
    level: StageLevel
    renew_at: float
    half: int = 0
    looks: int = 0


class BucketWorld:
    """Virtual seconds; every look reads one bucket."""

    def __init__(self, seed: int = 1) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.nodes: list[BucketNode] = []
        self.records: defaultdict[tuple[int, int, int], dict[int, float]] = defaultdict(dict)
        """The ends of lives by half, level and bucket, then by writer."""

    def add(self, many: int, half: int = 0) -> None:
        """So many new nodes, at level 0."""
        for _ in range(many):
            renew_at = self.now + self.rng.uniform(0.0, RENEWED)
            self.nodes.append(BucketNode(self.rng.getrandbits(32), StageLevel(self.rng), renew_at, half))

    def write(self, half: int, level: int, prefix: int) -> None:
        """A record with a whole life."""
        self.records[half, level, bucket_of(prefix, level)][prefix] = self.now + LIFE

    def read(self, half: int, level: int, bucket: int) -> Iterable[int]:
        """Whose records live there, as far as holders have places."""
        rows = self.records[half, level, bucket]
        for prefix in [prefix for prefix, end in rows.items() if end <= self.now]:
            del rows[prefix]
        return list(islice(rows, HELD))

    def look(self, times: int = 1) -> None:
        """Everybody looks, and renews its record where that is due."""
        for _ in range(times):
            self.now += LOOK
            for node in self.nodes:
                self._look(node)

    def _look(self, node: BucketNode) -> None:
        node.looks += 1
        if node.level.level > 0 and node.looks % (ROOT_EVERY << (node.level.level - 1)) == 0:
            node.level.took(0, 0, list(self.read(node.half, 0, 0)))
        level, bucket = node.level.next_bucket()
        node.level.took(level, bucket, list(self.read(node.half, level, bucket)))
        if self.now >= node.renew_at:
            node.renew_at = self.now + RENEWED
            for level in levels_to_write(node.prefix, node.level.level, node.level.fullness):
                self.write(node.half, level, node.prefix)

    def heal(self) -> None:
        """The halves see each other again."""
        for (half, level, bucket), rows in list(self.records.items()):
            if half:
                self.records[0, level, bucket].update(rows)
        for node in self.nodes:
            node.half = 0

    @property
    def levels(self) -> set[int]:
        """Where the nodes are."""
        return {node.level.level for node in self.nodes}

    def rms_error(self) -> float:
        """The relative error of all nodes' estimates."""
        many = len(self.nodes)
        return (sum((node.level.number / many - 1.0) ** 2 for node in self.nodes) / many) ** 0.5
