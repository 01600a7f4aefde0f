"""The cheap model of learning: it learns, by the node's own outer step, and is the same everywhere."""

from __future__ import annotations

import os
import subprocess
import sys

import torch

from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import OuterSpec
from noloco_node.model.cut import StageCut
from noloco_node.simulator.loop import in_virtual_time
from noloco_node.simulator.quadratic import BEST_LOSS, Landscape, Quadratic, QuadraticFacts, QuadraticTrainer
from noloco_node.simulator.world import World
from noloco_node.telemetry.events import InnerStep
from noloco_node.training.trainer import ForwardContext
from tests.simulator.populated import populate
from tests.worlds import micro_spec

NOISE = 0.5


async def small_swarm(seed: int, steps: int, replicas: int) -> tuple[str, float]:
    """Two stages to the end of their run: its trace, and the mean of the losses that were met last."""
    outer = OuterSpec(inner_steps=4, min_inner_steps=2)
    spec = micro_spec(steps=steps, microbatches_a_step=4, inner={"learning_rate": 0.5}, outer=outer)
    settings = NodeSettings(in_flight=2, drain_seconds=1, seed=seed)
    async with World(spec, settings, learning=Quadratic(seed, NOISE), seed=seed) as world:
        populate(world, replicas)
        await world.ended(3600.0)
        assert [node.condition for node in world.nodes] == ["ended"] * 2 * replicas
        losses = [[event.loss for event in events if isinstance(event, InnerStep)] for events in world.events]
        return world.trace, sum(each[-1] for each in losses) / len(losses)


def trace(seed: int = 1) -> str:
    """The trace of a short swarm."""
    return in_virtual_time(lambda: small_swarm(seed, 6, 2), seed=seed)[0]


def test_it_learns_until_the_noise_is_all_that_is_left() -> None:
    """A whole swarm, whose losses end a little above the best there is."""
    _, loss = in_virtual_time(lambda: small_swarm(1, 16, 4), seed=1)
    assert BEST_LOSS < loss < BEST_LOSS + NOISE**2


def test_another_process_with_another_hash_seed_has_the_same_trace() -> None:
    """Bit for bit; another seed gives another."""
    program = "from tests.simulator.test_quadratic import trace\nprint(trace())"
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    other = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    here = trace()
    assert other.stdout.split()[-1:] == [here]
    assert trace(2) != here


def test_its_gradient_leads_to_the_optimum_and_belongs_to_the_weights_of_the_forward() -> None:
    """Without noise one step of rate 1 is there, also where an outer step moved the weights meanwhile."""
    land = Landscape.of(3, 0, 0.0)
    trainer = QuadraticTrainer(QuadraticFacts(StageCut(0, 2, 0, 1)), land, torch.float32)
    passage, inputs = ForwardContext(), torch.arange(8).view(2, 4)
    activations = trainer.forward(inputs, passage)
    trainer.add_to_weights(torch.ones(64))
    assert trainer.backward(passage, torch.ones_like(activations), 16.0, 8) is None
    assert trainer.step(1.0).loss == 2.0
    torch.testing.assert_close(trainer.master, land.optimum + 1.0)
