"""The stages of a run in numbers."""

from __future__ import annotations

import pytest

from noloco_node.model.stage import build_stage
from noloco_node.sizing.footprint import footprint_of
from tests.worlds import micro_spec


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_stage_is_counted_as_it_is_built(stages: int) -> None:
    """Parameters are those of the real modules; work leaves out the table of embeddings and is 1 on average."""
    spec = micro_spec(stages=stages)
    footprint = footprint_of(spec)
    built = [build_stage(spec.model, stage) for stage in range(stages)]
    assert footprint.parameters == tuple(sum(p.numel() for p in stage.parameters()) for stage in built)
    assert sum(footprint.work) == pytest.approx(stages)
    if stages == 2:
        vocabulary, hidden = spec.model.config["vocab_size"], spec.model.config["hidden_size"]
        assert isinstance(vocabulary, int)
        assert isinstance(hidden, int)
        table = vocabulary * hidden
        first, last = footprint.parameters
        assert footprint.work[0] / footprint.work[1] == pytest.approx((first - table) / last)
