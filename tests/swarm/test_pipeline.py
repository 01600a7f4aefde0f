"""Microbatches under faults: nothing lost, nothing trained twice at one replica, every account closed."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import random
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import ActivationCodec, OuterSpec, PipelineSpec
from noloco_node.directory.records import PeerState
from noloco_node.identity.peer_id import PeerId
from noloco_node.pipeline import messages as microbatch
from noloco_node.pipeline.messages import MicrobatchHeader, Sample
from noloco_node.pipeline.microbatch import MicrobatchSource
from noloco_node.pipeline.server import MicrobatchName
from noloco_node.simulator.loop import in_virtual_time
from noloco_node.simulator.node import SimulatedDevice
from noloco_node.telemetry.events import Account, Evaluation, InnerStep, OuterStep
from noloco_node.training.compute_thread import Priority
from noloco_node.training.stage_trainer import StageTrainer
from noloco_node.training.trainer import ForwardContext
from noloco_node.transport.errors import Refusal, Refused
from noloco_node.transport.memory import Fault, FaultKind
from noloco_node.transport.messages import Message
from tests.support import eventually, last_account
from tests.worlds import (
    IN_SUBSPACE,
    LENGTH,
    VOCABULARY,
    WINDOWS,
    Drawn,
    World,
    micro_spec,
    peer_name,
    run_to_the_end,
    run_with_faults,
    samples_of,
    virtually,
    window_rows,
    world,
)

QUICK = PipelineSpec(budget_seconds=2.0, progress_seconds=1.0)
LENGTHS = (40, pytest.param(160, marks=pytest.mark.long))
"""Steps of a whole run that is to average well."""
SECONDS = {Priority.STEP: 0.01, Priority.BACKWARD: 0.04, Priority.FORWARD: 0.02, Priority.DRAW: 0.02}
DEVICE = partial(SimulatedDevice, SECONDS.__getitem__)
"""The device of whole runs in virtual time: a busy machine moves no exchange."""


def closed_account(made: World) -> Account:
    """The last account of the first stage-0 replica, checked to close."""
    account = last_account(made.events[0])
    assert account.drawn == account.trained + account.dropped + account.held_at_end
    assert account.drawn == len(made.drawn[0].batches)
    return account


@contextlib.asynccontextmanager
async def serving_world(
    stages: int = 2, pipeline: PipelineSpec = QUICK, subspace: dict[str, object] | None = None
) -> AsyncIterator[World]:
    """Replicas whose servers accept, without their loops: for requests made by hand."""
    async with world(micro_spec(stages=stages, pipeline=pipeline, subspace=subspace)) as made:
        for replica in made.replicas:
            replica.pipeline.open()
        yield made


def request(made: World, **changes: object) -> Message:
    """A valid microbatch for stage 1, with changed header fields."""
    run, origin = made.replicas[0].context.spec.run_id, peer_name(0, 0)
    header = MicrobatchHeader(id="a" * 32, budget_ms=1500, run=run, stage=1, origin=origin, origin_clock=0.0)
    activations = torch.zeros(WINDOWS, LENGTH, 32)
    labels = torch.zeros(WINDOWS, LENGTH, dtype=torch.int32)
    return Message({**header.model_dump(mode="json"), **changes}, (activations, labels))


def test_any_budget_that_a_run_may_have_fits_a_header() -> None:
    """With a longer one each node of the first stage ended with a traceback at its first microbatch."""
    with pytest.raises(ValidationError) as refused:
        PipelineSpec(budget_seconds=1e6)
    longest = refused.value.errors()[0]["ctx"]["le"]
    assert MicrobatchHeader(
        id="a" * 32, budget_ms=int(longest * 1000), run="", stage=1, origin=peer_name(0, 0), origin_clock=0.0
    )


async def ask(made: World, message: Message) -> Message:
    """Send from the stage-0 replica to the stage-1 replica."""
    return await made.replicas[0].context.transport.call(  # pyright: ignore[reportPrivateUsage]
        peer_name(1, 0), microbatch.MICROBATCH.name, message, timeout=5, progress=5, max_answer_bytes=1 << 20
    )


@pytest.mark.parametrize("codec", ["fp32", "int8", "int4"])
@virtually
async def test_how_large_a_returned_gradient_is_goes_to_the_trainer_with_it(
    codec: ActivationCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it was received its scale was taken already, beside the device's thread: by first and middle stages."""
    told: list[tuple[float | None, float]] = []
    backward = StageTrainer.backward

    def listening(self: StageTrainer, passage: ForwardContext, gradient: torch.Tensor, *rest: Any, **more: Any) -> Any:
        told.append((more["scale"], float(gradient.float().square().mean().sqrt())))
        return backward(self, passage, gradient, *rest, **more)

    monkeypatch.setattr(StageTrainer, "backward", listening)
    spec = micro_spec(stages=3, layers=3, steps=6, pipeline=QUICK.model_copy(update={"activations": (codec,)}))
    async with world(spec) as made:
        await run_to_the_end(made)
    assert len(told) == 12
    for scale, real in told:
        assert scale is not None
        assert math.isclose(scale, real, rel_tol=1e-3)


