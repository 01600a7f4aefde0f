"""The summary's figures are those of the events, and a node that was killed takes nothing else down with it."""

from __future__ import annotations

import json

import pytest

from noloco_node.telemetry.events import AnyEvent, NodeStopped
from noloco_node.telemetry.history import NodeHistory
from noloco_node.telemetry.summary import Summary, divergence_curve, token_counters, training_curve
from tests.telemetry import made_events as made


def last_fifth_killed() -> dict[str, list[AnyEvent]]:
    """The made-up run in which one first-stage node was killed after its account at step 30."""
    events = made.whole_run()
    early = [event for event in events["s0-r1"] if event.time <= 1030.0]
    books = made.account(time=1030.0, drawn=31, trained=29, held_at_end=2, tokens=30 * made.TOKENS)
    events["s0-r1"] = [*early, books]
    return events


def test_a_whole_run_is_summed_up_right() -> None:
    """Each figure against the made-up run, which was made so that they are known."""
    summary = made.summarize(made.whole_run(), merged_loss=1.6)
    assert (summary.run_name, summary.stages, summary.nodes, summary.died) == ("made-up", 2, 4, [])
    assert summary.tokens == 2 * 60 * 512
    assert summary.seconds == 59.0
    assert summary.tokens_per_second == pytest.approx(1024 * 59 / 59.0 + 512 / 59.0)
    assert summary.validation_loss == pytest.approx(made.loss_at(60 * 1024) + 0.1)
    assert summary.validation_loss_merged == 1.6
    assert summary.outer_steps_taken == dict.fromkeys(made.NAMES, 6)
    assert summary.distinct_partners == dict.fromkeys(made.NAMES, 1)
    assert summary.per_node["s1-r0"].partners == {"s1-r1": 6}
    assert [point.replica_divergence for point in summary.replica_divergence] == pytest.approx(list(made.SPREADS))
    assert [point.step for point in summary.replica_divergence] == [10, 20, 30, 40, 50, 60]
    assert summary.bytes_sent["s0-r0"] == {"activations": 1000, "exchange": 500}


def test_the_books_are_summed_over_the_first_stage_and_close() -> None:
    """Only stage 0 draws; retries and repeats may happen at any stage."""
    books = made.summarize(made.whole_run()).microbatches
    assert (books.drawn, books.trained, books.dropped, books.held_at_end, books.requeued) == (120, 116, 0, 4, 6)
    assert books.drawn == books.trained + books.dropped + books.held_at_end
    assert (books.retried, books.repeated) == (16, 4)


def test_who_has_left_stage_0_counts_with_what_it_did_there() -> None:
    """A node that moved was left out of tokens and books as if it had never drawn; what it trains elsewhere is none."""
    events = made.whole_run()
    whole = made.summarize(events)
    *rows, _ = events["s0-r1"]
    moved = made.moved(time=1060.5, from_stage=0, stage=1)
    events["s0-r1"] = [*rows, moved, made.inner_step(61), made.account(time=1070.0, drawn=0, trained=0, held_at_end=0)]
    summary = made.summarize(events)
    assert (summary.tokens, summary.tokens_per_second) == (whole.tokens, whole.tokens_per_second)
    assert summary.microbatches.drawn == whole.microbatches.drawn
    assert summary.per_node["s0-r1"].tokens == whole.per_node["s0-r1"].tokens + made.TOKENS
    events["s0-r1"].append(made.moved(time=1080.0, from_stage=1, stage=0))
    assert made.summarize(events).tokens == whole.tokens
    again = [made.inner_step(62), made.account(time=1090.0, drawn=3, trained=3, held_at_end=0)]
    summary = made.summarize({**events, "s0-r1": [*events["s0-r1"], *again]})
    assert summary.tokens == whole.tokens + made.TOKENS
    assert summary.microbatches.drawn == whole.microbatches.drawn + 3


def test_of_one_node_alone_all_counts_wherever_it_was() -> None:
    """A volunteer's own report: its node alone, which has moved."""
    rows = made.whole_run()["s0-r0"][:-1]
    moved = made.moved(time=1060.5, from_stage=0, stage=1)
    assert made.summarize({"node": [*rows, moved, made.inner_step(61)]}).tokens == 61 * made.TOKENS


