"""Slow ways between stage peers are used less where there are others, and never not at all."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noloco_node.averaging.matchmaking import Dial, PairingState, Window, decide
from noloco_node.identity.peer_id import PeerId
from noloco_node.peers.hop import LEAST_WEIGHT, LONGEST_MEMORY_SECONDS
from noloco_node.peers.partners import Partners, way_weights

PEERS = [PeerId(name) for name in ("a", "b", "c", "d")]


@given(st.lists(st.none() | st.floats(1e-9, 1e3), min_size=1, max_size=12))
def test_no_way_is_ever_given_up_and_the_best_is_never_held_back(seconds: list[float | None]) -> None:
    """Whatever was measured: weights lie between the least and 1, and somebody has 1, as has each that is not known."""
    weights = way_weights(seconds)
    assert all(LEAST_WEIGHT <= weight <= 1.0 for weight in weights)
    assert all(weight == 1.0 for second, weight in zip(seconds, weights, strict=True) if second is None)
    assert max(weights) == 1.0


def test_stage_peers_with_slow_ways_are_dialled_less_and_tried_anew_later() -> None:
    """Ten times as slow: a sixteenth. After a while a slow one counts as any other."""
    ways = Partners()
    for peer, seconds in zip(PEERS, (1.0, 1.1, 10.0, 0.9), strict=True):
        ways.exchanged(peer, seconds, 1_000_000, 0.0)
    assert ways.weights(PEERS, 1.0) == [1.0, 1.0, LEAST_WEIGHT, 1.0]
    rng, drawn = random.Random(2), Counter[PeerId]()
    for _ in range(3000):
        state = PairingState(10, 10, lambda: PEERS, False, 0.0, weigh=lambda f: ways.weights(f, 5.0))
        decision = decide(state, Window(10, 5), now=1.0, rng=rng)
        assert isinstance(decision, Dial)
        drawn[decision.partner] += 1
    assert drawn[PEERS[2]] == pytest.approx(3000 / 49, abs=40)
    assert min(drawn[peer] for peer in PEERS if peer != PEERS[2]) > 800
    assert ways.weights(PEERS, LONGEST_MEMORY_SECONDS + 1.0) == [1.0] * 4
    ways.exchanged(PEERS[2], 1.0, 1_000_000, LONGEST_MEMORY_SECONDS + 1.0)
    assert ways.weights(PEERS, LONGEST_MEMORY_SECONDS + 2.0) == [1.0] * 4
