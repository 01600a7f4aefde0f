"""Who gets the next microbatch."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from noloco_node.swarm.routing import SUSPENSION_SECONDS, Candidate, RoutingBook, choose_peer
from noloco_node.swarm.transport import PeerId

PEERS = [PeerId(name) for name in ("a", "b", "c", "d")]


def candidates(loads: list[int], suspended: list[float] | None = None) -> list[Candidate]:
    """One candidate a load."""
    return [
        Candidate(peer, 0, load, until)
        for peer, load, until in zip(PEERS, loads, suspended or [0.0] * len(loads), strict=False)
    ]


def test_uniform_is_uniform() -> None:
    """Each peer about a quarter of the time, whatever the load."""
    rng = random.Random(0)
    given = candidates([9, 0, 0, 0])
    counts = Counter(choose_peer("uniform", given, own_rank=0, now=1.0, rng=rng) for _ in range(4000))
    assert set(counts) == set(PEERS)
    assert all(850 < count < 1150 for count in counts.values())


def test_balanced_takes_the_less_loaded_of_two() -> None:
    """The most loaded of four is never taken, the least loaded half of the time (every pair that holds it)."""
    rng = random.Random(0)
    given = candidates([3, 2, 1, 0])
    counts = Counter(choose_peer("balanced", given, own_rank=0, now=1.0, rng=rng) for _ in range(4000))
    assert counts["a"] == 0
    assert counts["d"] == pytest.approx(2000, abs=150)


def test_balanced_counts_own_requests_under_way() -> None:
    """Own outstanding requests weigh even where the last answer reported no load."""
    given = [Candidate(PEERS[0], 5, 0), Candidate(PEERS[1], 0, 0)]
    rng = random.Random(0)
    assert {choose_peer("balanced", given, own_rank=0, now=1.0, rng=rng) for _ in range(50)} == {"b"}


@pytest.mark.parametrize("rank", range(6))
def test_fixed_always_takes_the_peer_of_its_rank(rank: int) -> None:
    """The same peer every time, by rank among fellows modulo the peers."""
    chosen = {choose_peer("fixed", candidates([0] * 4), own_rank=rank, now=1.0, rng=random.Random(s)) for s in range(9)}
    assert chosen == {PEERS[rank % 4]}


def test_suspended_peers_are_passed_over_unless_all_are() -> None:
    """A suspended peer gets nothing; if all are suspended the one that returns first is tried."""
    rng = random.Random(0)
    one_free = candidates([0, 0, 0], [9.0, 9.0, 0.5])
    assert {choose_peer("uniform", one_free, own_rank=0, now=1.0, rng=rng) for _ in range(50)} == {"c"}
    none_free = candidates([0, 0, 0], [9.0, 5.0, 7.0])
    assert choose_peer("uniform", none_free, own_rank=0, now=1.0, rng=rng) == "b"


def test_nobody_may_be_asked() -> None:
    """No peers, or all excluded: None."""
    rng = random.Random(0)
    assert choose_peer("uniform", [], own_rank=0, now=1.0, rng=rng) is None
    assert choose_peer("balanced", candidates([0, 0]), own_rank=0, now=1.0, rng=rng, excluded=PEERS) is None


def test_the_book_forgets_those_who_left_and_suspends_those_who_failed() -> None:
    """Suspension ends by time, by a good answer, and with the peer."""
    now = [10.0]
    book = RoutingBook("uniform", random.Random(0), lambda: now[0])
    book.update(PEERS[:2], 0)
    book.failed(PEERS[0])
    assert {book.choose() for _ in range(50)} == {"b"}
    now[0] += SUSPENSION_SECONDS + 0.1
    assert {book.choose() for _ in range(50)} == {"a", "b"}
    book.failed(PEERS[1])
    book.reported(PEERS[1], 0)
    assert {book.choose() for _ in range(50)} == {"a", "b"}
    book.update(PEERS[1:2], 0)
    assert {book.choose() for _ in range(50)} == {"b"}
