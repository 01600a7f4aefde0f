"""Inner training: what trains, what is skipped, and what the clock counts."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

from noloco_node.config.run_spec import LimitsSpec, OuterSpec
from noloco_node.pipeline.messages import HopFailed
from noloco_node.training import progress, stage_worker
from noloco_node.training.trainer import ForwardContext, MicrobatchNotFinite
from tests.support import eventually
from tests.training.made_trainers import lone_worker, make_trainer, moments_of
from tests.worlds import (
    LENGTH,
    MICROBATCH,
    WINDOWS,
    micro_spec,
    peer_name,
    run_to_the_end,
    trainer_of,
    window_batch,
    window_rows,
    world,
)

HIDDEN = 32
CONTRACT_CHANGES: list[dict[str, object]] = [{}, {"codec": "fp16"}, {"momentum": "local"}]

T = TypeVar("T")


def test_a_gradient_that_is_not_finite_skips_the_step_and_changes_nothing() -> None:
    """Weights and AdamW's state stay bitwise; the next step is an ordinary one."""
    trainer = make_trainer(micro_spec(stages=1), 0)
    inputs, labels = window_batch(range(WINDOWS))
    trainer.loss(inputs, labels)
    assert not trainer.step(1e-3).skipped
    weights, state = trainer.master.clone(), moments_of(trainer)
    trainer.loss(inputs, labels)
    trainer.gradient[17] = math.nan
    result = trainer.step(1e-3)
    assert result.skipped
    assert result.tokens == MICROBATCH
    assert torch.equal(trainer.master, weights)
    assert all(torch.equal(value, state[name]) for name, value in moments_of(trainer).items())
    assert trainer.tokens_accumulated == 0
    trainer.loss(inputs, labels)
    assert not trainer.step(1e-3).skipped
    assert not torch.equal(trainer.master, weights)
    assert bool(torch.isfinite(trainer.master).all())


def test_a_microbatch_whose_gradient_overflows_does_not_spoil_those_before_it() -> None:
    """It is refused before anything is accumulated, on the last stage and in a backward."""
    spec = micro_spec(stages=2)
    last, first = make_trainer(spec, 1), make_trainer(spec, 0)
    inputs, labels = window_batch(range(WINDOWS))
    last.loss(torch.randn(WINDOWS, LENGTH, HIDDEN), labels)
    good = ForwardContext()
    first.backward(good, torch.randn_like(first.forward(inputs, good)), 1.0, MICROBATCH)
    before = [trainer.gradient.clone() for trainer in (last, first)]
    with pytest.raises(MicrobatchNotFinite):
        last.loss(torch.full((WINDOWS, LENGTH, HIDDEN), 3e38), labels)
    bad = ForwardContext()
    outputs = first.forward(inputs, bad)
    with pytest.raises(MicrobatchNotFinite):
        first.backward(bad, torch.full_like(outputs, 3e38), 1.0, MICROBATCH)
    first.discard(bad)
    assert all(torch.equal(t.gradient, b) for t, b in zip((last, first), before, strict=True))
    assert [trainer.tokens_accumulated for trainer in (last, first)] == [MICROBATCH, MICROBATCH]
    assert [trainer.versions.live for trainer in (last, first)] == [1, 1]


