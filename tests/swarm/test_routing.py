"""The choice of the peer for the next microbatch."""

from __future__ import annotations

import random
from collections import Counter
from typing import get_args

import pytest

from noloco_node.config.run_spec import RoutingName
from noloco_node.identity.peer_id import PeerId
from noloco_node.peers.hop import RequestOutcome, Trust
from noloco_node.peers.scorecard import PeerBook, Scorecard
from noloco_node.pipeline.routing import Candidate, LoadBalancer, choose_peer

PEERS = [PeerId(name) for name in ("a", "b", "c", "d")]


def candidates(loads: list[int], rest: list[float] | None = None) -> list[Candidate]:
    """One candidate a load."""
    return [
        Candidate(peer, 0, load, until)
        for peer, load, until in zip(PEERS, loads, rest or [0.0] * len(loads), strict=False)
    ]


def test_balanced_takes_the_less_loaded_of_two() -> None:
    """The most loaded of four is never taken, the least loaded half of the time (every pair that holds it)."""
    rng = random.Random(0)
    given = candidates([3, 2, 1, 0])
    counts = Counter(choose_peer("balanced", given, own_rank=0, now=1.0, rng=rng) for _ in range(4000))
    assert counts[PeerId("a")] == 0
    assert counts[PeerId("d")] == pytest.approx(2000, abs=150)


def test_balanced_counts_own_requests_under_way() -> None:
    """Own outstanding requests weigh even where the last answer reported no load."""
    given = [Candidate(PEERS[0], 5, 0), Candidate(PEERS[1], 0, 0)]
    rng = random.Random(0)
    assert {choose_peer("balanced", given, own_rank=0, now=1.0, rng=rng) for _ in range(50)} == {"b"}


@pytest.mark.parametrize("rank", range(6))
def test_fixed_always_takes_the_peer_of_its_rank(rank: int) -> None:
    """It is one peer every time, by rank among stage peers modulo the peers."""
    chosen = {choose_peer("fixed", candidates([0] * 4), own_rank=rank, now=1.0, rng=random.Random(s)) for s in range(9)}
    assert chosen == {PEERS[rank % 4]}


@pytest.mark.parametrize("strategy", get_args(RoutingName))
@pytest.mark.parametrize("worse", [Trust.ON_TRIAL, Trust.SET_ASIDE])
def test_whom_audits_go_against_gets_nothing_while_others_work(strategy: RoutingName, worse: Trust) -> None:
    """Nothing goes there even if all others have been asked already and are busy: then nobody is asked. Alone, it
    is."""
    rng = random.Random(0)
    doubted, *others = candidates([0, 5, 5])
    doubted = doubted._replace(trust=worse)
    chosen = {choose_peer(strategy, [doubted, *others], own_rank=r, now=1.0, rng=rng) for r in range(9)}
    assert chosen == {"b", "c"}
    assert choose_peer(strategy, [doubted, *others], own_rank=0, now=1.0, rng=rng, excluded=PEERS[1:3]) is None
    assert choose_peer(strategy, [doubted], own_rank=0, now=1.0, rng=rng) == "a"


def test_a_peer_on_trial_helps_out_where_all_others_rest_but_not_one_that_is_set_aside() -> None:
    """Samples must not be dropped while a peer lives that may be honest."""
    rng = random.Random(0)
    trial, aside, other = candidates([0, 0, 0], [0.0, 0.0, 9.0])
    both = [trial._replace(trust=Trust.ON_TRIAL), aside._replace(trust=Trust.SET_ASIDE), other]
    chosen = {choose_peer("uniform", both, own_rank=0, now=1.0, rng=rng) for _ in range(50)}
    assert chosen == {"a"}
    assert choose_peer("uniform", both[1:], own_rank=0, now=1.0, rng=rng) == "c"


def test_what_audits_said_of_a_peer_outlives_its_absence() -> None:
    """Leaving the directory and coming back gains it nothing, until its time is over."""
    now = 0.0
    balancer = LoadBalancer("uniform", random.Random(0), lambda: now)
    balancer.update(PEERS[:3], 0)
    for _ in range(3):
        balancer.audited(PEERS[0], against=True, by_copy=False)
    assert balancer.set_aside_now == 1
    balancer.update(PEERS[1:3], 0)
    assert (balancer.set_aside_now, balancer.doubted) == (0, set())
    balancer.update(PEERS[:3], 0)
    assert {balancer.choose() for _ in range(50)} == set(PEERS[1:3])
    now = 1e6
    assert balancer.set_aside_now == 0
    assert {balancer.choose() for _ in range(50)} == set(PEERS[:3])


def test_peers_that_rest_are_not_asked_unless_all_do() -> None:
    """If all rest the one that returns first is tried."""
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


