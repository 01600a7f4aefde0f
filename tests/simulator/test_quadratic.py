"""The cheap model of learning: it learns, by the node's own outer step."""

from __future__ import annotations

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


def test_it_learns_until_the_noise_is_all_that_is_left() -> None:
    """A whole swarm of two stages, whose last losses are on average a little above the best there is."""
    outer = OuterSpec(inner_steps=4, min_inner_steps=2)
    spec = micro_spec(steps=16, microbatches_a_step=4, inner={"learning_rate": 0.5}, outer=outer)
    settings = NodeSettings(in_flight=2, drain_seconds=1, seed=1)

    async def loss() -> float:
        async with World(spec, settings, learning=Quadratic(1, NOISE), seed=1) as world:
            populate(world, 2)
            await world.ended(3600.0)
            losses = [[event.loss for event in events if isinstance(event, InnerStep)] for events in world.events]
            return sum(each[-1] for each in losses) / len(losses)

    assert BEST_LOSS < in_virtual_time(loss, seed=1) < BEST_LOSS + NOISE**2


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
