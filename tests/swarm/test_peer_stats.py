"""The peers that have answered this node, and those it has seen work: told by dealings alone, within bounded memory."""

from __future__ import annotations

import contextlib
import random

import pytest

from noloco_node import tallies
from noloco_node.identity.peer_id import PeerId
from noloco_node.peers.partners import Partners
from noloco_node.peers.scorecard import (
    ANSWER_SECONDS,
    ASKS_ALLOWED,
    FAILURE_ASKS,
    REST_AN_ASK,
    SILENCES_TOLERATED,
    WORK_SECONDS,
    Bans,
    Offence,
    PeerBook,
    PeerStats,
)
from noloco_node.pipeline.routing import LoadBalancer
from noloco_node.transport.errors import Refusal, Refused, TransportError
from noloco_node.transport.memory import Fault, FaultKind, MemoryNetwork, MemoryTransport
from noloco_node.transport.messages import Message
from tests.worlds import no_tensors

PEER = PeerId("a-peer-of-ours")


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_an_answer_counts_for_a_while_and_lost_calls_end_it() -> None:
    clock = Clock()
    known = PeerStats(clock)
    assert not known.answers(PEER)
    known.silent(PeerId("nobody"))
    assert not known.deserted, "nobody has ever answered"
    known.answered(PEER)
    assert known.answers(PEER)
    assert not known.works(PEER)
    assert not known.deserted
    clock.now += ANSWER_SECONDS + 0.1
    assert not known.answers(PEER)
    assert known.deserted
    known.answered(PEER)
    for _ in range(SILENCES_TOLERATED):
        known.silent(PEER)
        assert known.answers(PEER), "a link that loses one call is no silence"
    known.silent(PEER)
    assert not known.answers(PEER)
    known.answered(PEER)
    assert known.answers(PEER)


def test_work_counts_for_longer_and_clears_what_came_to_nothing() -> None:
    clock = Clock()
    known = PeerStats(clock)
    known.idle(PEER)
    clock.now += 5.0
    known.idle(PEER)
    assert (known.of(PEER).asks, known.of(PEER).asks_began_at) == (2 * FAILURE_ASKS, 100.0)
    assert not known.answers(PEER), "who was asked for work has not answered by that"
    known.worked(PEER, 512)
    known.worked(PEER, 512)
    assert known.of(PEER).asks == 0
    assert known.of(PEER).tokens == 1024
    assert known.works(PEER)
    assert known.answers(PEER)
    clock.now += WORK_SECONDS + 0.1
    assert not known.works(PEER)


def test_a_crowd_that_only_answers_never_drives_out_who_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tallies, "MOST_PEERS", 8)
    known = PeerStats(Clock())
    known.worked(PEER)
    for number in range(100):
        known.answered(PeerId(f"one-of-many-{number}"))
    assert known.works(PEER)
    assert sum(known.answers(PeerId(f"one-of-many-{number}")) for number in range(100)) == 8


async def test_the_transport_notes_answers_refusals_requests_and_silence() -> None:
    network = MemoryNetwork()
    caller, server = (MemoryTransport(network, PeerId(name)) for name in ("the-caller-node", "the-server-node"))

    async def handle(_peer: PeerId, message: Message) -> Message:
        if message.header.get("refuse"):
            raise Refused(Refusal.BUSY)
        return Message()

    async def ask(refuse: bool = False) -> None:
        with contextlib.suppress(Refused, TransportError):
            request = Message({"refuse": refuse})
            await caller.call(server.peer_id, "ask", request, timeout=1.0, progress=1.0, max_answer_bytes=0)

    server.serve("ask", no_tensors, handle, max_concurrent_per_peer=1)
    try:
        for refuse in (False, True):
            await ask(refuse)
            assert caller.peer_stats.answers(server.peer_id)
            assert server.peer_stats.answers(caller.peer_id)
            network.inject(Fault(FaultKind.LOSE_REQUEST, times=SILENCES_TOLERATED + 1))
            for _ in range(SILENCES_TOLERATED + 1):
                await ask(refuse)
            assert not caller.peer_stats.answers(server.peer_id)
    finally:
        await caller.close()
        await server.close()


def test_exchanges_that_broke_three_times_in_a_row_part_two_peers_for_a_while_only() -> None:
    """Both ends note it, so neither would begin another. Each further three double the rest; a peer that is let down
    for good has failed until it works."""
    clock = Clock()
    known = PeerStats(clock)
    for chance in range(3):
        for _ in range(ASKS_ALLOWED // FAILURE_ASKS + 1):
            assert not known.failed(PEER)
            clock.now += 200.0
            known.idle(PEER)
        rest = REST_AN_ASK * 400.0 * 2.0**chance
        clock.now += rest - 1.0
        assert known.failed(PEER)
        clock.now += 1.0
        assert not known.failed(PEER)
    known.worked(PEER)
    known.idle(PEER)
    assert not known.failed(PEER)
    known.let_down(PEER)
    clock.now += 1e9
    assert known.failed(PEER)


def test_a_scorecard_says_why_its_peer_is_left_alone_and_for_how_long() -> None:
    """Whatever part of the node has found it out, and nothing once that is over."""
    book, hour = PeerBook(), 3600.0
    hops = LoadBalancer("balanced", random.Random(1), lambda: 0.0, book)
    hops.failed(PEER)
    hops.leant(PEER)
    for _ in range(2):
        Partners(book).lost(PEER, 10.0, now=0.0)
    assert book.of(PEER).left_alone(0.0).split("; ") == [
        "it is set aside: its gradients contradict those of others, 60 s more",
        "it rests: a request to it failed, 5 s more",
        "exchanges with it came to nothing, 30 s more",
    ]
    hops.audited(PEER, against=True, by_copy=False)
    assert book.of(PEER).left_alone(0.0).count("contradict") == 1, "set aside is enough said"
    other = PeerId("contradicted once")
    hops.audited(other, against=True, by_copy=False)
    assert book.of(other).left_alone(0.0) == "it is on trial: a gradient of it contradicted others, 60 s more"
    hops.cards.hop(other).rest = tallies.Rest(0, 7.0)
    assert book.of(other).left_alone(0.0).endswith("; it rests: it held a request up for nothing, 7 s more")
    assert not hops.is_full(other)
    hops.full(other)
    assert hops.is_full(other)
    assert book.of(PEER).left_alone(hour) == book.of(PeerId("nobody")).left_alone(0.0) == ""


def test_a_new_stage_begins_with_no_word_of_the_old_one_and_bans_and_work_stay() -> None:
    """A node that moves has other neighbours; what it knows of a peer itself goes with it."""
    known = PeerStats(lambda: 0.0)
    known.worked(PEER, 8)
    known.book.hop(PEER).load = 3
    known.book.partner(PEER).committed = 2
    Bans(lambda: 0.0, known.book).offended(PEER, Offence.FORGED)
    known.book.begin_stage()
    card = known.of(PEER)
    assert (card.hop, card.partner) == (None, None)
    assert (card.tokens, card.conduct.offences) == (8, 1.0)
