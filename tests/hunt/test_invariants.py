"""What a hunt holds against a run that ended, by nodes made up for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from noloco_node.identity.addresses import peers_unreachable
from noloco_node.simulator.invariants import Run, Told, breaches, tied_past
from noloco_node.telemetry.events import InnerStep, OuterStep
from noloco_node.training.progress import tied_pace

OVER = "run 0 (hunt) has come to its end: nobody trains any more"


def told(
    number: int,
    stage: int,
    condition: str,
    clock: float,
    error: str = "",
    *,
    events: Sequence[InnerStep | OuterStep] = (),
    late: bool = False,
    cut_off: bool = False,
    outside: float = 0.0,
    ended_at: float = 60.0,
) -> Told:
    """A node that left nothing open."""
    peer = f"peer {number}"
    return Told(
        number,
        stage,
        peer,
        condition,
        error,
        None,
        events,
        clock,
        late,
        cut_off=cut_off,
        outside=outside,
        ended_at=ended_at,
    )


def run(*nodes: Told, fallen: frozenset[int] = frozenset(), lost_stage: bool = False, seconds: float = 60.0) -> Run:
    """To 100 tokens, a step of 4, four under way, of two stages."""
    return Run(
        100.0, 4.0, 12.0, 12.0, 4.0, seconds, True, nodes, fallen, fallen, 40.0, 20.0, lost_stage, lossy=True, stages=2
    )


@pytest.mark.parametrize(("origin", "unfinished"), [(85.0, True), (86.0, False)])
def test_a_run_whose_origins_die_has_been_finished_where_they_came_to_the_last_tenth(
    origin: float, unfinished: bool
) -> None:
    """The clock of the stage that is left does not matter. It knows by what they sent that they would have come there
    with what they had under way. A dead node of a later stage speaks for nobody."""
    nodes = told(0, 0, "killed", origin), told(1, 1, "killed", 99.0), told(2, 1, "ended", 60.0)
    found = breaches(run(*nodes, fallen=frozenset({0, 1}), lost_stage=True))
    assert [line.partition(":")[0] for line in found] == (["unfinished"] if unfinished else [])


@pytest.mark.parametrize(("clock", "late", "fails"), [(100.0, True, False), (100.0, False, True), (80.0, True, True)])
def test_only_who_comes_late_to_a_run_that_is_over_may_fail_of_that(clock: float, late: bool, fails: bool) -> None:
    """Nobody that began with it, and nobody where the others have not come to the last tenth."""
    found = breaches(run(told(0, 0, "ended", clock), told(1, 0, "failed", 0.0, OVER, late=late)))
    assert any(line.startswith("fails: node 1") for line in found) == fails


@pytest.mark.parametrize(
    ("outside", "late", "against"), [(8.0, True, []), (8.0, False, ["fails"]), (80.0, True, ["outside"])]
)
def test_who_comes_when_all_are_gone_may_give_up_but_nobody_is_kept_out_of_a_run(
    outside: float, late: bool, against: list[str]
) -> None:
    """Only faults that end by then keep anybody out; no other invariant tells of a node that was kept out."""
    nobody = str(peers_unreachable({"/ip4/127.0.0.1/tcp/7000/p2p/QmX": "it does not answer"}))
    found = breaches(run(told(0, 0, "ended", 100.0), told(1, 0, "failed", 0.0, nobody, late=late, outside=outside)))
    assert [line.partition(":")[0] for line in found] == against


@pytest.mark.parametrize(("left", "against"), [(1, []), (2, ["in vain", "fails", "fails"])])
def test_an_hour_is_waited_only_where_fewer_nodes_are_left_than_stages(left: int, against: list[str]) -> None:
    """Somebody may come to the stage that is lost; of two that are left for two stages one should have gone there."""
    waited = "nothing has been trained here for 3601 s, at 69% of the run's target: a stage has no replica (0)"
    nodes = [told(number, 1, "failed" if number < left else "killed", 69.0, waited) for number in range(3)]
    found = breaches(run(*nodes, fallen=frozenset(range(left, 3)), lost_stage=True, seconds=3700.0))
    assert [line.partition(":")[0] for line in found] == against


@pytest.mark.parametrize(
    ("other", "cut_off", "short"), [(100.0, True, False), (100.0, False, True), (95.0, True, True)]
)
def test_an_origin_that_was_cut_off_may_be_short_of_the_target_where_another_came_to_it(
    other: float, cut_off: bool, short: bool
) -> None:
    """Alone it can train nothing any more; where none came to the end they could have gone on together."""
    found = breaches(run(told(0, 0, "ended", 91.0, cut_off=cut_off), told(1, 0, "ended", other, cut_off=cut_off)))
    assert any(line.startswith("short: node 0") for line in found) == short


@pytest.mark.parametrize(("ended_at", "short"), [(350.0, True), (370.0, False)])
def test_an_origin_that_most_others_have_left_long_ago_may_be_short_of_the_target(ended_at: float, short: bool) -> None:
    """Fifteen graces after most have ended the later stages leave: one of many would have to train the whole batch."""
    others = [told(number, 0, "ended", 100.0) for number in (1, 2)]
    found = breaches(run(told(0, 0, "ended", 91.0, ended_at=ended_at), *others))
    assert any(line.startswith("short: node 0") for line in found) == short


@pytest.mark.parametrize(
    ("stage", "late_seconds", "held_up", "most"),
    [
        (0, 0.0, False, 112.0),
        (0, 0.0, True, 132.0),
        (0, 5.1, False, 112.0),
        (1, 0.0, True, 136.0),
        (1, 20.0, False, 141.0),
    ],
)
def test_late_messages_take_clocks_further_past_the_target(
    stage: int, late_seconds: float, held_up: bool, most: float
) -> None:
    """An origin's clock goes further by half of the lag, if an opening so late is taken still. Those of later stages go
    further by an eighth of it, for which the quick origins are believed."""
    for clock in (most, most + 1.0):
        held = replace(run(told(0, stage, "ended", clock)), late_seconds=late_seconds, held_up=held_up)
        assert any(line.startswith("past") for line in breaches(held)) == (clock > most)


def test_a_later_stage_passes_the_target_by_what_its_pace_allows_while_the_last_origins_train() -> None:
    """Step by step as `tied_pace` ties it, beside others that stand at the target."""
    lag, steps, past = 384.0, 100_000, 0.0
    for _ in range(steps):
        past += tied_pace(-past, lag) * lag / steps
    assert tied_past(lag) == pytest.approx(past, rel=1e-3)


@pytest.mark.parametrize(("ended_at", "against"), [(60.0, []), (1801.0, ["in vain"])])
def test_who_owes_nothing_may_wait_for_as_long_as_it_likes(ended_at: float, against: list[str]) -> None:
    """A node of which there were two waited for an hour for a stage whose nodes had come to the end."""
    nodes = (
        told(0, 0, "ended", 100.0),
        told(1, 1, "ended", 100.0, ended_at=ended_at),
        told(2, 1, "failed", 9.0, "in vain"),
    )
    found = breaches(replace(run(*nodes, seconds=3700.0), struck=frozenset({2})))
    assert [line.partition(":")[0] for line in found] == against


@pytest.mark.parametrize(("late", "short"), [(False, True), (True, False)])
def test_who_comes_late_to_a_run_with_a_twin_owes_no_more_than_that_has_trained(late: bool, short: bool) -> None:
    """Two with one identity share the work of one, and are the only donors at the run's end (seed 3314)."""
    nodes = told(0, 0, "ended", 100.0), told(1, 1, "ended", 50.0, late=late)
    found = breaches(replace(run(*nodes), hostile=True))
    assert any(line.startswith("short: node 1") for line in found) == short


