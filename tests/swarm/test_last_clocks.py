"""What a node that slept makes of the last words of gone peers, of the peers that it sees, and of a clock that was
set."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import pytest

from noloco_node.directory.records import PeerRecord, PeerState
from noloco_node.identity.peer_id import PeerId
from noloco_node.placement.last_clocks import ClocksLastHeard

TARGET, GRACE = 1000.0, 20.0
A, B, C, D = (PeerId(f"peer-{name * 8}") for name in "abcd")
WOKE = 200.0


def told(clocks: Mapping[PeerId, float]) -> list[PeerRecord]:
    """The record of a peer of stage 0, a token a second and replica."""
    return [
        PeerRecord(
            peer_id=peer,
            stage=0,
            state=PeerState.TRAINING,
            clock=clock,
            tokens_per_second=1.0,
            protocol=1,
            version="0",
            sequence=1,
        )
        for peer, clock in clocks.items()
    ]


@pytest.mark.parametrize(
    ("heard", "seen", "later", "answering", "over"),
    [
        ((A, B), {}, {}, (), True),
        ((A, B), {}, {}, (B,), False),  # this machine's clock was set: to it all records are old
        ((A, B), {B: 900.0}, {B: 900.0}, (), True),  # B has slept as well
        ((A, B), {B: 900.0}, {B: 900.0}, (B,), True),  # it answers, as a seen peer does
        ((A, B), {B: 900.0}, {B: 932.0}, (), False),  # B trains on
        ((A, B, C, D), {B: 900.0, C: 900.0, D: 900.0}, {B: 900.0, C: 900.0, D: 900.0}, (), False),  # A has died
    ],
)
def test_who_slept_goes_by_those_that_are_gone_where_nobody_moves(
    heard: Collection[PeerId],
    seen: Mapping[PeerId, float],
    later: Mapping[PeerId, float],
    answering: Collection[PeerId],
    over: bool,
) -> None:
    """All stood at 900 of 1000 and are to be there in 100 s at the latest. Of two that slept on one machine each took
    the other for the run that goes on."""
    clocks = ClocksLastHeard(GRACE)
    clocks.note(told(dict.fromkeys(heard, 900.0)), (1,), 0.0, slept=False)
    assert not clocks.have_come_to(TARGET, WOKE, answering.__contains__), "it has not slept"
    clocks.note(told(seen), (1,), WOKE, slept=True)
    for seconds in (GRACE / 2, 3 * GRACE):
        clocks.note(told(seen if seconds < GRACE else later), (1,), WOKE + seconds, slept=False)
    assert clocks.have_come_to(TARGET, WOKE + 3 * GRACE, answering.__contains__) is over


def test_what_was_under_way_when_it_fell_asleep_is_no_run_that_goes_on() -> None:
    """The other one that slept takes a last step as it wakes, of which the word comes within a grace."""
    clocks = ClocksLastHeard(GRACE)
    clocks.note(told({A: 900.0, B: 900.0}), (1,), 0.0, slept=False)
    for seconds, clock in ((0.0, 900.0), (10.0, 932.0), (60.0, 932.0)):
        clocks.note(told({B: clock}), (1,), WOKE + seconds, slept=seconds == 0.0)
    assert clocks.have_come_to(TARGET, WOKE + 60.0, lambda _: False)


def test_who_sees_the_run_go_on_has_slept_no_longer() -> None:
    """When the others die after that they are awaited as by anybody."""
    clocks = ClocksLastHeard(GRACE)
    clocks.note(told({A: 900.0, B: 900.0}), (1,), 0.0, slept=False)
    for seconds in (0.0, 30.0, 60.0):
        clocks.note(told({A: 950.0 + seconds, B: 950.0}), (1,), WOKE + seconds, slept=seconds == 0.0)
    clocks.note([], (1,), WOKE + 90.0, slept=False)
    assert not clocks.have_come_to(TARGET, WOKE + 1000.0, lambda _: False)


@pytest.mark.parametrize("answering", [(), (A,)])
@pytest.mark.parametrize("finished", [True, False])
def test_who_has_said_farewell_is_gone(finished: bool, answering: Collection[PeerId]) -> None:
    """The records of those that leave at the run's end are seen for a while after them. They answer while they write
    their last checkpoint. A node between two stages then took them for there, began its stage anew, and waited an hour
    alone."""
    clocks = ClocksLastHeard(GRACE)
    clocks.note(told({A: 990.0, B: 990.0}), (1,), 0.0, slept=False)
    ends = {"state": PeerState.GONE, "finished": finished}
    left = [record.model_copy(update=ends) for record in told({A: 995.0, B: 995.0})]
    clocks.note(left, (0,), WOKE, slept=True)
    assert clocks.have_come_to(TARGET, WOKE, answering.__contains__) == finished


def test_a_farewell_to_another_stage_hides_nothing() -> None:
    """A node that turned back on its way to another stage has said farewell there, at no clock."""
    turned_back = told({A: 0.0})[0].model_copy(update={"stage": 1, "state": PeerState.GONE, "sequence": 9})
    clocks = ClocksLastHeard(GRACE)
    clocks.note(told({A: 990.0, B: 990.0}), (1, 1), 0.0, slept=False)
    ends = {"state": PeerState.GONE, "finished": True}
    left = [record.model_copy(update=ends) for record in told({A: 995.0, B: 995.0})]
    clocks.note([*left, turned_back], (0, 0), WOKE, slept=True)
    assert clocks.have_come_to(TARGET, WOKE, lambda _: False)
    awake = ClocksLastHeard(GRACE)
    awake.note(told({A: 990.0, B: 990.0}), (1, 1), 0.0, slept=False)
    for seconds, clock in ((0.0, 990.0), (GRACE / 2, 990.0), (2 * GRACE, 992.0)):
        awake.note([*told({A: clock}), turned_back], (1, 1), WOKE + seconds, slept=seconds == 0.0)
    assert not awake.have_come_to(TARGET, WOKE + 2 * GRACE, lambda _: False), "A trains on"
