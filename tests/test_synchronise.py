"""The times of synchronising in pairs and all at once, where every message takes the same."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.synchronise import Times, by_ring, by_tree, in_pairs, log_normal


def one_second(shape: tuple[int, ...]) -> Times:
    return np.ones(shape)


@pytest.mark.parametrize("replicas", [2, 8, 64])
def test_equal_messages_take_as_many_rounds_as_theory_says(replicas: int) -> None:
    ready = np.zeros((1, replicas))
    assert in_pairs(ready, one_second).max() == 1.0
    assert by_tree(ready, one_second).max() == 2 * math.log2(replicas)
    assert by_ring(ready, one_second).max() == 2 * (replicas - 1)


def test_who_is_late_holds_up_its_partner_alone_in_pairs_and_everybody_in_a_tree_or_ring() -> None:
    ready = np.zeros((1, 8))
    ready[0, 5] = 100.0
    assert (in_pairs(ready, one_second) > 100).sum() == 2
    assert (by_tree(ready, one_second) > 100).sum() == 8
    assert (by_ring(ready, one_second) > 100).sum() == 8


def test_an_odd_one_out_is_done_at_once() -> None:
    assert in_pairs(np.zeros((1, 3)), one_second).tolist() == [[1.0, 1.0, 0.0]]


def test_a_tree_of_other_than_a_power_of_two_is_refused() -> None:
    with pytest.raises(ValueError, match="power of two"):
        by_tree(np.zeros((1, 6)), one_second)


def test_log_normal_times_have_the_mean_that_was_asked_for() -> None:
    drawn = log_normal(np.random.default_rng(1), 0.2, 0.7)((200_000,))
    assert drawn.mean() == pytest.approx(0.2, rel=0.01)
