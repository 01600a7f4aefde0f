"""An origin with wrong labels gets a part of a stage's steps; an honest one gets what it can do."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from noloco_node.identity.peer_id import PeerId
from noloco_node.pipeline.admission import SourceShares
from noloco_node.pipeline.messages import MicrobatchHeader, Mode
from noloco_node.simulator.loop import in_virtual_time
from noloco_node.transport.errors import Refusal, Refused
from tests.swarm.test_pipeline import DEVICE, request
from tests.worlds import MICROBATCH, micro_spec, world

FLOOD, FAST = PeerId("flooding-origin"), PeerId("quick-origin")
HONEST = [PeerId(f"honest-origin-{number}") for number in range(3)]
LEARNT = 2.0
"""Nats a token that the text costs a model that has learnt it."""


class Stage:
    """A last stage that has learnt as much of wrong labels as its steps hold of them, in seconds of its own clock."""

    def __init__(self, *wrong: PeerId, learnt: bool = True) -> None:
        self.now = 0.0
        self.learnt = learnt
        """Whether it has learnt anything; if not, all texts lose the same."""
        self.shares = SourceShares(lambda: self.learnt, lambda: self.now)
        self.wrong = frozenset(wrong)
        self.taken, self.refused = Counter[PeerId](), Counter[PeerId]()
        self._rng = random.Random(3)
        self._part = 0.0
        """The share of wrong labels in what it has learnt of late."""

    def train(self, sender: PeerId) -> None:
        """One microbatch of `sender`, where it may bring it."""
        if not self.shares.may_bring(sender, MICROBATCH):
            self.refused[sender] += 1
            return
        known = self._part if sender in self.wrong else 1.0 - self._part
        loss = LEARNT - math.log(max(known, 1e-3)) if self.learnt else 2.0 * LEARNT
        self.shares.took_in(sender, MICROBATCH, loss + self._rng.gauss(0.0, 0.1))
        self._part += ((sender in self.wrong) - self._part) / 200
        self.taken[sender] += 1

    def run(self, seconds: float, a_second: dict[PeerId, float]) -> Counter[PeerId]:
        """Senders come so often a second each, at random; what was taken of each."""
        before, until, total = self.taken.copy(), self.now + seconds, sum(a_second.values())
        while self.now < until:
            self.now += self._rng.expovariate(total)
            self.train(self._rng.choices([*a_second], [*a_second.values()])[0])
        return self.taken - before

    def refused_part(self, sender: PeerId) -> float:
        """The refused part of what `sender` asked for."""
        return self.refused[sender] / (self.refused[sender] + self.taken[sender])


@pytest.mark.parametrize("a_second", [8.0, 50.0])
def test_wrong_labels_of_one_flooding_origin_of_four_are_the_smaller_part_of_the_steps(a_second: float) -> None:
    """However much it sends it has two parts of five, and honest ones have what they ask for."""
    stage = Stage(FLOOD)
    stage.run(60.0, dict.fromkeys(HONEST, 1.0))
    taken = stage.run(240.0, {FLOOD: a_second, **dict.fromkeys(HONEST, 1.0)})
    assert 0.3 < taken[FLOOD] / taken.total() < 0.45
    assert max(map(stage.refused_part, HONEST)) < 0.01


@pytest.mark.parametrize("a_second", [8.0, 50.0])
def test_before_anything_is_learnt_no_origin_has_more_than_its_part(a_second: float) -> None:
    """Then losses tell nothing. Where the model learns all at once it has half of the steps at most for a while."""
    stage = Stage(FLOOD, learnt=False)
    stage.run(10.0, dict.fromkeys(HONEST, 1.0))
    taken = stage.run(240.0, {FLOOD: a_second, **dict.fromkeys(HONEST, 1.0)})
    assert 0.3 < taken[FLOOD] / taken.total() < 0.45
    stage.learnt = True
    taken = stage.run(240.0, {FLOOD: a_second, **dict.fromkeys(HONEST, 1.0)})
    assert taken[FLOOD] / taken.total() < 0.58
    assert max(map(stage.refused_part, HONEST)) < 0.01


@pytest.mark.parametrize("a_second", [4.0, 16.0, 50.0])
def test_an_honest_origin_that_is_faster_than_all_others_together_loses_next_to_nothing(a_second: float) -> None:
    """A large GPU beside three small ones, with text like theirs: there is no cause to bound it."""
    stage = Stage()
    stage.run(300.0, {FAST: a_second, **dict.fromkeys(HONEST, 1.0)})
    assert stage.refused_part(FAST) < 0.02
    assert max(map(stage.refused_part, HONEST)) < 0.01


def test_one_or_two_origins_alone_have_no_bound_and_nobody_waits_for_those_that_have_left() -> None:
    """That holds even if the text is another. Of four that were at work two may go, and the third is free again."""
    stage = Stage(FLOOD)
    taken = stage.run(60.0, {FLOOD: 50.0, HONEST[0]: 1.0})
    assert stage.refused_part(FLOOD) == 0.0
    taken = stage.run(60.0, {FLOOD: 50.0, **dict.fromkeys(HONEST, 1.0)})
    assert taken[FLOOD] < 0.7 * taken.total()
    stage.run(30.0, {FLOOD: 50.0, HONEST[0]: 1.0})
    stage.refused.clear()
    stage.run(30.0, {FLOOD: 50.0, HONEST[0]: 1.0})
    assert stage.refused_part(FLOOD) == 0.0


def test_throw_away_keys_that_bring_little_lower_the_bound_of_no_honest_origin() -> None:
    """Twenty keys with easy text, one microbatch each in twenty seconds, beside two honest origins."""
    stage = Stage(learnt=False)
    keys = {PeerId(f"key {number}"): 0.05 for number in range(20)}
    stage.run(300.0, {**dict.fromkeys(HONEST[:2], 4.0), **keys})
    assert max(map(stage.refused_part, HONEST[:2])) < 0.05


def test_a_stage_says_busy_to_who_has_its_share_and_goes_on_evaluating_for_it() -> None:
    """At the door, before the body comes. It is no offence."""
    in_virtual_time(_busy, seed=1)


async def _busy() -> None:
    """One sender brings nine microbatches where three others bring one each."""
    async with world(micro_spec(), device=DEVICE) as made:
        made.replicas[1].pipeline.open()
        server, sent = made.replicas[1].pipeline.server, request(made)
        for number in range(48):
            sender = HONEST[number % 12] if number % 12 < len(HONEST) else FLOOD
            given = {**sent.header, "origin": sender, "id": f"{number:032x}"}
            await server.handle(sender, MicrobatchHeader.model_validate(given), sent.tensors)

        def admit(sender: PeerId, mode: Mode) -> None:
            given = {**sent.header, "origin": sender, "mode": mode}
            server.admit(sender, MicrobatchHeader.model_validate(given), sent.specs)()

        for sender in HONEST:
            admit(sender, "train")
        with pytest.raises(Refused) as refused:
            admit(FLOOD, "train")
        assert refused.value.reason is Refusal.BUSY
        admit(FLOOD, "evaluate")