def test_what_each_process_counts_anew_is_counted_over_all_of_them() -> None:
    """Bytes, refusals and the time of the compute thread: only the last process was counted. A move is no new one."""
    first = [made.started("s0-r0"), made.account(time=1010.0, bytes_sent={"state": 1, "exchange": 2})]
    second = [
        made.started("s0-r0").model_copy(update={"time": 2000.0}),
        made.account(time=2010.0, bytes_sent={"exchange": 30}),
        made.moved(time=2011.0, from_stage=0, stage=1),
        made.account(time=2020.0, bytes_sent={"exchange": 40}, bytes_received={"exchange": 7}),
    ]
    without = made.started("s0-r0").model_copy(update={"time": 3000.0})
    for events in ([*first, *second], [*first, *second, without], [*first, without, *second]):
        history = NodeHistory.of("s0-r0", events)
        assert history.received == {"gradients": 900, "exchange": 7}
        summary = made.summarize({"s0-r0": events})
        assert summary.bytes_sent == {"s0-r0": {"state": 1, "exchange": 42}}
        assert (summary.per_node["s0-r0"].refused, summary.per_node["s0-r0"].busy_seconds) == ({"busy": 10}, 84.0)
    assert NodeHistory.of("s0-r0", []).sent == {}


def test_the_worst_lag_is_that_of_all_accounts() -> None:
    """Each says the worst since the one before: the last alone was taken for the worst of all."""
    events = made.whole_run()
    events["s0-r0"].insert(1, made.account(time=1000.5, loop_lag_seconds=9.0))
    assert made.summarize(events).per_node["s0-r0"].worst_loop_lag_seconds == 9.0


def test_training_loss_is_the_mean_by_tokens_of_the_last_part_of_the_clock() -> None:
    """Steps 57 to 60 are the last 5 %; a step of three times the tokens counts three times."""
    events = made.whole_run()
    (place,) = [i for i, event in enumerate(events["s0-r0"]) if event.event == "inner_step" and event.step == 60]
    events["s0-r0"][place] = made.inner_step(60, loss=5.0, tokens=3 * made.TOKENS)
    losses = [made.loss_at(step * 1024) for step in (57, 58, 59)]
    expected = (2 * sum(losses) + made.loss_at(60 * 1024) + 3 * 5.0) / (2 * 3 + 1 + 3)
    assert made.summarize(events).training_loss == pytest.approx(expected)


def test_a_killed_node_counts_with_what_it_wrote() -> None:
    """Its last account is what there is; it is named as died, and the others' figures stand."""
    summary = made.summarize(last_fifth_killed())
    assert summary.died == ["s0-r1"]
    assert summary.per_node["s0-r1"].ended == "died"
    assert summary.per_node["s0-r0"].ended == "target_reached"
    assert summary.tokens == (60 + 30) * 512
    assert summary.outer_steps_taken["s0-r1"] == 3
    books = summary.microbatches
    assert (books.drawn, books.trained, books.held_at_end) == (91, 87, 4)
    assert summary.per_node["s0-r1"].microbatches.drawn == 31


def test_a_node_that_never_came_up_is_only_named() -> None:
    """No event at all is no reason to fail."""
    events = made.whole_run() | {"s1-r1": []}
    summary = made.summarize(events)
    assert summary.died == ["s1-r1"]
    assert summary.per_node["s1-r1"].stage is None
    assert summary.per_node["s1-r0"].partners == {made.peer_of("s1-r1"): 6}
    assert made.summarize({"s0-r0": []}).tokens == 0


