"""One hostile replica among honest ones, for a whole run: what it costs the others."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from torch import Tensor

from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import OuterSpec, RunSpec
from noloco_node.node.replica import Replica
from noloco_node.pipeline.audit import Finding
from noloco_node.telemetry.events import OuterStep
from noloco_node.training.trainer import LossResult
from tests.worlds import (
    MICROBATCH,
    World,
    last_accounts,
    micro_spec,
    run_to_the_end,
    trainer_of,
    virtually,
    window_batch,
    world,
)

REPLICAS = 3


def spec(steps: int) -> RunSpec:
    """A run that averages often."""
    return micro_spec(
        stages=2,
        layers=2,
        steps=steps,
        microbatches_a_step=REPLICAS,
        outer=OuterSpec(inner_steps=5, codec="fp32"),
        inner={"warmup_tokens": MICROBATCH * REPLICAS * 5},
    )


def poison(replica: Replica) -> None:
    """Gradients a hundred times too large and of the wrong sign at every answer, weights ten times too large and of the
    wrong sign in every exchange."""
    worker = replica.worker
    loss, encoded = worker.loss, worker.outer.encoded_chunk

    async def poisoned_loss(*arguments: Any, **options: Any) -> LossResult:
        result = await loss(*arguments, **options)
        assert result.input_gradient is not None
        return dataclasses.replace(result, input_gradient=-100.0 * result.input_gradient)

    def poisoned_chunk(index: int) -> Tensor:
        return -10.0 * encoded(index)

    worker.loss = poisoned_loss  # type: ignore[method-assign]
    worker.outer.encoded_chunk = poisoned_chunk  # type: ignore[method-assign]


def honest_loss(made: World, hostile: Replica | None) -> float:
    """Mean held-out loss over all pairs of honest replicas."""
    inputs, labels = window_batch(range(10**6, 10**6 + 32))
    losses = [
        trainer_of(tail.worker).evaluate_loss(trainer_of(head.worker).evaluate(inputs), labels) / labels.numel()
        for head in made.of_stage(0)
        for tail in made.of_stage(1)
        if tail is not hostile
    ]
    return sum(losses) / len(losses)


async def run(steps: int, *, poisoned: bool) -> tuple[float, World]:
    """A whole run; the honest replicas' loss."""
    async with world(spec(steps), replicas=REPLICAS, settings=NodeSettings(in_flight=2, drain_seconds=1)) as made:
        hostile = made.of_stage(1)[0] if poisoned else None
        if hostile is not None:
            poison(hostile)
        await run_to_the_end(made, within=250)
        return honest_loss(made, hostile), made


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("steps", "learnt"), [(40, 3.9), pytest.param(80, 3.6, marks=pytest.mark.long)])
@virtually
async def test_one_poisoner_costs_the_others_less_than_three_percent_of_the_loss(steps: int, learnt: float) -> None:
    """It poisons every gradient and every exchange from the first on. No microbatch of an honest run is touched by a
    bound; a poisoned one shows what was bounded."""
    clean, untouched = await run(steps, poisoned=False)
    for account in last_accounts(untouched):
        assert set(account.strangers.bounded.values()) == {0}
    loss, attacked = await run(steps, poisoned=True)
    assert clean < learnt, "it must have learnt something (4.11 is chance)"
    assert loss < 1.03 * clean, (clean, loss)
    heads = [account.strangers for account in last_accounts(attacked)[:REPLICAS]]
    clipped = [e for events in attacked.events for e in events if isinstance(e, OuterStep) and e.clipped]
    assert clipped or sum(strangers.bounded["returned"] for strangers in heads), "one of the bounds has shown"
    assert sum(strangers.audits.get(Finding.CONTRADICTED, 0) for strangers in heads) > REPLICAS
