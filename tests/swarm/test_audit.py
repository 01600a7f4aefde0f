"""Audits: a liar is set aside, honest replicas never, and no account suffers."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from noloco_node.aio import cancel_and_wait
from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import PipelineSpec
from noloco_node.replica import Replica
from noloco_node.swarm import audit
from noloco_node.swarm.audit import (
    CONTRADICTED,
    TRIAL_SECONDS,
    Auditor,
    Finding,
    Repute,
    after_audit,
    likeness,
    odd_one_out,
)
from noloco_node.swarm.conduct import FIRST_BAN_SECONDS, LONGEST_BAN_SECONDS
from noloco_node.swarm.memory_transport import Fault, FaultKind
from noloco_node.swarm.microbatch import METHOD, Trained
from noloco_node.swarm.routing import RoutingBook
from noloco_node.swarm.transport import PeerId
from noloco_node.telemetry.events import Account
from noloco_node.training.stage_trainer import LossResult
from tests.support import eventually
from tests.worlds import World, micro_spec, peer_name, run_to_the_end, run_with_faults, world

ALWAYS = PipelineSpec(routing="uniform", audit_share=1.0, budget_seconds=10.0, progress_seconds=5.0)


@given(st.integers(0, 2**31), st.floats(-4.0, 4.0))
def test_likeness_is_that_of_the_formula(seed: int, factor: float) -> None:
    """Against 2k / (1 + k²) for a tensor and k times it; in any precision, also where squares would overflow."""
    one = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(seed))
    expected = 2.0 * factor / (1.0 + factor**2)
    assert likeness(one, factor * one) == pytest.approx(expected, abs=1e-5)
    assert likeness(1e30 * one, 1e30 * factor * one) == pytest.approx(expected, abs=1e-5)
    assert likeness(one.bfloat16(), (factor * one).bfloat16()) == pytest.approx(expected, abs=2e-2)


def test_nothing_is_like_nothing() -> None:
    """Zeros agree with zeros, and with nothing else."""
    zeros, ones = torch.zeros(3), torch.ones(3)
    assert likeness(zeros, zeros) == 1.0
    assert likeness(zeros, ones) == 0.0


def test_the_odd_one_out_is_found_wherever_it_stands() -> None:
    """Two that agree against one; where all agree or none does, nobody is blamed."""
    gradient, other, third = torch.randn(3, 500, generator=torch.Generator().manual_seed(0)).unbind()
    honest = gradient + 0.1 * other
    for place in range(3):
        jury = [gradient, honest]
        jury.insert(place, -gradient)
        assert odd_one_out(*jury) == place
    assert odd_one_out(gradient, honest, gradient) is None
    assert odd_one_out(gradient, other, third) is None
    chain = [gradient, gradient + 1.2 * other, other]
    assert [likeness(chain[0], chain[1]) >= 0.5, likeness(chain[1], chain[2]) >= 0.5] == [True, True]
    assert odd_one_out(*chain) is None, "the middle agrees with both others"


def test_a_liar_is_set_aside_soon_and_for_longer_each_time() -> None:
    """The third contradiction does it; back again, one more; an hour at most, and after an hour without, anew."""
    repute, now, lengths = Repute(), 0.0, list[float]()
    for _ in range(10):
        contradictions = 0
        while repute.aside_until <= now:
            repute, contradictions = after_audit(repute, True, now), contradictions + 1
        lengths.append(repute.aside_until - now)
        assert contradictions == (CONTRADICTED if not now else 1)
        now = repute.aside_until
    assert lengths == [min(LONGEST_BAN_SECONDS, FIRST_BAN_SECONDS * 2**n) for n in range(10)]
    later = after_audit(repute, True, now + LONGEST_BAN_SECONDS)
    assert later.aside_until - now - LONGEST_BAN_SECONDS == FIRST_BAN_SECONDS


def test_what_is_decided_while_a_peer_is_set_aside_does_not_lengthen_it() -> None:
    """Microbatches that were under way when it began are no new lies."""
    repute = Repute()
    for _ in range(CONTRADICTED):
        repute = after_audit(repute, True, 5.0)
    assert after_audit(repute, True, 6.0).aside_until == repute.aside_until == 5.0 + FIRST_BAN_SECONDS


@given(st.lists(st.sampled_from([True, False, False, None]), max_size=200).filter(lambda v: True not in v[:1]))
def test_who_agrees_as_often_as_it_contradicts_is_not_set_aside(verdicts: list[bool | None]) -> None:
    """An audit for a peer takes back one against it, and an undecided one changes nothing but the count."""
    repute, balanced = Repute(), [v for against in verdicts for v in (against, False)]
    for against in balanced:
        repute = after_audit(repute, against, 0.0)
    assert repute.contradictions == repute.set_asides == 0
    assert repute.audits == len(balanced)


GRADIENT = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
BODY = torch.zeros(2, 8)


class Stage:
    """A next stage whose peers answer as they are told to, and an auditor of it."""

    def __init__(self, peers: int, share: float = 0.0625) -> None:
        self.now = 0.0
        self.peers = [PeerId(f"peer {number}") for number in range(peers)]
        self.liars: set[PeerId] = set()
        self.asked: list[PeerId] = []
        self.book = RoutingBook("uniform", random.Random(0), lambda: self.now)
        self.book.update(self.peers, 0)
        self.auditor = Auditor(share, self.book, self._answer, random.Random(0), lambda: self.now)

    async def _answer(self, peer: PeerId, activations: Tensor, labels: Tensor) -> Trained:
        self.asked.append(peer)
        return self.answer_of(peer)

    def answer_of(self, peer: PeerId, size: float = 1.0) -> Trained:
        """A gradient of that many times the usual size."""
        return Trained(1.0, 1, (-size if peer in self.liars else size) * GRADIENT, size, peer)

    async def microbatch(self, first: PeerId | None = None, size: float = 1.0) -> int:
        """One more is answered, by whoever the book chooses unless it is said; how many were asked to audit it."""
        chosen = first or self.book.choose()
        assert chosen is not None
        asked = len(self.asked)
        self.auditor.consider(self.answer_of(chosen, size), BODY, BODY)
        running = asyncio.create_task(self.auditor.run())
        await eventually(lambda: not self.auditor._at_work)
        await cancel_and_wait([running])
        return len(self.asked) - asked

    async def known(self) -> Stage:
        """Each peer has answered its first."""
        for peer in self.peers:
            await self.microbatch(peer)
        return self


async def test_the_first_microbatch_of_each_and_a_share_of_the_others_are_audited() -> None:
    """And none where the run wants none, or nobody could decide."""
    stage = Stage(4)
    assert [await stage.microbatch(peer) for peer in stage.peers[:1]] == [1]
    await stage.known()
    count = sum([await stage.microbatch() for _ in range(1600)])
    assert 70 < count < 130
    assert set(stage.auditor.findings) == {Finding.AGREED}
    for idle in (Stage(4, share=0.0), Stage(2, share=1.0)):
        assert sum([await idle.microbatch() for _ in range(20)]) == 0


async def test_an_unusually_large_gradient_is_looked_at_at_once() -> None:
    """Within twice the usual norm it is one like any other."""
    stage = await Stage(3, share=1e-9).known()
    assert await stage.microbatch(size=1.9) == 0
    assert await stage.microbatch(size=2.1) == 1


async def test_who_is_on_trial_gets_nothing_but_comparisons_until_it_is_cleared_or_set_aside() -> None:
    """One lie: two audits clear it, which it does not open. Going on, it is set aside after two more."""
    stage = await Stage(4, share=1e-9).known()
    suspect = stage.peers[0]
    stage.liars = {suspect}
    assert await stage.microbatch(suspect, size=2.1) == 2
    assert {stage.book.choose() for _ in range(99)} == set(stage.peers[1:])
    stage.liars = set()
    stage.asked.clear()
    assert [await stage.microbatch() for _ in range(2)] == [1, 0]
    assert stage.asked == [suspect]
    assert {stage.book.choose() for _ in range(99)} == set(stage.peers)

    stage.liars = {suspect}
    assert [await stage.microbatch(suspect, size=3.0)] + [await stage.microbatch() for _ in range(3)] == [2, 2, 2, 0]
    assert stage.book.set_aside_now == 1
    stage.now = FIRST_BAN_SECONDS
    assert stage.book.set_aside_now == 0
    assert await stage.microbatch(stage.peers[1]) == 2, "back, and on trial as before"
    assert stage.book.set_aside_now == 1


async def test_a_trial_without_a_jury_ends_by_itself() -> None:
    """Where only two are left nobody can clear the suspect, and it works again after a minute."""
    stage = await Stage(3, share=1e-9).known()
    stage.liars = {stage.peers[0]}
    await stage.microbatch(stage.peers[0], size=2.1)
    stage.book.update(stage.peers[:2], 0)
    assert stage.book.choose() == stage.peers[1]
    assert await stage.microbatch() == 0
    stage.now = TRIAL_SECONDS
    assert {stage.book.choose() for _ in range(99)} == set(stage.peers[:2])


async def test_books_about_peers_do_not_grow_with_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those heard last are remembered."""
    monkeypatch.setattr(audit, "PEERS_REMEMBERED", 4)
    stage = await Stage(12).known()
    assert len(stage.auditor._reputes) == 4