@pytest.mark.parametrize(("other", "against"), [(100.0, []), (95.0, ["in vain", "fails"])])
def test_who_was_cut_off_at_the_end_may_wait_for_others_where_one_came_to_it(other: float, against: list[str]) -> None:
    """It has not seen them leave: they may have died, and others come in their place."""
    waited = "nothing has been trained here for 3601 s, at 91% of the run's target: a stage has no replica (1)"
    nodes = told(0, 0, "failed", 91.0, waited, cut_off=True), told(1, 0, "ended", other), told(2, 1, "ended", other)
    found = breaches(run(*nodes, seconds=3700.0))
    assert [line.partition(":")[0] for line in found if not line.startswith("short")] == against


@pytest.mark.parametrize(("late", "clock", "past"), [(False, 113.0, True), (True, 124.0, False), (True, 125.0, True)])
def test_who_joins_late_may_meet_who_has_passed_the_target_and_trains_its_own_round(
    late: bool, clock: float, past: bool
) -> None:
    """Two rounds in all, where others have one."""
    found = breaches(run(told(0, 0, "ended", clock, late=late)))
    assert any(line.startswith("past") for line in found) == past


@pytest.mark.parametrize(("work", "past"), [(12.0, False), (13.0, True)])
def test_what_an_origin_trains_past_the_target_itself_is_a_round_whatever_exchanges_do(work: float, past: bool) -> None:
    """An exchange that takes it back below the target, and one that came to nothing, change nothing of that."""
    events = (
        stepped(90.0),
        averaged(110.0),
        stepped(110.0 + work - 2.0),
        averaged(60.0, "aborted"),
        stepped(110.0 + work),
        averaged(99.0),
    )
    held = replace(run(told(0, 0, "ended", 99.0, events=events)), late_seconds=5.0)
    assert any("has trained" in line for line in breaches(held)) == past


def stepped(clock: float) -> InnerStep:
    """An inner step after which the clock is that."""
    return InnerStep.model_construct(clock=clock)


def averaged(clock: float, kind: str = "paired") -> OuterStep:
    """An outer step after which the clock is that."""
    return OuterStep.model_construct(clock=clock, kind=kind, partner=None, one_sided=False)
