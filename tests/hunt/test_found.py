"""Faults of the node that drawn schedules found: each by the shortest schedule that showed it."""

from __future__ import annotations

import pytest

from noloco_node.simulator.faults import Death, Liar, Schedule
from noloco_node.simulator.hunt import carry_out


@pytest.mark.parametrize(("seed", "replicas", "liar"), [(0, (3,), 2), (1, (2, 3), 4)])
def test_one_record_of_a_far_clock_beside_one_honest_stage_peer_moves_no_clock(
    seed: int, replicas: tuple[int, ...], liar: int
) -> None:
    """Half-way between the two is nobody's clock: honest replicas of the stage ended at 5e14 to 1e15 tokens of 768, and
    took states again and again that they did not lack."""
    outcome = carry_out(Schedule(seed=seed, replicas=replicas, faults=(Liar(at=0.2, node=liar, how="ahead"),)))
    assert outcome.fired == (True,)
    assert outcome.breaches == ()


@pytest.mark.parametrize("silent", [False, True])
def test_origins_that_die_before_the_last_tenth_end_no_short_run(silent: bool) -> None:
    """In a run as short as the lag that clocks may have every replica is near its end from half-way on: where all
    origins died it was over for the others, at 0.67 to 0.76 of the target. Now stage 0 is begun again."""
    deaths = tuple(Death(at=0.75, node=node, silent=silent) for node in (0, 1))
    outcome = carry_out(Schedule(seed=0, replicas=(2, 3), faults=deaths))
    assert outcome.fired == (True, True)
    assert outcome.breaches == ()
