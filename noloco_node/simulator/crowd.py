"""A crowd: more nodes than can be run whole, by events. What a node decides is decided by its own functions; coroutines
and messages are left out, and microbatches go in parcels."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from noloco_node.config.crowd_spec import Arrivals, CrowdSettings, Cut, Deaths
from noloco_node.identity.peer_id import PeerId
from noloco_node.placement.balancing import Server, Supply, choose_stage, supply_of
from noloco_node.placement.migration import MigrationStanding, Relocation
from noloco_node.simulator.crowd_averaging import CrowdAveraging
from noloco_node.simulator.crowd_directory import BucketDirectory, WholeDirectory
from noloco_node.simulator.crowd_nodes import Agenda, Nodes
from noloco_node.simulator.crowd_pipeline import BACKWARDS, CrowdPipeline
from noloco_node.state_transfer.participant import DONOR_PLACES

DONOR_PAUSE_SECONDS = (1.0, 3.0)
"""Seconds, least and most, before a joiner that all donors refused asks again."""
SPARE = 1.3
"""There is room for so many times the nodes that are expected to come."""


@dataclass(frozen=True, slots=True)
class CrowdMoment:
    """What was seen at one time; rates are since the one before."""

    at: float
    nodes: int
    serving: int
    trained: float
    """Microbatches a second, through all stages."""
    best: float
    """Microbatches a second if the serving nodes could be divided over the stages at will and never waited."""
    working: float
    """The share of the time that the devices of living nodes worked."""
    paired: int
    """Outer steps of one node, so far."""
    alone: int
    spread: float
    expected: float
    error: float
    """Relative rms error of the nodes' counts of their stage."""
    moves: int
    """So far."""


