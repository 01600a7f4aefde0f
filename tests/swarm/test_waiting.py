"""A run begins with everybody that it was planned with."""

from __future__ import annotations

import asyncio

import pytest

from noloco_node.config.node_settings import NodeSettings
from noloco_node.placement.arrival import START_SECONDS, CommonStart
from tests.support import eventually
from tests.worlds import micro_spec, world


@pytest.mark.parametrize(
    ("replicas", "up", "trained", "seconds", "over"),
    [
        (1, [1, 1], False, 0.0, True),
        (3, [3, 2], False, START_SECONDS - 1, False),
        (3, [3, 3], False, 0.0, True),
        (3, [4, 3], False, 0.0, True),
        (3, [1, 1], True, 0.0, True),
        (3, [1, 1], False, START_SECONDS, True),
    ],
)
def test_the_first_sample_waits_for_the_others_but_not_for_ever_and_not_in_a_run_that_has_begun(
    replicas: int, up: list[int], trained: bool, seconds: float, over: bool
) -> None:
    """`seconds` after the first look."""
    start = CommonStart(replicas)
    assert start.over([1, 1], False, 100.0) is (replicas == 1)
    assert start.over(up, trained, 100.0 + seconds) is over


def test_a_start_is_not_taken_back() -> None:
    """A replica that dies later holds nobody back."""
    start = CommonStart(2)
    assert start.over([2, 2], False, 0.0)
    assert start.over([1, 2], False, 1.0)


async def test_replicas_begin_together() -> None:
    """The one of two origins that is there first draws nothing until the other is."""
    async with world(micro_spec(steps=10), replicas=2, settings=NodeSettings(start_replicas=2)) as made:
        late = made.of_stage(0)[1]
        async with asyncio.TaskGroup() as group:
            for replica in made.replicas:
                if replica is not late:
                    group.create_task(replica.run())
            await eventually(lambda: made.replicas[0].membership.replicas_per_stage() == [1, 2], what="three are up")
            await made.replicas[0].membership.refresh()
            assert all(drawn.batches == [] for drawn in made.drawn)
            group.create_task(late.run())
        assert all(drawn.batches for drawn in made.drawn[:2])
