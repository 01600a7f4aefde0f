"""What a stage asks of a machine, and what fits."""

from __future__ import annotations

from pathlib import Path

import pytest

from noloco_node.config.load import load_config
from noloco_node.model.stage import build_stage
from noloco_node.sizing.footprint import Memory, fitting_stages, footprint_of, free_memory, memory_needed
from tests.worlds import micro_spec

CONFIGS = Path(__file__).parent.parent.parent / "configs"


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


def test_forty_four_bytes_a_parameter_are_split_over_device_and_host() -> None:
    """On the processor all of them lie in the machine's memory."""
    assert memory_needed(1000, "int8", own_memory=True) == Memory(24_000, 20_000)
    assert memory_needed(1000, "int8", own_memory=False) == Memory(0, 44_000)


def test_a_codec_that_trails_has_its_trail_on_the_host() -> None:
    """4 bytes a parameter, wherever the device's lie."""
    assert memory_needed(1000, "sign", own_memory=True) == Memory(24_000, 24_000)
    assert memory_needed(1000, "sign", own_memory=False) == Memory(0, 48_000)


def test_a_stage_must_fit_the_device_and_the_host() -> None:
    """Either one alone is not enough."""
    sizes = (10, 1000)
    assert fitting_stages(sizes, "int8", Memory(24_000, 20_000)) == [0, 1]
    assert fitting_stages(sizes, "int8", Memory(23_999, 20_000)) == [0]
    assert fitting_stages(sizes, "int8", Memory(24_000, 19_999)) == [0]
    assert fitting_stages(sizes, "int8", Memory(0, 44_000)) == [0, 1]
    assert fitting_stages(sizes, "int8", Memory(0, 399)) == []


def test_this_machine_has_memory_for_a_tiny_model() -> None:
    """The processor has none of its own; the host's is known and finite."""
    free = free_memory("cpu")
    assert free.device == 0
    assert 1 << 20 < free.host < 1 << 50
    run = load_config(CONFIGS / "tiny.yaml", []).run
    assert fitting_stages(footprint_of(run).parameters, run.outer.codec, free) == [0, 1]
