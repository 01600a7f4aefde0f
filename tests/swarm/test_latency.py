"""One hostile peer of four takes little of a sender's pace, whatever it does just below the rules, in virtual time."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable

import pytest

from noloco_node.identity.peer_id import PeerId
from noloco_node.peers.hop import HANG_SECONDS, RequestOutcome
from noloco_node.peers.scorecard import PeerBook
from noloco_node.pipeline.routing import LoadBalancer, outcome_of
from noloco_node.transport.errors import Refusal, Refused

PEERS = [PeerId(name) for name in ("hostile", "a", "b", "c")]
USUAL = 0.2
PATIENCE = 30.0

OUTCOMES = {
    "trained": RequestOutcome.CAME,
    "hung": RequestOutcome.FAILED,
    "draining": RequestOutcome.FAILED,
    "passed up": RequestOutcome.EXCUSED,
    "busy late": RequestOutcome.EXCUSED,
    "busy": RequestOutcome.UNTOLD,
}

Behaviour = Callable[[int, float], tuple[float, str]]
"""The hostile peer's behaviour, by the number of the request and the time: seconds until it ends, and how."""


def trained_beside(hostile: Behaviour, slots: int) -> float:
    """Microbatches that a sender with so many slots has trained in 800 s, beside what it does where all four are
    honest. The honest ones take about 0.2 s each and say that they hold two others; the hostile one says it is idle."""
    return trained_by_each(hostile, slots, until=800.0, seed=1).total() / (800.0 / USUAL * slots)


def trained_by_each(hostile: Behaviour, slots: int, *, until: float, seed: int, says: int = 0) -> Counter[PeerId]:
    """The number trained by each peer; the hostile one says that it holds so many others."""
    rng, now, asked, trained = random.Random(seed), 0.0, 0, Counter[PeerId]()
    book = LoadBalancer("balanced", random.Random(seed + 1), lambda: now)
    book.update(PEERS, 0)
    events: list[tuple[float, int, PeerId, float, str]] = []
    excluded: dict[int, set[PeerId]] = {slot: set() for slot in range(slots)}

    def send(slot: int) -> None:
        nonlocal asked
        peer = book.choose(excluded[slot])
        if peer is None:
            excluded[slot].clear()
            heapq.heappush(events, (now + 0.1, slot, PEERS[1], -1.0, "pause"))
            return
        seconds, how = USUAL * rng.uniform(0.8, 1.2), "trained"
        if peer == "hostile":
            seconds, how = hostile(asked, now)
            asked += 1
        began = book.sent(peer)
        heapq.heappush(events, (now + seconds, slot, peer, began, how))

    for slot in range(slots):
        send(slot)
    while events[0][0] < until:
        now, slot, peer, began, how = heapq.heappop(events)
        if how != "pause":
            book.done(peer, began, OUTCOMES[how])
            excluded[slot].add(peer)
        if how == "trained":
            trained[peer] += 1
            excluded[slot].clear()
            book.reported(peer, says if peer == "hostile" else 2)
        elif how == "hung":
            book.failed(peer)
        elif how.startswith("busy"):
            book.full(peer)
        send(slot)
    return trained


HOSTILE: dict[str, Behaviour] = {
    "just below the deadline": lambda _number, _now: (PATIENCE - 1.0, "trained"),
    "five times as long": lambda _number, _now: (5 * USUAL, "trained"),
    "one and a half times as long": lambda _number, _now: (1.5 * USUAL, "trained"),
    "slow every other time": lambda number, _now: ((PATIENCE - 1.0) if number % 2 else USUAL, "trained"),
    "hangs": lambda _number, _now: (PATIENCE, "hung"),
    "hangs every other time": lambda number, _now: (PATIENCE, "hung") if number % 2 else (USUAL, "trained"),
    "leaves at the last moment": lambda _number, _now: (PATIENCE - 1.0, "draining"),
    "passes up at the last moment, every other time": lambda number, _now: (
        (PATIENCE - 1.0, "passed up") if number % 2 else (USUAL, "trained")
    ),
    "passes up at the last moment": lambda _number, _now: (PATIENCE - 1.0, "passed up"),
    "gives up at once": lambda _number, _now: (0.02, "passed up"),
    "always full": lambda _number, _now: (0.02, "busy"),
    "always full, after nearly a second": lambda _number, _now: (HANG_SECONDS * 0.99, "busy"),
    "full at the last moment": lambda _number, _now: (PATIENCE - 1.0, "busy late"),
    "full at the last moment, every other time": lambda number, _now: (
        (PATIENCE - 1.0, "busy late") if number % 2 else (USUAL, "trained")
    ),
}


