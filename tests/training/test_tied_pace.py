"""A later stage's clock stays with its origins, whatever multiplies its work or miscounts its replicas."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noloco_node.training.progress import FASTEST_PACE, SLOWEST_PACE, Progress, tied_pace

LAG, TARGET, STEP = 40_000.0, 2_000_000.0, 1_000


@pytest.mark.parametrize("error", [0.75, 1.0, 1.05, 1.15, 1.293, 1.39])
def test_clock_over_target_stays_within_two_percent_over_eight_stages(error: float) -> None:
    """Each later stage counts up to `error` times the tokens that there are, the last one most; what it hears of its
    origins is a few steps old. Untied, its clock ends as far off as its count."""
    stages = [Progress() for _ in range(8)]
    heard: list[float] = []
    while stages[0].clock < TARGET:
        stages[0] = stages[0].after_inner_step(STEP, 1)
        heard.append(stages[0].clock)
        for stage in range(1, 8):
            counted = round(STEP * (1.0 + (error - 1.0) * stage / 7))
            pace = tied_pace(heard[max(0, len(heard) - 1 - stage)] - stages[stage].clock, LAG)
            stages[stage] = stages[stage].after_inner_step(counted, 1, pace)
    assert all(abs(stage.clock / TARGET - 1.0) <= 0.02 for stage in stages)


@given(lead=st.none() | st.floats(-1e18, 1e18))
def test_whatever_is_said_of_the_origins_time_neither_stands_still_nor_runs_away(lead: float | None) -> None:
    """The bound of a lie; and a stage that knows nothing keeps its own time."""
    pace = tied_pace(lead, LAG)
    assert SLOWEST_PACE <= pace <= FASTEST_PACE
    assert lead is not None or pace == 1.0


def test_equal_clocks_are_left_alone() -> None:
    """An exact swarm counts exact tokens."""
    assert tied_pace(0.0, LAG) == 1.0
