"""Audits in swarms of real replicas: a liar is set aside, honest replicas never, and no account suffers."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from noloco_node import tallies
from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import OuterSpec, PipelineSpec, RunSpec
from noloco_node.identity.peer_id import PeerId
from noloco_node.node.replica import Replica
from noloco_node.peers.hop import SET_ASIDE_AT, Trust
from noloco_node.pipeline.audit import Finding
from noloco_node.pipeline.messages import MICROBATCH, MicrobatchHeader
from noloco_node.pipeline.server import PipelineServer
from noloco_node.simulator.loop import in_virtual_time
from noloco_node.simulator.node import SimulatedDevice
from noloco_node.tallies import Doubling
from noloco_node.telemetry.events import Account, OuterStep
from noloco_node.training.compute_thread import Priority
from noloco_node.training.trainer import LossResult
from noloco_node.transport.memory import Fault, FaultKind
from tests.inside import reputes_of
from tests.support import eventually, last_account
from tests.worlds import (
    IN_SUBSPACE,
    World,
    last_accounts,
    micro_spec,
    peer_name,
    run_to_the_end,
    run_with_faults,
    trainer_of,
    virtually,
    world,
)

SECONDS = {Priority.STEP: 0.02, Priority.BACKWARD: 0.2, Priority.FORWARD: 0.1, Priority.DRAW: 0.1}
"""What the modelled device takes where a test runs in virtual time."""
ALWAYS = PipelineSpec(routing="uniform", audit_share=1.0, budget_seconds=10.0, progress_seconds=5.0)


def near_spec(*, steps: int, stages: int = 2, subspace: dict[str, object] | None = None) -> RunSpec:
    """A run in which honest stage peers stay near each other, as audits take for granted. They average often, and learn
    slowly, however unequally chance and the machine share the work out."""
    outer = OuterSpec(inner_steps=3, codec="fp32", max_lag_tokens=1_000_000)
    inner: dict[str, object] = {"learning_rate": 3e-4}
    cut: dict[str, Any] = {"stages": stages, "layers": stages, "subspace": subspace}
    return micro_spec(steps=steps, microbatches_a_step=3, pipeline=ALWAYS, inner=inner, outer=outer, **cut)


def lying(replica: Replica, lie: Callable[[Tensor], Tensor]) -> None:
    """What it gives back is a lie; it trains as ever."""
    loss = replica.worker.loss

    async def answer(*arguments: Any, **options: Any) -> LossResult:
        result = await loss(*arguments, **options)
        assert result.input_gradient is not None
        return dataclasses.replace(result, input_gradient=lie(result.input_gradient))

    replica.worker.loss = answer  # type: ignore[method-assign]


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
QUICK_LIES = ("sign turned",)


@pytest.mark.parametrize(
    "lie", [lie if lie in QUICK_LIES else pytest.param(lie, marks=pytest.mark.long) for lie in LIES]
)
@virtually
async def test_a_liar_among_three_is_set_aside_by_every_origin_and_nobody_else(lie: str) -> None:
    """After its third contradiction it is set aside while the others live; samples and accounts do not notice."""
    async with world(near_spec(steps=30), replicas=3) as made:
        lying(made.of_stage(1)[0], LIES[lie])
        await run_to_the_end(made)
        books = [replica.pipeline.balancer for replica in made.of_stage(0)]
        accounts = last_accounts(made)
    heads, tails = accounts[:3], accounts[3:]
    check_books(made, heads, tails)
    for book, account in zip(books, heads, strict=True):
        asides = {peer: repute.aside.times for peer, repute in reputes_of(book).items() if repute.aside.times}
        assert asides == {peer_name(1, 0): 1}
        assert account.strangers.audits[Finding.CONTRADICTED] == SET_ASIDE_AT
    assert tails[0].served <= 3 * SET_ASIDE_AT + 6
    assert min(tails[1].served, tails[2].served) > 3 * SET_ASIDE_AT + 6


def leaning(gradient: Tensor) -> Tensor:
    """1.2 times as long, by one direction for every token: 0.82 like what it ought to be."""
    direction = torch.randn(gradient.shape[-1], generator=torch.Generator().manual_seed(1)).expand_as(gradient)
    return gradient + 0.663 * float(gradient.norm() / direction.norm()) * direction


@virtually
async def test_a_tail_that_leans_one_way_in_every_answer_is_set_aside_though_audits_agree_with_each() -> None:
    """One origin and three tails, so that few microbatches are enough. The honest ones are never found to lean."""
    async with world(micro_spec(layers=2, steps=30, microbatches_a_step=3), replicas=3) as made:
        lying(made.of_stage(1)[0], leaning)
        head = made.of_stage(0)[0]
        made.replicas[1:3] = []
        await run_to_the_end(made)
    reputes = reputes_of(head.pipeline.balancer)
    assert {peer for peer, repute in reputes.items() if repute.aside.times} == {peer_name(1, 0)}
    account = last_account(made.events[0]).strangers
    assert account.audits[Finding.LEANT] >= 1
    assert account.audits[Finding.AGREED] > 0
    assert not account.audits.get(Finding.CONTRADICTED, 0)


@virtually
async def test_honest_replicas_agree_through_a_whole_run() -> None:
    """Every microbatch is looked at, beside three stages that average and move, and nobody is ever contradicted,
    however few and narrow the numbers are that travel."""
    spec = near_spec(stages=3, steps=15, subspace=IN_SUBSPACE)
    pipeline = spec.pipeline.model_copy(update={"activations": ("int4",)})
    spec = spec.model_copy(update={"pipeline": pipeline})
    async with world(spec, replicas=3, settings=NodeSettings(in_flight=2)) as made:
        await run_to_the_end(made)
        accounts = last_accounts(made)
    findings = {name for account in accounts[:6] for name in account.strangers.audits}
    assert Finding.AGREED in findings
    assert not findings & {Finding.CONTRADICTED, Finding.UNDECIDED, Finding.LEANT}
    assert sum(account.strangers.audits[Finding.AGREED] for account in accounts[:3]) > 20


@virtually
async def test_an_audit_asks_for_what_the_first_was_asked_whatever_the_codec_of_each_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each link has its own codec, but any peer asked in an audit gets the first one's: all agree, all of one
    microbatch went the same way. But for its id nothing in its header tells one from an ordinary one, the budget
    included."""
    spec = near_spec(steps=12)
    pipeline = spec.pipeline.model_copy(update={"activations": ("fp32", "bf16", "int8")})
    headers: dict[bytes, list[dict[str, object]]] = {}
    links: set[tuple[int, str]] = set()
    handle = PipelineServer.handle

    async def seen(server: PipelineServer, peer: PeerId, header: MicrobatchHeader, tensors: Any) -> Any:
        if header.mode == "train":
            headers.setdefault(tensors[1].numpy().tobytes(), []).append(header.model_dump(mode="json"))
            links.add((id(server), header.codec))
        return await handle(server, peer, header, tensors)

    monkeypatch.setattr(PipelineServer, "handle", seen)
    async with world(spec.model_copy(update={"pipeline": pipeline}), replicas=3) as made:
        for head in made.of_stage(0):
            assert head.pipeline.downstream is not None
            head.pipeline.downstream._codecs.choose = lambda peer: pipeline.activations[int(peer[-1])]  # type: ignore[method-assign]
        await run_to_the_end(made)
        accounts = last_accounts(made)
    findings = Counter[str]()
    for account in accounts[:3]:
        findings.update(account.strangers.audits)
    assert findings[Finding.AGREED] > 20
    assert not findings[Finding.CONTRADICTED] + findings[Finding.UNDECIDED]
    assert len(links) == 9, "audits take each codec to each peer"
    audited = [same for same in headers.values() if len(same) > 1]
    assert len(audited) > 20
    for same in audited:
        assert len({str(header.pop("id")) for header in same}) == len(same)
        assert all(header == same[0] for header in same), same


