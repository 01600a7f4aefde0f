"""The stages of a run in numbers."""

from __future__ import annotations

import pytest

from noloco_node.model.stage import build_stage
from noloco_node.sizing.footprint import footprint_of
from tests.worlds import IN_SUBSPACE, micro_spec


@pytest.mark.parametrize(("stages", "subspace"), [(1, None), (2, None), (4, None), (4, IN_SUBSPACE)])
def test_a_stage_is_counted_as_it_is_built(stages: int, subspace: dict[str, object] | None) -> None:
    """Parameters are those of the real modules; work leaves out the table of embeddings and is 1 on average."""
    spec = micro_spec(stages=stages, subspace=subspace)
    footprint = footprint_of(spec)
    built = [build_stage(spec.model, stage) for stage in range(stages)]
    assert footprint.parameters == tuple(sum(p.numel() for p in stage.parameters()) for stage in built)
    assert sum(footprint.work) == pytest.approx(stages)
    assert {stage.cut_width for stage in built} == {footprint.cut_width}
    if stages == 2:
        vocabulary, hidden = spec.model.config["vocab_size"], spec.model.config["hidden_size"]
        assert isinstance(vocabulary, int)
        assert isinstance(hidden, int)
        table = vocabulary * hidden
        first, last = footprint.parameters
        assert footprint.work[0] / footprint.work[1] == pytest.approx((first - table) / last)


def test_experts_that_a_token_does_not_go_to_are_memory_and_no_work() -> None:
    """Two of four experts work for a token: half of their matrices count, and all of the others."""
    spec = micro_spec(stages=1, layers=4)
    mixture = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    model = spec.model.model_copy(update={"config": spec.model.config | mixture})
    spec = spec.model_copy(update={"model": model})
    built = dict(build_stage(model, 0).named_parameters())
    experts = sum(value.numel() for name, value in built.items() if ".experts." in name)
    table = 61 * 32
    footprint = footprint_of(spec)
    assert footprint.parameters[0] == sum(value.numel() for value in built.values())
    attention = 12 * 32 * spec.data.sequence_length * 4
    assert footprint.flop_per_token[0] == 6 * (footprint.parameters[0] - table - experts / 2) + attention
