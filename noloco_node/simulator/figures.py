"""What a simulation is measured by. Everything is taken from what nodes told, from their books and from the links."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import torch

from noloco_node.identity.peer_id import PeerId
from noloco_node.simulator.directory import COUNTED_AS
from noloco_node.simulator.node import Node
from noloco_node.simulator.world import World
from noloco_node.telemetry.events import Account, AnyEvent, InnerStep, NodeReassigned, OuterStep


@dataclass(frozen=True)
class SimulationSample:
    """One moment of the run."""

    hours: float
    loss: float | None
    """Mean of what the replicas' last inner steps lost, nats per token."""
    spread: tuple[float | None, ...]
    """The variance of each stage's slow weights over replicas, mean over dimensions; None with fewer than two."""
    nodes: int
    trained: int
    """Microbatches so far, at the last stage."""


@dataclass(frozen=True)
class SimulationFigures:
    """All of a run."""

    nodes_started: int
    nodes_failed: int
    nodes_killed: int
    moves: int
    """To another stage."""
    work_share: tuple[float, ...]
    """The share of the time for which devices worked, for each stage."""
    tokens_per_second: float
    """Trained at the last stage, by all of its nodes that told their books."""
    outer_steps: dict[str, int]
    """Paired, alone, aborted, caught up."""
    alone_share: float
    sent_per_node: dict[str, float]
    """Bytes a second that a node sent on average, by method."""
    directory_received: tuple[float, float]
    """Bytes a second of the directory that a node received: the mean, and the most of any."""
    directory_sent: tuple[float, float]
    """Bytes a second that a node sent for the directory; a node near a stage's key sends most."""
    samples: tuple[SimulationSample, ...]

    def as_json(self) -> dict[str, Any]:
        """For a file."""
        return asdict(self)


class Watcher:
    """Collects from a world while it runs; it keeps no events but counts."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._losses: dict[int, float] = {}
        self._outer: Counter[str] = Counter()
        self._samples: list[SimulationSample] = []
        self._began: dict[int, float] = {}
        self._last: dict[int, float] = {}
        self._books: dict[int, tuple[float, Account]] = {}
        """For each node the time of its last account, and the account."""
        self._worked = [0.0] * world.spec.stages
        """Seconds that devices worked at each stage, by the nodes' books."""
        self._there = [0.0] * world.spec.stages
        """Seconds that nodes were there, by the same."""
        self._trained = 0
        """Microbatches at the last stage."""
        self._moves = 0
        world.on_event = self._take

    def sample(self) -> None:
        """Take a sample of this moment."""
        world = self._world
        running = [node for node in world.running if node.replica is not None]
        losses = [self._losses[node.number] for node in running if node.number in self._losses]
        spread: list[float | None] = []
        for stage in range(world.spec.stages):
            there = [node.replica for node in running if node.replica and node.replica.stage == stage]
            slow = [replica.worker.outer.slow for replica in there]
            spread.append(float(torch.stack(slow).double().var(0).mean()) if len(slow) > 1 else None)
        hours, trained = asyncio.get_running_loop().time() / 3600.0, self._trained
        self._samples.append(
            SimulationSample(hours, fmean(losses) if losses else None, tuple(spread), len(running), trained)
        )

    def figures(self) -> SimulationFigures:
        """The figures of the run so far."""
        world, now = self._world, asyncio.get_running_loop().time()
        every, shares = world.nodes, zip(self._worked, self._there, strict=True)
        committed = self._outer["paired"] + self._outer["no_partner"]
        seconds = max(sum(self._lived(node.number) for node in every), 1e-9)
        sent: Counter[str] = Counter()
        for counts in world.links.sent.values():
            sent.update(counts)
        return SimulationFigures(
            nodes_started=len(every),
            nodes_failed=sum(node.condition == "failed" for node in every),
            nodes_killed=sum(node.condition == "killed" for node in every),
            moves=self._moves,
            work_share=tuple(worked / there if there else 0.0 for worked, there in shares),
            tokens_per_second=self._trained * world.spec.microbatch_tokens / max(now, 1e-9),
            outer_steps=dict(self._outer),
            alone_share=self._outer["no_partner"] / committed if committed else 0.0,
            sent_per_node={method: octets / seconds for method, octets in sorted(sent.items())},
            directory_received=self._directory(world.links.received),
            directory_sent=self._directory(world.links.sent),
            samples=tuple(self._samples),
        )

    def _take(self, node: Node, event: AnyEvent) -> None:
        now = asyncio.get_running_loop().time()
        self._began.setdefault(node.number, now)
        self._last[node.number] = now
        if isinstance(event, Account):
            self._take_books(node, now, event)
        elif isinstance(event, NodeReassigned):
            self._moves += 1
        elif isinstance(event, InnerStep):
            self._losses[node.number] = event.loss
        elif isinstance(event, OuterStep):
            self._outer[event.kind] += 1

    def _take_books(self, node: Node, now: float, books: Account) -> None:
        """They go on through all of a node's stays; what has come since the last ones is of its present stage."""
        last = self._world.spec.stages - 1
        at, before = self._books.get(node.number, (self._began[node.number], None))
        self._books[node.number] = now, books
        self._worked[node.stage] += books.busy_seconds - (before.busy_seconds if before else 0.0)
        self._there[node.stage] += now - at
        if node.stage == last:
            trained = (each.trained if last == 0 else each.served for each in (books, before) if each)
            self._trained += next(trained) - next(trained, 0)

    def _lived(self, number: int) -> float:
        """Seconds from the first that a node told to the last."""
        return self._last.get(number, 0.0) - self._began.get(number, 0.0)

    def _directory(self, counted: dict[PeerId, Counter[str]]) -> tuple[float, float]:
        """The mean and the most over nodes; only nodes that lived long enough count for the most. A newcomer asks for
        everything."""
        rates, octets, seconds = list[float](), 0, 0.0
        for node in self._world.nodes:
            own = sum(counted.get(node.peer, Counter[str]())[kind] for kind in COUNTED_AS.values())
            lived = self._lived(node.number)
            octets, seconds = octets + own, seconds + lived
            # Of a shorter life nothing is known of what a single node sends and receives in a second.
            if lived >= 60.0:
                rates.append(own / lived)
        mean = octets / max(seconds, 1e-9)
        return mean, max(rates, default=mean)
