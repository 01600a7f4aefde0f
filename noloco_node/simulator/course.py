"""A simulation from its configuration to its figures, which come from nodes' events and books, and from the links."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import torch

from noloco_node.averaging.side import THREAD
from noloco_node.config.experiments import SimSpec
from noloco_node.config.load import Config
from noloco_node.errors import ExitCode, UserError
from noloco_node.identity.peer_id import PeerId
from noloco_node.simulator.directory import COUNTED_AS
from noloco_node.simulator.links import Attachment, Links, SharedWay
from noloco_node.simulator.loop import ThreadSeconds, in_virtual_time
from noloco_node.simulator.node import Node, peer_of
from noloco_node.simulator.quadratic import Quadratic, weigh_as
from noloco_node.simulator.world import World
from noloco_node.sizing.footprint import Footprint, footprint_of
from noloco_node.sizing.traffic import traffic_of
from noloco_node.telemetry.events import Account, AnyEvent, InnerStep, NodeReassigned, OuterStep
from noloco_node.training.compute_thread import Priority


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


PIECES = 6
"""One side's arithmetic falls into so many pieces of work on average, if an exchange is a single chunk. A dialler has
seven, a dialled side five. Each goes over the weights about once."""


def exchange_arithmetic(footprint: Footprint, seconds: float) -> ThreadSeconds:
    """The seconds of a piece of work on each thread of a node. An exchange takes so many `seconds` of either side's
    processor for a million weights."""
    millions = fmean(footprint.parameters) / 1e6
    return lambda thread: seconds * millions / PIECES if thread == THREAD else 0.0


OPERATIONS = {Priority.STEP: 0.05, Priority.BACKWARD: 2.0, Priority.FORWARD: 1.0, Priority.DRAW: 1.0}
"""A device takes so long for each kind of work, in `sim.operation_seconds`. The last stage's forward is with its loss
and backward: three times as long."""

_Progress = Callable[[float, float], None]
"""A function that is told the virtual hours that have passed, and all that there are to be."""


@dataclass(frozen=True)
class Simulated:
    """What came of a simulation."""

    figures: SimulationFigures
    trace: str
    virtual_hours: float
    core_hours: float


def check_simulation(config: Config, footprint: Footprint) -> None:
    """Raise UserError (CONFIG) for what cannot be simulated: a stage that nobody could hold, or an exchange that takes
    longer than a chunk may."""
    sim, stages = config.sim, config.run.stages
    if sim.nodes < stages:
        raise UserError(
            ExitCode.CONFIG,
            f"sim.nodes is {sim.nodes}, and run.model.stages is {stages}: nobody could hold stage {sim.nodes}",
            f"set sim.nodes to {stages} at least",
        )
    _check_links(config, footprint)


def _check_links(config: Config, footprint: Footprint) -> None:
    """Check that what is sent as one chunk comes through before it is given up: an exchange, and a stage peer's state
    if nodes come for those that die."""
    sim, patience = config.sim, config.run.limits.exchange_progress_seconds
    narrow, mbit = ("up_mbit", sim.up_mbit) if sim.up_mbit <= sim.down_mbit else ("down_mbit", sim.down_mbit)
    octets = max(each.outer_step for each in traffic_of(config.run, footprint))
    state = fmean(footprint.state_bytes) if sim.life_hours is not None else 0.0
    slowest = max(octets, state) / (mbit * 125e3)
    if 4.0 * slowest > patience:
        what = "a stage peer's state" if state > octets else "an exchange"
        raise UserError(
            ExitCode.CONFIG,
            f"with sim.{narrow} {mbit:g} {what} takes {slowest:.3g} s, and a quadratic's is a single chunk, which "
            f"run.limits.exchange_progress_seconds ({patience:g}) would break off",
            f"raise sim.{narrow}, set run.limits.exchange_progress_seconds to {math.ceil(4.0 * slowest)} or more, or "
            "name a smaller model",
        )


def simulate(config: Config, progress: _Progress) -> Simulated:
    """Run what `config.sim` says. Raises UserError (CONFIG) as `check_simulation`."""
    footprint = footprint_of(config.run)
    check_simulation(config, footprint)
    began = time.process_time()
    figures, trace, seconds = in_virtual_time(
        lambda: _run(config, footprint, progress),
        seed=config.sim.seed,
        elsewhere_seconds=exchange_arithmetic(footprint, config.sim.exchange_seconds),
    )
    return Simulated(figures, trace, seconds / 3600.0, (time.process_time() - began) / 3600.0)


def quadratic_of(config: Config, footprint: Footprint) -> Quadratic:
    """What stands for the run's model, with moments for as many of its weights as the optimizer has."""
    squares = sum(footprint.moments) / sum(footprint.parameters) - 1.0
    return Quadratic(config.sim.seed, squares_share=squares)


async def _run(config: Config, footprint: Footprint, progress: _Progress) -> tuple[SimulationFigures, str, float]:
    sim, loop = config.sim, asyncio.get_running_loop()
    way = SharedWay([[trip / 1000.0 for trip in row] for row in sim.round_trips_ms])
    outer = config.run.outer
    links = Links(way, weigh_as(footprint, outer.codec))
    learning = quadratic_of(config, footprint)
    settings = config.node.model_copy(update={"seed": sim.seed})

    def device(number: int) -> Callable[[Priority], float]:
        by_stage = [device_seconds(config, number, stage) for stage in range(config.run.stages)]
        return lambda work: by_stage[world.nodes[number].stage](work)

    def start(stage: int) -> None:
        node = _start(world, way, sim, stage)
        if sim.life_hours is not None:
            hours = random.Random(f"life/{sim.seed}/{node.number}").expovariate(1.0 / sim.life_hours)
            loop.call_later(3600.0 * hours, die, node)

    def die(node: Node) -> None:
        if node.condition == "running":
            world.kill(node)
            start(node.stage)

    async with World(
        config.run, settings, footprint=footprint, learning=learning, device=device, links=links, seed=sim.seed
    ) as world:
        watcher = Watcher(world)
        end = sim.hours * 3600.0
        for number in range(sim.nodes):
            start(number % config.run.stages)
        sample = sim.sample_seconds
        while world.running and loop.time() < end:
            await asyncio.sleep(min(10.0, sample, end - loop.time()))
            if loop.time() >= sample:
                sample += sim.sample_seconds
                watcher.sample()
            progress(loop.time() / 3600.0, sim.hours)
        return watcher.figures(), world.trace, loop.time()


def device_seconds(config: Config, number: int, stage: int) -> Callable[[Priority], float]:
    """What a node's device takes at a stage for each kind of work; drawn by its number, so that another node more
    changes nobody's."""
    sim, last = config.sim, stage == config.run.stages - 1
    slower = math.exp(sim.device_spread * random.Random(f"device/{sim.seed}/{number}").gauss(0.0, 1.0))
    seconds = {kind: sim.operation_seconds * times * slower for kind, times in OPERATIONS.items()}
    if last:
        seconds[Priority.FORWARD] *= 3.0
    return seconds.__getitem__


def _start(world: World, way: SharedWay, sim: SimSpec, stage: int) -> Node:
    number = len(world.nodes)
    rng = random.Random(f"link/{sim.seed}/{number}")
    up, down = (
        mbit * 125_000.0 * math.exp(sim.link_spread * rng.gauss(0.0, 1.0)) for mbit in (sim.up_mbit, sim.down_mbit)
    )
    way.attach(peer_of(number), Attachment(number % len(sim.round_trips_ms), up, down))
    return world.start(stage)
