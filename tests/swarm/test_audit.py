"""Audits: which peers are examined, which decide, and what follows for a peer that is contradicted."""

from __future__ import annotations

import asyncio
import itertools
import random
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from noloco_node import tallies
from noloco_node.aio import cancel_and_wait
from noloco_node.config.run_spec import PipelineSpec, RunSpec
from noloco_node.directory.clocks import DrawnBy
from noloco_node.finite import ALIKE
from noloco_node.identity.peer_id import PeerId
from noloco_node.peers.hop import TRIAL_SECONDS, Trust
from noloco_node.pipeline.audit import Auditor, Finding, likeness, odd_one_out
from noloco_node.pipeline.messages import MICROBATCH, Ledger, MicrobatchHeader, Outgoing, Trained
from noloco_node.pipeline.microbatch import Downstream
from noloco_node.pipeline.routing import LoadBalancer
from noloco_node.tallies import BANS
from noloco_node.transport.errors import PeerUnreachable, Refusal, Refused
from noloco_node.transport.memory import MemoryNetwork, MemoryTransport
from noloco_node.transport.messages import Message
from tests.inside import audits_under_way, reputes_of
from tests.support import eventually
from tests.worlds import micro_spec, peer_name


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


def test_the_odd_one_out_is_told_by_a_third() -> None:
    """Of two that contradict each other, it is the one that the third contradicts too; nobody if it agrees with both or
    with none."""
    gradient, other, third = torch.randn(3, 500, generator=torch.Generator().manual_seed(0)).unbind()
    honest = gradient + 0.1 * other
    assert odd_one_out(gradient, -gradient, honest) == 1
    assert odd_one_out(-gradient, gradient, honest) == 0
    assert odd_one_out(gradient, other, third) is None
    assert odd_one_out(gradient, other, gradient + 1.2 * other) is None


GRADIENT = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
BODY = Outgoing("a" * 32, "train", DrawnBy(PeerId("some origin"), 0.0), torch.zeros(2, 8), torch.zeros(2, 8))


class Stage:
    """A next stage whose peers answer as they are told to, and an auditor of it."""

    def __init__(self, peers: int, share: float = 0.0625, allowance: float = 12.0) -> None:
        self.now = 0.0
        self.peers = [PeerId(f"peer {number:02}") for number in range(peers)]
        self.liars: dict[PeerId, Tensor] = {}
        """What they give back instead of the gradient."""
        self.silent: set[PeerId] = set()
        self.busy: set[PeerId] = set()
        self.stalling: set[PeerId] = set()
        self.honest_to_copies = False
        self.asked: list[PeerId] = []
        self.balancer = LoadBalancer("uniform", random.Random(0), lambda: self.now)
        self.balancer.update(self.peers, 0)
        self.auditor = Auditor(
            share, self.balancer, self._answer, random.Random(0), lambda: self.now, allowance=allowance
        )

    async def _answer(self, peer: PeerId, outgoing: Outgoing, budget: float) -> Trained:
        self.asked.append(peer)
        if peer in self.silent:
            raise PeerUnreachable("gone")
        if peer in self.busy:
            raise Refused(Refusal.BUSY)
        if peer in self.stalling:
            await asyncio.Event().wait()
        return Trained(1.0, 1, GRADIENT, 1.0, peer) if self.honest_to_copies else self.answer_of(peer)

    def answer_of(self, peer: PeerId, size: float = 1.0) -> Trained:
        """A gradient of that many times the usual size."""
        return Trained(1.0, 1, size * self.liars.get(peer, GRADIENT), size, peer)

    async def microbatch(self, first: PeerId | None = None, size: float = 1.0) -> list[PeerId]:
        """One more is answered, by a peer of the balancer's choice unless it is said; returns the peers asked to audit
        it."""
        chosen = first or self.balancer.choose()
        assert chosen is not None
        asked = len(self.asked)
        self.auditor.consider(self.answer_of(chosen, size), BODY, budget=9.0, took=0.0)
        if audits_under_way(self.auditor):
            running = asyncio.create_task(self.auditor.run())
            await eventually(lambda: not audits_under_way(self.auditor))
            await cancel_and_wait([running])
        return self.asked[asked:]

    async def known(self) -> Stage:
        """Each peer has answered its first."""
        for peer in self.peers:
            await self.microbatch(peer)
        return self

    def served(self) -> set[PeerId]:
        """The peers that get ordinary microbatches."""
        return {peer for _ in range(300) if (peer := self.balancer.choose())}

    def trust(self, number: int) -> Trust:
        """In one of the peers."""
        return self.balancer.trust(self.peers[number])