def lying(replica: Replica, lie: Callable[[Tensor], Tensor]) -> None:
    """What it gives back is a lie; it trains as ever."""
    loss = replica.worker.loss

    async def answer(*arguments: Any, **options: Any) -> LossResult:
        result = await loss(*arguments, **options)
        assert result.input_gradient is not None
        return dataclasses.replace(result, input_gradient=lie(result.input_gradient))

    replica.worker.loss = answer  # type: ignore[method-assign]


def last_accounts(made: World) -> list[Account]:
    """Of each replica, those of stage 0 first."""
    return [[event for event in events if isinstance(event, Account)][-1] for events in made.events]


def check_books(made: World, heads: list[Account], tails: list[Account]) -> None:
    """Each sample is trained once for its origin; what the later stage trained beyond that are audits, no repeats."""
    for account in heads:
        assert account.drawn == account.trained + account.dropped + account.held_at_end
        assert account.dropped == account.held_at_end == account.repeated == 0
    trained, served = sum(a.trained for a in heads), sum(a.served for a in tails)
    again = {Finding.AGREED: 1, Finding.CONTRADICTED: 2, Finding.UNDECIDED: 2}
    audited = sum(a.strangers.audits.get(finding, 0) * more for a in heads for finding, more in again.items())
    assert 0 <= served - trained - audited <= 2 * len(heads), "an audit that failed, or that the end cut off"