def test_balanced_routing_keeps_using_every_peer() -> None:
    """Three origins meet three servers with a queue each, in simulated time. A load reported once must not lock a peer
    out for ever. Every origin therefore keeps asking every server, each at least half of its fair share."""
    rng, now = random.Random(3), [0.0]
    servers = [PeerId(name) for name in ("x", "y", "z")]
    balancers = [LoadBalancer("balanced", random.Random(seed), lambda: now[0]) for seed in range(3)]
    for balancer in balancers:
        balancer.update(servers, 0)
    free_at = dict.fromkeys(servers, 0.0)
    queued: dict[PeerId, list[float]] = {server: [] for server in servers}
    events = [(rng.random(), origin) for origin in range(3) for _ in range(2)]
    under_way: list[tuple[float, int, PeerId, float]] = []
    asked: Counter[tuple[int, PeerId]] = Counter()
    while now[0] < 600:
        now[0], origin = min(events)
        events.remove((now[0], origin))
        for done in [entry for entry in under_way if entry[0] <= now[0]]:
            under_way.remove(done)
            balancers[done[1]].done(done[2], done[3], RequestOutcome.CAME)
            queued[done[2]].remove(done[0])
            balancers[done[1]].reported(done[2], len(queued[done[2]]))
        server = balancers[origin].choose()
        assert server is not None
        asked[origin, server] += 1
        began = balancers[origin].sent(server)
        free_at[server] = max(free_at[server], now[0]) + rng.uniform(0.5, 1.5)
        queued[server].append(free_at[server])
        under_way.append((free_at[server], origin, server, began))
        events.append((free_at[server] + 1e-6, origin))
    for origin in range(3):
        total = sum(asked[origin, server] for server in servers)
        assert min(asked[origin, server] for server in servers) > 0.5 * total / 3


def test_a_peer_that_keeps_failing_rests_longer_each_time() -> None:
    """5 s, 10 s, 20 s and so on up to a minute; one good answer forgives all of it."""
    now = [0.0]
    balancer = LoadBalancer("uniform", random.Random(0), lambda: now[0])
    balancer.update(PEERS[:2], 0)
    pauses: list[float] = []
    for _ in range(6):
        balancer.failed(PEERS[0])
        start = now[0]
        while {balancer.choose() for _ in range(30)} == {"b"}:
            now[0] += 0.5
        pauses.append(now[0] - start)
    assert pauses == pytest.approx([5, 10, 20, 40, 60, 60], abs=1.0)
    balancer.reported(PEERS[0], 0)
    balancer.failed(PEERS[0])
    now[0] += 5.1
    assert {balancer.choose() for _ in range(50)} == {"a", "b"}


class Counted(PeerBook):
    """Counts how many scorecards were looked at."""

    asked = 0

    def of(self, peer: PeerId) -> Scorecard:
        """See `PeerBook.of`."""
        self.asked += 1
        return super().of(peer)


def balancer_of(strategy: RoutingName, many: int) -> tuple[LoadBalancer, list[PeerId]]:
    """A balancer with so many peers; its time stands still."""
    balancer, peers = LoadBalancer(strategy, random.Random(1), lambda: 100.0), [PeerId(f"p{n:05}") for n in range(many)]
    balancer.update(peers, own_rank=7)
    return balancer, peers


@pytest.mark.parametrize("strategy", ["uniform", "balanced"])
def test_a_choice_looks_at_a_few_peers_however_many_there_are(strategy: RoutingName) -> None:
    """As many at 10,000 as at 100."""
    looks: list[int] = []
    for many in (100, 10_000):
        balancer, _ = balancer_of(strategy, many)
        balancer.cards = counted = Counted()
        balancer.choose()  # the first one looks at all, for what is quick among them
        counted.asked = 0
        for _ in range(20):
            assert balancer.choose() is not None
        looks.append(counted.asked)
    assert looks[0] == looks[1] <= 20 * 8


@pytest.mark.parametrize("strategy", ["uniform", "balanced"])
def test_of_many_peers_all_are_equally_likely(strategy: RoutingName) -> None:
    """Chi-square against uniform over 40 peers: 39 degrees of freedom, within four standard deviations of the mean."""
    balancer, peers = balancer_of(strategy, 40)
    counts = Counter(balancer.choose() for _ in range(8000))
    assert sum((counts[peer] - 200) ** 2 / 200 for peer in peers) < 39 + 4 * (2 * 39) ** 0.5


@pytest.mark.parametrize("strategy", ["uniform", "balanced"])
def test_of_many_peers_only_those_are_asked_that_may_be(strategy: RoutingName) -> None:
    """A peer that rests, is on trial or excluded gets nothing while three of a hundred others are free; then None."""
    balancer, peers = balancer_of(strategy, 100)
    free = set(peers[20:23])
    for peer in peers[:20]:
        balancer.audited(peer, against=True, by_copy=False)
    for peer in peers[23:60]:
        balancer.failed(peer)
    excluded = set(peers[60:])
    assert {balancer.choose(excluded) for _ in range(100)} == free
    balancer, peers = balancer_of(strategy, 100)
    assert balancer.choose(set(peers)) is None


def test_fixed_routing_among_many_is_that_of_all() -> None:
    """With and without peers that are on trial or excluded."""
    balancer, peers = balancer_of("fixed", 100)
    shuffled = peers[:]
    random.Random(2).shuffle(shuffled)
    balancer.update(shuffled, own_rank=107)
    assert balancer.choose() == peers[7]
    assert balancer.choose({peers[3]}) == peers[107 % 99 + 1]
    balancer.audited(peers[0], against=True, by_copy=False)
    assert balancer.choose() == peers[107 % 99 + 1]


def test_who_is_slow_among_many_is_asked_less() -> None:
    """What is quick is said by all stage peers, not by those that happen to be drawn."""
    now = [0.0]
    balancer, peers = (
        LoadBalancer("balanced", random.Random(1), lambda: now[0]),
        [PeerId(f"p{n:02}") for n in range(30)],
    )
    balancer.update(peers, 0)
    for peer in peers:
        now[0] = 0.0
        began = balancer.sent(peer)
        now[0] = 1.0 if peer in peers[:10] else 6.0
        balancer.done(peer, began, RequestOutcome.CAME)
    now[0] = 6.0
    counts = Counter(balancer.choose() for _ in range(3000))
    quick, slow = (sum(counts[peer] for peer in some) / len(some) for some in (peers[:10], peers[10:]))
    assert 8 * slow < quick
