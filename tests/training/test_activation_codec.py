"""Activations by codec: bounded errors, sizes that both ends agree on, and nothing of a token spoils another."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from noloco_node.config.run_spec import ACTIVATION_CODECS, INT8_BLOCK, ActivationCodec, PipelineSpec, token_bytes
from noloco_node.training.activation_codec import (
    DTYPES,
    STEPS,
    carried_dtype,
    decode,
    encode,
    there_and_back,
    wire_length,
)


@settings(max_examples=60, deadline=None)
@given(
    numbers=st.integers(1, 700),
    power=st.integers(-44, 30),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_int8_is_off_by_half_a_step_of_its_own_block_at_most(
    numbers: int, power: int, seed: int, dtype: torch.dtype
) -> None:
    """At any scale, with blocks of very different size beside each other, and a last one that is not full."""
    generator = torch.Generator().manual_seed(seed)
    tensor = (torch.randn(3, 2, numbers, generator=generator) * 10.0**power).to(dtype)
    tensor[1, :, : INT8_BLOCK // 2] *= 1000.0
    tensor[2] = 0.0
    wire = encode(tensor, "int8")
    assert wire.dtype == torch.uint8
    assert wire.shape == (3, 2, token_bytes(numbers, "int8")) == (3, 2, wire_length(numbers, "int8"))
    back = decode(wire, "int8", torch.float32)
    assert back.shape == tensor.shape
    assert not bool(back[2].any())
    smallest = torch.finfo(torch.float32).tiny
    for start in range(0, numbers, INT8_BLOCK):
        block = tensor[..., start : start + INT8_BLOCK].float()
        step = (block.abs().amax(-1, keepdim=True) / STEPS).clamp_min(smallest)
        assert bool(((back[..., start : start + INT8_BLOCK] - block).abs() <= 0.5001 * step).all())


def test_codes_without_a_scale_are_no_numbers() -> None:
    """The receiver sees it as with any other precision."""
    wire = encode(torch.ones(2, 3, 64), "int8")
    wire[1, 1, -4:] = 255
    back = decode(wire, "int8", torch.float32)
    assert bool(torch.isnan(back[1, 1]).all())
    assert bool(torch.isfinite(back[0]).all())


def test_what_fp16_cannot_hold_is_its_largest_number() -> None:
    """Where the run allows wider codecs beside it: a slow link must not make infinity of what is finite."""
    assert there_and_back(torch.tensor([1e9, -1e9, 1.0]), "fp16").tolist() == [65504.0, -65504.0, 1.0]


@pytest.mark.parametrize("codec", ACTIVATION_CODECS)
def test_sizes_are_what_travels(codec: ActivationCodec) -> None:
    """`token_bytes` counts them before there is a tensor."""
    for numbers in (1, 64, 128, 129, 768, 2048):
        wire = encode(torch.randn(2, 3, numbers), codec)
        assert wire.dtype == DTYPES[codec]
        assert wire.nbytes == 6 * token_bytes(numbers, codec)
        assert wire.shape[-1] == wire_length(numbers, codec)


def test_a_run_names_one_codec_or_several_from_wide_to_narrow() -> None:
    """In whatever order and however often they are written."""
    assert PipelineSpec.model_validate({"activations": "fp16"}).activations == ("fp16",)
    several = PipelineSpec.model_validate({"activations": ["int8", "fp32", "int8"]})
    assert several.activations == ("fp32", "int8")
    assert several == PipelineSpec(activations=("fp32", "int8"))
    assert [carried_dtype(each) for each in (("fp32", "int8"), ("bf16", "int8"), ("int8",))] == [
        torch.float32,
        torch.bfloat16,
        torch.float32,
    ]
    with pytest.raises(ValueError, match="at least 1"):
        PipelineSpec.model_validate({"activations": []})
