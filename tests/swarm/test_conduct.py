"""Offences and bans: a pure decision that an honest peer on the worst of networks never falls under."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noloco_node import tallies
from noloco_node.identity.peer_id import PeerId
from noloco_node.peers import scorecard as conduct
from noloco_node.peers.scorecard import TOLERATED, BanRecord, Bans, Offence, after_offence
from noloco_node.tallies import BANS
from noloco_node.transport.errors import (
    BrokenStream,
    DeadlinePassed,
    PeerUnreachable,
    ProtocolViolation,
    Refusal,
    Refused,
)
from noloco_node.transport.interface import OFFENSIVE, RequestDesk, TransportLimits
from noloco_node.trust.screened_directory import ScreenedDirectory
from tests.memory_directory import MemoryDirectory, MemoryDirectoryHub
from tests.support import Clock
from tests.worlds import record_of

PEER = PeerId("a-stranger")


def offended(times: int, now: float = 0.0, standing: BanRecord | None = None) -> BanRecord:
    """An account after so many offences at one moment."""
    standing = standing or BanRecord()
    for _ in range(times):
        standing = after_offence(standing, Offence.MALFORMED, now)
    return standing


def test_a_few_offences_are_borne_and_one_more_brings_a_ban_with_a_reason_and_an_end() -> None:
    """The ban begins at the offence beyond what is tolerated, and ends by itself."""
    assert not offended(int(TOLERATED)).banned(0.0)
    banned = offended(int(TOLERATED) + 1)
    assert banned.banned(0.0)
    assert banned.banned(BANS.first - 1)
    assert not banned.banned(BANS.first)
    assert banned.reason is Offence.MALFORMED


def test_each_ban_is_twice_as_long_up_to_an_hour_and_good_conduct_makes_it_short_again() -> None:
    """After as long without a ban as the longest lasts, the count begins anew."""
    standing, now, lengths = BanRecord(), 0.0, []
    for _ in range(9):
        standing = offended(int(TOLERATED) + 1, now, standing)
        lengths.append(standing.ban.until - now)
        now = standing.ban.until
    assert lengths[:3] == [BANS.first, 2 * BANS.first, 4 * BANS.first]
    assert lengths[-1] == BANS.longest
    now += BANS.longest
    assert offended(int(TOLERATED) + 1, now, standing).ban.until - now == BANS.first


def test_time_forgives() -> None:
    """Offences no more often than they are forgiven never lead to a ban; a little more often they do."""
    for pace, banned in ((1.0, False), (0.8, True)):
        standing = BanRecord()
        for number in range(1000):
            standing = after_offence(standing, Offence.MALFORMED, number * pace * BANS.first)
        assert (standing.ban.times > 0) is banned


@given(st.lists(st.tuples(st.floats(0, 1e6), st.sampled_from(list(Offence))), max_size=60))
def test_a_ban_is_never_shortened_and_never_longer_than_an_hour(course: list[tuple[float, Offence]]) -> None:
    """Whatever comes when, in the order of time."""
    standing = BanRecord()
    for now, offence in sorted(course, key=lambda entry: entry[0]):
        before, standing = standing, after_offence(standing, offence, now)
        assert standing.ban.until >= before.ban.until
        assert standing.ban.until <= now + BANS.longest
        assert 0.0 <= standing.offences <= TOLERATED


@given(
    st.lists(
        st.sampled_from([BrokenStream(""), DeadlinePassed(""), PeerUnreachable("")])
        | st.sampled_from([reason for reason in Refusal if reason not in OFFENSIVE]),
        min_size=50,
    )
)
def test_a_bad_network_and_a_full_or_slow_node_are_no_offence(course: list[Exception | Refusal]) -> None:
    """Broken streams, time-outs, and all that a node is told in ordinary life, however often."""
    desk = RequestDesk(TransportLimits())
    for event in course:
        if isinstance(event, Refusal):
            desk.count_refusal(PEER, Refused(event))
        else:
            desk.judge(PEER, event)
    assert desk.conduct.offences.total() == 0


def test_which_refusals_answer_an_offence_is_written_down() -> None:
    """A new refusal is ordinary life unless somebody decides otherwise, and BUSY always is."""
    assert set(OFFENSIVE) == {Refusal.MALFORMED, Refusal.TOO_LARGE, Refusal.NOT_FINITE, Refusal.FORGED}


def test_a_ban_is_logged_once_counted_by_reason_and_refuses_with_the_time_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What a banned peer had under way adds nothing to its account."""
    clock = Clock(0.0)
    desk, begun = RequestDesk(TransportLimits()), []
    book = desk.conduct = Bans(clock)
    book.on_ban = begun.append
    with caplog.at_level(logging.WARNING):
        for _ in range(50):
            desk.judge(PEER, ProtocolViolation("its answer is no answer"))
    assert begun == [PEER]
    assert len(caplog.records) == 1
    assert "banned here for 60 s: bad_answer (its answer is no answer)" in caplog.text
    assert book.bans == {"bad_answer": 1}
    assert book.offences == {"bad_answer": 50}
    assert book.banned_now == 1
    clock.now = 20.0
    with pytest.raises(Refused, match="bad_answer, 40 s more") as refused:
        desk.refuse_banned(PEER)
    assert refused.value.reason is Refusal.BANNED
    clock.now = BANS.first
    desk.refuse_banned(PEER)
    assert not book.banned(PEER)
    assert book.banned_now == 0


def test_the_book_does_not_grow_with_new_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Identities cost nothing: the accounts of the oldest offenders are forgotten."""
    monkeypatch.setattr(tallies, "MOST_PEERS", 8)
    monkeypatch.setattr(conduct, "TOLERATED", 1.5)
    book = Bans()
    strangers = [PeerId(f"stranger-{number}") for number in range(100)]
    for stranger in strangers:
        book.offended(stranger, Offence.FORGED)
    for stranger in reversed(strangers):
        book.offended(stranger, Offence.FORGED)
        if stranger == strangers[-8]:
            assert book.banned_now == 8
    assert book.banned_now <= 8
    assert book.bans == {"forged": 8}


def test_bans_that_have_ended_are_forgotten_where_nobody_asks_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A seed never looks at `changes`."""
    monkeypatch.setattr(conduct, "TOLERATED", 0.0)
    clock = Clock(0.0)
    book = Bans(clock)
    for number in range(100):
        clock.now = 1000.0 * number
        book.offended(PeerId(f"stranger-{number}"), Offence.FORGED)
    assert len(book._ends) == 1
    assert book.changes == 199


async def test_a_ban_shows_in_the_view_from_its_first_moment_to_its_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Views are kept from one refresh to the next. A ban whose account had to make room for another ends in the view,
    too."""
    monkeypatch.setattr(tallies, "MOST_PEERS", 1)
    clock, hub = Clock(0.0), MemoryDirectoryHub(1)
    book, banned, other = Bans(clock), PeerId("peer-that-is-banned"), PeerId("peer-beside-it")
    for peer in (banned, other):
        await MemoryDirectory(hub).publish(record_of(peer), 600)
    directory = ScreenedDirectory(MemoryDirectory(hub), book)
    await directory.refresh()

    def ban() -> None:
        for _ in range(int(TOLERATED) + 1):
            book.offended(banned, Offence.MALFORMED)
        assert set(directory.view.stages[0]) == {other}

    assert set(directory.view.stages[0]) == {banned, other}
    ban()
    clock.now = BANS.first
    assert set(directory.view.stages[0]) == {banned, other}
    ban()
    book.offended(other, Offence.MALFORMED)
    assert set(directory.view.stages[0]) == {banned, other}
