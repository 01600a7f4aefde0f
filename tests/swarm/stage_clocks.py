"""How far the clock of a later stage is from stage 0's: a pipeline without devices or messages, with the node's own
books and counts.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from noloco_node.directory.clocks import DrawnBy, OriginsSeen, PeerClocks
from noloco_node.identity.peer_id import PeerId
from noloco_node.training.progress import Progress, tied_pace

TOKENS, INNER_STEPS = 64, 10


@dataclass
class Node:
    """One replica: its inner steps are of one microbatch."""

    name: PeerId
    seen: OriginsSeen
    speed: float = 1.0
    """How much of its stage's work comes to it, beside its stage peers."""
    copies: float = 1.0
    """How often it trains what it is given."""
    progress: Progress = field(default_factory=Progress)
    shifted_at: float = -1.0
    """Like `StageWorker.shifted_at`."""


class Pipeline:
    """Stages of replicas; `in_flight` microbatches of each origin are under way and end in random order."""

    def __init__(
        self,
        stages: int,
        replicas: int,
        *,
        steps: int = 150,
        in_flight: int = 1,
        seed: int = 0,
        inner_steps: int = INNER_STEPS,
    ) -> None:
        self.rng, self.now = random.Random(seed), 0.0
        self.target, self.in_flight = float(steps * replicas * TOKENS), in_flight
        self.inner_steps = inner_steps
        self.lag = 4.0 * inner_steps * replicas * TOKENS
        self.stages = [[self.node(f"peer-{s}-{n}") for n in range(replicas)] for s in range(stages)]
        self.counted = [replicas] * stages
        """As how many each stage's replicas count themselves."""
        self.done = 0
        self.swayed: dict[int, int] = {}
        """Stages at which one partner says that its clock is as far as can be, to everybody once in so many
        microbatches of each replica."""
        self.spoken: list[tuple[PeerId, float, float]] = []
        """Keys that send the second stage so many microbatches of their own for each 1,000 honest ones, and say of
        their clock that it is so many times the target."""
        self.leads: list[list[float]] = []
        """By how much the mean clock of each later stage is ahead of stage 0's, as a part of the lag that is allowed,
        when all had averaged."""

    def node(self, name: str) -> Node:
        """A replica at the beginning."""
        return Node(PeerId(name), OriginsSeen(lambda: self.now))

    def run(self) -> None:
        """Until the clocks of stage 0 are at the target on the mean."""
        under_way = {node.name: 0 for node in self.stages[0]}
        waiting: list[tuple[Node, float]] = []
        while self.clocks()[0] < 1.0:
            for node in self.stages[0]:
                while under_way[node.name] < self.in_flight:
                    under_way[node.name] += 1
                    coming = under_way[node.name] * TOKENS * self.counted[0]
                    waiting.append((node, node.progress.clock + coming))
            origin, word = waiting.pop(self.rng.randrange(len(waiting)))
            under_way[origin.name] -= 1
            self.carry_through(origin, word)

    def carry_through(self, origin: Node, word: float) -> None:
        """Every later stage trains it, and then the origin."""
        sender = origin
        for stage in range(1, len(self.stages)):
            nodes = self.stages[stage]
            node = self.rng.choices(nodes, [node.speed for node in nodes])[0]
            if stage == 1:
                for liar, often, times in self.spoken:
                    if self.rng.random() < often / 1000:
                        self.train(1, node, DrawnBy(liar, times * self.target), liar)
            while self.rng.random() < node.copies - 1.0:
                self.train(stage, node, DrawnBy(origin.name, word), sender.name)
            self.train(stage, node, DrawnBy(origin.name, word), sender.name)
            sender = node
        self.train(0, origin, None, origin.name)
        self.done += 1
        if self.done % (self.inner_steps * len(self.stages[0])) == 0:
            self.average()
        for stage, every in self.swayed.items():
            if self.done % (every * len(self.stages[0])) == 0:
                for node in self.stages[stage]:
                    self.shift(node, self.believed(stage, node, 1e18))

    def train(self, stage: int, node: Node, drawn: DrawnBy | None, sender: PeerId) -> None:
        """A microbatch comes back to this replica, and with it an inner step."""
        self.now += 1.0
        pace = tied_pace(node.seen.lead(), self.lag) if drawn else 1.0
        node.progress = node.progress.after_inner_step(TOKENS, self.counted[stage], pace)
        if drawn:
            node.seen.saw(drawn, sender, tokens=TOKENS, own_clock=node.progress.clock)

    def average(self) -> None:
        """Every replica meets one of its stage."""
        for stage, nodes in enumerate(self.stages):
            order = self.rng.sample(nodes, len(nodes))
            for pair in zip(order[::2], order[1::2], strict=False):
                seen = [
                    self.believed(stage, node, other.progress.clock)
                    for node, other in zip(pair, pair[::-1], strict=True)
                ]
                for node, other in zip(pair, seen, strict=True):
                    self.shift(node, other)
        first, *later = self.clocks()
        self.leads.append([(clock - first) * self.target / self.lag for clock in later])

    def believed(self, stage: int, node: Node, claimed: float) -> float:
        """What a replica makes of a partner's clock; a liar's is that of a stage peer in the directory, too."""
        stage_peers = [other.progress.clock for other in self.stages[stage] if other is not node]
        stage_peers += [1e18] if stage in self.swayed else []
        lead = node.seen.lead(node.shifted_at)
        return PeerClocks(
            self.lag,
            own=lambda: node.progress.clock,
            estimated=lambda: stage_peers,
            recorded=lambda: stage_peers,
            origins_lead=lambda: node.seen.lead() if lead is None else lead,
        ).met(claimed)

    def shift(self, node: Node, other: float) -> None:
        """An outer step with a partner whose clock is believed to be `other`."""
        node.progress = node.progress.after_outer_step(node.progress, (other - node.progress.clock) / 2)
        node.shifted_at = self.now

    def clocks(self) -> list[float]:
        """Of each stage, the mean over its replicas as a part of the target."""
        return [mean(node.progress.clock for node in nodes) / self.target for nodes in self.stages]


def mean(values: Iterable[float]) -> float:
    """Of at least one."""
    taken = list(values)
    return sum(taken) / len(taken)