@virtually
@pytest.mark.parametrize(("most", "requeued", "dropped"), [({}, 3, 0), ({"requeues": 2}, 2, 1)])
async def test_a_sample_whose_hop_fails_is_drawn_again_as_often_as_is_allowed(
    most: dict[str, int], requeued: int, dropped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It returns to the queue and is trained later: put back is an event, not a loss. One that always fails is given
    up, and the run goes on with the next ones."""
    pipeline = PipelineSpec.model_validate({"budget_seconds": 2.0, "progress_seconds": 1.0, **most})
    monkeypatch.setattr("noloco_node.pipeline.microbatch.ATTEMPTS", 1)
    async with world(micro_spec(layers=2, steps=12, pipeline=pipeline)) as made:
        await run_with_faults(made, Fault(FaultKind.LOSE_REQUEST, method=microbatch.MICROBATCH.name, times=3))
        account = closed_account(made)
        losses = [event for event in made.events[0] if isinstance(event, InnerStep)]
    assert made.network.fired[FaultKind.LOSE_REQUEST] == 3
    assert (account.requeued, account.dropped, account.held_at_end) == (requeued, dropped, 0)
    assert len(losses) == 12 == account.trained


@pytest.mark.parametrize("call", ["forward", "backward", "loss", "evaluate", "evaluate_loss"])
@virtually
async def test_a_device_without_memory_for_a_microbatch_costs_no_sample(
    call: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be at the first, a middle or the last stage. The microbatch goes to another or is drawn again, an
    evaluation is made at the next occasion, and the node stays. Its log has no word of a defect."""
    refused, done, times = 0, getattr(StageTrainer, call), 2 if call.startswith("evaluate") else 5

    def now_and_then(self: StageTrainer, *given: Any, **more: Any) -> Any:
        nonlocal refused
        if self.tokens_accumulated == 0 and refused < times:
            refused += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return done(self, *given, **more)

    monkeypatch.setattr(StageTrainer, call, now_and_then)
    pipeline = PipelineSpec(budget_seconds=4.0, progress_seconds=2.0, requeues=0)
    async with world(micro_spec(stages=3, layers=3, steps=12, pipeline=pipeline)) as made:
        await run_to_the_end(made)
        account = closed_account(made)
        evaluations = [event for event in made.events[0] if isinstance(event, Evaluation)]
    assert evaluations[-1].final
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    assert refused == times
    assert account.trained == 12
    assert account.dropped == account.held_at_end == 0


@pytest.mark.parametrize(("stages", "requeues"), [(2, 1), (3, 0)])
@virtually
async def test_an_outage_drops_no_sample(stages: int, requeues: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The only peer of the last stage cannot be reached for a while: samples wait with growing pauses, none is dropped.
    If that is two stages on, the one between says so, and the origin does not count it against the samples."""
    monkeypatch.setattr("noloco_node.pipeline.microbatch.ATTEMPTS", 2 if stages == 3 else 3)
    pipeline = PipelineSpec(budget_seconds=10.0, progress_seconds=5.0, requeues=requeues)
    async with world(micro_spec(stages=stages, steps=12, pipeline=pipeline)) as made:
        last = peer_name(stages - 1, 0)
        fault = Fault(FaultKind.UNREACHABLE, target=last, method=microbatch.MICROBATCH.name, times=16)
        await run_with_faults(made, fault)
        account = closed_account(made)
    assert made.network.fired[FaultKind.UNREACHABLE] == 16
    assert account.requeued >= 3
    assert account.dropped == account.held_at_end == 0


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("reason", [Refusal.BUSY, Refusal.DRAINING, Refusal.NOT_ADMITTED, Refusal.WRONG_STAGE])
@virtually
async def test_peers_that_would_refuse_any_microbatch_cost_no_sample(
    reason: Refusal, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last stage has no place for longer than a sample's whole time, at the next hop or two hops on. It had dropped
    samples that nobody had looked into."""
    monkeypatch.setattr("noloco_node.pipeline.microbatch.ATTEMPTS", 2)
    pipeline = PipelineSpec(budget_seconds=1.0, progress_seconds=0.5, requeues=0)
    async with world(micro_spec(stages=stages, layers=stages, steps=12, pipeline=pipeline)) as made:
        target, times = peer_name(stages - 1, 0), 60 if reason in microbatch.NO_FAILURE else 16
        fault = Fault(FaultKind.REFUSE, None, target, microbatch.MICROBATCH.name, times, reason)
        await run_with_faults(made, fault)
        account = closed_account(made)
    assert made.network.fired[FaultKind.REFUSE] == times
    assert account.requeued >= 2
    assert account.trained == 12
    assert account.dropped == account.held_at_end == 0


@virtually
async def test_nothing_is_drawn_while_a_stage_has_no_replica(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody serves the last of three stages. The origin holds back, says which stage it waits for, in the log and in
    its account, and trains on as soon as one is there."""
    caplog.set_level("INFO")
    async with world(micro_spec(stages=3, layers=3, steps=12, pipeline=QUICK)) as made:
        origin, middle, last = made.replicas
        async with asyncio.TaskGroup() as group:
            for replica in (origin, middle):
                group.create_task(replica.run())
            await eventually(lambda: origin.missing.stages == [2], what="it is seen that nobody serves stage 2")
            origin.books.write()
            held = last_account(made.events[0])
            assert held.missing_stages == [2]
            assert held.drawn == 0
            group.create_task(last.run())
        account = closed_account(made)
        assert account.trained == 12
        assert account.dropped == 0
        assert origin.missing.stages == []
    assert "stage 2 has no replica yet: microbatches are held back" in caplog.text
    assert "stage 2 is served after" in caplog.text, "never before: not again"


async def test_a_node_that_leaves_stage_0_keeps_its_books_and_what_was_put_back() -> None:
    """The next replica of the same node has the same ledger. The account closes through all stays, and a return to
    stage 0 begins with the samples that waited."""
    async with world(micro_spec(stages=2)) as made:
        later = made.replicas[1]
        ledger = later.pipeline.ledger
        ledger.drawn, ledger.trained = 5, 3
        ledger.waiting.extend((Sample(window_rows([1, 2, 3, 4])), Sample(window_rows([5, 6, 7, 8]))))
        later.books.write()
        account = last_account(made.events[1])
        assert (account.drawn, account.trained, account.held_at_end) == (5, 3, 2)
    async with world(micro_spec(stages=1)) as made:
        drawn, replica = Drawn(start=100), made.replicas[0]
        origin = MicrobatchSource(
            replica.context.spec, replica.worker, None, ledger, samples_of(drawn), random.Random(0), 1
        )
        assert await origin.train_one()
        assert (ledger.drawn, ledger.trained, origin.held) == (5, 4, 1)
        assert drawn.batches == []


async def test_fewer_blocks_than_replicas_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """As soon as so many live; nothing else changes."""
    async with world(micro_spec(stages=1)) as made:
        replica = made.replicas[0]
        samples = dataclasses.replace(samples_of(Drawn()), blocks=2)
        origin = MicrobatchSource(
            replica.context.spec, replica.worker, None, replica.pipeline.ledger, samples, random.Random(0), 1
        )
        for live in (2, 3, 4):
            replica.worker.live_replicas = live
            assert await origin.train_one()
            assert caplog.text.count("read a text of 2 blocks") == (live > 2)


@virtually
async def test_a_silent_peer_leaves_time_for_another() -> None:
    """A peer that takes a microbatch and never answers costs half of the budget; the second peer trains it."""
    pipeline = PipelineSpec(budget_seconds=3.0, progress_seconds=0.3)
    async with world(micro_spec(pipeline=pipeline), replicas=2) as made:
        origin = made.replicas[0]
        for replica in made.replicas:
            replica.pipeline.open()
            await replica.membership.announce(PeerState.TRAINING)
        await origin.membership.refresh()
        never = asyncio.Event()
        made.network.inject(Fault(FaultKind.DELAY, method=microbatch.MICROBATCH.name, times=1, wait=never.wait))
        assert origin.pipeline.origin is not None
        assert await origin.pipeline.origin.train_one()
        assert made.network.fired[FaultKind.DELAY] == 1
        assert origin.pipeline.ledger.retried == 1
        assert origin.pipeline.ledger.requeued == 0


async def test_what_a_leaving_node_cannot_finish_goes_back_as_no_failure() -> None:
    """A microbatch that waits for the next stage is refused as draining, so that its sender tries another at once. Its
    memory here is free, and one that is being trained is left to its end."""
    async with serving_world(stages=3) as made:
        middle = made.replicas[1]
        never = asyncio.Event()
        fault = Fault(
            FaultKind.DELAY, target=peer_name(2, 0), method=microbatch.MICROBATCH.name, times=1, wait=never.wait
        )
        made.network.inject(fault)
        await made.replicas[2].membership.announce(PeerState.TRAINING)
        await middle.membership.refresh()
        asked = asyncio.create_task(ask(made, request(made)))
        await eventually(lambda: made.network.fired[FaultKind.DELAY], what="it waits for the last stage")
        assert middle.pipeline.server.pending == 1
        middle.pipeline.server.hand_back()
        with pytest.raises(Refused) as refused:
            await asked
        assert refused.value.reason is Refusal.DRAINING
        assert middle.pipeline.server.pending == 0
        assert middle.worker.live_versions == 1
        last = made.replicas[2]
        marked = last.pipeline.server.begin_training  # pyright: ignore[reportPrivateUsage]

        def mark_and_leave(name: MicrobatchName) -> None:
            marked(name)
            last.pipeline.server.hand_back()

        last.pipeline.server.begin_training = mark_and_leave  # pyright: ignore[reportPrivateUsage]
        message = request(made, id="b" * 32, stage=2)
        answer = await made.replicas[1].context.transport.call(  # pyright: ignore[reportPrivateUsage]
            peer_name(2, 0), microbatch.MICROBATCH.name, message, timeout=5, progress=5, max_answer_bytes=1 << 20
        )
        assert answer.header["tokens"] == WINDOWS * LENGTH


async def test_a_full_node_is_busy_at_once() -> None:
    """With max_pending microbatches held, the next is refused without waiting, and served again afterwards."""
    async with world(micro_spec(stages=3, pipeline=QUICK), settings=NodeSettings(max_pending=1)) as made:
        middle = made.replicas[1]
        middle.pipeline.open()  # nobody serves stage 2, so the first microbatch stays pending here
        waiting = asyncio.create_task(ask(made, request(made)))
        await eventually(lambda: middle.pipeline.server.pending == 1, what="the first is pending")
        with pytest.raises(Refused) as refused:
            await ask(made, request(made, id="b" * 32))
        assert refused.value.reason is Refusal.BUSY
        with pytest.raises(Refused) as upward:
            await waiting
        assert upward.value.reason is Refusal.OUT_OF_REACH
        assert middle.pipeline.server.pending == 0
        assert middle.worker.live_versions == 1, "the graph of the failed microbatch is gone"


FITS, LABELS = torch.zeros(WINDOWS, LENGTH, 32), torch.zeros(WINDOWS, LENGTH, dtype=torch.int32)
UNFIT: list[tuple[dict[str, object], tuple[torch.Tensor, ...], Refusal]] = [
    ({"run": "f" * 32}, (FITS, LABELS), Refusal.WRONG_RUN),
    ({"stage": 0}, (FITS, LABELS), Refusal.WRONG_STAGE),
    ({"protocol": 999}, (FITS, LABELS), Refusal.WRONG_PROTOCOL),
    ({"origin_clock": 1e30}, (FITS, LABELS), Refusal.MALFORMED),
    ({"origin": "somebody else"}, (FITS, LABELS), Refusal.MALFORMED),
    ({}, (torch.zeros(WINDOWS, LENGTH, 33), LABELS), Refusal.MALFORMED),
    ({}, (FITS.half(), LABELS), Refusal.MALFORMED),
    ({}, (torch.zeros(99, LENGTH, 32), torch.zeros(99, LENGTH, dtype=torch.int32)), Refusal.TOO_LARGE),
    ({}, (FITS,), Refusal.MALFORMED),
    ({}, (FITS, torch.full_like(LABELS, 10**6)), Refusal.MALFORMED),
    ({}, (FITS, torch.full_like(LABELS, -7)), Refusal.MALFORMED),
    ({}, (torch.full_like(FITS, float("nan")), LABELS), Refusal.NOT_FINITE),
    ({"codec": "fp16"}, (FITS.half(), LABELS), Refusal.MALFORMED),
    ({"codec": "int8"}, (FITS, LABELS), Refusal.MALFORMED),
    ({"codec": "fp32"}, (torch.zeros(WINDOWS, LENGTH, 36, dtype=torch.uint8), LABELS), Refusal.MALFORMED),
    ({"codec": "int8"}, (torch.zeros(WINDOWS, LENGTH, 35, dtype=torch.uint8), LABELS), Refusal.MALFORMED),
    ({"codec": "int8"}, (torch.full((WINDOWS, LENGTH, 36), 255, dtype=torch.uint8), LABELS), Refusal.NOT_FINITE),
]
"""Changes of a valid header, tensors, and what is said of them."""


async def test_microbatches_that_do_not_fit_are_refused_with_their_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wrong field, shape, precision and size has its own typed refusal. So have labels outside the vocabulary,
    NaN, a codec that the run does not allow, and a body that is not what the header says. The replica is untouched."""
    monkeypatch.setattr("noloco_node.peers.scorecard.TOLERATED", math.inf)  # or the sender would be banned for them
    pipeline = QUICK.model_copy(update={"activations": ("fp32", "int8")})
    async with serving_world(pipeline=pipeline) as made:
        for number, (changes, tensors, reason) in enumerate(UNFIT):
            with pytest.raises(Refused) as refused:
                await ask(made, Message(request(made, **changes).header, tensors))
            assert refused.value.reason is reason, number
            assert made.replicas[1].worker.progress.tokens == 0


async def test_a_subspace_takes_its_own_width_and_every_token() -> None:
    """The first id of a row travels before the labels, and is bounded as they are: it is an index into a table."""
    fits = (8, LENGTH + 1, VOCABULARY - 1)
    async with serving_world(subspace=IN_SUBSPACE) as made:

        async def answer_to(width: int, length: int, first: int) -> Message:
            tokens = torch.zeros(WINDOWS, length, dtype=torch.int32)
            tokens[0, 0] = first
            return await ask(made, Message(request(made).header, (torch.ones(WINDOWS, LENGTH, width), tokens)))

        for unfit in ((8, LENGTH + 1, VOCABULARY), (8, LENGTH + 1, -1), (8, LENGTH, 0), (32, LENGTH + 1, 0)):
            with pytest.raises(Refused) as refused:
                await answer_to(*unfit)
            assert refused.value.reason is Refusal.MALFORMED, unfit
            assert made.replicas[1].worker.progress.tokens == 0
        assert (await answer_to(*fits)).tensors[0].shape == (WINDOWS, LENGTH, 8)


@virtually
async def test_narrow_activations_learn_the_same() -> None:
    """The last validation loss differs from fp32 on the wire by less than 2 %, and what travels by what it should."""
    losses: dict[str, float] = {}
    sent: dict[str, float] = {}
    for wire in ("fp32", "int8"):
        spec = micro_spec(layers=2, steps=60, pipeline=PipelineSpec.model_validate({"activations": wire}))
        async with world(spec) as made:
            await run_to_the_end(made)
            losses[wire] = next(e.loss for e in made.events[0] if isinstance(e, Evaluation) and e.final)
            body = made.replicas[0].context.transport.traffic.sent[microbatch.MICROBATCH.name]
            sent[wire] = body / made.replicas[0].pipeline.ledger.drawn / WINDOWS / LENGTH
    assert losses["fp32"] < 3.7, "it must have learnt something"
    assert losses == pytest.approx(dict.fromkeys(losses, losses["fp32"]), rel=0.02)
    assert sent["fp32"] - sent["int8"] == pytest.approx(32 * 3 - 4, rel=0.1)


@pytest.mark.parametrize("steps", LENGTHS)
def test_a_swarm_that_exchanges_by_four_bits_comes_to_its_end(steps: int) -> None:
    """All exchange about once in H inner steps, and the spread falls."""
    in_virtual_time(lambda: _exchanges_by_four_bits(steps), seed=steps)


async def _exchanges_by_four_bits(steps: int) -> None:
    """The course of it."""
    outer = OuterSpec(inner_steps=10, codec="int4")
    spec = micro_spec(layers=2, steps=steps, microbatches_a_step=4, outer=outer)
    async with world(spec, replicas=4, settings=NodeSettings(in_flight=2), device=DEVICE) as made:
        await run_to_the_end(made)
        each = [[event for event in events if isinstance(event, OuterStep)] for events in made.events]
        inner = [replica.worker.progress.steps for replica in made.replicas]
        assert min(len(replica.outer_steps.partners) for replica in made.replicas) >= 2
    for events, taken in zip(each, inner, strict=True):
        committed = [event for event in events if event.kind != "aborted"]
        assert 0.5 * taken / 10 <= len(committed) <= 2.0 + taken / 5, "not before H_min, but for the last"
        assert [event.outer_steps_taken for event in committed] == list(range(1, len(committed) + 1))
    paired = sorted((e for events in each for e in events if e.kind == "paired"), key=lambda event: event.time)
    assert len(paired) > steps // 8
    assert sum(event.kind == "no_partner" for events in each for event in events) < 0.2 * len(paired)
    spreads = [event.replica_divergence for event in paired if event.replica_divergence is not None]
    assert sum(spreads[-8:]) / 8 < 0.5 * max(spreads)


async def test_who_only_evaluates_gets_a_ration_and_who_trains_here_what_it_has_earned() -> None:
    """Keys cost nothing, and each took as much of the device as an origin. All of them together have four evaluations
    saved up, then a thirty-third of what is trained here. An origin that trains evaluates on all the while."""
    async with serving_world() as made:
        server, spec = made.replicas[1].pipeline.server, made.replicas[0].context.spec
        tokens, one = WINDOWS * LENGTH, spec.evaluation.windows * LENGTH
        asked = request(made, mode="evaluate")
        header, specs = MicrobatchHeader.model_validate(asked.header), asked.specs
        rations = server.rations
        origin, given = PeerId(peer_name(0, 0)), 0
        rations.worked(origin, 10 * one)
        for number in range(40):
            key = PeerId(f"key-{number}")
            with contextlib.suppress(Refused):
                for _ in range(40):
                    server.admit(key, header.model_copy(update={"origin": key}), specs)()
                    given += 1
        assert 0 < given * tokens <= 4 * one
        for _ in range(10 * one // tokens):
            server.admit(origin, header, specs)()
        rations.worked(origin, 10 * one)
        server.admit(origin, header, specs)()
