"""A model of a swarm whose replicas share a text by claims: the node's own decisions, time and records modelled."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace

from noloco_node.data.shared_turns import Claim, Said, SharedPosition, SharedTurns, Turn

LIFE, RENEWAL, LOOK, DELAY = 20, 7, 2, 1
"""Seconds: a record's life, the time between two renewals and two looks, and how long a record takes to be found."""


@dataclass
class Shape:
    """The shape of a model swarm. `block`: windows of a block, of which the median replica draws one a second."""

    replicas: int = 200
    blocks_each: int = 6
    block: int = 60
    replaced: float = 0.3
    """Share of the replicas that are replaced in the time of a pass."""
    seen: float = 1.0
    """Share of the records that a look shows, drawn anew for each."""
    speeds: tuple[float, float] = (0.25, 4.0)
    passes: int = 2
    liars: int = 0
    """They claim what others hold, as if they had read far in it, and what lies ahead; and read nothing of that."""

    @property
    def row(self) -> int:
        return self.replicas * self.blocks_each


@dataclass
class Record:
    said: Said
    published: int


@dataclass
class Modelled:
    """One replica."""

    name: str
    turns: SharedTurns
    speed: float
    phase: int
    turn: Turn | None = None
    at: int = 0
    progress: float = 0.0
    renewed: int = -RENEWAL
    told: tuple[Claim, ...] = ()


@dataclass
class ClaimSwarm:
    """`run` it, then look at `overlap` and `coverage`."""

    shape: Shape
    seed: int = 0
    now: int = 0
    nodes: list[Modelled] = field(default_factory=list)
    records: dict[str, Record] = field(default_factory=dict)
    drawn: dict[int, list[int]] = field(default_factory=dict)
    """For each slot, how often each window of it was drawn."""
    events: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self._born = 0
        for _ in range(self.shape.replicas):
            self.add()
        self.lying = {node.name for node in self.nodes[: self.shape.liars]}

    def add(self, position: SharedPosition | None = None, name: str | None = None) -> Modelled:
        name = name or f"peer{self._born}"
        self._born += 1
        rng = random.Random(f"{self.seed}/{name}")
        turns = SharedTurns(self.shape.row, 0, name, rng, position)
        low, high = self.shape.speeds
        speed = min(high, max(low, self.rng.lognormvariate(0.0, 0.5)))
        node = Modelled(name, turns, speed, self.rng.randrange(LOOK))
        self.nodes.append(node)
        return node

    def run(self) -> None:
        shape = self.shape
        pass_seconds = shape.blocks_each * shape.block
        rate = shape.replaced * shape.replicas / pass_seconds
        due = 0.0
        while self.now < (shape.passes + 1) * pass_seconds:
            due += rate
            while due >= 1.0:
                due -= 1.0
                self.replace()
            self.tick()

    def replace(self) -> None:
        """One that leaves, in whatever way, and a newcomer in its place."""
        node = self.nodes.pop(self.rng.randrange(self.shape.liars, len(self.nodes)))
        way = self.rng.choice(("gone", "gone", "restarted"))
        self.events[way] += 1
        if way == "restarted":
            self.add(node.turns.position, node.name)
        else:
            self.add()

    def tick(self) -> None:
        self.now += 1
        fresh = [r for r in self.records.values() if DELAY <= self.now - r.published <= LIFE]
        for node in self.nodes:
            if self.now % LOOK == node.phase:
                self.look(node, fresh)
            self.train(node)

    def look(self, node: Modelled, fresh: list[Record]) -> None:
        shape = self.shape
        shown = fresh if shape.seen == 1.0 else self.rng.sample(fresh, round(shape.seen * len(fresh)))
        node.turns.heard([record.said for record in shown], shape.replicas)
        told = {(claim.slot, claim.begun) for claim in node.told}
        if {(claim.slot, claim.begun) for claim in node.turns.claims} != told or self.now - node.renewed >= RENEWAL:
            self.publish(node)

    def publish(self, node: Modelled) -> None:
        claims = self.claims_of(node)
        node.renewed, node.told = self.now, node.turns.claims
        self.records[node.name] = Record(Said(node.name, claims), self.now)

    def claims_of(self, node: Modelled) -> tuple[Claim, ...]:
        """The claims of a liar: what another holds, and what lies far ahead, of which it reads nothing."""
        if node.name not in self.lying:
            return node.turns.claims
        other = self.rng.choice([each for each in self.nodes if each is not node]).turns.claims
        top = max((claim.slot for claim in other), default=0)
        far = top + self.rng.choice((self.shape.replicas, 10**6))
        return (*(Claim(claim.slot, 10**6, begun=True) for claim in other[:2]), Claim(far), Claim(top + 1))

    def train(self, node: Modelled) -> None:
        if node.name in self.lying:
            return
        node.progress += node.speed
        while node.progress >= 1.0:
            node.progress -= 1.0
            if node.turn is None:
                node.turn = node.turns.take()
                if node.turn is None:
                    self.events["waited"] += 1
                    node.progress = 0.0
                    return
                node.at = node.turn.start
            counts = self.drawn.setdefault(node.turn.slot, [0] * self.shape.block)
            if node.at < self.shape.block:
                counts[node.at] += 1
                node.at += 1
                node.turns.reached(node.turn.slot, node.at)
                self.events["drawn"] += 1
            if node.at >= self.shape.block:
                node.turns.finished(node.turn.slot)
                node.turn = None

    def coverage(self) -> float:
        """Share of the first pass's windows that were drawn."""
        shape = self.shape
        slots = range(shape.row)
        return sum(bool(n) for slot in slots for n in self.drawn.get(slot, ())) / (shape.row * shape.block)

    def overlap(self) -> float:
        """Windows of the first pass that were drawn again, over all of the pass."""
        shape = self.shape
        slots = range(shape.row)
        again = sum(n - 1 for slot in slots for n in self.drawn.get(slot, ()) if n > 1)
        return again / (shape.row * shape.block)


SHAPE = Shape(replicas=40, blocks_each=4, speeds=(0.5, 4.0), passes=1)
IN_PART = replace(SHAPE, blocks_each=3, block=120, seen=0.25)
LIARS = replace(SHAPE, liars=1)


def main() -> None:
    """The figures of docs/data.md and docs/security.md."""
    for words, shape in (
        ("all records seen", SHAPE),
        ("a quarter of the records seen", IN_PART),
        ("one key lies", LIARS),
    ):
        swarm = ClaimSwarm(shape)
        swarm.run()
        print(
            f"{words}: {shape.replicas} replicas, {shape.row} blocks of {shape.block} s, overlap "
            f"{swarm.overlap():.4f}, coverage {swarm.coverage():.4f}, {dict(swarm.events)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
