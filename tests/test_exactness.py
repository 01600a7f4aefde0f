"""One replica a stage and one microbatch in flight equal ordinary training of the whole model, step by step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from noloco_node.config.run_spec import RunSpec
from noloco_node.node.replica import Replica
from noloco_node.telemetry.events import InnerStep
from tests.reference import train, whole_model
from tests.worlds import Swarm, micro_spec, run_to_the_end, window_batch, world

STEPS = 12
TOLERANCE = 1e-6
_TRAINED = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.5}
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 8, "mlp_only_layers": [1], **_TRAINED},
    "mixtral": {"num_local_experts": 4, **_TRAINED},
}
EXPERTS = [("qwen3_moe", 2, "recompute"), ("qwen3_moe", 4, "keep"), ("mixtral", 3, "checkpoint")]


async def fast_weights(replica: Replica) -> dict[str, torch.Tensor]:
    """A replica's fast weights by full name."""
    _, fast = await replica.worker.named_weights()
    return {replica.full_names[local]: weight for local, weight in fast.items()}


async def final_weights(made: Swarm) -> dict[str, torch.Tensor]:
    """Fast weights of all stages by full name."""
    merged: dict[str, torch.Tensor] = {}
    for replica in made.replicas:
        merged |= await fast_weights(replica)
    return merged


async def run_and_compare(
    made: Swarm, spec: RunSpec, steps: int = STEPS, learnt: float = 0.05, tolerance: float = TOLERANCE
) -> None:
    """Run to the end; every loss and every weight must be that close to ordinary training on the same samples."""
    await run_to_the_end(made)
    weights = await final_weights(made)
    batches = [window_batch(indices) for indices in made.drawn[0].batches]
    losses = [event.loss for event in made.events[0] if isinstance(event, InnerStep)]
    expected_losses, expected_weights = train(spec, batches)
    assert len(losses) == steps
    assert expected_losses[0] - expected_losses[-1] > learnt, "the reference must have learnt something"
    assert max(abs(a - b) for a, b in zip(losses, expected_losses, strict=True)) < tolerance
    assert weights.keys() == expected_weights.keys()
    worst = max(float((weights[name] - expected_weights[name]).abs().max()) for name in weights)
    assert worst < tolerance, worst


@pytest.mark.parametrize(("stages", "backward"), [(1, "keep"), (2, "recompute"), (4, "keep")])
async def test_losses_and_weights_equal_single_process_training(stages: int, backward: str) -> None:
    """A dozen inner steps in fp32, whatever the cut."""
    spec = micro_spec(layers=4, stages=stages, steps=STEPS, inner={"backward": backward})
    async with world(spec) as made:
        await run_and_compare(made, spec)


@pytest.mark.parametrize("stages", [1, 4])
async def test_muon_and_rates_by_kind_equal_single_process_training(stages: int) -> None:
    """Whatever the cut: a matrix lies in one stage as a whole."""
    rates = {"optimizer": "muon", "embedding_rate": 4.0, "head_rate": 2.0, "norm_rate": 3.0}
    spec = micro_spec(layers=4, stages=stages, steps=STEPS, inner=rates)
    async with world(spec) as made:
        await run_and_compare(made, spec, tolerance=1e-4)


async def test_muon_trains_as_torchs_own_does() -> None:
    """To the rounding of bf16, in which torch iterates. Losses differ by a thousandth of what is learnt, weights by a
    hundredth of their way."""
    spec = micro_spec(stages=2, steps=STEPS, inner={"optimizer": "muon"})
    async with world(spec) as made:
        await run_to_the_end(made)
        weights = await final_weights(made)
        batches = [window_batch(indices) for indices in made.drawn[0].batches]
        losses = [event.loss for event in made.events[0] if isinstance(event, InnerStep)]
    theirs, wanted = train(spec, batches, torchs_muon=True)
    learnt = theirs[0] - theirs[-1]
    apart = max(abs(a - b) for a, b in zip(losses, theirs, strict=True))
    assert learnt > 0.1
    assert apart < 1e-3 * learnt
    begun = {name: parameter.detach() for name, parameter in whole_model(spec)[0].named_parameters()}
    moved = sum(float((wanted[name] - begun[name]).norm()) for name in wanted)
    off = sum(float((wanted[name] - weights[name]).norm()) for name in wanted)
    assert off < 0.01 * moved


@pytest.mark.parametrize(
    ("stages", "backward", "free"), [(1, "keep", False), (2, "checkpoint", True), (4, "recompute", False)]
)
async def test_a_subspace_is_trained_as_an_ordinary_model_made_of_products(
    stages: int, backward: str, free: bool
) -> None:
    """Eight numbers a token cross each cut both ways, and nothing is lost by it, whatever the cut."""
    subspace = {"subspace_rank": 8, "subspace_last_stage_free": free, "embedding_std": 0.3}
    spec = micro_spec(layers=4, stages=stages, steps=STEPS, inner={"backward": backward}, subspace=subspace)
    async with world(spec) as made:
        await run_and_compare(made, spec, tolerance=5e-6)


@pytest.mark.parametrize(("family", "stages", "backward"), EXPERTS)
async def test_a_mixture_of_experts_is_trained_as_transformers_trains_it(
    family: str, stages: int, backward: str
) -> None:
    """The routers' loss over all layers at once, whatever the cut: also where a stage has no experts."""
    spec = micro_spec(layers=4, stages=stages, steps=8, inner={"backward": backward, "warmup_tokens": 0, "eps": 1e-5})
    config = spec.model.config | {"model_type": family} | MIXTURES[family]
    spec = spec.model_copy(update={"model": spec.model.model_copy(update={"config": config})})
    async with world(spec) as made:
        await run_and_compare(made, spec, steps=8, learnt=0.01)
        plain = config | {"output_router_logits": False}
        other = spec.model_copy(update={"model": spec.model.model_copy(update={"config": plain})})
        _, without = train(other, [window_batch(indices) for indices in made.drawn[0].batches])
        weights = await final_weights(made)
        gate = next(name for name in weights if name.endswith("mlp.gate.weight"))
        assert (weights[gate] - without[gate]).abs().max() > 1e-4, "the routers' loss changes what is learnt"
