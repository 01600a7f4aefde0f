"""A simulated training is what it says: data parallel where it must be, contracting as it should, losing no tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from noloco_node.config.lab_spec import Algorithm, WorldSpec
from noloco_node.config.load import load_config
from noloco_node.config.run_spec import RunSpec
from noloco_node.data.sampler import WindowSampler
from noloco_node.laboratory.figures import Measurement
from noloco_node.laboratory.training import DrawnWindows, Training, simulate
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


def trained(run: RunSpec, algorithm: Algorithm, *, replicas: int = 4, **world: Any) -> Measurement:
    """One training with seed 1."""
    return simulate(
        run,
        WorldSpec.model_validate(world),
        algorithm,
        replicas=replicas,
        seed=1,
        evaluations=2,
        spread_points=STEPS,
    )


LINEAR = (
    "run.inner.eps=1000",
    "run.inner.learning_rate=1000",
    "run.inner.weight_decay=0",
    "run.inner.clip_norm=1000",
)
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


@pytest.mark.parametrize(("fragments", "codec"), [(1, "fp32"), (2, "int8")])
def test_the_spread_falls_as_the_theory_says_and_the_mean_stays(
    fragments: int, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 replicas, hardly any learning, a disturbed start: the variance falls by the predicted factor a round."""
    # A replica that does not move of its own takes every partner for an outlier.
    monkeypatch.setattr(PartnerBound, "judge", lambda *_, **__: Judgement(0.0, 0.0, 1.0))
    run = spec(
        "run.inner.learning_rate=1e-12",
        f"run.outer.inner_steps={max(2, fragments)}",
        "run.outer.alpha=0",
        "run.outer.beta=1",
        f"run.outer.codec={codec}",
        f"run.outer.fragments={fragments}",
    )
    training = Training(run, WorldSpec(initial_spread=0.01), "noloco", 16, seed=1)
    mean = training.merged_weights()
    training.run_to_the_end(evaluations=1, spread_points=STEPS)
    result = training.measured(seconds=1.0)
    for before, after in zip(mean, training.merged_weights(), strict=True):
        assert float((before - after).abs().max()) < 1e-5
    first, last = result.spread[0].spread, result.spread[-1].spread
    assert first == pytest.approx(1e-4, rel=0.05)
    assert last is not None
    assert last > 0
    rounds = result.outer_rounds / fragments
    assert rounds > 6
    predicted = contraction_factor(0.0, 1.0, group_size=2, replicas=16, momentum="averaged")
    assert math.log(last / 1e-4) / rounds == pytest.approx(math.log(predicted), rel=0.25)


@pytest.mark.parametrize(
    "world",
    [
        {"speeds": [1, 2, 4, 8], "microbatches_a_step": None},
        {"absent_share": 0.3, "absence_steps": 4, "microbatches_a_step": None},
        {"lag": 2},
        {"group_size": 4},
    ],
    ids=["uneven speeds", "absences", "lag", "groups of four"],
)
def test_an_uneven_world_still_reaches_the_target_together(world: dict[str, Any]) -> None:
    """Clocks end within a few steps of the target, everyone learns, and most outer steps find a partner."""
    run = spec("run.outer.inner_steps=3", "run.outer.codec=int4")
    training = Training(run, WorldSpec.model_validate(world), "noloco", 4, seed=1)
    training.run_to_the_end(evaluations=2, spread_points=4)
    result = training.measured(seconds=1.0)
    target = run.inner.target_tokens
    assert all(0.8 * target <= clock <= 1.3 * target for clock in training.clocks())
    assert result.tokens == pytest.approx(target, rel=0.35)
    assert result.alone_share < 0.3
    assert result.validation_loss is not None
    assert result.validation_loss < 5.0


def test_lagging_exchanges_span_inner_steps() -> None:
    """There are as many steps and fewer rounds: a replica is engaged from the snapshot to the commit."""
    run = spec("run.outer.inner_steps=2")
    at_once, late = (trained(run, "noloco", lag=lag) for lag in (0, 3))
    assert at_once.inner_steps == late.inner_steps
    assert late.outer_rounds < 0.8 * at_once.outer_rounds


def test_diloco_with_nesterov_is_torchs_sgd_on_the_outer_gradient() -> None:
    """Momentum 0.9, learning rate 0.7, over three outer steps; heavy-ball momentum ends elsewhere."""
    settings = ("run.outer.inner_steps=2", "run.outer.alpha=0.9", "run.outer.beta=0.7", "run.outer.codec=fp32")
    run = spec(*settings, "run.outer.momentum=averaged")
    ends: dict[bool, list[Tensor]] = {}
    for nesterov in (True, False):
        training = Training(run, WorldSpec(nesterov=nesterov, token_weights=False), "diloco", 2, seed=1)
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


def drawn(replica: int, skew: float) -> DrawnWindows:
    """One of four replicas and a thousand windows."""
    return DrawnWindows(WindowSampler(1000, 1, f"{replica:06d}"), 1000, 1, replica, 4, skew)


def test_skewed_replicas_draw_mostly_from_a_stretch_of_their_own() -> None:
    """Nine in ten windows of each from its quarter of the text, the quarters disjoint; the rest from anywhere."""
    walks = [drawn(replica, 0.9) for replica in range(4)]
    for replica, walk in enumerate(walks):
        taken = [number for _ in range(100) for number in walk.take(8)]
        inside = sum(250 * replica <= number < 250 * (replica + 1) for number in taken) / len(taken)
        assert inside == pytest.approx(0.9 + 0.1 / 4, abs=0.03)
        assert min(taken) >= 0
        assert max(taken) < 1000
    assert drawn(2, 0.0).take(50) == WindowSampler(1000, 1, "000002").take(50)


def test_noise_on_the_weights_is_gone_after_the_step_and_none_is_data_parallel() -> None:
    """A noise too small to see gives data parallel's losses, though each replica has a microbatch of its own. A large
    one costs loss, and the weights that are evaluated carry none of it."""
    plain, unseen, loud = (trained(spec(), "data_parallel", weight_noise=noise) for noise in (0.0, 1e-12, 0.1))
    assert unseen.validation_loss == pytest.approx(plain.validation_loss, abs=1e-4)
    assert loud.validation_loss is not None
    assert plain.validation_loss is not None
    assert loud.validation_loss > plain.validation_loss + 0.01
    training = Training(spec(), WorldSpec(weight_noise=0.1), "data_parallel", 4, seed=1)
    (_, *_), (stage, *_) = training.parts
    before = stage.fast.clone()
    ids = torch.zeros(4, 1, 8, dtype=torch.int64)
    stage.forward(torch.zeros(4, dtype=torch.int64), ids, noise=0.1, generator=torch.Generator())
    assert torch.equal(stage.fast, before)