async def test_the_first_microbatch_of_each_and_a_share_of_the_others_are_audited() -> None:
    """None is audited if the run wants none, or nobody could decide."""
    stage = Stage(4, allowance=1.0)
    assert len(await stage.microbatch(stage.peers[0])) == 1
    count = 1 + sum([len(await stage.microbatch()) for _ in range(1599)])
    assert 90 < count <= 101
    assert all(stage.balancer.repute(peer).audits for peer in stage.peers)
    assert set(stage.auditor.findings) == {Finding.AGREED}
    for idle in (Stage(4, share=0.0), Stage(2, share=1.0)):
        assert not any([await idle.microbatch() for _ in range(20)])


async def test_an_unusually_large_gradient_is_looked_at_at_once() -> None:
    """Within twice the usual norm it is one like any other."""
    stage = await Stage(3, share=1e-9).known()
    assert not await stage.microbatch(size=1.9)
    assert await stage.microbatch(size=2.1)


async def test_who_is_on_trial_is_only_compared_until_it_is_cleared_or_set_aside() -> None:
    """After one lie it gets copies of the next microbatches. To agree with eight ends the trial, and with eight of its
    own, all of which are examined, the doubt. A peer that goes on lying is set aside, and comes back on trial."""
    stage = await Stage(4, share=1e-9).known()
    suspect, *others = stage.peers
    stage.liars = {suspect: -GRADIENT}
    assert len(await stage.microbatch(suspect, size=2.1)) == 2
    assert stage.trust(0) is Trust.ON_TRIAL
    assert stage.served() == set(others)
    stage.liars = {}
    assert [await stage.microbatch(others[0]) for _ in range(9)] == [[suspect]] * 8 + [[]]
    assert stage.served() == set(stage.peers)
    assert [len(await stage.microbatch(suspect)) for _ in range(9)] == [1] * 8 + [0]
    assert not stage.balancer.doubted

    stage.liars = {suspect: -GRADIENT}
    asked = [await stage.microbatch(suspect, size=3.0)] + [await stage.microbatch() for _ in range(3)]
    assert [len(some) for some in asked] == [2, 2, 2, 0]
    assert (stage.trust(0), stage.balancer.set_aside_now) == (Trust.SET_ASIDE, 1)
    stage.now = BANS.first
    assert (stage.trust(0), stage.balancer.set_aside_now) == (Trust.ON_TRIAL, 0)
    assert stage.served() == set(others)
    assert suspect in await stage.microbatch()
    assert stage.trust(0) is Trust.SET_ASIDE


async def test_what_a_peer_still_had_in_hand_when_it_was_set_aside_earns_it_nothing() -> None:
    """Honest answers that are held back do not bring it back before its time either."""
    stage = await Stage(4, share=1.0).known()
    stage.liars = {stage.peers[0]: -GRADIENT}
    for _ in range(3):
        await stage.microbatch(stage.peers[0])
    assert stage.trust(0) is Trust.SET_ASIDE
    stage.liars = {}
    assert not any([await stage.microbatch(stage.peers[0], size=2.5) for _ in range(9)])
    assert stage.trust(0) is Trust.SET_ASIDE


async def test_a_trial_without_a_jury_ends_by_itself() -> None:
    """Where only two are left nobody can clear the suspect, and it works again after a minute."""
    stage = await Stage(3, share=1e-9).known()
    stage.liars = {stage.peers[0]: -GRADIENT}
    await stage.microbatch(stage.peers[0], size=2.1)
    stage.balancer.update(stage.peers[:2], 0)
    assert stage.served() == {stage.peers[1]}
    assert not await stage.microbatch()
    stage.now = TRIAL_SECONDS
    assert stage.served() == set(stage.peers[:2])


