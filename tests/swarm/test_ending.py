"""How nodes that draw no samples learn that the run is over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from noloco_node.aio import Pulse
from noloco_node.errors import ExitCode, UserError
from noloco_node.swarm.directory import PeerState
from noloco_node.swarm.ending import ORPHAN_GRACES, until_nobody_trains
from noloco_node.swarm.membership import Membership, OwnFigures
from noloco_node.swarm.memory_directory import MemoryDirectory, MemoryDirectoryHub
from noloco_node.swarm.transport import PeerId
from tests.support import eventually, one_turn
from tests.worlds import micro_spec, peer_name, world

GRACE = 0.02


class Swarm:
    """Origins A and B of stage 0, and a node of stage 1 that looks at them now and then."""

    def __init__(self) -> None:
        self.hub = MemoryDirectoryHub(2)
        self.a, self.b = self.member("origin-aaaa", 0), self.member("origin-bbbb", 0)
        self.watcher = self.member("watcher-wwww", 1)

    def member(self, name: str, stage: int) -> Membership:
        return Membership(
            MemoryDirectory(self.hub), PeerId(name), stage, 2, 60.0, lambda: OwnFigures(5.0, 1.0, 0), lambda: None
        )

    def ended(self, is_near_end: Callable[[], bool] = lambda: False) -> asyncio.Task[None]:
        return asyncio.create_task(
            until_nobody_trains(self.watcher, asyncio.Event(), Pulse(), grace=GRACE, is_near_end=is_near_end)
        )


FINISHED = (PeerState.TRAINING, PeerState.FINISHING, PeerState.DRAINING, PeerState.GONE)
STOPPED = (PeerState.TRAINING, PeerState.DRAINING, PeerState.GONE)


@pytest.mark.parametrize(
    ("a", "b", "over"),
    [
        (FINISHED[:2], (), True),
        (FINISHED[:3], (), True),
        (FINISHED, (), True),
        (FINISHED, STOPPED, True),
        (FINISHED, FINISHED[:1], False),
        (STOPPED, (), False),
        (STOPPED[:2], STOPPED, False),
        ((), (), False),
    ],
)
async def test_the_run_is_over_once_an_origin_was_at_its_end_and_none_trains(
    a: tuple[PeerState, ...], b: tuple[PeerState, ...], over: bool
) -> None:
    """However far the origin has left meanwhile: who looks every two seconds misses what passes in one."""
    swarm = Swarm()
    for member, course in ((swarm.a, a), (swarm.b, b)):
        for state in course:
            await member.announce(state)
    await swarm.watcher.refresh()
    assert swarm.watcher.run_is_over() is over


async def test_a_node_that_saw_an_origin_train_and_then_gone_ends_with_it() -> None:
    """At once, without waiting for the grace time, and however far its own clock is behind."""
    swarm = Swarm()
    await swarm.a.announce(PeerState.TRAINING)
    await swarm.watcher.refresh()
    ending = swarm.ended()
    await one_turn()
    assert not ending.done()
    for state in FINISHED[1:]:
        await swarm.a.announce(state)
    await swarm.watcher.refresh()
    await asyncio.wait_for(ending, ORPHAN_GRACES * GRACE)


async def test_orphans_end_near_the_target_and_complain_far_from_it() -> None:
    """Their origin was stopped before the run's end."""
    swarm = Swarm()
    await swarm.a.announce(PeerState.TRAINING)
    await swarm.watcher.refresh()
    near, far = swarm.ended(lambda: True), swarm.ended()
    await one_turn()
    for state in STOPPED[1:]:
        await swarm.a.announce(state)
    await swarm.watcher.refresh()
    await asyncio.wait_for(near, 10)
    with pytest.raises(UserError, match="no replica of stage 0 has been seen") as raised:
        await asyncio.wait_for(far, 10)
    assert raised.value.exit_code is ExitCode.PEERS_UNREACHABLE


@pytest.mark.parametrize("attempt", range(3))
async def test_who_is_told_to_stop_does_not_say_that_the_run_is_over(attempt: int) -> None:
    """Neither an origin nor a replica of the last stage; and the latter goes on when the only origin leaves. A race
    made it say so now and then: three attempts."""
    async with world(micro_spec(steps=1_000_000)) as made, asyncio.TaskGroup() as group:
        origin, last = made.replicas
        lives = [group.create_task(replica.run()) for replica in (origin, last)]
        for replica, life in zip((origin, last), lives, strict=True):
            await eventually(lambda: last.worker.progress.steps > 3, 30, "both train")
            assert not life.done()
            replica.stop.set()
            await asyncio.wait_for(life, 30)
            row = made.hub.rows[replica.stage][peer_name(replica.stage, 0)]
            assert row.record.state is PeerState.GONE
            assert not row.record.finished