@virtually
async def test_an_audit_that_fails_costs_no_sample_and_counts_against_nobody() -> None:
    """Streams that break in an audit or before it: the books close as ever."""
    async with world(near_spec(steps=14), replicas=3) as made:
        kinds = (FaultKind.LOSE_ANSWER, FaultKind.LOSE_REQUEST, FaultKind.REFUSE)
        await run_with_faults(made, *(Fault(kind, method=MICROBATCH.name, times=8) for kind in kinds))
        accounts = last_accounts(made)
        assert all(made.network.fired[kind] == 8 for kind in kinds)
    heads = accounts[:3]
    assert sum(a.drawn for a in heads) == sum(a.trained for a in heads)
    assert sum(a.strangers.audits[Finding.AGREED] for a in heads) > 9
    assert not any(a.strangers.audits.get(Finding.CONTRADICTED, 0) or a.strangers.set_aside_now for a in heads)


@pytest.mark.timeout(300)  # 9 s on a quiet machine, 90 beside a swarm
def test_a_replica_that_has_lost_its_weights_is_set_aside_copies_a_stage_peer_and_is_cleared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Honest, but useless until it has a good state again: it gets no work, lags, copies, and works as before."""
    monkeypatch.setattr(tallies, "BANS", Doubling(4.0, 4.0))
    in_virtual_time(_loses_its_weights, seed=1)


async def _loses_its_weights() -> None:
    """The course of it, in virtual time: on a busy machine clearing took as long as the machine liked."""
    outer = OuterSpec(inner_steps=5, codec="fp32", max_lag_tokens=4_000)
    spec = micro_spec(layers=2, steps=2000, microbatches_a_step=3, pipeline=ALWAYS, outer=outer)
    async with world(spec, replicas=3, device=partial(SimulatedDevice, SECONDS.__getitem__)) as made:
        lost, stage_peer = made.of_stage(1)[:2]

        def master(replica: Replica) -> Tensor:
            return trainer_of(replica.worker).master

        async with asyncio.TaskGroup() as group:
            group.create_task(run_to_the_end(made, within=500))
            await eventually(lambda: lost.worker.progress.steps > 8, 60)
            await _scramble(lost)
            before = len(outer_steps(made, 3))
            books = [replica.pipeline.balancer for replica in made.of_stage(0)]
            await eventually(lambda: any(book.trust(peer_name(1, 0)) is Trust.SET_ASIDE for book in books), 60)
            await eventually(lambda: any(e.kind == "caught_up" for e in outer_steps(made, 3)[before:]), 60)
            served = lost.pipeline.ledger.served
            await eventually(lambda: lost.pipeline.ledger.served > served + 20, 60, "it works again")
            apart = float((master(lost) - master(stage_peer)).norm())
            assert apart < 0.3 * float(master(stage_peer).norm()), (
                "stage peers drift by a tenth at most, the noise was far larger"
            )
            for replica in made.replicas:
                replica.stop.set()


async def _scramble(replica: Replica) -> None:
    """Noise in place of its weights."""
    progress, state = await replica.worker.joiner_state()
    noise = torch.randn(state["fast"].numel(), generator=torch.Generator().manual_seed(0))
    noisy = {**state, "fast": noise, "slow": noise}
    await replica.worker.load_full_state(progress.clock, progress.outer_rounds, noisy)


def outer_steps(made: World, number: int) -> list[OuterStep]:
    """The outer steps of one replica so far."""
    return [event for event in made.events[number] if isinstance(event, OuterStep)]
