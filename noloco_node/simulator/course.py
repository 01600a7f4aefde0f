"""A simulation from its configuration to its figures."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

from noloco_node.averaging.side import THREAD
from noloco_node.config.load import Config
from noloco_node.config.sim_spec import SimSpec
from noloco_node.errors import ExitCode, UserError
from noloco_node.simulator.figures import SimulationFigures, Watcher
from noloco_node.simulator.links import Attachment, Links, SharedWay
from noloco_node.simulator.loop import ThreadSeconds, in_virtual_time
from noloco_node.simulator.node import Node, peer_of
from noloco_node.simulator.quadratic import Quadratic, weigh_as
from noloco_node.simulator.world import World
from noloco_node.sizing.footprint import Footprint, footprint_of
from noloco_node.sizing.traffic import traffic_of
from noloco_node.training.compute_thread import Priority

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
            loop.call_later(_life(sim.life_hours, sim.seed, node.number), die, node)

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


def _life(life_hours: float, seed: int, number: int) -> float:
    """Seconds that a node lives."""
    return random.Random(f"life/{seed}/{number}").expovariate(1.0 / (life_hours * 3600.0))
