"""Replicas that are held in exchanges on purpose: no key and no crowd of them may have more than its part of the
time."""

from __future__ import annotations

import pytest

from noloco_node.averaging.session import Session, overdue, too_slow
from noloco_node.identity.peer_id import PeerId
from noloco_node.outer.update import token_weights
from noloco_node.peers.partners import Partners
from noloco_node.transport.calls import floor_of

ONE, OTHER = PeerId("one"), PeerId("other")


def test_a_home_line_averages_a_large_stage_and_what_drips_is_given_up_on_the_way() -> None:
    """The line has 20 Mbit/s each way and 0.2 s, and carries one chunk of 1 MiB after the other, for stages of 50 MB
    and 500 MB. A chunk at each last moment is found out long before the last one."""
    chunk, limit = 1 << 20, 20.0
    for size in (50_000_000, 500_000_000):
        floor, session, now = floor_of(size, chunk, limit), session_of(), 0.0
        while session.sent < size:
            now += 0.2 + 2 * chunk / 2.5e6
            assert too_slow(session, now, limit, floor) is None
            session.sent, session.received, session.last_progress = session.sent + chunk, session.sent + chunk, now
    floor, session, now = floor_of(50_000_000, chunk, limit), session_of(), 0.0
    while overdue(session, now, limit, floor) is None:
        now += 0.9 * limit
        session.sent, session.received, session.last_progress = session.sent + chunk, session.sent + chunk, now
    assert now < 6 * limit
    session = session_of()
    assert "no chunk" in str(overdue(session, 21.0, limit, floor))


def test_an_opening_has_the_time_that_its_bytes_take_at_the_least_pace() -> None:
    """18 MB of a stage of 562 million weights are one message, 7 s each way on a free line of 20 Mbit/s: with anything
    beside them no replica of it ever averaged. Once a chunk has come the next is asked for in time."""
    limit, floor = 20.0, floor_of(281_000_000, 1 << 20, 20.0)
    session = session_of()
    session.opening_seconds = 18e6 / floor
    assert 30.0 < session.opening_seconds < 40.0
    assert overdue(session, 55.0, limit, floor) is None
    assert "no chunk" in str(overdue(session, 61.0, limit, floor))
    session.add_once(0, lambda: None)
    assert "no chunk" in str(overdue(session, 21.0, limit, floor))


def session_of() -> Session:
    """One that began at 0 and in which nothing has moved."""
    return Session("a" * 32, OTHER, "dialled", started=0.0, last_progress=0.0)


def test_newcomers_together_have_a_twentieth_of_the_time_however_they_go_about_it() -> None:
    """Whether they come to the end or leave at once."""
    for each in (0.01, 3.0, 500.0):
        visits, now, held = Partners(), 0.0, 0.0
        for _ in range(50):
            while not visits.may_give(now):
                now += each / 10
            now, held = now + each, held + each
            visits.gave(each, now)
        assert held / now < 0.06, each


def test_a_visit_that_takes_the_time_of_several_outer_steps_costs_as_many() -> None:
    """It costs as many as the whole time that goes by, not the slowest steps: the usual step is the median."""
    visits, now = Partners(), 0.0
    for took in (10.0, 10.0, 500.0, 10.0, 10.0, 10.0):
        now += took
        visits.stepped(now)
    visits.made(ONE, 2, 40.0)
    for _ in range(6):
        assert visits.too_many(ONE, 2)
        now += 10.0
        visits.stepped(now)
    assert not visits.too_many(ONE, 2)
    assert not visits.too_many(OTHER, 2)


def test_in_the_last_round_all_may_come_and_only_their_time_counts() -> None:
    """No outer step follows by which a part could grow."""
    visits = Partners()
    for number in range(4):
        visits.stepped(10.0 * number)
    visits.made(ONE, 5)
    visits.made(ONE, 5)
    assert visits.too_many(ONE, 5)
    visits.begin_last_round()
    for _ in range(9):
        assert not visits.too_many(ONE, 5)
        visits.made(ONE, 5, 5.0)
    visits.made(ONE, 5, 40.0)
    assert visits.too_many(ONE, 5)


def test_a_word_on_tokens_takes_a_third_of_a_members_weight_at_most() -> None:
    """Half of it was taken. Both sides of an exchange use both counts as said, so the two weigh 2 together."""
    assert token_weights((3200, 1 << 53)) == pytest.approx((2 / 3, 4 / 3))
    assert token_weights((3200, 1600)) == pytest.approx((4 / 3, 2 / 3)), "a partner that was dialled at H/2"
