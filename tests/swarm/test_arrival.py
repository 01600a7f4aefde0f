"""Joiners that come at the same time: each says where it goes before it downloads, and they spread out."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from noloco_node.aio import cancel_and_wait
from noloco_node.directory.records import OwnWord, PeerRecord, PeerState
from noloco_node.identity.peer_id import PeerId
from noloco_node.placement.arrival import Arrival
from noloco_node.placement.balancing import Server, supply_of, worth_moving
from tests.memory_directory import MemoryDirectory, MemoryDirectoryHub
from tests.support import eventually, one_turn
from tests.swarm.worlds import AllAnswer
from tests.worlds import record_of

WORK = (1.0, 1.0, 1.0)


class SlowDirectory(MemoryDirectory):
    """Every operation lets the others go first, so that all look before any has announced itself."""

    async def publish(self, record, life):  # type: ignore[no-untyped-def]
        """See `MemoryDirectory.publish`."""
        await asyncio.sleep(0)
        return await super().publish(record, life)

    async def refresh(self):  # type: ignore[no-untyped-def]
        """See `MemoryDirectory.refresh`."""
        await asyncio.sleep(0)
        return await super().refresh()


def trains(peer: str, stage: int) -> PeerRecord:
    """The record of a replica of a stage."""
    return record_of(peer, stage, capacity=1.0, sequence=1)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("count", [2, 3, 6, 12])
async def test_joiners_that_look_at_the_same_time_spread_over_the_stages(count: int, seed: int) -> None:
    """They all found an empty swarm. In the end no stage has more than one node above any other (two where a whole
    crowd came within one look), and every node is announced once."""
    hub = MemoryDirectoryHub(len(WORK))
    arrivals = [
        Arrival(SlowDirectory(hub), PeerId(f"joiner-{i:06d}"), 20.0, AllAnswer(), one_turn) for i in range(count)
    ]
    choices = (a.choose(WORK, range(3), random.Random(100 * seed + i)) for i, a in enumerate(arrivals))
    chosen = await asyncio.gather(*choices)
    counts = [chosen.count(stage) for stage in range(3)]
    assert max(counts) - min(counts) <= (1 if count < 6 else 2)
    view = await MemoryDirectory(hub).refresh()
    announced = [len(view.live(stage, hub.now(), PeerState.JOINING)) for stage in range(3)]
    assert announced == counts


async def test_the_first_node_that_has_the_text_begins_with_the_first_stage() -> None:
    """It took any, and moved after ten seconds where the next one had no text."""
    chosen: set[int] = set()
    for seed in range(8):
        hub = MemoryDirectoryHub(len(WORK))
        first, second = (
            Arrival(MemoryDirectory(hub), PeerId(f"joiner-{name}"), 20.0, AllAnswer(), one_turn)
            for name in ("with-text", "without-it")
        )
        assert await first.choose(WORK, range(3), random.Random(seed)) == 0
        chosen.add(await second.choose(WORK, (1, 2), random.Random(seed)))
    assert chosen == {1, 2}


async def test_an_announcement_lives_while_the_node_prepares_and_is_withdrawn_where_it_fails() -> None:
    """It is renewed within its life; a node that gives up does not hold its place."""
    hub = MemoryDirectoryHub(1)
    directory = MemoryDirectory(hub)

    def announced() -> bool:
        return bool(hub.rows[0]) and hub.rows[0][PeerId("joiner-000001")].record.state is PeerState.JOINING

    async def prepare_in_vain() -> None:
        async with Arrival(directory, PeerId("joiner-000001"), 0.3, AllAnswer(), one_turn).announced(0):
            first = hub.rows[0][PeerId("joiner-000001")].expires
            await eventually(lambda: hub.rows[0][PeerId("joiner-000001")].expires > first + 0.1, what="renewed")
            assert announced()
            raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        await prepare_in_vain()
    assert not announced()
    assert (await directory.refresh()).live(0, hub.now()) == ()


async def test_who_is_paused_still_says_what_it_has_done() -> None:
    """Who looks on would else see a run of no tokens."""
    hub, own = MemoryDirectoryHub(1), PeerId("joiner-000001")
    directory = MemoryDirectory(hub)
    word = OwnWord(name="old", tokens=640)
    await directory.publish(record_of(own, 0, clock=790.0, outer_steps_taken=20, shown=word), 60.0)
    await directory.refresh()
    async with Arrival(directory, own, 20.0, AllAnswer(), one_turn, "new").announced(0, PeerState.DRAINING):
        said = hub.rows[0][own].record
    assert (said.shown_state, said.clock, said.outer_steps_taken) == ("paused", 790.0, 20)
    assert (said.shown.name, said.shown.tokens) == ("new", 640)


@pytest.mark.parametrize("at_once", [True, False])
async def test_of_movers_that_decide_at_the_same_time_no_more_go_than_are_needed(at_once: bool) -> None:
    """Three nodes of a stage with three see another with one. Each decides for itself that it should go there; when
    they look again after their announcements, none goes or one, and one after another exactly one."""
    hub = MemoryDirectoryHub(2)
    work = (1.0, 1.0)
    places = {f"node-{i:08d}": int(i == 3) for i in range(4)}
    for peer, stage in places.items():
        record = trains(peer, stage)
        await MemoryDirectory(hub).publish(record, 60.0)

    def still_poor(others: Sequence[Server]) -> bool:
        return worth_moving(supply_of([*others, Server(PeerId("self"), 0, 1.0)], work), 0, 1.0, 1)

    arrivals = [
        Arrival(SlowDirectory(hub), PeerId(peer), 20.0, AllAnswer(), one_turn)
        for peer, stage in places.items()
        if stage == 0
    ]
    tries = [arrival.confirmed(1, work, still_poor) for arrival in arrivals]
    going = list(await asyncio.gather(*tries)) if at_once else [await each for each in tries]
    assert sum(going) <= 1
    assert at_once or going[0]
    announced = (await MemoryDirectory(hub).refresh()).live(1, hub.now(), PeerState.JOINING)
    assert len(announced) == sum(going), "who stays withdraws its announcement"


async def test_a_node_that_is_ended_as_it_sets_out_is_waited_for_no_longer() -> None:
    """Its training has come to an end, and with it what looks for other stages."""
    hub, begun, peer = MemoryDirectoryHub(2), asyncio.Event(), PeerId("mover-0000001")

    async def asked() -> None:
        begun.set()
        await asyncio.Event().wait()

    arrival = Arrival(MemoryDirectory(hub), peer, 20.0, AllAnswer(), asked)
    setting_out = asyncio.create_task(arrival.confirmed(1, (1.0, 1.0), lambda _: True))
    await begun.wait()
    assert hub.rows[1][peer].record.state is PeerState.JOINING
    await cancel_and_wait((setting_out,))
    assert hub.rows[1][peer].record.state is PeerState.GONE
