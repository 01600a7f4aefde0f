"""Pauses double to their longest, whatever the count, and are spread by half."""

from __future__ import annotations

import random

from noloco_node.tallies import Doubling


def test_pauses_double_up_to_the_longest_and_stay_there() -> None:
    """That holds also after so many that their power would be no number."""
    pauses = Doubling(0.5, 60.0)
    assert [pauses.after(earlier) for earlier in range(-1, 9)] == [0.5, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert pauses.after(10**9) == 60.0


def test_those_who_fail_together_do_not_come_back_together() -> None:
    """About a pause is from half of it to half as much again, and both ends are reached."""
    rng, pauses = random.Random(3), Doubling(1.0, 8.0)
    drawn = [pauses.about(2, rng) for _ in range(1000)]
    assert 2.0 <= min(drawn) < 2.1
    assert 5.9 < max(drawn) <= 6.0
