"""The account of health checks in a crowd: as many calls and records as the node's own code makes."""

from __future__ import annotations

import asyncio
import itertools
import random

import numpy as np
import pytest

from noloco_node.directory.health_checks import ASK_AGAIN, CALLS_A_SECOND
from noloco_node.directory.records_call import MOST_TOLD
from noloco_node.simulator.crowd_calls import MESSAGE_BYTES, TOLD_BYTES, HealthCheckTraffic, Sights, asks_a_second
from noloco_node.simulator.loop import in_virtual_time
from noloco_node.transport.calls import ASKED_AT_ONCE
from tests.swarm.test_health_checks import LIFE, callers

RECORD = 343.0
CALL = 2.0 * (MESSAGE_BYTES + TOLD_BYTES * RECORD)
"""Bytes of a call and its answer in which either tells its own record alone."""


def sights(
    many: int, own: float, following: float = 0.0, *, share: float = 1.0, population: float | None = None
) -> Sights:
    """The sights of so many nodes, each of which has so many in view."""
    none = np.zeros(many)
    every = own + following if population is None else population
    return Sights(
        np.arange(many),
        none + own,
        none + following,
        none,
        none,
        none,
        none + share,
        none + share,
        none + every,
    )


@pytest.mark.parametrize("heard", [0.0, 0.05])
def test_calls_are_as_many_as_the_roll_call_makes(heard: float) -> None:
    """Eight nodes work with each other so often a second, or not at all, for thirty lives of a record."""

    async def course() -> int:
        rng = random.Random(1)
        async with callers(8) as made:
            calls = 0
            for second in range(int(30 * LIFE)):
                await asyncio.sleep(1.0)
                if second % 6 == 0:
                    for each in made:
                        await each.directory.publish(each.record, LIFE)
                for one, other in itertools.combinations(made, 2):
                    if rng.random() < heard:
                        one.transport.peer_stats.worked(other.transport.peer_id)
                        other.transport.peer_stats.worked(one.transport.peer_id)
                if second == int(2 * LIFE):
                    calls = sum(len(each.asked) for each in made)
            return sum(len(each.asked) for each in made) - calls

    pairs, seconds = 28, 28 * LIFE
    expected = pairs * seconds * asks_a_second(ASK_AGAIN * LIFE, heard)
    assert in_virtual_time(course) == pytest.approx(expected, rel=0.12)


def test_a_crowd_that_sees_each_other_first_tells_all_and_then_each_pair_speaks_now_and_then() -> None:
    """Sixty-four: a minute's calls of the beginning bring twelve records each way for every pair."""
    calls, each = HealthCheckTraffic(64, LIFE, RECORD), sights(64, 63.0)
    octets = [calls.tick(each, np.zeros(64), 0.0, 0.0, 2.0) for _ in range(60)]
    settled = 64 * 63 / 2 / (ASK_AGAIN * LIFE) * CALL
    assert octets[-1] / 2.0 == pytest.approx(settled)
    pairs, twelve = 64 * 63 / 2, 2.0 * (MOST_TOLD - 1) * TOLD_BYTES * RECORD
    first = sum(octets) - 60 * 2.0 * settled
    assert pairs * twelve < first < pairs * (twelve + 2.2 * CALL)


def test_nobody_calls_oftener_than_it_may_and_few_records_go_to_strangers_of_who_knows_many() -> None:
    """A crowd of a hundred thousand, of which each sees 256, and another one every second."""
    calls, each = HealthCheckTraffic(10, LIFE, RECORD), sights(10, 128.0, 128.0, share=0.0, population=1e5)
    octets = [calls.tick(each, np.full(10, 2.0), 0.0, 0.0, 2.0) for _ in range(200)]
    assert sum(octets[:3]) > 2.0 * sum(octets[-3:]), "until it knows many it tells strangers all"
    calls_in_two_seconds = 10 * 2.0 * CALLS_A_SECOND
    assert calls_in_two_seconds * CALL < octets[-1] < 1.7 * calls_in_two_seconds * CALL
    assert octets[0] <= 10 * (ASKED_AT_ONCE + 2.0 * CALLS_A_SECOND) * MOST_TOLD * CALL


def test_whoever_was_in_view_before_is_told_few() -> None:
    """Both halves of a stage, one after the other, again and again."""
    calls, each = HealthCheckTraffic(10, LIFE, RECORD), sights(10, 64.0, share=1.0, population=128.0)
    octets = [calls.tick(each, np.full(10, 4.0), 0.0, 0.0, 2.0) for _ in range(100)]
    again, first = octets[-1] / CALL, 10 * 4.0
    assert again == pytest.approx(first + 10 * 2.0 * (64.0 - 4.0) / 2.0 / (ASK_AGAIN * LIFE), rel=0.05)
