"""How far a partner may move a replica, and who has a say in it."""

from __future__ import annotations

import math

import pytest

from noloco_node.outer.clipping import DifferenceBound


def test_zero_voices_never_scale_a_difference_to_nothing() -> None:
    """Replicas that have not moved say nothing about distances: they do not lower the bound."""
    bound = DifferenceBound(3.0)
    assert bound.bound(0.0) == math.inf
    assert bound.scale(7.0, 0.0) == 1.0
    for peer in ("a", "b", "c"):
        bound.accept(peer, 0.0)
    assert bound.scale(7.0, 0.0) == 1.0
    assert bound.bound(2.0) == 6.0
    assert bound.scale(12.0, 2.0) == pytest.approx(0.5)
    bound.accept("d", 1.0)
    assert bound.scale(12.0, 0.0) == pytest.approx(0.25)


def test_one_peer_is_one_voice() -> None:
    """However often it comes, the low median over it and the own motion stays at the smaller of the two."""
    bound = DifferenceBound(3.0)
    for _ in range(100):
        bound.accept("loud", 1e9)
    assert bound.bound(1.0) == 3.0
