"""Counts, clock and the mark of the last outer step."""

from __future__ import annotations

from noloco_node.training.progress import Progress


def test_an_outer_step_counts_from_its_snapshot_and_keeps_what_came_after() -> None:
    """The steps, tokens and clock since the snapshot stay."""
    then = Progress().after_inner_step(30, 4)
    now = then.after_inner_step(20, 4)
    one = now.after_outer_step(then, clock_shift=-5.0)
    assert (one.steps, one.tokens, one.clock, one.outer_rounds) == (2, 50, 195.0, 1)
    assert (one.steps_since_outer, one.tokens_since_outer) == (1, 20)


def test_a_copy_keeps_its_own_counts() -> None:
    """Clock and round are the stage peer's; the counts since an outer step start anew."""
    copy = Progress(steps=7, tokens=90, clock=100.0).as_copy_of(900.0, 12)
    assert (copy.steps, copy.tokens, copy.clock, copy.outer_rounds) == (7, 90, 900.0, 12)
    assert (copy.steps_since_outer, copy.tokens_since_outer) == (0, 0)
    assert (copy.own_rounds, copy.after_outer_step(copy, 0.0).own_rounds) == (0, 1)
    assert copy.after_inner_step(10, 1).as_copy_of(1000.0, 8).own_rounds == 0
