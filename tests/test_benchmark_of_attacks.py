"""The attacks that `benchmarks.attacks` shows, in a small form: what is said of them in `docs/security.md` holds."""

from __future__ import annotations

import pytest

from benchmarks.attacked_bucket import Attack, attacked
from benchmarks.attacks import bucket_table, clocks_of
from noloco_node.directory.sampled_view import PLACES


def test_nodes_of_a_crowded_bucket_are_seen_as_often_as_its_crowd_lets_them_and_all_are_met() -> None:
    """Of two buckets one has three ids that were sought for it to one of its own nodes. These have their part of its
    places, nobody takes the stage for another size than one crowded bucket makes it, and the other bucket is seen
    whole."""
    found = attacked(Attack(honest=96, ids=130, silent=False, observers=1, seconds=300.0, seed=1))
    share = PLACES / (found.attacked.honest + 130)
    assert 0.6 * share < found.attacked.in_view < 1.5 * share
    assert found.unharmed.in_view == 1.0
    assert found.unharmed.met == 1.0
    assert found.attackers_most < 0.6
    assert found.elsewhere == 0.0
    assert found.attacked.error is not None
    assert found.attacked.error < 1.0
    assert bucket_table([found]).count("\n") == 3


@pytest.mark.parametrize("inner_steps", [3, 8])
def test_a_liar_with_a_quarter_of_the_work_moves_a_later_clock_by_a_part_of_the_lag(inner_steps: int) -> None:
    """Not by more than a third of it on average, whichever way it lies, and nobody's word moves it at all where nobody
    lies."""
    means = {word: clocks_of(inner_steps, word, 0.25, seeds=1, steps=200).mean for word in ("none", "behind", "ahead")}
    assert abs(means["none"]) < 0.06
    assert -0.1 < means["behind"] < 0.3
    assert means["none"] < means["ahead"] < 0.33
