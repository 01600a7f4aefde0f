"""Faults of the node that drawn schedules found: each by the shortest schedule that showed it."""

from __future__ import annotations

from noloco_node.simulator.faults import Liar, Schedule
from noloco_node.simulator.hunt import carry_out


def test_one_record_of_a_far_clock_beside_one_honest_stage_peer_moves_no_clock() -> None:
    """Half-way between the two is nobody's clock: both honest replicas of the stage ended at 7.5e14 tokens, and took
    states again and again that they did not lack."""
    schedule = Schedule(seed=9, replicas=(4, 3), faults=(Liar(at=0.698, node=6, how="ahead"),))
    outcome = carry_out(schedule)
    assert outcome.fired == (True,)
    assert outcome.breaches == ()
