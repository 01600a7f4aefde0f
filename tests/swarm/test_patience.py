"""Stage peers whose exchanges come to nothing rest, and are not banned."""

from __future__ import annotations

import random

import pytest
import torch

from noloco_node.identity.peer_id import PeerId
from noloco_node.outer.clipping import PartnerBound
from noloco_node.outer.codec import BLOCK
from noloco_node.outer.update import OuterRule
from noloco_node.peers.partners import Partners, after_lost_exchange
from noloco_node.peers.scorecard import PeerBook
from noloco_node.tallies import MOST_PEERS, Rest
from tests.outer.groups import average, learn, replica_of

RULE = OuterRule(0.5, 0.5, 0.5, "averaged")
ONE, OTHER = PeerId("one"), PeerId("other")


def test_one_stage_peer_costs_at_most_a_quarter_of_the_time_however_it_goes_about_it() -> None:
    """Stalling to the deadline each time, or leaving at once and coming back: all but the first are paid for."""
    for lost in (0.05, 1.0, 20.0, 500.0):
        rest, now, engaged, begun = Rest(), 0.0, 0.0, 0
        while begun < 200:
            now = max(now, rest.until)
            engaged, begun, now = engaged + lost, begun + 1, now + lost
            rest = after_lost_exchange(rest, lost, now)
        assert engaged / now < 0.26, lost


def test_the_first_lost_exchange_in_a_row_brings_no_rest() -> None:
    """A stage peer that died and came back, or whose link broke once, may come again at once."""
    patience = Partners()
    patience.lost(ONE, 20.0, now=100.0)
    assert not patience.resting(ONE, 100.0)
    patience.lost(ONE, 20.0, now=120.0)
    assert patience.resting(ONE, 179.0)
    assert not patience.resting(ONE, 180.0)
    patience.lost(ONE, 20.0, now=200.0)
    patience.committed(ONE)
    assert not patience.resting(ONE, 200.0)


def test_who_rests_is_passed_over_unless_nobody_else_is_there() -> None:
    """A stage with a single troubled stage peer still dials it."""
    patience = Partners()
    for _ in range(2):
        patience.lost(ONE, 1.0, now=0.0)
    assert list(patience.ready([ONE, OTHER], 1.0)) == [OTHER]
    assert list(patience.ready([ONE], 1.0)) == [ONE]
    assert list(patience.ready([ONE, OTHER], 10.0)) == [ONE, OTHER]


@pytest.mark.parametrize("size", [2, 6])
@pytest.mark.parametrize("apart", [5.0, 20.0])
def test_two_halves_that_were_apart_come_together(size: int, apart: float) -> None:
    """They knew each other, then each half learnt in a way of its own until it was that many bounds away. It goes on
    learning that way; averaging at random brings them together against it."""
    generator, rng = torch.Generator().manual_seed(size), random.Random(size)
    group = [replica_of(RULE, torch.ones(BLOCK)) for _ in range(2 * size)]
    bounds = [PartnerBound() for _ in group]
    ways = torch.randn(2, BLOCK, generator=generator) * 0.55 * 0.02

    def rounds(number: int) -> float:
        """Largest difference of the last one, in bounds."""
        largest = 0.0
        for _ in range(number):
            for place, replica in enumerate(group):
                learn(replica, generator)
                replica.snapshot.add_(ways[place % 2])
            order = rng.sample(range(2 * size), 2 * size)
            largest = 0.0
            for a, b in zip(order[::2], order[1::2], strict=True):
                seen = average(group, bounds, a, b, str(rng.random()))
                largest = max(largest, *(met.norm / met.bound for met in seen))
        return largest

    assert rounds(30) < 1.0, "nobody is far away"
    way = torch.randn(BLOCK, generator=generator)
    bound = bounds[0].difference.bound(0.0)
    for place, replica in enumerate(group):
        replica.slow.add_(way, alpha=(place % 2) * 4.0 * apart * bound / float(way.norm()))
    assert rounds(1) > 0.8 * apart
    assert rounds(40) < 1.0


def test_nobody_dials_more_often_than_its_part_of_the_outer_steps() -> None:
    """A peer that comes whenever it may has a fifth of them among five stage peers. Of the others, which come at random
    and half as often, fewer than a tenth are refused."""
    rng, visits = random.Random(2), Partners()
    others = [PeerId(name) for name in "abcd"]
    came, refused, tries = 0, 0, 0
    for _ in range(1000):
        honest = rng.choice([*others, None, None, None, None])
        if not visits.too_many(ONE, 5):
            visits.made(ONE, 5)
            came += 1
        elif honest is not None:
            tries += 1
            refused += (no := visits.too_many(honest, 5))
            if not no:
                visits.made(honest, 5)
        visits.stepped()
    assert came <= 1000 / 5 + 2
    assert refused < 0.1 * tries


def test_a_single_stage_peer_may_always_come() -> None:
    """Its part is every step."""
    visits = Partners()
    for _ in range(9):
        assert not visits.too_many(ONE, 1)
        visits.made(ONE, 1)
        visits.stepped()


def test_the_book_does_not_grow_with_new_stage_peers() -> None:
    """Those met last are remembered."""
    book = PeerBook()
    visits = Partners(book)
    for number in range(MOST_PEERS + 9):
        visits.made(PeerId(str(number)), 9)
    assert len(list(book.partners)) == MOST_PEERS
