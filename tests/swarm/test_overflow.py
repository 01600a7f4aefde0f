"""Numbers that do not fit what travels: the node that works them out keeps them to itself, and nobody is blamed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from noloco_node.config.run_spec import PipelineSpec
from noloco_node.node.replica import Replica
from noloco_node.pipeline.messages import HopFailed
from noloco_node.transport.errors import Refusal
from tests.worlds import World, all_train, micro_spec, trainer_of, window_rows, world

HALF = PipelineSpec(activations=("fp16",), budget_seconds=5.0, progress_seconds=2.0)


@asynccontextmanager
async def half_precision() -> AsyncIterator[World]:
    """Three stages, one replica each, that send fp16 and see each other."""
    async with world(micro_spec(stages=3, layers=3, pipeline=HALF)) as made:
        await all_train(made)
        yield made


def grow(replica: Replica, factor: float, *names: str) -> None:
    """Multiply those of a stage's weights whose names hold one of `names`."""
    trainer = trainer_of(replica.worker)
    grown = {
        name: weight * factor if any(part in name for part in names) else weight
        for name, weight in trainer.layout.views(trainer.master.clone()).items()
    }
    trainer.add_to_weights(trainer.layout.flatten(grown) - trainer.master)


def offences(made: World) -> int:
    """That anybody holds against anybody."""
    return sum(replica.context.transport.conduct.offences.total() for replica in made.replicas)


@pytest.mark.parametrize("stage", [0, 1], ids=["origin", "relay"])
async def test_activations_that_overflow_are_not_sent_and_nobody_is_blamed(stage: int) -> None:
    """Finite in fp32 and infinite in fp16: an honest node would be banned for its own weights."""
    async with half_precision() as made:
        head = made.replicas[0]
        assert head.pipeline.origin is not None
        grow(made.replicas[stage], 1e9, "embed_tokens" if stage == 0 else "_proj")
        for _ in range(12):
            assert not await head.pipeline.origin.train_one()
        with pytest.raises(HopFailed):
            await head.pipeline.origin.evaluate(window_rows([1, 2, 3, 4]))
        assert offences(made) == 0
        assert made.replicas[stage].worker.live_versions == 1
        sent = {refusal for replica in made.replicas for refusal in replica.context.transport.refusals_given}
        assert Refusal.NOT_FINITE not in sent


async def test_a_gradient_that_overflows_is_neither_sent_nor_kept() -> None:
    """The last stage says that its weights are at fault; its sender holds nothing against it."""
    async with half_precision() as made:
        head, tail = made.replicas[0], made.replicas[2]
        assert head.pipeline.origin is not None
        grow(tail, 1e7, "head")
        for _ in range(12):
            assert not await head.pipeline.origin.train_one()
        assert offences(made) == 0
        assert trainer_of(tail.worker).tokens_accumulated == 0
        assert Refusal.DIVERGED in tail.context.transport.refusals_given
