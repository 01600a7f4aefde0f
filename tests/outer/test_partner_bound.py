"""What a partner can do to what others learn while the norm of its difference stays within the bound."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from noloco_node.outer.clipping import PartnerBound, Regress
from noloco_node.outer.codec import BLOCK
from noloco_node.outer.replica import OuterReplica
from noloco_node.outer.update import OuterRule
from tests.outer.groups import average, learn, replica_of

RULE = OuterRule(0.0, 1.0, 1.0, "averaged")
ROUNDS = 40
HONEST = 6
FILLED = 0.99
"""How much of the bound on the norm a hostile partner uses: it knows everything."""

Way = Callable[[OuterReplica, Tensor], Tensor]
"""Where a hostile partner pulls, from what it knows of its victim and from the weights that the run began with."""


def undo(victim: OuterReplica, first: Tensor) -> Tensor:
    """Back to the first weights."""
    return first - victim.snapshot


def ruin_few(victim: OuterReplica, first: Tensor) -> Tensor:
    """All into every hundredth value, away from where learning leads."""
    return torch.where(torch.arange(victim.size) % 100 == 0, victim.snapshot.sign(), 0.0)


def attacked(victim: OuterReplica, bound: PartnerBound, way: Tensor, name: str) -> None:
    """One exchange of the victim with a hostile partner that pulls along `way` as far as the norm's bound lets it."""
    victim.open(members=2, weight=1.0, exchange=name)
    victim.agree([])
    length = FILLED * bound.difference.bound(victim.own_motion())
    push = way * min(1.0, length / float(way.norm())) if length else torch.zeros_like(way)
    for index in range(victim.chunks):
        part = slice(index * BLOCK, (index + 1) * BLOCK)
        victim.add_chunk(index, victim.encoded_chunk(index) + 2 * push[part])
    judgement = bound.judge(victim, "evil", stage_peers=HONEST)
    assert judgement.norm <= judgement.bound, "the bound on the norm has nothing to say"
    victim.commit(judgement.scale)
    bound.accept("evil", judgement)


def distance_after(way: Way | None) -> Tensor:
    """The part of each value (of one) that is left to learn after so many rounds; the mean over replicas. Everybody
    meets somebody, and one of six meets a hostile partner."""
    generator = torch.Generator().manual_seed(3)
    first = torch.ones(2 * BLOCK)
    group = [replica_of(RULE, first) for _ in range(HONEST)]
    bounds = [PartnerBound() for _ in group]
    for number in range(ROUNDS):
        for replica in group:
            learn(replica, generator)
        order = torch.randperm(HONEST, generator=generator).tolist()
        if way is not None:
            victim = order.pop()
            attacked(group[victim], bounds[victim], way(group[victim], first), f"evil/{number}")
            alone = order.pop()
            group[alone].open(members=1, weight=1.0)
            group[alone].commit()
        for a, b in zip(order[::2], order[1::2], strict=True):
            average(group, bounds, a, b, str(number))
    return torch.stack([replica.slow for replica in group]).mean(0)


def test_a_partner_that_undoes_what_others_learn_takes_little_of_it_back() -> None:
    """Within the bound on the norm, in every sixth exchange: four fifths of what is learnt without it are kept."""
    clean, left = float(distance_after(None).mean()), float(distance_after(undo).mean())
    assert clean < 0.4
    assert 1.0 - left > 0.8 * (1.0 - clean)


def test_a_partner_cannot_put_its_whole_pull_into_a_few_values() -> None:
    """They would be thrown far beyond where they began; now they are held up as the others are by an `undo`."""
    left = distance_after(ruin_few)
    few = torch.arange(left.numel()) % 100 == 0
    assert float(left[few].mean()) < 1.5
    assert float(left[~few].mean()) < 0.4


def test_half_of_what_was_learnt_may_be_taken_back_where_others_take_none() -> None:
    """Whatever the one asks for, and however often; also the last one that is left of several."""
    regress = Regress()
    for stage_peers in (5, 5, 5, 1):
        for honest in ("a", "b", "c"):
            assert regress.scale(honest, -0.1, 2.0, 0.5, stage_peers=stage_peers) == 1.0
        assert 7.0 * regress.scale("evil", 7.0, 2.0, 0.5, stage_peers=stage_peers) == pytest.approx(1.0)


def test_a_single_stage_peer_is_not_measured() -> None:
    """Nobody could tell which of two is off."""
    regress = Regress()
    assert [regress.scale("other", 7.0, 2.0, 0.5, stage_peers=1) for _ in range(9)] == [1.0] * 9


def test_who_takes_no_more_than_most_others_is_believed_after_some_rounds() -> None:
    """This replica is then the one that is off, or most of a swarm has been parted from it. One of them that asks for
    ten times as much gets no more than the others."""
    regress = Regress()
    scales = [regress.scale(peer, 7.0, 2.0, 0.5, stage_peers=5) for _ in range(12) for peer in ("a", "b", "c")]
    assert scales[-3:] == [1.0, 1.0, 1.0]
    assert 70.0 * regress.scale("d", 70.0, 2.0, 0.5, stage_peers=5) == pytest.approx(1.5 * 7.0)


def test_the_way_is_that_of_the_own_steps_and_a_loaded_state_begins_anew() -> None:
    """Before the first outer step it is that of Δ; no other weights are judged by a way that led elsewhere."""
    replica = replica_of(RULE, torch.ones(BLOCK))
    replica.open(members=1, weight=1.0)
    assert replica.taken_back() == (0.0, 0.0)
    replica.snapshot.sub_(0.5)
    assert replica.taken_back() == pytest.approx((0.0, 0.5 * BLOCK**0.5))
    replica.commit()
    replica.snapshot.copy_(replica.slow + 0.25)
    replica.open(members=1, weight=1.0)
    assert replica.taken_back() == pytest.approx((0.0, -0.25 * BLOCK**0.5))
    replica.load(torch.ones(BLOCK), torch.zeros(BLOCK))
    replica.snapshot.copy_(replica.slow)
    assert replica.taken_back() == (0.0, 0.0)
