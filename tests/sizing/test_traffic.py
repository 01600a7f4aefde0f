"""What a node is told that a run takes of its line is what a swarm sends."""

from __future__ import annotations

import pytest

from noloco_node.config.run_spec import EvaluationSpec
from noloco_node.sizing.footprint import footprint_of
from noloco_node.sizing.traffic import rest_of_run
from tests.worlds import micro_spec, run_to_the_end, virtually, world

REPLICAS = 2


@virtually
async def test_the_rest_of_a_run_is_told_as_it_is_sent_evaluations_included() -> None:
    """A whole run with evaluations that are a third of its forwards, which were left out of what `join` says."""
    spec = micro_spec(steps=12)
    often = EvaluationSpec(every_tokens=spec.inner.target_tokens // 4, windows=4)
    spec = spec.model_copy(update={"evaluation": often})
    footprint = footprint_of(spec)
    told = rest_of_run(spec, footprint, spec.inner.target_tokens, (REPLICAS,) * spec.stages)
    async with world(spec, REPLICAS) as made:
        await run_to_the_end(made)
        for stage, use in enumerate(told):
            traffic = [each.context.transport.traffic for each in made.of_stage(stage)]  # pyright: ignore
            sent = sum(sum(each.sent.values()) for each in traffic) / REPLICAS
            received = sum(sum(each.received.values()) for each in traffic) / REPLICAS
            assert use.sent == pytest.approx(sent, rel=0.1)
            assert use.received == pytest.approx(received, rel=0.1)
