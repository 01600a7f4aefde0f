"""Whole nodes in virtual time: to the end of their run, frozen and apart, and nobody waits."""

from __future__ import annotations

import asyncio
import hashlib
import statistics
import threading
from collections.abc import Callable, Coroutine

from noloco_node.averaging.side import THREAD
from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import LimitsSpec, OuterSpec, PipelineSpec, RunSpec
from noloco_node.identity.peer_id import PeerId
from noloco_node.simulator.course import PIECES, exchange_arithmetic
from noloco_node.simulator.links import Links, PlainWay
from noloco_node.simulator.loop import WALL, in_virtual_time
from noloco_node.simulator.quadratic import Quadratic
from noloco_node.simulator.world import SECONDS, World
from noloco_node.sizing.footprint import footprint_of
from noloco_node.telemetry.events import AnyEvent, Evaluation, OuterStep
from noloco_node.training.compute_thread import Priority
from tests.simulator.populated import populate
from tests.worlds import micro_spec

REPLICAS = 4
SPEC = micro_spec(layers=2, steps=8, microbatches_a_step=4, outer=OuterSpec(inner_steps=2, min_inner_steps=1))


def link(source: PeerId, target: PeerId, octets: int) -> float:
    """10 to 30 ms, as the pair of peers has it, and 10 MB/s."""
    return 0.01 + 0.02 * int(hashlib.sha256(f"{source}{target}".encode()).hexdigest()[:8], 16) / 2**32 + octets / 1e7


def simulated(course: Callable[[World], Coroutine[None, None, None]], spec: RunSpec = SPEC) -> None:
    """A course of eight nodes, which all start at once; nothing of it is left on any thread."""

    async def work() -> None:
        threads = threading.active_count()
        settings = NodeSettings(in_flight=2, drain_seconds=1, seed=1)
        async with World(spec, settings, links=Links(PlainWay(link)), seed=1) as world:
            populate(world, REPLICAS)
            await course(world)
        assert threading.active_count() <= threads, "something works on a thread of its own"

    in_virtual_time(work, seed=1)


def told(world: World) -> list[AnyEvent]:
    """By all nodes."""
    return [event for events in world.events for event in events]


def test_eight_replicas_come_to_the_end_of_their_run() -> None:
    """From the first microbatch on. That a seed gives the same trace again is shown with faults (`tests/hunt`)."""

    async def course(world: World) -> None:
        await world.ended(600.0)
        assert [node.condition for node in world.nodes] == ["ended"] * 8
        accounts = world.accounts().values()
        assert all(each.clock >= SPEC.inner.target_tokens for each in accounts)
        assert all(each.drawn == each.trained + each.dropped + each.held_at_end for each in accounts)
        assert any(isinstance(event, OuterStep) and event.kind == "paired" for event in told(world))
        assert any(isinstance(event, Evaluation) for event in told(world))
        least = SPEC.inner.target_tokens / SPEC.microbatch_tokens / REPLICAS * SECONDS[Priority.BACKWARD]
        assert asyncio.get_running_loop().time() > least

    simulated(course)


def test_a_frozen_node_does_nothing_and_goes_on_where_it_stood() -> None:
    """Nothing is told by it meanwhile; the others wait for nobody."""

    async def course(world: World) -> None:
        await asyncio.sleep(3.0)
        victim = world.nodes[0]
        world.freeze(victim)
        before = len(world.events[0])
        await asyncio.sleep(3.0)
        assert len(world.events[0]) == before
        assert all(events[-1].time > WALL + 3.5 for events in world.events[1:])
        world.thaw(victim)
        await asyncio.sleep(3.0)
        assert len(world.events[0]) > before

    simulated(course)


def test_nothing_goes_between_sides_that_are_apart_and_all_again_once_they_are_together() -> None:
    """Meanwhile nobody averages with the other side."""

    def met(world: World, since: float) -> list[tuple[int, int]]:
        return [
            (number, world.node_of(PeerId(event.partner)).number)
            for number, events in enumerate(world.events)
            for event in events
            if isinstance(event, OuterStep) and event.partner and event.time > since
        ]

    async def course(world: World) -> None:
        await asyncio.sleep(3.0)
        sides = [node for node in world.nodes if node.number % 2], [node for node in world.nodes if not node.number % 2]
        world.part(*sides)
        since = world.events[0][-1].time + 5.0  # what was under way has come to its deadline
        await asyncio.sleep(15.0)
        apart, until = met(world, since), world.events[0][-1].time
        assert apart
        assert all(one % 2 == other % 2 for one, other in apart), apart
        world.part()
        await asyncio.sleep(10.0)
        assert any(one % 2 != other % 2 for one, other in met(world, until))

    limits = LimitsSpec(record_seconds=6, exchange_progress_seconds=3)
    hops = PipelineSpec(progress_seconds=2)
    longer = micro_spec(steps=40, microbatches_a_step=4, outer=SPEC.outer, limits=limits, pipeline=hops)
    simulated(course, spec=longer)


def test_an_exchange_takes_the_time_of_its_arithmetic_on_either_side() -> None:
    """Where nothing else does: as many pieces of work as a simulation reckons with, and a step alone has three."""
    footprint = footprint_of(SPEC)
    thread_seconds, pieces = exchange_arithmetic(footprint, 1.0), list[str]()

    def counted(thread: str) -> float:
        pieces.append(thread)
        return thread_seconds(thread)

    async def work() -> list[OuterStep]:
        settings = NodeSettings(in_flight=2, drain_seconds=1, seed=1)
        async with World(SPEC, settings, learning=Quadratic(), seed=1) as world:
            populate(world, REPLICAS)
            await world.ended(600.0)
            return [event for event in told(world) if isinstance(event, OuterStep)]

    steps = in_virtual_time(work, seed=1, elsewhere_seconds=counted)
    paired = [step.seconds for step in steps if step.kind == "paired"]
    assert not any(step.kind == "aborted" for step in steps)
    assert pieces.count(THREAD) == PIECES * len(paired) + 3 * sum(step.kind == "no_partner" for step in steps)
    one_side = statistics.fmean(footprint.parameters) / 1e6
    # Until the commit one works while the other waits: 5 pieces of the dialler and 2 of the other, of 12; 1 of its own.
    assert min(paired) >= one_side * 7 / PIECES
    assert thread_seconds("") == thread_seconds("checkpoint") == 0.0