@pytest.mark.parametrize("way", ["silent", "busy"])
async def test_suspects_that_do_not_answer_hold_no_audit_up(way: str) -> None:
    """They lied once and say nothing since: another liar is found out all the same. A peer that is gone is seldom asked
    again; one that is busy, as an honest one may be, more often."""
    stage = await Stage(8, share=1.0).known()
    *suspects, liar = stage.peers[:4]
    stage.liars = dict.fromkeys((*suspects, liar), -GRADIENT)
    for suspect in suspects:
        await stage.microbatch(suspect)
    setattr(stage, way, set(suspects))
    stage.asked.clear()
    for _ in range(100):
        stage.now += 0.5
        await stage.microbatch()
    assert stage.trust(3) is Trust.SET_ASIDE
    assert stage.asked.count(suspects[0]) <= (3 if way == "silent" else 50)
    assert stage.auditor.findings[Finding.FAILED] == 0


async def test_a_juror_that_stalls_is_not_waited_for_long() -> None:
    """It has a few times what the first answer took; then another one is asked."""
    stage = await Stage(4, share=1.0).known()
    stage.liars = {stage.peers[0]: -GRADIENT}
    await stage.microbatch(stage.peers[0])
    stage.liars, stage.stalling = {}, {stage.peers[0]}
    asked = await stage.microbatch(stage.peers[1])
    assert asked[0] == stage.peers[0]
    assert len(asked) == 2


async def test_a_stage_in_which_most_were_doubted_is_audited_again_in_time() -> None:
    """Two of three were contradicted, say by a liar further on: nobody can decide. Time forgives; a liar is found."""
    stage = await Stage(3, share=1.0).known()
    for peer in stage.peers[:2]:
        stage.balancer.audited(peer, against=True, by_copy=False)
    assert not await stage.microbatch()
    stage.liars = {stage.peers[0]: -GRADIENT}
    for _ in range(1200):
        stage.now += 1.0
        await stage.microbatch()
    assert stage.trust(0) is Trust.SET_ASIDE
    assert stage.balancer.repute(stage.peers[1]).aside.times == stage.balancer.repute(stage.peers[2]).aside.times == 0


@pytest.mark.parametrize("same_lie", [True, False])
async def test_two_liars_of_twelve_are_found_and_clear_or_outvote_nobody(same_lie: bool) -> None:
    """Whether they tell one lie or two: they never sit on one jury once they are doubted."""
    stage = await Stage(12, share=1.0).known()
    for number in range(2):
        stage.liars[stage.peers[number]] = -GRADIENT if same_lie else GRADIENT.roll(number + 1, -1)
    for _ in range(400):
        stage.now += 0.1
        await stage.microbatch()
    assert [stage.trust(number) for number in range(12)] == [Trust.SET_ASIDE] * 2 + [Trust.ORDINARY] * 10
    stage.now = max(stage.balancer.repute(peer).aside.until for peer in stage.peers) + 0.1
    for _ in range(100):
        await stage.microbatch()
    assert stage.served() == set(stage.peers[2:])


@pytest.mark.parametrize("honest_to_copies", [True, False])
@pytest.mark.parametrize("share_of_lies", [0.25, 1.0])
async def test_who_lies_now_and_then_is_found_as_well(share_of_lies: float, honest_to_copies: bool) -> None:
    """Ten microbatches a second for ten minutes, every thirty-second looked at: it places few of its lies, also where
    it can tell copies and answers them honestly."""
    stage, rng, used = await Stage(4, share=1 / 32).known(), random.Random(1), 0
    stage.honest_to_copies = honest_to_copies
    for _ in range(6000):
        stage.now += 0.1
        stage.liars = {stage.peers[0]: -GRADIENT} if rng.random() < share_of_lies else {}
        chosen = stage.balancer.choose()
        await stage.microbatch(chosen)
        used += chosen in stage.liars
    assert used < 0.3 * 6000 / 4 * share_of_lies


async def test_replicas_that_all_differ_cost_little_and_nobody_is_shut_out() -> None:
    """After a partition, or with very small microbatches, no two agree: nothing can be decided, and a trial ends."""
    stage = await Stage(4, share=1 / 32).known()
    stage.liars = {stage.peers[0]: -GRADIENT}
    await stage.microbatch(stage.peers[0], size=3.0)
    for number, peer in enumerate(stage.peers):
        stage.liars[peer] = torch.randn(2, 8, generator=torch.Generator().manual_seed(90 + number))
    pairs = itertools.combinations(stage.liars.values(), 2)
    assert not any(likeness(one, other) >= ALIKE for one, other in pairs)
    stage.asked.clear()
    for _ in range(1000):
        await stage.microbatch()
    assert stage.served() == set(stage.peers)
    assert len(stage.asked) < 1000 / 32 + 2 * 8 + 12


