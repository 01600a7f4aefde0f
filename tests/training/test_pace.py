"""How fast a replica says that it trains."""

from __future__ import annotations

import pytest

from noloco_node.training.progress import Capacity, Pace


def test_bursts_of_steps_do_not_raise_the_speed() -> None:
    """Nine steps within a millisecond each and one after a second are ten steps a second, not hundreds."""
    pace, now = Pace(), 0.0
    assert pace.tokens_per_second == 0.0
    for step in range(1, 2001):
        now += 1.0 if step % 10 == 0 else 0.001
        pace.step(100, now)
        if step > 1000:
            assert 500 < pace.tokens_per_second < 2000, step


def test_the_first_step_only_starts_the_watch() -> None:
    """It has no beginning; from the second on, an even pace is known exactly."""
    pace = Pace()
    pace.step(64, 100.0)
    assert pace.tokens_per_second == 0.0
    pace.step(64, 100.5)
    assert pace.tokens_per_second == pytest.approx(128.0)
    assert pace.step_seconds == pytest.approx(0.5)


def test_capacity_leaves_out_the_time_that_a_device_waits() -> None:
    """A slow beginning is forgotten, and work without tokens counts with the next tokens."""
    capacity = Capacity()
    assert capacity.look(0, 100.0) == 0.0
    assert capacity.look(10, 110.0) == pytest.approx(1.0), "the first steps compile"
    assert capacity.look(10, 111.5) == pytest.approx(1.0), "an evaluation"
    tokens, busy = 10, 111.5
    for _ in range(200):
        tokens, busy = tokens + 1000, busy + 2.0
        capacity.look(tokens, busy)
    assert capacity.look(tokens, busy) == pytest.approx(500.0, rel=0.01)


def test_the_tokens_of_earlier_lives_are_not_trained_in_the_first_second_of_this_one() -> None:
    """A node that was started again at 400,000 tokens could do 400,880 a second, it said, where it did 7,000."""
    capacity = Capacity()
    assert capacity.look(400_000, 3.0) == 0.0
    assert capacity.look(407_000, 4.0) == pytest.approx(7000.0)
