"""The learning rate and the share of the batch, as functions of the clock and of the replicas alive."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noloco_node.training.progress import learning_rate, share_of_batch
from tests.training.made_trainers import lone_worker
from tests.worlds import MICROBATCH, WINDOWS, micro_spec, window_batch

PLAN = {"peak": 2.0, "minimum_ratio": 0.1, "warmup": 100, "target": 1100}


def test_the_rate_warms_up_to_its_peak_and_falls_to_its_minimum() -> None:
    """Linear to the end of the warm-up, half-way down in the middle, the minimum at the target and after it."""
    rates = [learning_rate(clock, **PLAN) for clock in (0, 25, 100, 600, 1100, 5000)]
    assert rates == pytest.approx([0.0, 0.5, 2.0, 2.0 * (0.1 + 0.9 / 2), 0.2, 0.2])


def test_without_a_warm_up_the_first_step_has_the_peak() -> None:
    """A run that is all warm-up but one token divides by nothing."""
    assert learning_rate(0, peak=2.0, minimum_ratio=0.1, warmup=0, target=10) == 2.0
    assert learning_rate(10, peak=2.0, minimum_ratio=0.1, warmup=10, target=10) == 2.0


@given(first=st.floats(0, 1e7), second=st.floats(0, 1e7))
def test_the_rate_rises_then_falls_and_stays_within_bounds(first: float, second: float) -> None:
    """Monotone on either side of the end of the warm-up."""
    low, high = sorted((first, second))
    rates = learning_rate(low, **PLAN), learning_rate(high, **PLAN)
    assert all(0 <= rate <= PLAN["peak"] for rate in rates)
    if high <= PLAN["warmup"]:
        assert rates[0] <= rates[1]
    if low >= PLAN["warmup"]:
        assert rates[0] >= rates[1] >= PLAN["peak"] * PLAN["minimum_ratio"] * (1 - 1e-12)


def test_the_share_is_the_batch_over_the_replicas_within_bounds() -> None:
    """A node that sees nobody, not even itself, counts as one; of however many each has its part."""
    assert [share_of_batch(1200, live) for live in (0, 1, 3, 8, 12_000)] == [1200, 1200, 400, 150, 0.1]


@pytest.mark.parametrize(("live", "batch"), [(1, 160), (3, 256), (5, 448), (2, 128), (7, 64)])
async def test_tokens_are_conserved_over_inner_steps(live: int, batch: int) -> None:
    """No whole number of microbatches fills the shares. Every token stands behind exactly one step, and surplus tokens
    carry over, so that steps × share follows the tokens. (If one microbatch is more than a share, each is a step.)"""
    spec = micro_spec(stages=1, microbatches_a_step=7, inner={"global_batch_tokens": batch})
    microbatches = 60
    async with lone_worker(spec) as (worker, trainer, reports):
        worker.live_replicas = live
        inputs, labels = window_batch(range(WINDOWS))
        for _ in range(microbatches):
            await worker.loss(inputs, labels)
        progress, waiting = worker.progress, trainer.tokens_accumulated
    trained = microbatches * MICROBATCH
    share = batch / live
    assert progress.tokens + waiting == trained
    assert sum(report.result.tokens for report in reports) == progress.tokens
    assert progress.clock == progress.tokens * live
    if share <= MICROBATCH:
        assert progress.steps == microbatches
    else:
        assert progress.steps * share == pytest.approx(trained, abs=share + MICROBATCH)
        assert len({report.result.tokens for report in reports}) == (1 if share % MICROBATCH == 0 else 2)


async def test_a_share_that_shrinks_takes_effect_at_once() -> None:
    """Replicas that join make the steps of the others smaller, from the next microbatch on."""
    spec = micro_spec(stages=1, microbatches_a_step=8)
    async with lone_worker(spec) as (worker, _, reports):
        inputs, labels = window_batch(range(WINDOWS))
        for _ in range(5):
            await worker.loss(inputs, labels)
        assert not reports
        worker.live_replicas = 4
        await worker.loss(inputs, labels)
        assert [report.result.tokens for report in reports] == [6 * MICROBATCH]
        assert reports[0].live_replicas == 4
