"""The walk: every window once a pass, another order each pass and peer, exact resume, constant memory."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from noloco_node.data.sampler import Permutation, SamplerPosition, WindowSampler


@given(st.integers(1, 100), st.text(max_size=20))
@settings(max_examples=15)
@example(255, "")
@example(256, "")
@example(257, "")
def test_a_permutation_hits_everything_once(count: int, key: str) -> None:
    """A bijection for every count, powers of two and their neighbours included."""
    order = Permutation(count, key)
    assert sorted(order[position] for position in range(len(order))) == list(range(count))


def test_a_permutation_looks_random() -> None:
    """Neighbours land apart: the mean distance of random neighbours is a third of the range; few stay in order."""
    count = 3000
    order = [Permutation(count, "key")[position] for position in range(count)]
    distances = [abs(a - b) for a, b in pairwise(order)]
    assert 0.3 < sum(distances) / len(distances) / count < 0.37
    assert sum(b > a for a, b in pairwise(order)) / count == pytest.approx(0.5, abs=0.04)


@given(st.integers(1, 60), st.integers(0, 9), st.lists(st.integers(0, 50), max_size=8))
def test_a_walk_sees_each_window_once_a_pass(count: int, seed: int, chunks: list[int]) -> None:
    """Whatever the sizes of the bites, windows counted differ by at most one."""
    walk = WindowSampler(count, seed, "peer")
    seen = [window for chunk in chunks for window in walk.take(chunk)]
    assert len(seen) == sum(chunks)
    for start in range(0, len(seen), count):
        part = Counter(seen[start : start + count])
        assert not part or max(part.values()) == 1
    assert walk.position == SamplerPosition(epoch=len(seen) // count, offset=len(seen) % count)


@given(st.integers(1, 60), st.integers(0, 150), st.integers(0, 60))
def test_a_walk_resumes_exactly(count: int, before: int, after: int) -> None:
    """From its position, sent through JSON, a new walk goes on as the old one."""
    walk = WindowSampler(count, 5, "peer")
    walk.take(before)
    position = SamplerPosition.model_validate_json(walk.position.model_dump_json())
    assert WindowSampler(count, 5, "peer", position).take(after) == walk.take(after)


def test_passes_peers_and_seeds_walk_in_different_orders() -> None:
    """No two of them share an order."""
    walks = [WindowSampler(50, seed, peer) for seed in (0, 1) for peer in ("a", "b")]
    orders = [tuple(walk.take(50)) for walk in walks for _ in range(2)]
    assert len(set(orders)) == 8


def test_an_order_is_the_same_on_every_machine() -> None:
    """Written down, so that a change that would break a resume is seen."""
    assert WindowSampler(1000, 0, "peer").take(6) == [803, 82, 233, 741, 651, 616]


def test_a_walk_over_billions_of_windows_needs_no_memory() -> None:
    """No list of indices is ever made."""
    tracemalloc.start()
    taken = WindowSampler(10**12, 0, "peer").take(100)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(set(taken)) == 100
    assert max(taken) > 10**11
    assert peak < 100_000


def test_impossible_positions_are_refused() -> None:
    """A position of another text, or a damaged one."""
    with pytest.raises(ValueError, match="offset 10 in a pass over 10"):
        WindowSampler(10, 0, "peer", SamplerPosition(epoch=0, offset=10))
    with pytest.raises(ValueError, match="offset 0 in a pass over 0 windows"):
        WindowSampler(0, 0, "peer")
    with pytest.raises(ValidationError):
        SamplerPosition(epoch=-1)
