"""The partner to average with, and the time: every transition of the pure decisions."""

from __future__ import annotations

import random

import pytest

from noloco_node.averaging.matchmaking import (
    Dial,
    PairingState,
    StepAlone,
    Window,
    answer_proposal,
    decide,
    retry_delay,
)
from noloco_node.directory.clocks import PeerClocks, believed_clock, laggard
from noloco_node.identity.peer_id import PeerId
from noloco_node.transport.errors import Refusal

WINDOW = Window(inner_steps=10, min_inner_steps=5)
STAGE_PEERS = (PeerId("b"), PeerId("c"), PeerId("d"))


def state(steps: int, **changes: object) -> PairingState:
    """A replica with three stage peers that took `steps` inner steps since its last outer step."""
    values = {
        "steps_since_outer": steps,
        "steps_free": steps,
        "stage_peers": STAGE_PEERS,
        "engaged": False,
        "next_try": 0.0,
        **changes,
    }
    stage_peers = values["stage_peers"]
    values["stage_peers"] = lambda: stage_peers
    return PairingState(**values)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (state(9), "wait"),
        (state(10), "dial"),
        (state(19), "dial"),
        (state(20), "alone"),
        (state(50, steps_free=9), "dial"),
        (state(50, steps_free=10), "alone"),
        (state(20, engaged=True), "wait"),
        (state(10, next_try=1.5), "wait"),
        (state(10, stage_peers=()), "alone"),
        (state(0, last_round=True), "dial"),
        (state(99, last_round=True), "dial"),
        (state(0, last_round=True, stage_peers=()), "alone"),
        (state(0, last_round=True, last_done=True), "wait"),
    ],
)
def test_the_dialling_window(given: PairingState, expected: str) -> None:
    """Dial from H on, alone only from H + 2·H_min or without stage peers, nothing while engaged or before the next
    try."""
    decision = decide(given, WINDOW, now=1.0, rng=random.Random(0))
    assert {StepAlone: "alone", Dial: "dial"}.get(type(decision), "wait") == expected


def test_a_window_without_a_minimum_still_looks_for_a_partner() -> None:
    """H_min = 0 lets a replica be dialled at any time; it does not make it step alone at once."""
    window = Window(inner_steps=10, min_inner_steps=0)
    assert isinstance(decide(state(10), window, now=1.0, rng=random.Random(0)), Dial)
    assert isinstance(decide(state(12), window, now=1.0, rng=random.Random(0)), StepAlone)


def test_partners_are_drawn_evenly() -> None:
    """Over many decisions every stage peer is dialled about equally often."""
    rng = random.Random(1)
    drawn = [decide(state(10), WINDOW, now=1.0, rng=rng) for _ in range(3000)]
    for stage_peer in STAGE_PEERS:
        assert 900 < sum(isinstance(d, Dial) and d.partner == stage_peer for d in drawn) < 1100


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({"dialling": PeerId("c")}, Refusal.BUSY),
        ({"too_often": True}, Refusal.TOO_EARLY),
        ({"too_often": True, "last_round": True}, Refusal.TOO_EARLY),
        ({"steps_since_outer": 4}, Refusal.TOO_EARLY),
        ({"steps_since_outer": 4, "last_round": True}, None),
        ({"steps_since_outer": 5}, None),
    ],
)
def test_answers_to_a_proposal(changes: dict[str, object], expected: Refusal | None) -> None:
    """Accept from H_min on; refuse with the reason that fits."""
    values: dict[str, object] = {
        "own": PeerId("m"),
        "dialler": PeerId("b"),
        "dialling": None,
        "too_often": False,
        "steps_since_outer": 10,
        "window": WINDOW,
        "last_round": False,
        **changes,
    }
    assert answer_proposal(**values) == expected  # pyright: ignore[reportArgumentType]


def test_two_that_dial_each_other_agree_who_leads() -> None:
    """The proposal of the smaller id stands, the other is crossed: exactly one exchange comes of it."""

    def answer(own: str, dialler: str) -> Refusal | None:
        return answer_proposal(
            own=PeerId(own),
            dialler=PeerId(dialler),
            dialling=PeerId(dialler),
            too_often=False,
            steps_since_outer=10,
            window=WINDOW,
            last_round=False,
        )

    assert answer(own="b", dialler="a") is None
    assert answer(own="a", dialler="b") is Refusal.CROSSED


