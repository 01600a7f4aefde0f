"""Peers that vanish without a farewell are asked for again, ever more rarely; so two halves of a network rejoin."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from noloco_node.directory.known_peers import LOST_PAUSES, LostPeers
from noloco_node.directory.records import DirectoryView, LiveRecord, PeerState
from noloco_node.identity.peer_id import PeerId
from noloco_node.peers.scorecard import PeerStats
from noloco_node.tallies import FEW_PEERS
from tests.worlds import record_of

OWN = PeerId("own-peer-id")


def view(*peers: str, state: PeerState = PeerState.TRAINING) -> DirectoryView:
    """A directory of one stage with these peers in it."""
    records = {PeerId(peer): LiveRecord(record_of(peer, 0, state), expires=1e9) for peer in peers}
    return DirectoryView((records,))


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> LostPeers:
    """Nobody is missed yet, and everybody has answered before."""
    monkeypatch.setattr(PeerStats, "met", lambda *_: True)
    return LostPeers(OWN, random.Random(5), PeerStats())


def test_who_vanishes_is_missed_until_it_is_seen_again(lost: LostPeers) -> None:
    """The own record may come and go: nobody misses himself."""
    lost.seen(view("peer-number-1", "peer-number-2", OWN), view("peer-number-2"), 0.0)
    assert lost.missed == ("peer-number-1",)
    lost.seen(view("peer-number-2"), view(), 1.0)
    assert lost.missed == ("peer-number-1", "peer-number-2")
    lost.seen(view(), view("peer-number-1"), 2.0)
    assert lost.missed == ("peer-number-2",)


def test_who_said_goodbye_is_not_missed(lost: LostPeers) -> None:
    """Neither when its last record ends, nor where it was missed before it came back to say so."""
    lost.seen(view("peer-number-1"), view(), 0.0)
    assert lost.missed
    lost.seen(view("peer-number-1", state=PeerState.GONE), view(), 1.0)
    assert not lost.missed


def test_a_peer_on_another_stage_is_not_lost(lost: LostPeers) -> None:
    """It has moved."""
    before = DirectoryView((*view("peer-number-1").stages, {}))
    after = DirectoryView(({}, *view("peer-number-1").stages))
    lost.seen(before, after, 0.0)
    assert not lost.missed


def test_it_is_asked_for_ever_more_rarely_and_never_forgotten(lost: LostPeers) -> None:
    """Soon at first, then about once a minute. After a weekend without its line a node still finds the others."""
    lost.seen(view("peer-number-1"), view(), 0.0)
    asked = [float(now) for now in range(3600) if lost.due(now)]
    gaps = [later - earlier for earlier, later in pairwise(asked)]
    assert asked[0] <= 1.5 * LOST_PAUSES.first + 1
    assert gaps[0] < LOST_PAUSES.longest / 2
    assert 0.5 * LOST_PAUSES.longest <= min(gaps[5:]) <= max(gaps[5:]) <= 1.5 * LOST_PAUSES.longest + 1
    monday = 3 * 86_400.0
    lost.seen(view(), view(), monday)
    assert lost.due(monday) == "peer-number-1"


def test_everyone_has_a_turn_and_the_list_is_bounded(lost: LostPeers) -> None:
    """A thousand peers that come and go leave no thousand questions."""
    for number in range(1000):
        lost.seen(view(f"peer-number-{number}"), view(), float(number))
    assert len(lost.missed) == FEW_PEERS
    assert lost.missed[-1] == "peer-number-999"
    asked = [lost.due(2000.0) for _ in range(FEW_PEERS + 1)]
    assert set(asked) == {*lost.missed, None}


def test_records_without_nodes_are_not_missed() -> None:
    """They come and go, and never answered."""
    lost = LostPeers(OWN, random.Random(5), PeerStats())
    lost.seen(view("who-was-never-met"), view(), 0.0)
    assert not lost.missed


def test_a_clock_that_goes_back_puts_nobody_off(lost: LostPeers) -> None:
    """It goes back by an hour: a peer to be asked for at a moment far ahead is asked for soon, and not at once."""
    lost.seen(view("the-lost-one"), view(), 7200.0)
    assert lost.due(7210.0) == "the-lost-one"
    assert lost.due(3610.0) is None
    assert lost.due(3610.0 + 1.5 * LOST_PAUSES.longest) == "the-lost-one"
