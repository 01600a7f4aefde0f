"""Fellows whose exchanges come to nothing rest, and are not banned."""

from __future__ import annotations

from noloco_node.swarm.patience import Patience, Rest, after_lost_exchange
from noloco_node.swarm.transport import PeerId

ONE, OTHER = PeerId("one"), PeerId("other")


def test_one_fellow_costs_at_most_a_quarter_of_the_time_however_it_goes_about_it() -> None:
    """Stalling to the deadline each time, or leaving at once and coming back: all but the first are paid for."""
    for lost in (0.05, 1.0, 20.0, 500.0):
        rest, now, engaged, begun = Rest(), 0.0, 0.0, 0
        while begun < 200:
            now = max(now, rest.until)
            engaged, begun, now = engaged + lost, begun + 1, now + lost
            rest = after_lost_exchange(rest, lost, now)
        assert engaged / now < 0.26, lost


def test_the_first_lost_exchange_in_a_row_brings_no_rest() -> None:
    """A fellow that died and came back, or whose link broke once, may come again at once."""
    patience = Patience()
    patience.lost(ONE, 20.0, now=100.0)
    assert not patience.resting(ONE, 100.0)
    patience.lost(ONE, 20.0, now=120.0)
    assert patience.resting(ONE, 179.0)
    assert not patience.resting(ONE, 180.0)
    patience.lost(ONE, 20.0, now=200.0)
    patience.committed(ONE)
    assert not patience.resting(ONE, 200.0)


def test_who_rests_is_passed_over_unless_nobody_else_is_there() -> None:
    """A stage with a single troubled fellow still dials it."""
    patience = Patience()
    for _ in range(2):
        patience.lost(ONE, 1.0, now=0.0)
    assert list(patience.ready([ONE, OTHER], 1.0)) == [OTHER]
    assert list(patience.ready([ONE], 1.0)) == [ONE]
    assert list(patience.ready([ONE, OTHER], 10.0)) == [ONE, OTHER]
