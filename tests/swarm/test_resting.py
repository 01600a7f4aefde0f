"""A replica that rests: within two seconds it holds nothing of others, and they go on as after a drain."""

from __future__ import annotations

import asyncio

import pytest

from noloco_node.config.run_spec import OuterSpec
from noloco_node.directory.records import SERVING, PeerState
from noloco_node.telemetry.events import Doing, InnerStep
from tests.support import eventually, last_account
from tests.worlds import micro_spec, peer_name, virtually, world

WHY = "paused: for this test"


@virtually
async def test_replicas_that_rest_give_back_what_they_hold_and_others_train_on() -> None:
    """An origin and a tail rest while a microbatch and an exchange may be under way. The directory shows them as
    paused, nobody counts them, no sample is lost, and the other two train on together."""
    often = OuterSpec(inner_steps=4)
    async with world(micro_spec(steps=100_000, outer=often), replicas=2) as made, asyncio.TaskGroup() as group:
        running = [group.create_task(replica.run()) for replica in made.replicas]
        first, second = made.events[0], made.events[1]

        def steps_of(number: int) -> int:
            return sum(isinstance(event, InnerStep) for event in made.events[number])

        await eventually(lambda: all(steps_of(number) > 4 for number in range(4)), 60, "all train")
        told = asyncio.get_running_loop().time()
        for number in (0, 2):
            made.replicas[number].rest(WHY)
        await asyncio.wait((running[0], running[2]), timeout=30)
        assert asyncio.get_running_loop().time() - told < 2.0
        for number in (0, 2):
            said = [event for event in made.events[number] if isinstance(event, Doing)][-1]
            assert (said.what, said.detail) == ("paused", WHY)
            record = made.hub.rows[number // 2][peer_name(number // 2, 0)].record
            assert (record.state, record.shown.paused) == (PeerState.DRAINING, True)
        account = last_account(first)
        assert account.drawn == account.trained + account.dropped + account.held_at_end
        assert made.replicas[0].pipeline.held == account.held_at_end

        before = steps_of(1), steps_of(3)
        await eventually(lambda: steps_of(1) > before[0] + 4 and steps_of(3) > before[1] + 4, 60, "the others train on")
        for number in (1, 3):
            left, others = {peer_name(1 - number // 2, 1)}, made.replicas[number].membership.others
            await eventually(lambda o=others, e=left: {record.peer_id for record in o(*SERVING)} == e, 60, "it is seen")
        assert last_account(second).dropped == 0
        for number in (1, 3):
            made.replicas[number].stop.set()


async def test_a_stage_whose_only_node_is_paused_is_not_said_to_be_lost(caplog: pytest.LogCaptureFixture) -> None:
    """Others say what holds their microbatches back: its owner will let it go on."""
    async with world(micro_spec(steps=100_000)) as made, asyncio.TaskGroup() as group:
        origin, tail = made.replicas
        running = [group.create_task(replica.run()) for replica in made.replicas]
        await eventually(lambda: any(isinstance(event, InnerStep) for event in made.events[0]), 60, "both train")
        tail.rest(WHY)
        await eventually(lambda: origin.missing.stages == [1], 60, "it is seen")
        assert "stage 1 has only paused nodes: microbatches are held back until one comes" in caplog.text
        assert "lost" not in caplog.text
        waits = "a replica of stage 1: only paused nodes have it"
        said = made.events[0]
        await eventually(lambda: any(isinstance(e, Doing) and waits in e.detail for e in said), 60, "it is shown")
        origin.stop.set()
        await asyncio.wait(running, timeout=60)
