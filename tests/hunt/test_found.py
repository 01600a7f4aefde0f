"""Faults of the node that drawn schedules found: each by the shortest schedule that showed it.

Where what mended one has a test of its own, in milliseconds, and another schedule here is of the same kind, only `make
test-long` carries it out.
"""

from __future__ import annotations

import pytest

from noloco_node.simulator.faults import (
    Crash,
    Death,
    Freeze,
    Join,
    LateMessages,
    Liar,
    LostMessages,
    LostStage,
    Partition,
    Relocate,
    Schedule,
)
from noloco_node.simulator.hunt import HuntOutcome, carry_out


def carried(schedule: Schedule) -> HuntOutcome:
    """What comes of it: each fault fires and no invariant is broken."""
    outcome = carry_out(schedule)
    assert all(outcome.fired)
    assert outcome.breaches == ()
    return outcome


def test_one_record_of_a_far_clock_beside_one_honest_stage_peer_moves_no_clock() -> None:
    """Half-way between the two is nobody's clock. Honest replicas of the stage ended at 5e14 to 1e15 tokens of 768, and
    took states again and again that they did not lack."""
    carried(Schedule(seed=0, replicas=(3,), faults=(Liar(at=0.2, node=2, how="ahead"),)))


def test_origins_that_die_before_the_last_tenth_end_no_short_run() -> None:
    """In a run as short as the lag that clocks may have every replica is near its end from half-way on. If all origins
    died it was over for the others, at 0.67 to 0.76 of the target. Now stage 0 is begun again."""
    deaths = tuple(Death(at=0.75, node=node, silent=True) for node in (0, 1))
    carried(Schedule(seed=0, replicas=(2, 3), faults=deaths))


@pytest.mark.long
def test_who_came_late_to_its_stage_waits_no_hour_for_origins_that_are_gone() -> None:
    """The only origin left moved to the last stage at 0.94 of the target. The others had seen its clock and left. It
    had seen none at its new stage, stood at 0.88, and waited an hour for stage 0 until it failed (seed 1022)."""
    faults = (LostStage(at=0.167, stage=0), Relocate(at=0.938, node=3, stage=2))
    outcome = carried(Schedule(seed=1022, replicas=(3, 3, 2), faults=faults))
    assert outcome.seconds < 600.0


@pytest.mark.long
def test_origins_that_come_back_from_old_checkpoints_take_later_stages_past_the_target_within_the_lag() -> None:
    """Two of three origins die late and come back 0.18 and 0.44 of the target behind. Later stages, which go half as
    fast meanwhile, end at 1.25 to 1.31 of it (seed 1015)."""
    faults = (
        LostMessages(at=0.193, node=5, what="answer", calls=17),
        Crash(at=0.791, node=2, back_after=37.85),
        Crash(at=1.0, node=1, back_after=0.46),
    )
    carried(Schedule(seed=1015, replicas=(3, 2, 2), faults=faults))


def test_an_origin_that_was_cut_off_at_the_end_learns_that_the_stages_are_back() -> None:
    """Alone for 18 s it took the later stages for lost. When it saw them again the other origin had come to its end,
    and nothing was looked for any more. It drew nothing beside stages that waited for it, and left after 100 s with a
    step untrained (seed 2034)."""
    faults = (Partition(at=1.0, nodes=(1,), seconds=17.68),)
    outcome = carried(Schedule(seed=2034, replicas=(2, 4, 2), faults=faults))
    assert outcome.seconds < 180.0


@pytest.mark.long
def test_who_took_a_lost_first_stage_over_as_the_others_left_at_the_end_waits_no_hour_for_them() -> None:
    """It began stage 0 anew, at a clock of 0, just as the others, near the target, left for want of that stage. It
    had been as near as they, and did not know that any more (seed 1769)."""
    faults = (Relocate(at=0.139, node=1, stage=1), Freeze(at=0.447, node=4, seconds=2.18), LostStage(at=1.0, stage=0))
    carried(Schedule(seed=1769, replicas=(2, 2, 2), faults=faults, standby_copies=0))


def test_an_exchange_whose_opening_stood_still_moves_no_clock_past_the_target() -> None:
    """One snapshot was of 564 tokens and the other, five inner steps after the agreement, of 808; one of four ended at
    910 of 768."""
    fault = LateMessages(at=1.0, node=0, calls=8, seconds=15.65)
    carried(Schedule(seed=8034, replicas=(4,), faults=(fault,)))


