"""What a hunt holds against a run that ended, by nodes made up for it."""

from __future__ import annotations

import pytest

from noloco_node.simulator.invariants import Run, Told, breaches

OVER = "run 0 (hunt) has come to its end: nobody trains any more"


def told(number: int, stage: int, condition: str, clock: float, error: str = "", *, late: bool = False) -> Told:
    """A node that left nothing open."""
    return Told(number, stage, f"peer {number}", condition, error, None, (), clock, late)


def run(*nodes: Told, fallen: frozenset[int] = frozenset(), lost_stage: bool = False, seconds: float = 60.0) -> Run:
    """To 100 tokens, a step of 4, of two stages."""
    return Run(100.0, 4.0, 12.0, 12.0, seconds, True, nodes, fallen, fallen, 100.0, lost_stage, lossy=True, stages=2)


@pytest.mark.parametrize(("origin", "unfinished"), [(89.0, True), (90.0, False)])
def test_a_run_whose_origins_die_has_been_finished_where_they_came_to_the_last_tenth(
    origin: float, unfinished: bool
) -> None:
    """Whatever the clock of the stage that is left; a dead node of a later stage speaks for nobody."""
    nodes = told(0, 0, "killed", origin), told(1, 1, "killed", 99.0), told(2, 1, "ended", 60.0)
    found = breaches(run(*nodes, fallen=frozenset({0, 1}), lost_stage=True))
    assert [line.partition(":")[0] for line in found] == (["unfinished"] if unfinished else [])


@pytest.mark.parametrize(("clock", "late", "fails"), [(100.0, True, False), (100.0, False, True), (80.0, True, True)])
def test_only_who_comes_late_to_a_run_that_is_over_may_fail_of_that(clock: float, late: bool, fails: bool) -> None:
    """Nobody that began with it, and nobody where the others have not come to the last tenth."""
    found = breaches(run(told(0, 0, "ended", clock), told(1, 0, "failed", 0.0, OVER, late=late)))
    assert any(line.startswith("fails: node 1") for line in found) == fails


@pytest.mark.parametrize(("left", "against"), [(1, []), (2, ["in vain", "fails", "fails"])])
def test_an_hour_is_waited_only_where_fewer_nodes_are_left_than_stages(left: int, against: list[str]) -> None:
    """Somebody may come to the stage that is lost; of two that are left for two stages one should have gone there."""
    waited = "nothing has been trained here for 3601 s, at 69% of the run's target: a stage has no replica (0)"
    nodes = [told(number, 1, "failed" if number < left else "killed", 69.0, waited) for number in range(3)]
    found = breaches(run(*nodes, fallen=frozenset(range(left, 3)), lost_stage=True, seconds=3700.0))
    assert [line.partition(":")[0] for line in found] == against
