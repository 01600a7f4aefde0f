"""What follows from audits, as a pure decision."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noloco_node.peers.hop import FORGIVEN, SET_ASIDE_AT, TRIAL_SECONDS, Reputation, Trust, after_audit
from noloco_node.tallies import BANS


def test_a_liar_is_set_aside_soon_and_for_longer_each_time() -> None:
    """The third contradiction does it; back again, one more; an hour at most, and after an hour without, anew."""
    repute, now, lengths = Reputation(), 0.0, list[float]()
    for _ in range(10):
        contradictions = 0
        while repute.trust(now) is not Trust.SET_ASIDE:
            repute, contradictions = after_audit(repute, True, now), contradictions + 1
        lengths.append(repute.aside.until - now)
        assert contradictions == (1 if now else SET_ASIDE_AT)
        now = repute.aside.until
        assert repute.trust(now) is Trust.ON_TRIAL
    assert lengths == [min(BANS.longest, BANS.first * 2**n) for n in range(10)]
    later = now + BANS.longest
    while repute.trust(later) is not Trust.SET_ASIDE:
        repute = after_audit(repute, True, later)
    assert repute.aside.until - later == BANS.first


@pytest.mark.parametrize("against", [True, False, None])
def test_while_a_peer_is_set_aside_nothing_counts(against: bool | None) -> None:
    """Microbatches that were under way when it began are neither new lies nor merits."""
    repute = Reputation()
    for _ in range(int(SET_ASIDE_AT)):
        repute = after_audit(repute, True, 5.0)
    after = after_audit(repute, against, 6.0)
    assert (after.doubt, after.aside.until, after.trial_until) == (repute.doubt, repute.aside.until, repute.trial_until)


@pytest.mark.parametrize("verdict", [False, None])
def test_copies_shorten_a_trial_and_only_ordinary_answers_take_the_doubt_away(verdict: bool | None) -> None:
    """Eight of each. Copies take nothing off the doubt: they can be told from ordinary microbatches."""
    start = after_audit(Reputation(), True, 5.0)
    assert start.trust(5.0 + TRIAL_SECONDS - 1.0) is Trust.ON_TRIAL
    assert start.trust(5.0 + TRIAL_SECONDS) is Trust.ORDINARY
    copied = answered = start
    for _ in range(round(1 / FORGIVEN)):
        assert copied.trust(5.0) is answered.trust(5.0) is Trust.ON_TRIAL
        copied, answered = after_audit(copied, verdict, 5.0, by_copy=True), after_audit(answered, verdict, 5.0)
    assert (copied.trust(5.0), copied.doubt_at(5.0)) == (Trust.ORDINARY, 1.0)
    assert (answered.trust(5.0), answered.doubt_at(5.0)) == (Trust.ORDINARY, 0.0)


def test_time_forgives_once_a_trial_is_over() -> None:
    """An eighth a minute: a stage in which all were doubted has somebody to decide again."""
    repute = after_audit(Reputation(), True, 5.0)
    doubts = [repute.doubt_at(5.0 + minutes * TRIAL_SECONDS) for minutes in range(11)]
    assert doubts == [1.0, 1.0, *(1.0 - FORGIVEN * n for n in range(1, 9)), 0.0]
    later = 5.0 + 5 * TRIAL_SECONDS
    assert after_audit(repute, True, later).doubt_at(later) == repute.doubt_at(later) + 1.0


@given(st.lists(st.tuples(st.sampled_from([True, False, None]), st.booleans()), max_size=200))
def test_doubt_is_what_contradictions_brought_and_agreement_took_away(verdicts: list[tuple[bool | None, bool]]) -> None:
    """Never below zero, never at the threshold, and a peer that is not contradicted is never doubted nor on trial."""
    repute, now = Reputation(), 0.0
    for against, by_copy in verdicts:
        before, now = repute, now + 1.0
        repute = after_audit(repute, against, now, by_copy=by_copy)
        assert 0.0 <= repute.doubt_at(now) < SET_ASIDE_AT
        assert repute.audits == before.audits + 1
        assert against or repute.doubt_at(now) <= before.doubt_at(now)
    if all(against is not True for against, _ in verdicts):
        assert repute.trust(now) is Trust.ORDINARY
        assert repute.doubt == 0.0


@pytest.mark.parametrize(("lies", "is_found"), [(1 / 20, False), (1 / 7, True), (1 / 2, True)])
def test_who_contradicts_in_more_than_every_ninth_audit_is_set_aside_in_the_end(lies: float, is_found: bool) -> None:
    """Spread evenly, which is what serves it best."""
    repute, owed = Reputation(), 0.0
    for _ in range(500):
        owed += lies
        against = owed >= 1.0
        repute, owed = after_audit(repute, against, 0.0), owed - against
    assert bool(repute.aside.times) is is_found
