"""Activations by codec: bounded errors, sizes that both ends agree on, and nothing of a token spoils another."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from noloco_node.config.run_spec import (
    ACTIVATION_CODECS,
    INT4_BLOCK,
    INT8_BLOCK,
    ActivationCodec,
    PipelineSpec,
    token_bytes,
)
from noloco_node.pipeline.activations import DTYPES, STEPS, decode, encode, there_and_back, wire_length
from noloco_node.training.trainer import carried_dtype


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
    back = decode(wire, "int8", torch.float32, numbers)
    assert back.shape == tensor.shape
    assert not bool(back[2].any())
    smallest = torch.finfo(torch.float32).tiny
    for start in range(0, numbers, INT8_BLOCK):
        block = tensor[..., start : start + INT8_BLOCK].float()
        step = (block.abs().amax(-1, keepdim=True) / STEPS).clamp_min(smallest)
        assert bool(((back[..., start : start + INT8_BLOCK] - block).abs() <= 0.5001 * step).all())


@settings(max_examples=60, deadline=None)
@given(numbers=st.integers(1, 700), power=st.integers(-30, 30), seed=st.integers(0, 1000))
def test_int4_is_off_by_a_known_share_of_its_own_block(numbers: int, power: int, seed: int) -> None:
    """At any scale, with one number in a thousand a hundred times the others, and blocks of very different size. In the
    rotated block the largest is 7 steps, and each number is off by half a step at most."""
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randn(3, 2, numbers, generator=generator) * 10.0**power
    tensor[0, 0, numbers // 2] *= 100.0
    tensor[1, :, :INT4_BLOCK] *= 1000.0
    tensor[2] = 0.0
    wire = encode(tensor, "int4")
    assert wire.shape == (3, 2, token_bytes(numbers, "int4")) == (3, 2, wire_length(numbers, "int4"))
    back = decode(wire, "int4", torch.float32, numbers)
    assert back.shape == tensor.shape
    for start in range(0, numbers, INT4_BLOCK):
        block, found = (each[..., start : start + INT4_BLOCK] for each in (tensor, back))
        norm = torch.linalg.vector_norm(block, dim=-1).clamp_min(1e-36)
        assert bool((torch.linalg.vector_norm(found - block, dim=-1) <= 0.58 * norm).all())


def test_int4_loses_one_percent_of_the_energy_on_average_and_leans_nowhere() -> None:
    """Of Gaussian numbers, and of some with few large ones among them as the residual stream has. The mean of errors
    is nought, also of numbers that are all alike."""
    generator = torch.Generator().manual_seed(1)
    plain = torch.randn(64, 16, 768, generator=generator)
    tall = plain.clone()
    tall[..., ::97] *= 30.0
    for tensor in (plain, tall):
        error = there_and_back(tensor, "int4") - tensor
        assert float(error.square().sum() / tensor.square().sum()) < 0.013
    alike = torch.full((64, 16, 768), 0.3)
    assert float(there_and_back(alike, "int4").mean()) == pytest.approx(0.3, rel=1e-3)


def test_int4_gives_equal_codes_for_equal_numbers_whatever_stands_beside_them() -> None:
    """A peer, its jurors and a repeat send the same codes, also where only some windows of a microbatch are alike."""
    tensor = torch.randn(2, 8, 192)
    wire, other = encode(tensor, "int4"), encode(torch.cat((tensor[:1], torch.zeros(1, 8, 192))), "int4")
    assert torch.equal(wire, encode(tensor.clone(), "int4"))
    assert torch.equal(wire[0], other[0])


@pytest.mark.parametrize(("codec", "scale"), [("int8", 4), ("int4", 2)])
def test_codes_without_a_scale_are_no_numbers(codec: ActivationCodec, scale: int) -> None:
    """The receiver sees it as with any other precision."""
    wire = encode(torch.ones(2, 3, 64), codec)
    wire[1, 1, -scale:] = 255
    back = decode(wire, codec, torch.float32, 64)
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