class Crowd:
    """One simulation of so many nodes."""

    def __init__(self, settings: CrowdSettings, many: int) -> None:
        self.settings = settings
        self.agenda = Agenda()
        self._rng = random.Random(f"crowd/{settings.seed}/{many}")
        arrays = np.random.default_rng([settings.seed, many])
        self.nodes = Nodes(settings, most_nodes(settings, many), self._rng, self.agenda)
        whole = settings.directory.view == "everybody"
        self.directory = (WholeDirectory if whole else BucketDirectory)(self.nodes, arrays)
        generator = torch.Generator().manual_seed(settings.seed)
        self.averaging = CrowdAveraging(self.nodes, self.directory, generator)
        self.pipeline = CrowdPipeline(self.nodes, self.directory, self.averaging.trained, self.averaging.missing)
        self.moments: list[CrowdMoment] = []
        self.joined_after: list[float] = []
        """Seconds from its start until a newcomer served."""
        self._new: set[int] = set()
        self.moves = 0
        self._giving: dict[int, int] = {}
        self._joining = [0.0] * settings.work.stages
        """Speeds on their way to each stage."""
        self._before = (0, 0.0, 0.0)
        self._start(many)

    def run(self, sample_seconds: float = 30.0, told: Callable[[float], None] = lambda _: None) -> None:
        """All of it; `told` gets the share that is done."""
        at = 0.0
        while at < self.settings.seconds:
            at = min(self.settings.seconds, at + sample_seconds)
            self.agenda.run(at)
            self._sample()
            told(at / self.settings.seconds)

    def _start(self, many: int) -> None:
        strengths, stages = [0.0] * self.settings.work.stages, range(self.settings.work.stages)
        for _ in range(many):
            stage = choose_stage(self._supply(strengths), stages, self._rng)
            i = self._add(stage, serving=True)
            strengths[stage] += self.nodes.speed[i]
        self.averaging.agree(many / self.settings.work.stages)
        self._tick()
        for i in range(many):
            self.agenda.after(self._rng.random() * self._draw_seconds, self.pipeline.begin, i)
            self._settle(i)
        for event in (*self.settings.deaths, *self.settings.arrivals, *self.settings.cuts):
            self.agenda.after(event.at_seconds, self._befall, event)
        if self.settings.churn_an_hour:
            self._churn()

    @property
    def _draw_seconds(self) -> float:
        return self.settings.parcel * self.settings.devices.forward_seconds * (1.0 + BACKWARDS)

    def _supply(self, strengths: list[float]) -> Supply:
        return Supply(tuple(strengths), (1.0,) * len(strengths))

    def _add(self, stage: int, *, serving: bool) -> int:
        i = self.nodes.add(stage, serving=serving)
        self.pipeline.joined(i)
        self.averaging.joined(i)
        return i

    def _tick(self) -> None:
        self.directory.tick()
        self.averaging.look()
        self.agenda.after(self.settings.directory.look_seconds, self._tick)

    def _churn(self) -> None:
        """One dies and one comes, after a while."""
        rate = self.settings.churn_an_hour / 3600.0 * self.nodes.many
        self.agenda.after(self._rng.expovariate(rate), self._one_for_another)

    def _one_for_another(self) -> None:
        while True:
            i = self._rng.randrange(len(self.nodes))
            if self.nodes.alive[i]:
                break
        self.kill(i)
        self.join()
        self._churn()

    def kill(self, i: int) -> None:
        """A node is gone from one moment to the next."""
        self.nodes.kill(i)
        self.pipeline.left(i)
        self.averaging.left(i)

    def join(self) -> None:
        """A node comes: it chooses a stage, copies its state from somebody there, and serves."""
        if len(self.nodes) >= self.nodes.most:
            return
        i = self._add(0, serving=False)
        self._new.add(i)
        work = (1.0,) * self.settings.work.stages
        supply = supply_of([*self.directory.servers(i), *self._on_their_way()], work)
        self._go_to(i, choose_stage(supply, range(len(work)), self._rng))

    def _on_their_way(self) -> list[Server]:
        """The joining nodes of each stage, as one server."""
        joining = enumerate(self._joining)
        return [Server(PeerId(f"to {s}"), s, strength, present=False) for s, strength in joining if strength > 0.0]

    def _go_to(self, i: int, stage: int) -> None:
        self.nodes.move(i, stage)
        self._joining[stage] += self.nodes.speed[i]
        self.directory.forget(i)
        self.agenda.after(2.0 * self.settings.directory.look_seconds, self._ask, i)

    def _ask(self, i: int) -> None:
        """Ask some of the stage for its state until one has a place."""
        if not self.nodes.alive[i]:
            self._joining[self.nodes.stage[i]] -= self.nodes.speed[i]
            return
        seen = [int(peer) for peer in self.directory.seen(i, 0)]
        for j in self._rng.sample(seen, min(4, len(seen))):
            if self.nodes.reach(i, j) and self.nodes.serving[j] and self._giving.get(j, 0) < DONOR_PLACES:
                self._giving[j] = self._giving.get(j, 0) + 1
                seconds = DONOR_PLACES * self.nodes.copy_seconds(j, i, self.settings.work.state_bytes)
                self.agenda.after(seconds, self._copied, i, j)
                return
        self.agenda.after(self._rng.uniform(*DONOR_PAUSE_SECONDS), self._ask, i)

    def _copied(self, i: int, j: int) -> None:
        self._giving[j] -= 1
        if self.nodes.alive[i] and (not self.nodes.reach(i, j) or not self.nodes.serving[j]):
            self._ask(i)
            return
        self._joining[self.nodes.stage[i]] -= self.nodes.speed[i]
        if not self.nodes.alive[i]:
            return
        self.nodes.count("states", self.settings.work.state_bytes)
        self.averaging.copy(j, i)
        self.nodes.serving[i] = True
        if i in self._new:
            self._new.discard(i)
            self.joined_after.append(self.agenda.now - self.nodes.born[i])
        self.nodes.tell("serves", i, self.nodes.stage[i])
        self.pipeline.begin(i)
        self._settle(i)

    def _settle(self, i: int) -> None:
        """A node's stay at its stage begins."""
        stages = self.settings.work.stages
        if stages == 1:
            return
        stay, life = self.settings.min_stay_seconds, self.settings.directory.record_seconds
        work = (1.0,) * stages
        standing = MigrationStanding(work, range(stages), self.agenda.now, stay, life)
        self._look_further(i, Relocation(standing, self._rng))

    def _look_further(self, i: int, relocation: Relocation) -> None:
        self.agenda.after(relocation.next_look - self.agenda.now, self._look, i, relocation)

    def _look(self, i: int, relocation: Relocation) -> None:
        """A node decides whether another stage needs it more. What it sees in a bucket stands there as one server. Of
        lost stages none is seen, and rescues are not simulated."""
        if not self.nodes.serving[i]:
            return
        own, stage = self.nodes.speed[i], self.nodes.stage[i]
        others = [*self.directory.servers(i), *self._on_their_way()]
        move = relocation.look(self.agenda.now, Server(self.nodes.peer[i], stage, own), others)
        if move is None:
            self._look_further(i, relocation)
            return
        self.moves += 1
        self.nodes.tell("moves", i, move.stage)
        self.nodes.serving[i] = False
        self.pipeline.left(i)
        self.averaging.left(i)
        self._go_to(i, move.stage)

    def _befall(self, event: Deaths | Arrivals | Cut) -> None:
        if isinstance(event, Deaths):
            living = self.nodes.living()
            for i in self._rng.sample(living, min(round(event.share * len(living)), len(living) - 1)):
                self.kill(i)
        elif isinstance(event, Arrivals):
            for _ in range(round(event.times * self.nodes.many)):
                self.agenda.after(self._rng.random() * event.within_seconds, self.join)
        else:
            self.nodes.apart = event.region
            self.agenda.after(event.for_seconds, self._heal)

    def _heal(self) -> None:
        self.nodes.apart = None

    def _sample(self) -> None:
        """Take down where all stand."""
        self.moments.append(self.moment())
        self._before = (self.pipeline.finished, math.fsum(self.pipeline.busy), self.agenda.now)
        self.nodes.tell("moment", *self._before)

    def moment(self) -> CrowdMoment:
        """Where all stand, since the last one that was taken down."""
        nodes, now = self.nodes, self.agenda.now
        finished, worked, at = self._before
        passed = max(now - at, 1e-9)
        serving: list[int] = np.flatnonzero(nodes.serving_row).tolist()
        unit = self.settings.devices.forward_seconds * (1.0 + BACKWARDS) * self.settings.work.stages
        spread, expected = self.averaging.spread()
        return CrowdMoment(
            at=now,
            nodes=nodes.many,
            serving=len(serving),
            trained=(self.pipeline.finished - finished) * self.settings.parcel / passed,
            best=math.fsum(nodes.speed[i] for i in serving) / unit,
            working=(math.fsum(self.pipeline.busy) - worked) / passed / max(1, nodes.many),
            paired=self.averaging.kinds["paired"],
            alone=self.averaging.kinds["alone"],
            spread=spread,
            expected=expected,
            error=self.directory.error,
            moves=self.moves,
        )


def most_nodes(settings: CrowdSettings, many: int) -> int:
    """The most nodes that may come to live, each with a number of its own."""
    living, coming = float(many), 0.0
    for event in settings.arrivals:
        coming += event.times * living
        living += event.times * living
    return math.ceil(SPARE * (many + coming + settings.churn_an_hour * settings.hours * living)) + 16
