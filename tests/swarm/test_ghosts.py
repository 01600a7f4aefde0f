"""Records without nodes behind them: they introduce peers that are not there, and change nothing for anyone."""

from __future__ import annotations

import asyncio

import pytest

from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import LimitsSpec, OuterSpec
from noloco_node.directory.records import LiveRecord, PeerState
from noloco_node.identity.peer_id import PeerId
from noloco_node.node import stage_lifecycle
from noloco_node.node.stage_lifecycle import StageLifecycle
from noloco_node.placement import balancing
from noloco_node.placement.balancing import Move
from noloco_node.simulator.node import SimulatedDevice
from noloco_node.sizing.footprint import footprint_of
from noloco_node.telemetry.events import InnerStep, OuterStep
from tests.inside import directory_of
from tests.support import eventually
from tests.worlds import World, micro_spec, record_of, virtually, world

GHOST_CLOCK = 4e6
LIMITS = LimitsSpec(record_seconds=15, grace_seconds=2, chunk_bytes=16384)
"""A replica whose clock seems to stand still for the life of a record is no longer counted: longer than a busy machine
stands still itself."""
AVERAGING = OuterSpec(inner_steps=4)


def haunt(made: World, stage: int, count: int) -> None:
    """Put `count` records into the directory, valid for an hour, that nobody stands behind."""
    for number in range(count):
        peer = PeerId(f"ghost-{stage}-{number:04d}")
        record = record_of(peer, stage, clock=GHOST_CLOCK, tokens_per_second=1e9, capacity=1e12, outer_steps_taken=1)
        made.hub.rows[stage][peer] = LiveRecord(record, made.hub.now() + 3600.0)


def steps_of(made: World) -> list[InnerStep]:
    """Inner steps of all replicas."""
    return [event for events in made.events for event in events if isinstance(event, InnerStep)]


@virtually
async def test_four_hundred_ghosts_a_stage_change_neither_share_nor_clock_nor_partners() -> None:
    """They come while two replicas a stage train. Everybody goes on to the run's end as if nobody had come."""
    spec = micro_spec(layers=2, steps=400, microbatches_a_step=2, outer=AVERAGING, limits=LIMITS)
    async with world(spec, replicas=2, settings=NodeSettings(in_flight=1, drain_seconds=1, start_replicas=2)) as made:
        async with asyncio.TaskGroup() as group:
            for replica in made.replicas:
                group.create_task(replica.run())
            await eventually(lambda: len(steps_of(made)) > 20, 100.0, "training has begun")
            before = len(steps_of(made))
            for stage in (0, 1):
                haunt(made, stage, 400)
            for replica in made.replicas:
                await replica.membership.refresh()
            await eventually(lambda: len(steps_of(made)) > before + 40, 100.0, "training goes on")
            clocks = [replica.membership.usual_clock() for replica in made.replicas]
            for replica in made.replicas:
                replica.stop.set()
        steps = steps_of(made)
        assert {step.live_replicas for step in steps[8:]} == {2}
        assert max(clocks) <= max(step.clock for step in steps) < 1.5 * spec.inner.target_tokens
        met = [event.partner for events in made.events for event in events if isinstance(event, OuterStep)]
        assert any(met)
        assert not any(partner and partner.startswith("ghost") for partner in met)


@virtually
async def test_ghosts_move_nobody_and_put_no_rescue_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of both stages claim the speed of a thousand nodes. Nobody leaves its stage for that. When stage 1 has lost
    both replicas, one of stage 0 goes there although its ghosts live."""
    monkeypatch.setattr(stage_lifecycle, "REFRESH_SECONDS", 0.5)
    monkeypatch.setattr(balancing, "RESCUE_SLOT_SECONDS", 1.0)
    settings = NodeSettings(in_flight=1, drain_seconds=1, reassign="always", min_stay_seconds=1.0, start_replicas=2)
    spec = micro_spec(layers=2, steps=4000, microbatches_a_step=2, outer=AVERAGING, limits=LIMITS)
    async with world(spec, replicas=2, settings=settings, device=lambda: SimulatedDevice(lambda _: 0.3)) as made:
        stays = [
            StageLifecycle(spec, settings, footprint_of(spec), each.context.transport, directory_of(each.membership))
            for each in made.replicas
        ]
        running = [asyncio.create_task(replica.run()) for replica in made.replicas]
        await eventually(lambda: len(steps_of(made)) > 8, 100.0, "training has begun")
        for stage in (0, 1):
            haunt(made, stage, 12)
        watches = [asyncio.create_task(s.accompany(r)) for s, r in zip(stays, made.replicas, strict=True)]
        await asyncio.sleep(20 * settings.min_stay_seconds)
        assert [stay.move for stay in stays] == [None] * 4
        for replica in made.replicas[2:]:
            replica.stop.set()
        await asyncio.wait(running[2:])
        await eventually(lambda: any(stay.move for stay in stays[:2]), 60.0, "one of stage 0 goes")
        assert {stay.move for stay in stays[:2]} <= {None, Move(1, "lost")}
        assert len(made.replicas[0].membership.live(1, PeerState.TRAINING)) >= 12, "the ghosts live"
        for task in (*watches, *running):
            task.cancel()
        await asyncio.wait((*watches, *running))


async def test_a_ghost_at_a_stage_that_nobody_serves_does_not_make_it_served() -> None:
    """Its record lives, and nobody answers: the stage is as empty as without it, and nothing is drawn."""
    spec = micro_spec(limits=LIMITS)
    async with world(spec) as made:
        haunt(made, 1, 1)
        origin = made.replicas[0]
        running = asyncio.create_task(origin.run())
        await eventually(lambda: origin.missing.looked, what="it has looked")
        assert origin.missing.stages == [1]
        assert not made.drawn[0].batches
        origin.stop.set()
        await running


async def test_a_common_start_waits_for_those_that_answer_and_heeds_no_ghosts_clock() -> None:
    """Two replicas of each stage are asked for: one ghost makes no second, nor a run that has begun."""
    async with world(micro_spec(limits=LIMITS), settings=NodeSettings(in_flight=1, start_replicas=2)) as made:
        for stage in (0, 1):
            haunt(made, stage, 1)
        async with asyncio.TaskGroup() as group:
            for replica in made.replicas:
                group.create_task(replica.run())
            await eventually(lambda: not made.replicas[0].missing.stages and made.replicas[0].missing.looked)
            membership = made.replicas[0].membership
            assert (membership.replicas_per_stage(), membership.usual_clock()) == ([1, 1], 0.0)
            assert membership.live_replicas() == 1
            assert not made.drawn[0].batches
            for replica in made.replicas:
                replica.stop.set()