async def test_books_about_peers_do_not_grow_with_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those heard last are remembered."""
    monkeypatch.setattr(tallies, "MOST_PEERS", 4)
    stage = await Stage(12).known()
    assert len(reputes_of(stage.balancer)) == 4


async def test_a_failure_in_an_audit_ends_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody foresaw it: it is logged with its cause, and the next microbatch is audited as ever."""
    stage = await Stage(3, share=1.0).known()
    answer, stage.auditor.train_again = stage.auditor.train_again, broken
    await stage.microbatch()
    stage.auditor.train_again = answer
    await stage.microbatch()
    assert stage.auditor.findings == {Finding.AGREED: 4, Finding.FAILED: 1}
    assert "RuntimeError: no memory" in caplog.text


async def broken(_peer: PeerId, _outgoing: Outgoing, _budget: float) -> Trained:
    """Fails as nothing should."""
    raise RuntimeError("no memory")


class Chain:
    """A pipeline of real senders without layers: what comes to a stage is counted and sent on."""

    def __init__(self, spec: RunSpec, replicas: int) -> None:
        self.spec = spec
        self.network = MemoryNetwork()
        self.work = [0] * spec.stages
        self.rng = random.Random(0)
        self.names = [[peer_name(stage, index) for index in range(replicas)] for stage in range(spec.stages)]
        self.transports: list[MemoryTransport] = []
        self.downstream: dict[PeerId, Downstream] = {}
        for stage, names in enumerate(self.names):
            for name in names:
                self.add(stage, name)

    def add(self, stage: int, name: PeerId) -> None:
        """One replica."""
        transport = MemoryTransport(self.network, name)
        self.transports.append(transport)
        if stage + 1 < self.spec.stages:
            balancer = LoadBalancer("uniform", self.rng, time.monotonic)
            balancer.update(self.names[stage + 1], 0)
            self.downstream[name] = Downstream(self.spec, stage, transport, balancer, Ledger(), self.rng)

        async def handle(_peer: PeerId, message: Message) -> Message:
            activations, labels = message.tensors
            self.work[stage] += 1
            header = MicrobatchHeader.model_validate(message.header)
            if name in self.downstream:
                outgoing = Outgoing(header.id, "train", header.drawn, activations, labels)
                await self.downstream[name].send(outgoing, 60.0)
            answer = {"loss_sum": 1.0, "tokens": labels.numel(), "load": 0}
            return Message(answer, (activations * self.rng.lognormvariate(0.0, 0.2),))

        transport.serve(MICROBATCH.name, lambda *_: None, handle, max_concurrent_per_peer=1000)

    async def train(self, microbatches: int) -> list[float]:
        """What each stage has worked, in microbatches that were drawn."""
        auditing = [asyncio.create_task(each.auditor.run()) for each in self.downstream.values()]
        body, labels = torch.ones(1, 2, 4), torch.zeros(1, 2, dtype=torch.int32)
        for number in range(microbatches):
            origin = self.names[0][number % len(self.names[0])]
            drawn = DrawnBy(origin, 0.0)
            await self.downstream[origin].send(Outgoing(f"{number:032x}", "train", drawn, body, labels), 60.0)
        await eventually(lambda: not any(audits_under_way(each.auditor) for each in self.downstream.values()))
        await cancel_and_wait(auditing)
        for transport in self.transports:
            await transport.close()
        return [done / microbatches for done in self.work]


async def test_all_audits_together_stay_below_their_share_at_every_stage_of_eight() -> None:
    """Copies of audits are audited again further down. The last stage, too, works at most 1 + share times what was
    drawn, the first microbatches of each peer included. Audits there are, by every sender."""
    pipeline = PipelineSpec(routing="uniform", budget_seconds=60.0, progress_seconds=50.0)
    chain = Chain(micro_spec(stages=8, layers=8, pipeline=pipeline), replicas=3)
    work = (await chain.train(600))[1:]
    assert work == sorted(work)
    assert 1.0 <= work[0] <= work[-1] <= 1.0 + pipeline.audit_share + 0.02, work
    assert sum(each.auditor.findings[Finding.AGREED] for each in chain.downstream.values()) > 0.5 * 600 * (1 / 32)