async def test_a_decision_on_an_inner_step_stands_on_one_number_of_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop reads the directory between the decision and the step: clock and report are of the share decided on."""
    async with lone_worker(micro_spec(stages=1)) as (worker, _, reports):

        def share_while_the_loop_writes(global_batch_tokens: int, live_replicas: int) -> float:
            worker.live_replicas = 4
            return progress.share_of_batch(global_batch_tokens, live_replicas)

        monkeypatch.setattr(stage_worker, "share_of_batch", share_while_the_loop_writes)
        await worker.loss(*window_batch(range(WINDOWS)))
        assert [report.live_replicas for report in reports] == [1]
        assert worker.progress.clock == MICROBATCH


async def test_a_run_of_one_stage_survives_a_loss_that_is_not_finite() -> None:
    """The sample is put back, in the end dropped, and the account closes; the node does not fall."""
    async with world(micro_spec(stages=1)) as made:
        (replica,) = made.replicas
        assert replica.pipeline.origin is not None
        trainer = trainer_of(replica.worker)
        sound = trainer.master.clone()
        trainer.add_to_weights(torch.full_like(sound, math.nan))
        attempts = 1 + replica.context.spec.pipeline.requeues
        for _ in range(attempts):
            await replica.pipeline.origin.train_one()
        ledger = replica.pipeline.ledger
        assert (ledger.drawn, ledger.requeued, ledger.dropped, ledger.trained) == (1, attempts - 1, 1, 0)
        assert replica.pipeline.origin.held == replica.worker.progress.tokens == 0
        with pytest.raises(HopFailed):
            await replica.pipeline.origin.evaluate(window_rows(range(4)))
        trainer.load(sound, moments_of(trainer))
        await replica.pipeline.origin.train_one()
        assert ledger.trained == 1


async def test_the_embedding_trains() -> None:
    """On stage 0 of two, and on the token rows that occurred: by more than weight decay alone would move them."""
    async with world(micro_spec(steps=12, inner={"weight_decay": 0.0})) as made:
        first = made.replicas[0]
        before, _ = await first.worker.named_weights()
        await run_to_the_end(made)
        _, after = await first.worker.named_weights()
        seen = torch.cat([window_batch(windows)[0].flatten() for windows in made.drawn[0].batches]).unique()
    (name,) = [local for local, full in first.full_names.items() if "embed_tokens" in full]
    moved = (after[name] - before[name]).norm(dim=1)
    assert bool((moved[seen] > 1e-3).all())


async def test_the_clock_is_own_tokens_times_live_replicas_and_exchanges_keep_its_mean() -> None:
    """Three replicas of uneven speed: before any exchange the clocks are exact; after several their sum is the same,
    and they have come together."""
    outer = OuterSpec(inner_steps=2, min_inner_steps=0, max_lag_tokens=10_000)
    spec = micro_spec(stages=1, microbatches_a_step=3, outer=outer, limits=LimitsSpec(chunk_bytes=4096))
    trained = (9, 3, 6)
    async with world(spec, replicas=3) as made, asyncio.TaskGroup() as group:
        running = [group.create_task(replica.averaging.run()) for replica in made.replicas]
        for replica, microbatches in zip(made.replicas, trained, strict=True):
            replica.averaging.open()
            replica.worker.live_replicas = 3
            assert replica.pipeline.origin is not None
            for _ in range(microbatches):
                await replica.pipeline.origin.train_one()
        workers = [replica.worker for replica in made.replicas]
        clocks = [worker.progress.clock for worker in workers]
        assert clocks == [3 * MICROBATCH * microbatches for microbatches in trained]
        for dialler, partner in ((0, 1), (1, 2), (2, 0), (0, 1)):
            assert await made.replicas[dialler].averaging.dial(peer_name(0, partner))
            await eventually(lambda: not any(replica.averaging.under_way for replica in made.replicas))
        met = [worker.progress.clock for worker in workers]
        rounds = [worker.progress.outer_rounds for worker in workers]
        for task in running:
            task.cancel()
    assert rounds == [3, 3, 2]
    assert sum(met) == pytest.approx(sum(clocks), rel=1e-12)
    assert max(met) - min(met) < 0.3 * (max(clocks) - min(clocks))


async def test_a_state_read_during_a_commit_is_of_one_moment() -> None:
    """θ has moved, φ and δ are still being carried over: a reader of the state gets all three after the step."""
    outer = OuterSpec(inner_steps=2, alpha=0.5, beta=0.5)
    async with lone_worker(micro_spec(stages=1, outer=outer)) as (worker, _, _):
        for first in range(0, 3 * WINDOWS, WINDOWS):
            await worker.loss(*window_batch(range(first, first + WINDOWS)))
        applied, release = asyncio.Event(), asyncio.Event()
        pieces: list[str] = []

        async def on_host(work: Callable[[], T]) -> T:
            pieces.append(getattr(work, "__name__", ""))
            if len(pieces) == 2:
                applied.set()
                await release.wait()
            return await asyncio.to_thread(work)

        _, before = await worker.joiner_state()
        snapshot = await worker.snapshot()
        worker.outer.open(members=1, weight=1.0)
        committing = asyncio.create_task(worker.commit(snapshot, scale=1.0, clock_shift=0.0, on_host=on_host))
        await applied.wait()
        progress, during = await worker.joiner_state()
        assert progress.outer_rounds == 1
        torch.testing.assert_close(during["fast"], during["slow"], atol=1e-6, rtol=0)
        assert not torch.equal(during["slow"], before["slow"])
        assert torch.equal(during["momentum"], 0.5 * (before["fast"] - before["slow"]))
        release.set()
        await committing
        _, after = await worker.joiner_state()
        assert all(torch.equal(during[name], after[name]) for name in after)


async def test_a_copied_state_takes_no_gradient_of_the_weights_before_it() -> None:
    """What had gathered towards the next inner step goes with them: that step is of what is trained on the copy."""
    spec = micro_spec(stages=1, microbatches_a_step=2)
    after: list[torch.Tensor] = []
    for gathers in (True, False):
        async with lone_worker(spec) as (worker, trainer, reports):
            _, state = await worker.joiner_state()
            copied = {**state, "fast": state["fast"] + 0.1, "slow": state["slow"] + 0.1}
            if gathers:
                await worker.loss(*window_batch(range(WINDOWS)))
            await worker.load_full_state(5000.0, 7, copied)
            progress = worker.progress
            assert (progress.steps_since_outer, progress.tokens_since_outer, progress.outer_rounds) == (0, 0, 7)
            assert (trainer.tokens_accumulated, trainer.loss_accumulated) == (0, 0.0)
            assert worker.trained_tokens == worker.progress.tokens
            for first in (WINDOWS, 2 * WINDOWS):
                await worker.loss(*window_batch(range(first, first + WINDOWS)))
            assert [report.result.tokens for report in reports] == [2 * MICROBATCH]
            after.append(trainer.master.clone())
    assert torch.equal(*after)


async def test_the_contract_names_everything_that_two_replicas_must_share_to_average() -> None:
    """Another codec, momentum or chunk size is another contract."""
    contracts: set[str] = set()
    specs = [micro_spec(stages=1, outer=OuterSpec.model_validate(outer)) for outer in CONTRACT_CHANGES]
    for spec in (*specs, micro_spec(stages=1, outer=OuterSpec(), limits=LimitsSpec(chunk_bytes=8192))):
        async with lone_worker(spec) as (worker, _, _):
            contracts.add(worker.contract)
    assert len(contracts) == len(CONTRACT_CHANGES) + 1


async def test_a_refused_microbatch_takes_no_step() -> None:
    """Tokens, clock and steps are those of the sound ones."""
    async with lone_worker(micro_spec(stages=1, microbatches_a_step=2)) as (worker, trainer, reports):
        inputs, labels = window_batch(range(WINDOWS))
        await worker.loss(inputs, labels)
        sound = trainer.master.clone()
        trainer.add_to_weights(torch.full_like(sound, math.nan))
        with pytest.raises(MicrobatchNotFinite):
            await worker.loss(inputs, labels)
        with pytest.raises(MicrobatchNotFinite):
            await worker.evaluate_loss(inputs, labels)
        assert not reports
        trainer.load(sound, moments_of(trainer))
        assert trainer.tokens_accumulated == MICROBATCH
        assert worker.live_versions == 1
