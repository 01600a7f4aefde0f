"""What follows from audits, as a pure decision."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noloco_node.swarm.conduct import FIRST_BAN_SECONDS, LONGEST_BAN_SECONDS
from noloco_node.swarm.repute import FORGIVEN, SET_ASIDE_AT, TRIAL_SECONDS, Repute, Trust, after_audit


def test_a_liar_is_set_aside_soon_and_for_longer_each_time() -> None:
    """The third contradiction does it; back again, one more; an hour at most, and after an hour without, anew."""
    repute, now, lengths = Repute(), 0.0, list[float]()
    for _ in range(10):
        contradictions = 0
        while repute.trust(now) is not Trust.SET_ASIDE:
            repute, contradictions = after_audit(repute, True, now), contradictions + 1
        lengths.append(repute.aside_until - now)
        assert contradictions == (1 if now else SET_ASIDE_AT)
        now = repute.aside_until
        assert repute.trust(now) is Trust.ON_TRIAL
    assert lengths == [min(LONGEST_BAN_SECONDS, FIRST_BAN_SECONDS * 2**n) for n in range(10)]
    later = now + LONGEST_BAN_SECONDS
    assert after_audit(repute, True, later).aside_until - later == FIRST_BAN_SECONDS


@pytest.mark.parametrize("against", [True, False, None])
def test_while_a_peer_is_set_aside_nothing_counts(against: bool | None) -> None:
    """Microbatches that were under way when it began are neither new lies nor merits."""
    repute = Repute()
    for _ in range(int(SET_ASIDE_AT)):
        repute = after_audit(repute, True, 5.0)
    after = after_audit(repute, against, 6.0)
    assert (after.doubt, after.aside_until, after.trial_until) == (repute.doubt, repute.aside_until, repute.trial_until)


def test_a_trial_ends_with_the_doubt_or_with_its_time() -> None:
    """Eight audits that are not decided against it, or a minute."""
    repute = after_audit(Repute(), True, 5.0)
    assert repute.trust(5.0 + TRIAL_SECONDS - 1.0) is Trust.ON_TRIAL
    assert repute.trust(5.0 + TRIAL_SECONDS) is Trust.ORDINARY
    for left in range(round(1 / FORGIVEN), 0, -1):
        assert repute.trust(6.0) is Trust.ON_TRIAL
        repute = after_audit(repute, None if left % 2 else False, 6.0)
    assert repute.trust(6.0) is Trust.ORDINARY


@given(st.lists(st.sampled_from([True, False, None]), max_size=200))
def test_doubt_is_what_contradictions_brought_and_agreement_took_away(verdicts: list[bool | None]) -> None:
    """Never below zero, never at the threshold, and a peer that is not contradicted is never doubted."""
    repute, now = Repute(), 0.0
    for against in verdicts:
        before, now = repute, now + 1.0
        repute = after_audit(repute, against, now)
        assert 0.0 <= repute.doubt < SET_ASIDE_AT
        assert repute.audits == before.audits + 1
        assert against or repute.doubt <= before.doubt
    if True not in verdicts:
        assert repute == Repute(audits=len(verdicts))


@pytest.mark.parametrize(("lies", "is_found"), [(1 / 20, False), (1 / 7, True), (1 / 2, True)])
def test_who_contradicts_in_more_than_every_ninth_audit_is_set_aside_in_the_end(lies: float, is_found: bool) -> None:
    """Spread evenly, which is what serves it best."""
    repute, owed = Repute(), 0.0
    for _ in range(500):
        owed += lies
        repute, owed = (
            (after_audit(repute, True, 0.0), owed - 1.0) if owed >= 1.0 else (after_audit(repute, False, 0.0), owed)
        )
    assert bool(repute.set_asides) is is_found