def test_one_claim_cannot_push_the_clock() -> None:
    """A partner's clock counts only within max_lag of the median of what the directory says."""
    stage_peers = [100.0, 110.0, 120.0]
    for claim, believed in ((1e15, 160.0), (0.0, 60.0), (115.0, 115.0)):
        assert believed_clock(claim, estimated=stage_peers, recorded=stage_peers, max_lag=50.0) == believed
    assert believed_clock(115.0, estimated=[], recorded=[], max_lag=50.0) == 115.0


@pytest.mark.parametrize("overestimate", [1.0, 3.0, 30.0])
def test_estimates_that_run_ahead_do_not_carry_time_along(overestimate: float) -> None:
    """64 replicas take in tokens and average their clocks with random partners; records are renewed seldom and moved on
    at too high a speed. The mean clock stays that of the tokens, and no two clocks drift further apart than max_lag."""
    rng = random.Random(5)
    replicas, max_lag, speed, renewal = 64, 40.0, 10.0, 20
    clocks = [0.0] * replicas
    records = [(0.0, 0)] * replicas
    for now in range(1, 400):
        for index in range(replicas):
            clocks[index] += speed * rng.uniform(0.5, 1.5)
            if now % renewal == index % renewal:
                records[index] = (clocks[index], now)
        order = rng.sample(range(replicas), replicas)
        recorded = [clock for clock, _ in records]
        estimated = [clock + overestimate * speed * (now - then) for clock, then in records]
        for left, right in zip(order[::2], order[1::2], strict=True):
            seen = [
                believed_clock(clocks[other], estimated=estimated, recorded=recorded, max_lag=max_lag)
                for other in (left, right)
            ]
            shifts = (seen[1] - clocks[left]) / 2, (seen[0] - clocks[right]) / 2
            clocks[left] += shifts[0]
            clocks[right] += shifts[1]
    assert sum(clocks) / replicas == pytest.approx(399 * speed, rel=0.02)
    assert max(clocks) - min(clocks) < max_lag


def test_who_lags() -> None:
    """Only a difference beyond max_lag makes a laggard, and this replica only where the directory's records agree."""
    stage_peers = [160.0, 150.0, 155.0]
    assert laggard(100.0, 160.0, estimated=stage_peers, recorded=stage_peers, max_lag=50.0) == "own"
    others = [100.0, 158.0, 150.0]
    assert laggard(160.0, 100.0, estimated=others, recorded=others, max_lag=50.0) == "other"
    near = [150.0, 151.0]
    assert laggard(100.0, 150.0, estimated=near, recorded=near, max_lag=50.0) is None


def test_a_third_that_lags_does_not_part_two_that_agree() -> None:
    """In a stage of three, each of the two knows the other and the laggard: half-way between them is nobody's clock."""
    estimated, recorded = [9100.0, 320.0], [4900.0, 320.0]
    assert laggard(7500.0, 7600.0, estimated=estimated, recorded=recorded, max_lag=1000.0) is None
    assert believed_clock(7600.0, estimated=estimated, recorded=recorded, max_lag=1000.0) == 7600.0
    assert laggard(7500.0, 320.0, estimated=estimated, recorded=recorded, max_lag=1000.0) == "other"


def test_who_has_run_ahead_of_everyone_averages_with_them() -> None:
    """None of its stage peers would agree to lag, so it must not refuse them all; and they do not follow it."""
    stage_peers = [100.0, 110.0, 120.0]
    assert laggard(180.0, 110.0, estimated=stage_peers, recorded=stage_peers, max_lag=50.0) is None
    theirs = [180.0, 100.0, 120.0]
    assert laggard(110.0, 180.0, estimated=theirs, recorded=theirs, max_lag=50.0) is None
    only_one = [110.0]
    assert laggard(180.0, 110.0, estimated=only_one, recorded=only_one, max_lag=50.0) is None
    assert laggard(110.0, 180.0, estimated=[180.0], recorded=[180.0], max_lag=50.0) == "own", "of two, one may follow"


def test_estimates_alone_make_no_laggard() -> None:
    """The estimate of a stage peer's present clock may be ahead of the truth: the records must say it too."""
    estimated, recorded = [170.0, 180.0], [110.0, 120.0]
    assert laggard(100.0, 170.0, estimated=estimated, recorded=recorded, max_lag=50.0) is None
    assert laggard(100.0, 170.0, estimated=estimated, recorded=estimated, max_lag=50.0) == "own"
    assert laggard(100.0, 170.0, estimated=[], recorded=[], max_lag=50.0) is None, "nobody to confirm it"