def test_only_paired_outer_steps_count_as_partners_and_aborted_ones_as_no_round() -> None:
    """Alone and caught-up steps are rounds without an averaging partner."""
    events = {
        "s0-r0": [
            made.started("s0-r0"),
            made.outer_step(1, "s0-r1"),
            made.outer_step(2, None, kind="no_partner", role="none", replica_divergence=None),
            made.outer_step(2, "s0-r1", kind="aborted", reason="busy", replica_divergence=None),
            made.outer_step(3, "s1-r1", kind="caught_up", replica_divergence=None),
        ]
    }
    summary = made.summarize(events)
    assert summary.outer_steps_taken == {"s0-r0": 3}
    assert summary.distinct_partners == {"s0-r0": 1}
    assert summary.per_node["s0-r0"].outer_steps == {"aborted": 1, "no_partner": 1, "caught_up": 1, "paired": 1}
    assert [point.outer_steps_taken for point in summary.replica_divergence] == [1]


def test_the_spread_of_a_round_is_the_mean_over_the_nodes_that_paired_in_it() -> None:
    """A node without a partner in a round does not pull its mean down."""
    histories = [
        NodeHistory.of("a", [made.outer_step(1, "s0-r1", replica_divergence=1e-6, step=10)]),
        NodeHistory.of("b", [made.outer_step(1, "s0-r0", replica_divergence=3e-6, step=14)]),
        NodeHistory.of("c", [made.outer_step(1, None, kind="no_partner", replica_divergence=None, step=90)]),
    ]
    (point,) = divergence_curve(histories)
    assert (point.replica_divergence, point.step, point.nodes) == (pytest.approx(2e-6), 12, 2)


def test_a_step_that_was_not_finite_does_not_poison_the_curve() -> None:
    """NaN losses are left out of means, not spread into them."""
    events = made.whole_run()
    events["s0-r0"].insert(-2, made.inner_step(60, loss=float("nan"), skipped=True, tokens=0))
    curve = training_curve(token_counters([NodeHistory.of(name, rows) for name, rows in events.items()]))
    assert curve
    assert all(1.0 < point.loss < 6.0 for point in curve)


def test_the_summary_is_plain_json_and_reads_back() -> None:
    """`summary.json` loads as the same summary."""
    summary = made.summarize(made.whole_run(), merged_loss=1.6)
    text = json.dumps(summary.as_json(), allow_nan=False)
    assert Summary.model_validate_json(text) == summary


def test_a_node_that_was_interrupted_did_not_die() -> None:
    """Its last event says how it ended."""
    events = made.whole_run()
    last = events["s1-r0"][-1]
    assert isinstance(last, NodeStopped)
    events["s1-r0"][-1] = last.model_copy(update={"reason": "interrupted"})
    summary = made.summarize(events)
    assert summary.died == []
    assert summary.per_node["s1-r0"].ended == "interrupted"


def test_the_time_in_which_a_swarm_was_down_is_no_training_time() -> None:
    """Two lives of ten steps, one a second, a night between them: the speed is that of the training."""
    lives = [
        [made.started("s0-r0").model_copy(update={"time": begun})]
        + [made.inner_step(step, time=begun + step) for step in range(1, 11)]
        for begun in (1000.0, 50_000.0)
    ]
    summary = made.summarize({"s0-r0": [event for life in lives for event in life]})
    assert summary.tokens == 20 * made.TOKENS
    assert summary.seconds == pytest.approx(18.0)
    assert summary.tokens_per_second == pytest.approx(made.TOKENS)


def test_averages_after_the_training_are_no_part_of_the_spread() -> None:
    """At the end replicas average again without having trained: what that finds is what averaging has left."""
    events = made.whole_run()
    for name, rows in events.items():
        rows.insert(-2, made.outer_step(7, made.stage_peer_of(name), step=60, replica_divergence=1e-11, clock=70_000.0))
    curve = made.summarize(events).replica_divergence
    assert [point.outer_steps_taken for point in curve] == [1, 2, 3, 4, 5, 6]
    assert max(point.clock for point in curve) <= max(step.clock for step in NodeHistory.of("a", events["s0-r0"]).inner)
    resumed = [made.outer_step(1, "s0-r1", step=10), made.outer_step(2, "s0-r1", step=8), made.outer_step(3, "s0-r1")]
    assert len(divergence_curve([NodeHistory.of("a", resumed)])) == 3, "a node that went on from before counts on"
