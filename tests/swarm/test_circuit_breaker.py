"""A stage filled by peers that answer and train nothing: its neighbours see it by their own work."""

from __future__ import annotations

import asyncio
import random

import pytest

from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import LimitsSpec
from noloco_node.directory.records import LiveRecord
from noloco_node.directory.records_call import serve_records
from noloco_node.identity.peer_id import PeerId
from noloco_node.node import stage_lifecycle as stays_module
from noloco_node.node.stage_lifecycle import StageLifecycle
from noloco_node.pipeline import messages as microbatch
from noloco_node.pipeline.routing import TRIES, CircuitBreaker, patience
from noloco_node.placement.balancing import (
    MigrationStanding,
    Move,
    Relocation,
    Server,
    as_seen_at_work,
    supply_of,
    worth_moving,
)
from noloco_node.sizing.footprint import footprint_of
from noloco_node.transport.errors import Refusal, Refused
from noloco_node.transport.memory import MemoryTransport
from noloco_node.transport.messages import Message
from tests.inside import directory_of
from tests.memory_directory import MemoryDirectory
from tests.support import alongside, eventually
from tests.worlds import World, micro_spec, no_tensors, peer_name, record_of, world

EVEN = (1.0, 1.0)


def servers(stage: int, what: str, many: int, *, present: bool = True) -> list[Server]:
    """Nodes of one stage and the usual strength."""
    return [Server(PeerId(f"{what}-{number:06d}"), stage, 1.0, present) for number in range(many)]


def test_only_what_was_tried_again_and_again_until_now_blocks_a_stage() -> None:
    """A few failures, a pause in the sending and a single answer say nothing; the sender nearest to the end is
    first."""
    now = 0.0
    blocked = CircuitBreaker(lambda: now)
    for _ in range(TRIES - 1):
        blocked.failed()
    now = 50.0
    assert not blocked.lasts(50.0)
    blocked.failed()
    assert (blocked.lasts(50.0), blocked.lasts(51.0)) == (True, False)
    now = 200.0
    assert not blocked.lasts(50.0), "nothing is sent"
    blocked.failed()
    assert blocked.lasts(50.0)
    blocked.through()
    for _ in range(TRIES):
        blocked.failed()
    assert not blocked.lasts(50.0)
    waits = [patience(20.0, 60.0, behind) for behind in range(7)]
    assert waits[0] > 60.0
    assert waits == sorted(set(waits))


@pytest.mark.parametrize("present", [True, False], ids=["serving", "joining"])
def test_a_crowd_of_keys_at_a_stage_does_not_make_those_who_train_there_leave_it(*, present: bool) -> None:
    """Two nodes a stage, and eight keys of one process that answer at stage 0, or say that they are on their way."""
    own, stage_peer = servers(0, "honest", 2)
    others = [stage_peer, *servers(1, "far", 2), *servers(0, "crowd", 8, present=present)]
    before = supply_of([*others, own], EVEN)
    assert worth_moving(before, 0, 1.0, 1), "as records and answers have it"
    seen = as_seen_at_work(others, 0, {stage_peer.peer, PeerId("crowd-000000")} if present else {stage_peer.peer})
    assert not worth_moving(supply_of([*seen, own], EVEN), 0, 1.0, 1)
    relocation = Relocation(MigrationStanding(EVEN, (0, 1), 0.0, 100.0, 20.0), random.Random(1))
    assert not any(relocation.look(float(now), own, seen) for now in range(2000))


def test_of_those_who_see_a_stage_shut_one_goes_there_and_the_last_stays() -> None:
    """Stage 1 is filled by a crowd that lets nothing through; the third stage, the richest, cannot see it. Of the two
    nodes of stage 0 one goes within a confirmation and two slots; where there is but one it stays."""
    work = (1.0, 1.0, 1.0)
    crowd, rich = servers(1, "crowd", 400), servers(2, "rich", 4)
    own, stage_peer = servers(0, "honest", 2)

    def first_move(others: list[Server], *, shut: bool) -> tuple[int, Move] | None:
        relocation = Relocation(MigrationStanding(work, range(3), 0.0, 1e6, 20.0), random.Random(1))
        seen = as_seen_at_work(others, 0, {stage_peer.peer}, shut=[s.peer for s in crowd] if shut else ())
        looks = ((now, relocation.look(float(now), own, seen, shut=shut)) for now in range(100))
        return next(((now, move) for now, move in looks if move is not None), None)

    assert first_move([stage_peer, *crowd, *rich], shut=False) is None
    found = first_move([stage_peer, *crowd, *rich], shut=True)
    assert found is not None
    assert found[1] == Move(1, "lost")
    assert 20 <= found[0] <= 31
    assert first_move([*crowd, *rich], shut=True) is None


async def fill(made: World, stage: int, many: int) -> list[MemoryTransport]:
    """Keys of one process that answer at `stage` and are always too busy."""
    made_up: list[MemoryTransport] = []
    for number in range(many):
        peer = PeerId(f"crowd-{number:08d}")
        transport = MemoryTransport(made.network, peer)
        directory = MemoryDirectory(made.hub)
        serve_records(transport, made.replicas[0].context.spec.run_id, directory, lambda: stage)

        async def busy(_peer: PeerId, _message: Message) -> Message:
            raise Refused(Refusal.BUSY, "always")

        transport.serve(microbatch.MICROBATCH.name, no_tensors, busy, max_concurrent_per_peer=8)
        record = record_of(peer, stage, clock=1e6)
        made.hub.rows[stage][peer] = LiveRecord(record, made.hub.now() + 3600.0)
        made_up.append(transport)
    return made_up


async def test_a_stage_that_only_a_crowd_of_keys_fills_is_rescued_by_a_neighbour(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Six keys that answer and are always too busy are all that is at stage 1. One of the two nodes of stage 0 goes
    there, and finds nobody worth its trust there."""
    monkeypatch.setattr(stays_module, "REFRESH_SECONDS", 0.05)
    monkeypatch.setattr("noloco_node.placement.balancing.RESCUE_SLOT_SECONDS", 0.2)
    monkeypatch.setattr("noloco_node.pipeline.participant.patience", lambda *_: 0.3)
    spec = micro_spec(limits=LimitsSpec(record_seconds=1.0, grace_seconds=2, chunk_bytes=16384))
    settings = NodeSettings(in_flight=1, drain_seconds=1, reassign="always")
    async with world(spec, replicas=2, settings=settings) as made:
        for stage, index in ((1, 0), (1, 1)):
            made.network.kill(peer_name(stage, index))
        crowd = await fill(made, 1, 6)
        origins, stays = made.replicas[:2], list[StageLifecycle]()
        for own, other in (origins, origins[::-1]):
            transport = own.context.transport
            transport.peer_stats.worked(other.context.transport.peer_id)  # pyright: ignore[reportPrivateUsage]
            directory = directory_of(own.membership)
            stays.append(StageLifecycle(spec, settings, footprint_of(spec), transport, directory))
        async with asyncio.TaskGroup() as group:
            for replica in origins:
                group.create_task(replica.run())
            async with alongside(*(each.accompany(replica) for (replica, each) in zip(origins, stays, strict=True))):
                await eventually(lambda: any(each.move for each in stays), what="one of them goes")
            for replica in origins:
                replica.stop.set()
        (mover,) = (n for n, each in enumerate(stays) if each.move is not None)
        assert stays[mover].move == Move(1, "lost")
        known = origins[mover].context.transport.peer_stats  # pyright: ignore[reportPrivateUsage]
        assert all(known.failed(each.peer_id) for each in crowd)
        for each in crowd:
            await each.close()
