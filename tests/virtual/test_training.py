"""A simulated training is what it says: data parallel where it must be, contracting as it should, losing no tokens."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from noloco_node.config.experiments import Algorithm, WorldSpec
from noloco_node.config.load import load_config
from noloco_node.config.run_spec import RunSpec
from noloco_node.laboratory.figures import Measurement
from noloco_node.laboratory.training import Training, simulate
from noloco_node.outer.clipping import Judgement, PartnerBound
from noloco_node.outer.stability import contraction_factor
from tests.virtual import made_results as made

GLOBAL_BATCH = 1024
STEPS = 24


def spec(*overrides: str) -> RunSpec:
    """The micro run for some steps, at one learning rate but for the warm-up."""
    few = (
        "run.evaluation.windows=64",
        f"run.inner.target_tokens={STEPS * GLOBAL_BATCH}",
        "run.inner.warmup_tokens=1024",
    )
    return load_config(made.MICRO, (*few, *overrides)).run


def trained(run: RunSpec, algorithm: Algorithm) -> Measurement:
    """One training of four replicas with seed 1."""
    return simulate(run, WorldSpec(), algorithm, replicas=4, seed=1, evaluations=2, divergence_points=STEPS)


LINEAR = ("run.inner.eps=1000", "run.inner.learning_rate=1000", "run.inner.weight_decay=0", "run.inner.clip_norm=1000")
"""So large an eps that AdamW's step is linear in the gradient."""


def test_everyone_averaging_every_step_with_a_linear_optimizer_is_data_parallel() -> None:
    """The mean of steps is the step of the mean: the laboratory's algorithms rest on the same arithmetic. With AdamW as
    it is they differ."""
    every_step = ("run.outer.inner_steps=1", "run.outer.alpha=0", "run.outer.beta=1", "run.outer.codec=fp32")
    every_step += ("run.pipeline.routing=fixed",)  # or a replica of the second stage steps on two microbatches at once
    losses: dict[tuple[bool, Algorithm], float] = {}
    for linear in (True, False):
        for algorithm in ("data_parallel", "diloco"):
            result = trained(spec(*every_step, *(LINEAR if linear else ())), algorithm)
            assert result.validation_loss is not None
            assert result.validation_loss < 5.0, "it must have learnt something"
            losses[linear, algorithm] = result.validation_loss
    assert losses[True, "diloco"] == pytest.approx(losses[True, "data_parallel"], abs=1e-3)
    assert abs(losses[False, "diloco"] - losses[False, "data_parallel"]) > 3e-3


def disturb(training: Training, deviation: float) -> None:
    """Move every replica's weights, fast and slow alike, by independent Gaussian noise."""
    generator = torch.Generator().manual_seed(1)
    for stage_group, stage in zip(*training.parts, strict=True):
        for row, replica in enumerate(stage_group.replicas):
            noise = torch.randn(replica.size, generator=generator).mul_(deviation)
            stage.fast[row].add_(noise)
            replica.load(replica.slow + noise, replica.momentum)


def test_the_spread_falls_as_the_theory_says_and_the_mean_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 replicas, hardly any learning, a disturbed start: the variance falls by the predicted factor a round."""
    # A replica that does not move of its own takes every partner for an outlier.
    monkeypatch.setattr(PartnerBound, "judge", lambda *_, **__: Judgement(0.0, 0.0, 1.0))
    run = spec(
        "run.inner.learning_rate=1e-12",
        "run.outer.inner_steps=2",
        "run.outer.alpha=0",
        "run.outer.beta=1",
        "run.outer.codec=int8",
    )
    training = Training(run, WorldSpec(), "noloco", 16, seed=1)
    disturb(training, 0.01)
    mean = training.merged_weights()
    training.run_to_the_end(evaluations=1, divergence_points=STEPS)
    result = training.measured(seconds=1.0)
    for before, after in zip(mean, training.merged_weights(), strict=True):
        assert float((before - after).abs().max()) < 1e-5
    first, last = result.spread[0].spread, result.spread[-1].spread
    assert first == pytest.approx(1e-4, rel=0.05)
    assert last is not None
    assert last > 0
    rounds = result.outer_rounds
    assert rounds > 6
    predicted = contraction_factor(0.0, 1.0, group_size=2, replicas=16, momentum="averaged")
    assert math.log(last / 1e-4) / rounds == pytest.approx(math.log(predicted), rel=0.25)


def test_all_replicas_reach_the_target_together() -> None:
    """Clocks end within a few steps of the target, everyone learns, and most outer steps find a partner."""
    run = spec("run.outer.inner_steps=3", "run.outer.codec=int4")
    training = Training(run, WorldSpec(), "noloco", 4, seed=1)
    training.run_to_the_end(evaluations=2, divergence_points=4)
    result = training.measured(seconds=1.0)
    target = run.inner.target_tokens
    assert all(0.8 * target <= clock <= 1.3 * target for clock in training.clocks())
    assert result.tokens == pytest.approx(target, rel=0.35)
    assert result.alone_share < 0.3
    assert result.validation_loss is not None
    assert result.validation_loss < 5.0


def test_all_algorithms_are_measured_by_the_same_windows() -> None:
    """Of ten, four replicas had eight, and their mean and data parallel's one replica all of them: other losses of the
    same weights."""
    nothing = ("run.inner.learning_rate=1e-30", "run.inner.weight_decay=0", "run.inner.target_tokens=2048")
    run = spec(*nothing, "run.evaluation.windows=10", "run.inner.warmup_tokens=0")
    apart, one = trained(run, "local"), trained(run, "data_parallel")
    assert apart.validation_loss == pytest.approx(apart.validation_loss_merged, abs=1e-6)
    assert apart.validation_loss == pytest.approx(one.validation_loss, abs=1e-6)


def test_diloco_with_nesterov_is_torchs_sgd_on_the_outer_gradient() -> None:
    """Momentum 0.9, learning rate 0.7, over three outer steps; heavy-ball momentum ends elsewhere."""
    settings = ("run.outer.inner_steps=2", "run.outer.alpha=0.9", "run.outer.beta=0.7", "run.outer.codec=fp32")
    run = spec(*settings, "run.outer.momentum=averaged")
    ends: dict[bool, list[Tensor]] = {}
    for nesterov in (True, False):
        training = Training(run, WorldSpec(nesterov=nesterov), "diloco", 2, seed=1)
        (stage_group, *_), (stage, *_) = training.parts
        slow = stage_group.replicas[0].slow.clone()
        reference = slow.clone().requires_grad_()
        outer = torch.optim.SGD([reference], lr=0.7, momentum=0.9, nesterov=True)
        generator = torch.Generator().manual_seed(3)
        for _ in range(3):
            learnt = 0.01 * torch.randn(stage.fast.shape, generator=generator)
            for row, replica in enumerate(stage_group.replicas):
                stage.fast[row].copy_(replica.slow + learnt[row])
            reference.grad = -learnt.mean(0)
            outer.step()
            stage_group.last()
        ends[nesterov] = [replica.slow for replica in stage_group.replicas]
        assert float((stage.fast[0] - stage_group.replicas[0].slow).abs().max()) < 1e-6
        error = max(float((end - reference.detach()).abs().max()) for end in ends[nesterov])
        assert (error < 1e-6) == nesterov, error
