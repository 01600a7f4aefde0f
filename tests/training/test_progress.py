"""Counts, clock and the marks of the fragments."""

from __future__ import annotations

from noloco_node.training.progress import Mark, Progress, staggered


def test_fragments_start_staggered() -> None:
    """One of F is due every H/F steps; with one fragment the count starts at zero."""
    progress = Progress(marks=staggered(4, 10))
    assert progress.steps_since_outer == (0, 2, 5, 7)
    assert [progress.steps_since(fragment) for fragment in (0, 3, None)] == [0, 7, 0]
    assert Progress(steps=3, marks=staggered(1, 10)).steps_since_outer == (3,)
    later = Progress(steps=40, tokens=900, marks=staggered(2, 10, steps=40, tokens=900))
    assert later.steps_since_outer == (0, 5)
    assert later.tokens_since(1) == 0


def test_the_tokens_behind_the_whole_are_the_mean_of_its_fragments() -> None:
    """Each fragment has its own; all of them weigh in the last outer step."""
    progress = Progress(steps=9, tokens=100, marks=(Mark(1, 20), Mark(5, 60)))
    assert [progress.tokens_since(fragment) for fragment in (0, 1, None)] == [80, 40, 60]


def test_an_outer_step_counts_from_its_snapshot_and_keeps_what_came_after() -> None:
    """It may be of the fragment alone, or of all of them; the steps, tokens and clock since the snapshot stay."""
    then = Progress(marks=staggered(2, 10)).after_inner_step(30, 4)
    now = then.after_inner_step(20, 4)
    one = now.after_outer_step(1, then, clock_shift=-5.0)
    assert (one.steps, one.tokens, one.clock, one.outer_rounds) == (2, 50, 195.0, 1)
    assert one.marks == (Mark(0, 0), Mark(1, 30))
    assert now.after_outer_step(None, then, clock_shift=0.0).marks == (Mark(1, 30), Mark(1, 30))


def test_a_copy_keeps_its_own_counts() -> None:
    """Clock and round are the stage peer's; the fragments' counts start anew, staggered."""
    copy = Progress(steps=7, tokens=90, clock=100.0, marks=staggered(2, 10)).as_copy_of(900.0, 12, 10)
    assert (copy.steps, copy.tokens, copy.clock, copy.outer_rounds) == (7, 90, 900.0, 12)
    assert copy.steps_since_outer == (0, 5)
    assert copy.tokens_since(None) == 0
    assert (copy.own_rounds, copy.after_outer_step(None, copy, 0.0).own_rounds) == (0, 1)
    assert copy.after_inner_step(10, 1).as_copy_of(1000.0, 8, 10).own_rounds == 0