@pytest.mark.parametrize("claim", [1e3, 1e18])
def test_a_claim_of_the_future_makes_no_laggard(claim: float) -> None:
    """A replica a little below the median is not made to take the state of a peer that claims a huge clock."""
    stage_peers = [1000.0, 1000.0, 1010.0]
    assert laggard(999.0, claim, estimated=stage_peers, recorded=stage_peers, max_lag=100.0) is None


def test_clocks_believed_with_stage_peers_and_without() -> None:
    """A partner is met within max_lag of the directory's word, or of the own clock. One that says that it is further
    back is met no further on than at the own clock, for what only records say moves nobody forward. A donor's clock is
    never raised. If no peer is known it is taken as it is: a joiner has nothing to hold against it."""
    known: list[float] = [100.0, 110.0, 120.0]
    clocks = PeerClocks(50.0, own=lambda: 20.0, estimated=lambda: known, recorded=lambda: known)
    assert [clocks.met(claim) for claim in (1e15, 0.0, 115.0)] == [160.0, 20.0, 115.0]
    assert [clocks.not_beyond(claim) for claim in (1e15, 0.0, 115.0)] == [160.0, 0.0, 115.0]
    assert clocks.own_lags()
    assert clocks.laggard(1e15) == "own"
    known.clear()
    assert [clocks.met(claim) for claim in (1e15, -1e15, 30.0)] == [70.0, -30.0, 30.0]
    assert clocks.not_beyond(1e15) == 1e15
    assert not clocks.own_lags()
    assert clocks.laggard(1e15) is None
    assert clocks.laggard(-31.0) == "other"


def test_a_later_stage_believes_a_partner_around_its_origins_also_where_the_directory_has_run_away() -> None:
    """To half of the lag that is allowed on either side; where the directory is nearer, it decides."""
    known: list[float] = [1e6]
    clocks = PeerClocks(
        50.0, own=lambda: 100.0, estimated=lambda: known, recorded=lambda: known, origins_lead=lambda: -10.0
    )
    assert [clocks.met(claim) for claim in (1e15, 0.0, 80.0)] == [115.0, 100.0, 100.0]
    known[:] = [100.0]
    assert [clocks.met(claim) for claim in (1e15, 0.0, 80.0)] == [115.0, 65.0, 80.0]


def test_of_two_stage_peers_one_that_lies_makes_no_laggard_and_moves_nobody() -> None:
    """The own clock is the third voice. Beside one alone whose record lies, no further than to here."""
    peers = [810.0, 1e15]
    clocks = PeerClocks(50.0, own=lambda: 800.0, estimated=lambda: peers, recorded=lambda: peers)
    assert not clocks.own_lags()
    assert not clocks.far_behind()
    assert clocks.laggard(1e15) is None
    assert [clocks.met(claim) for claim in (1e15, 790.0)] == [860.0, 790.0]
    assert clocks.not_beyond(1e15) == 860.0
    peers[:] = [1e15]
    assert clocks.laggard(790.0) is None
    assert clocks.met(790.0) == 800.0
    peers[:] = [800.0, 800.0, 800.0]
    assert clocks.laggard(740.0) == "other", "it says so itself, and is not believed to be further on"


def test_retries_are_jittered_and_bounded() -> None:
    """Never below 20 ms, never above 5 s, and not all the same."""
    rng = random.Random(2)
    delays = [retry_delay(seconds, rng) for seconds in (0.0, 0.1, 1.0, 100.0) for _ in range(50)]
    assert min(delays) >= 0.02
    assert max(delays) <= 5.0
    assert len(set(delays)) > 50


@pytest.mark.parametrize("lead", [1e17, -1e17, 0.0, None])
def test_what_the_origins_are_said_to_be_holds_partners_back_and_moves_no_clock(lead: float | None) -> None:
    """An origin that has most of a stage's work for a while may say where the origins are. An honest partner is met
    where it is all the same, or at least no further away than before."""
    own, known = 1_000.0, [990.0, 1_000.0, 1_020.0]
    clocks = PeerClocks(
        100.0, own=lambda: own, estimated=lambda: known, recorded=lambda: known, origins_lead=lambda: lead
    )
    for claimed in (950.0, 1_000.0, 1_040.0):
        assert min(own, claimed) <= clocks.met(claimed) <= max(own, claimed)
