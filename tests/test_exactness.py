"""One replica a stage and one microbatch in flight equal ordinary training of the whole model, step by step."""

from __future__ import annotations

import pytest
import torch

from noloco_node.config.run_spec import RunSpec
from noloco_node.replica import Replica
from noloco_node.telemetry.events import InnerStep
from tests.reference import train
from tests.worlds import Swarm, micro_spec, run_to_the_end, window_batch, world

STEPS = 50
TOLERANCE = 1e-6


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


async def run_and_compare(made: Swarm, spec: RunSpec) -> None:
    """Run to the end; every loss and every weight must be within 1e-6 of ordinary training on the same samples."""
    await run_to_the_end(made)
    weights = await final_weights(made)
    batches = [window_batch(indices) for indices in made.drawn[0].batches]
    losses = [event.loss for event in made.events[0] if isinstance(event, InnerStep)]
    expected_losses, expected_weights = train(spec, batches)
    assert len(losses) == STEPS
    assert expected_losses[0] - expected_losses[-1] > 0.5, "the reference must have learnt something"
    assert max(abs(a - b) for a, b in zip(losses, expected_losses, strict=True)) < TOLERANCE
    assert weights.keys() == expected_weights.keys()
    worst = max(float((weights[name] - expected_weights[name]).abs().max()) for name in weights)
    assert worst < TOLERANCE, worst


@pytest.mark.parametrize("backward", ["keep", "recompute"])
@pytest.mark.parametrize("stages", [1, 2, 4])
async def test_losses_and_weights_equal_single_process_training(stages: int, backward: str) -> None:
    """Fifty inner steps in fp32, whatever the cut."""
    spec = micro_spec(stages=stages, steps=STEPS, inner={"backward": backward})
    async with world(spec) as made:
        await run_and_compare(made, spec)