@pytest.mark.long
def test_nobody_moves_for_its_poverty_to_a_stage_that_was_lost_meanwhile() -> None:
    """Both origins died after a replica of stage 1 had planned to strengthen them. Its second look showed nobody at
    stage 0, which it took for a stage all the poorer. It left its state at 766 of 768, and failed as the run ended
    (seed 9014)."""
    carried(Schedule(seed=9014, replicas=(2, 2), faults=(LostStage(at=0.999, stage=0),)))


def test_who_had_just_left_for_a_stage_when_the_run_ended_came_too_late() -> None:
    """Its aim had one origin left, which answered at the look that confirmed the move and was dead by then. The others
    left as at the end (seed 9014 with all of its faults)."""
    faults = (Death(at=0.907, node=1), LostStage(at=0.999, stage=0))
    carried(Schedule(seed=9014, replicas=(2, 2), faults=faults))


@pytest.mark.long
def test_a_stage_is_brought_back_from_the_copy_of_a_stranger_who_is_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    """The node that brings the last of three stages back comes from the first, and has never worked with any node of
    it. That a copy of theirs is taken alone is a warning to the user that runs the node, and was logged as a failure is
    (seed 14019)."""
    faults = (LostStage(at=0.4, stage=2),)
    outcome = carry_out(Schedule(seed=14019, replicas=(2, 2, 2), faults=faults, standby_copies=1))
    assert outcome.breaches == ()
    assert "stage 2 was restored from a copy" in caplog.text
    assert "STAGE 2 IS TAKEN FROM A STRANGER'S COPY ALONE" in caplog.text


@pytest.mark.long
def test_origins_owe_no_end_where_all_of_the_next_stage_turn_hostile() -> None:
    """Both replicas of stage 1 answer busy to all in the end, and an origin stands at 756 of 768. That is near enough
    to leave by rule, and no nearer is to be had (found as seed 211)."""
    faults = tuple(Liar(at=0.97, node=node, how="busy") for node in (2, 3))
    carried(Schedule(seed=3, replicas=(2, 2), faults=faults))


@pytest.mark.long
def test_a_later_stage_waits_for_the_slow_origins_when_the_quick_ones_have_ended() -> None:
    """The slower half of stage 0 was 0.22 of the target behind when the quicker half ended. The stage after it had
    heard of the quick ones in all of its latest 32 microbatches, which are most of so short a run. That kept its clock
    at full pace: it ended at 965 of 768 (seed 73)."""
    faults = (LostMessages(at=0.809, node=1, what="dial", calls=10),)
    carried(Schedule(seed=73, replicas=(4, 3), faults=faults))


@pytest.mark.long
def test_who_sleeps_through_the_end_leaves_in_order_when_it_wakes() -> None:
    """An origin stood still for 38 s at 0.82 of the target, and woke when all had left and their records were gone. It
    waited an hour for a stage without a replica, and failed (seed 5100)."""
    outcome = carried(Schedule(seed=5100, replicas=(4, 4), faults=(Freeze(at=1.0, node=3, seconds=38.2),)))
    assert outcome.seconds < 600.0


@pytest.mark.long
def test_an_origin_does_not_leave_its_stage_for_a_poor_one_when_the_run_ends() -> None:
    """It went at 752 of 768, found all gone, came back without a state, and waited for ever as if the run had not begun
    (seed 8075)."""
    carried(Schedule(seed=8075, replicas=(2, 2, 3), faults=(Death(at=0.1, node=0, silent=False),)))


def test_who_joins_after_a_partition_has_ended_is_on_nobodys_other_side() -> None:
    """The simulator kept all that had been there together apart from later nodes, for ever. Nobody let the joiner in,
    and when all had left it began a swarm of its own and waited for a day."""
    faults = (Partition(at=0.1, nodes=(1,), seconds=3.0), Join(at=0.2))
    carried(Schedule(seed=0, replicas=(2, 2), faults=faults))


def test_who_is_between_two_stages_when_the_others_leave_begins_no_stage_anew() -> None:
    """They had said that the run was over, and that they leave; their last records were taken for them. It sets out
    early enough to come: at 0.888 it was still on its way, at the target, when it was to go back."""
    faults = (Relocate(at=0.666, node=2, stage=0), Relocate(at=0.8, node=0, stage=1), Relocate(at=1.0, node=0, stage=0))
    carried(Schedule(seed=61055, replicas=(2, 3), faults=faults))


def test_who_comes_as_the_others_leave_at_the_end_is_told_that_the_run_has_ended() -> None:
    """It was told that none of five replicas gave its state, all of which had just left (seed 53)."""
    faults = (Join(at=0.167), Join(at=0.838), Join(at=1.0))
    carried(Schedule(seed=53, replicas=(4, 4), faults=faults, standby_copies=0))
