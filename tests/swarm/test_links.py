"""Relayed and slow ways are used less where there are others, and never not at all."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noloco_node.averaging.matchmaking import Dial, PairingState, Window, decide
from noloco_node.identity.peer_id import PeerId
from noloco_node.peers.latency import LEAST_WEIGHT, LONGEST_MEMORY_SECONDS
from noloco_node.peers.partners import RELAYED_WEIGHT, Partners, way_weights
from noloco_node.pipeline.routing import Candidate, LoadBalancer, choose_peer

PEERS = [PeerId(name) for name in ("a", "b", "c", "d")]
WAY = st.tuples(st.none() | st.floats(1e-9, 1e3), st.booleans())


def routed(
    relayed: set[PeerId], busy: Collection[PeerId] = (), loads: dict[PeerId, int] | None = None
) -> Counter[PeerId | None]:
    """The number that each peer gets of 4,000 microbatches."""
    rng = random.Random(0)
    given = [Candidate(peer, 0, (loads or {}).get(peer, 0), relayed=peer in relayed) for peer in PEERS]
    chosen = (choose_peer("balanced", given, own_rank=0, now=1.0, rng=rng, excluded=busy) for _ in range(4000))
    return Counter(chosen)


def test_relayed_peers_get_fewer_microbatches_where_others_are_connected_directly() -> None:
    """They get a quarter of what a direct one gets, and all that is left if the direct ones are busy. They get their
    even part if all are relayed; and none is chosen by its load over a direct one."""
    counts = routed({PEERS[0]})
    assert counts[PEERS[0]] == pytest.approx(4000 / 13, abs=80)
    assert min(counts[peer] for peer in PEERS[1:]) > 1050
    assert set(routed(set(PEERS[:2]), busy=set(PEERS[2:]))) == set(PEERS[:2])
    assert routed(set(PEERS)) == routed(set()), "nothing changes, to the last draw"
    loaded = routed({PEERS[0]}, loads=dict.fromkeys(PEERS[1:], 9))
    assert loaded[PEERS[0]] == pytest.approx(4000 / 13, abs=80)


def test_the_book_asks_who_is_relayed_when_it_chooses() -> None:
    """What is known changes while a node lives."""
    balancer, relayed = LoadBalancer("balanced", random.Random(1), lambda: 0.0), {PEERS[0]}
    balancer.update(PEERS[:2], 0)
    balancer.relayed = lambda: relayed
    before = Counter(balancer.choose() for _ in range(1000))
    relayed.clear()
    after = Counter(balancer.choose() for _ in range(1000))
    assert before[PEERS[0]] == pytest.approx(200, abs=50)
    assert after[PEERS[0]] == pytest.approx(500, abs=60)


@given(st.lists(WAY, min_size=1, max_size=12))
def test_no_way_is_ever_given_up_and_the_best_is_never_held_back(ways: list[tuple[float | None, bool]]) -> None:
    """Whatever was measured: weights lie between the least and 1, somebody has 1, and relays count for nothing where
    all are relayed."""
    seconds, relayed = [each[0] for each in ways], [each[1] for each in ways]
    weights = way_weights(seconds, relayed)
    assert all(LEAST_WEIGHT <= weight <= 1.0 for weight in weights)
    direct = [row for row in zip(seconds, weights, relayed, strict=True) if not row[2]]
    for second, weight, _ in direct:
        if second is None:
            assert weight == 1.0
    if all(relayed):
        assert weights == way_weights(seconds, [False] * len(ways))
        assert max(weights) == 1.0


def test_stage_peers_with_slow_or_relayed_ways_are_dialled_less_and_tried_anew_later() -> None:
    """Ten times as slow: a sixteenth; relayed: a quarter. After a while a slow one counts as any other."""
    ways = Partners()
    for peer, seconds in zip(PEERS, (1.0, 1.1, 10.0, 0.9), strict=True):
        ways.exchanged(peer, seconds, 1_000_000, 0.0)
    assert ways.weights(PEERS, (), 1.0) == [1.0, 1.0, LEAST_WEIGHT, 1.0]
    assert ways.weights(PEERS, {PEERS[0]}, 1.0) == [RELAYED_WEIGHT, 1.0, LEAST_WEIGHT, 1.0]
    assert ways.weights(PEERS, (), LONGEST_MEMORY_SECONDS + 1.0) == [1.0] * 4
    ways.exchanged(PEERS[2], 1.0, 1_000_000, LONGEST_MEMORY_SECONDS + 1.0)
    assert ways.weights(PEERS, (), LONGEST_MEMORY_SECONDS + 2.0) == [1.0] * 4
    rng, drawn = random.Random(2), Counter[PeerId]()
    for _ in range(3000):
        state = PairingState((10,), 10, lambda: PEERS, False, 0.0, weigh=lambda f: ways.weights(f, {PEERS[0]}, 5.0))
        decision = decide(state, Window(10, 5), now=1.0, rng=rng)
        assert isinstance(decision, Dial)
        drawn[decision.partner] += 1
    assert drawn[PEERS[0]] == pytest.approx(3000 / 13, abs=60)
    assert min(drawn[peer] for peer in PEERS[1:]) > 800