@pytest.mark.parametrize(("how", "slots"), [(how, 1 + 2 * (number % 2)) for number, how in enumerate(HOSTILE)])
def test_one_hostile_peer_of_four_takes_at_most_a_quarter_of_the_pace(how: str, slots: int) -> None:
    """By the first answers that it gives, too."""
    assert trained_beside(HOSTILE[how], slots) > 0.75


def test_two_keys_of_22_that_answer_anything_at_once_get_little_more_than_their_part() -> None:
    """They said what is quick, and all others were slow beside them: they had 58 % of the microbatches."""
    rng, now, asked = random.Random(1), 0.0, Counter[bool]()
    book = LoadBalancer("balanced", rng, lambda: now)
    quick = {PeerId("x"), PeerId("y")}
    book.update([*quick, *(PeerId(f"honest-{number}") for number in range(20))], 0)
    events: list[tuple[float, int, PeerId, float]] = []

    def send(number: int) -> None:
        peer = book.choose()
        assert peer is not None
        asked[peer in quick] += 1
        seconds = 0.05 * USUAL if peer in quick else USUAL * rng.uniform(0.8, 1.2)
        heapq.heappush(events, (now + seconds, number, peer, book.sent(peer)))

    for number in range(2000):
        if number >= 8:
            now, _, peer, began = heapq.heappop(events)
            book.done(peer, began, RequestOutcome.CAME)
            book.reported(peer, 0)
        send(number)
    assert asked[True] / asked.total() < 2 * 2 / 22


def test_honest_peers_lose_nothing_to_each_other() -> None:
    """That holds even if one is twice as slow: it has its part by its speed."""
    assert trained_beside(lambda _number, _now: (USUAL, "trained"), 3) > 0.99


@pytest.mark.parametrize("how", ["passed up", "busy late", "hung"])
def test_a_newcomer_that_is_late_with_every_word_for_its_first_minute_has_its_part_within_five(how: str) -> None:
    """Its device warms up. It has nothing to show for being left alone, and is for a minute and a half beyond the
    first. Of the work of its first five minutes it has more than two fifths of another's, where four could be."""
    for seed in range(3):
        trained = trained_by_each(
            lambda _number, now: (PATIENCE - 1.0, how) if now < 60.0 else (USUAL, "trained"),
            3,
            until=300.0,
            seed=seed,
            says=2,
        )
        newcomer = trained.pop(PEERS[0])
        assert 0.4 < newcomer / (trained.total() / 3) < 1.0


@pytest.mark.parametrize(
    ("reason", "seconds", "left_alone"),
    [(Refusal.BUSY, 2.0, False), (Refusal.OUT_OF_REACH, 2.0, False), (Refusal.DRAINING, 2.0, True)],
)
def test_who_is_full_late_is_not_left_alone_as_who_hangs_is(reason: Refusal, seconds: float, left_alone: bool) -> None:
    """A request may wait on the sender's own link. One that never brought anything where others did has no such word
    taken."""
    now = 0.0
    cards = PeerBook()
    book = LoadBalancer("balanced", random.Random(1), lambda: now, cards)
    book.update(PEERS, 0)

    def ends(peer: PeerId, after: float, how: RequestOutcome) -> None:
        nonlocal now
        began = book.sent(peer)
        now += after
        book.done(peer, began, how)

    how = outcome_of(Refused(reason), seconds)
    for peer in ("a", "b"):
        ends(PeerId(peer), USUAL, RequestOutcome.CAME)
    for _ in range(3):
        ends(PeerId("a"), seconds, how)
        ends(PeerId("hostile"), seconds, how)
    assert bool(cards.of(PeerId("a")).left_alone(now)) == left_alone
    assert cards.of(PeerId("hostile")).left_alone(now)