LIES: dict[str, Callable[[Tensor], Tensor]] = {
    "sign turned": torch.neg,
    "another's": lambda gradient: gradient.flip(-1),
    "much too small": lambda gradient: 0.1 * gradient,
    "zeros": torch.zeros_like,
}


@pytest.mark.parametrize("lie", LIES)
async def test_a_liar_among_three_is_set_aside_by_every_origin_and_nobody_else(lie: str) -> None:
    """After its third contradiction it gets no microbatch while the others live; samples and accounts do not notice."""
    async with world(micro_spec(steps=60, microbatches_a_step=3, pipeline=ALWAYS), replicas=3) as made:
        lying(made.of_stage(1)[0], LIES[lie])
        await run_to_the_end(made)
        books = [replica._book for replica in made.of_stage(0)]
        accounts = last_accounts(made)
    heads, tails = accounts[:3], accounts[3:]
    check_books(made, heads, tails)
    for book, account in zip(books, heads, strict=True):
        assert set(book._aside_until) == {peer_name(1, 0)}
        assert account.strangers.audits[Finding.CONTRADICTED] == CONTRADICTED
    assert tails[0].served <= 3 * CONTRADICTED + 6
    assert min(tails[1].served, tails[2].served) > 30


async def test_honest_replicas_agree_through_a_whole_run() -> None:
    """Every microbatch is looked at, beside three stages that average and move, and nobody is ever contradicted."""
    spec = micro_spec(stages=3, steps=30, microbatches_a_step=3, pipeline=ALWAYS)
    async with world(spec, replicas=3, settings=NodeSettings(in_flight=2)) as made:
        await run_to_the_end(made)
        accounts = last_accounts(made)
    findings = {name for account in accounts[:6] for name in account.strangers.audits}
    assert Finding.AGREED in findings
    assert not findings & {Finding.CONTRADICTED, Finding.UNDECIDED}
    assert sum(account.strangers.audits[Finding.AGREED] for account in accounts[:3]) > 20


async def test_a_stage_of_two_is_not_audited() -> None:
    """Nobody could decide between them, so the work is saved."""
    async with world(micro_spec(steps=6, pipeline=ALWAYS), replicas=2) as made:
        await run_to_the_end(made)
        accounts = last_accounts(made)
    assert not any(account.strangers.audits for account in accounts)
    assert sum(a.served for a in accounts[2:]) == sum(a.trained for a in accounts[:2])


async def test_an_audit_that_fails_costs_no_sample_and_counts_against_nobody() -> None:
    """Streams that break in an audit or before it: the books close as ever."""
    async with world(micro_spec(steps=30, microbatches_a_step=3, pipeline=ALWAYS), replicas=3) as made:
        kinds = (FaultKind.LOSE_ANSWER, FaultKind.LOSE_REQUEST, FaultKind.REFUSE)
        await run_with_faults(made, *(Fault(kind, method=METHOD, times=8) for kind in kinds))
        accounts = last_accounts(made)
        assert all(made.network.fired[kind] == 8 for kind in kinds)
    heads = accounts[:3]
    assert sum(a.drawn for a in heads) == sum(a.trained for a in heads)
    assert sum(a.strangers.audits.get(Finding.FAILED, 0) for a in heads) > 0
    assert not any(a.strangers.audits.get(Finding.CONTRADICTED, 0) or a.strangers.set_aside_now for a in heads)
