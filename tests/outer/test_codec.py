"""What each codec does to the difference of two partners."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from noloco_node.outer import CodecName
from noloco_node.outer.codec import BLOCK, CODECS
from noloco_node.outer.modulo_codes import rotated, rotated_back_, signs

ALL: list[CodecName] = [name for name, codec in CODECS.items() if not codec.decoupled]
MODULO: list[CodecName] = [name for name in ALL if CODECS[name].modulo]
SIZE = 20 * BLOCK + 329


def pair(spread: float, *, size: int = SIZE, shift: float = 0.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Two vectors of weights of size 1, `spread` apart, both shifted."""
    generator = torch.Generator().manual_seed(seed)
    own = torch.randn(size, generator=generator) + shift
    return own, own + spread * torch.randn(size, generator=generator)


def difference(name: CodecName, own: Tensor, other: Tensor, exchange: str = "e", *, chunk: int | None = None) -> Tensor:
    """other − own as it arrives, chunk by chunk."""
    codec, start = CODECS[name], 0
    sketches = [codec.sketch(exchange, own), codec.sketch(exchange, other)]
    coding = codec.coding(exchange, len(own), sketches)
    arrived: list[Tensor] = []
    for a, b in zip(own.split(chunk or len(own)), other.split(chunk or len(own)), strict=True):
        wires = coding.encode(b, start), coding.encode(a, start)
        assert wires[0].shape == (codec.wire_elements(len(a)),)
        assert wires[0].dtype == codec.wire_dtype
        arrived.append(coding.difference(*wires, start))
        start += len(a)
    return torch.cat(arrived)


def rms(x: Tensor) -> float:
    """Root mean square."""
    return float(x.double().square().mean().sqrt())


def error(name: CodecName, own: Tensor, other: Tensor, exchange: str = "e") -> Tensor:
    """What the codec adds to the difference, in fp64."""
    return difference(name, own, other, exchange).double() - (other.double() - own.double())


@pytest.mark.parametrize(("name", "per_weight", "absolute"), [("fp32", 2.0**-23, 0.0), ("fp16", 2.0**-11, 2.0**-24)])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e3])
def test_floats_err_by_their_precision_of_the_weights(
    name: CodecName, per_weight: float, absolute: float, scale: float
) -> None:
    """|error| is at most the precision times both weights: half a unit of each."""
    own, other = (scale * x for x in pair(0.1))
    bound = per_weight * (own.abs() + other.abs()).double() + absolute
    assert bool((error(name, own, other).abs() <= bound).all())


@pytest.mark.parametrize("name", MODULO)
@pytest.mark.parametrize("spread", [1e-3, 1.0])
def test_modulo_codes_err_by_at_most_a_step(name: CodecName, spread: float) -> None:
    """A rotated value is off by less than a step, so each block's root mean square error is less than one. The step is
    the range over the largest code; its estimate from the sketch is within a factor of 2 here."""
    own, other = pair(spread)
    codec = CODECS[name]
    step = codec.range_in_deviations * spread / (2 ** (codec.bits - 1) - 1)
    for block in error(name, own, other)[: 20 * BLOCK].split(BLOCK):
        assert rms(block) < 2 * step
    assert 0.3 * step < rms(error(name, own, other)) < 0.6 * step  # of a step, sqrt(1/6) is expected


@pytest.mark.parametrize("name", MODULO)
def test_dithered_codes_are_unbiased_over_exchanges(name: CodecName) -> None:
    """The mean error over 100 exchanges is a tenth of one error."""
    own, other = pair(0.01, size=2 * BLOCK)
    errors = [error(name, own, other, str(number)) for number in range(100)]
    assert rms(sum(errors) / 100) == pytest.approx(rms(torch.cat(errors)) / 10, rel=0.1)  # pyright: ignore[reportArgumentType]


def test_errors_repeat_neither_from_row_to_row_nor_from_block_to_block() -> None:
    """If all weights are equal and so are all differences, the dither alone decides. Its errors at two places are not
    correlated at the distance of a row or of a block. (From one place to the next they alternate, as they should.)"""
    own = torch.ones(64 * BLOCK)
    other = own + 0.0013
    found = torch.stack([error("int8", own, other, str(number)) for number in range(20)])
    for lag in (64, 128, 768, 1024, 1536, 2048, 4096):
        correlation = float((found[:, lag:] * found[:, :-lag]).mean() / found.square().mean())
        assert abs(correlation) < (0.5 if lag < BLOCK else 0.03), lag
    assert abs(float((found[1:] * found[:-1]).mean() / found.square().mean())) < 0.03


@pytest.mark.parametrize("name", MODULO)
def test_the_error_knows_the_spread_and_not_the_weights(name: CodecName) -> None:
    """Both shifted by 100: the same error. Ten times as far apart: ten times the error."""
    plain = rms(error(name, *pair(0.1)))
    assert rms(error(name, *pair(0.1, shift=100.0))) == pytest.approx(plain, rel=0.05)
    assert rms(error(name, *pair(1.0))) == pytest.approx(10 * plain, rel=0.05)


@pytest.mark.parametrize("name", MODULO)
@pytest.mark.parametrize("kind", ["heavy tails", "uneven rows", "one row of many"])
def test_uneven_differences_cost_no_more_than_even_ones(name: CodecName, kind: str) -> None:
    """Without the rotation, values beyond the range would wrap around and cost a large part of the difference."""
    generator = torch.Generator().manual_seed(5)
    moved = torch.randn(64, BLOCK, generator=generator)
    if kind == "heavy tails":  # Student's t with four degrees of freedom
        moved /= (torch.randn(4, 64, BLOCK, generator=generator).square().mean(0)).sqrt()
    elif kind == "uneven rows":
        moved *= torch.randn(64, 8, generator=generator).exp().repeat_interleave(BLOCK // 8, 1)
    else:
        moved *= (torch.arange(BLOCK) < 64).float()
    own = pair(1.0, size=64 * BLOCK)[0]
    other = own + 0.01 * moved.flatten()
    even = error(name, *pair(0.01, size=64 * BLOCK))
    share = (rms(error(name, own, other)) / rms(other - own)) ** 2
    assert share < 1.5 * (rms(even) / 0.01) ** 2


@pytest.mark.parametrize("name", ALL)
@given(seed=st.integers(0, 999), scale=st.sampled_from([0.0, 1e-30, 1e-3, 1.0, 1e4]), size=st.integers(1, 3 * BLOCK))
@settings(max_examples=25, deadline=None)
def test_both_sides_find_the_same_difference_with_opposite_sign(
    name: CodecName, seed: int, scale: float, size: int
) -> None:
    """Bit by bit, for every length; equal values differ by exactly nothing."""
    own, other = (scale * x for x in pair(0.3, size=size, seed=seed))
    there, back = difference(name, own, other, str(seed)), difference(name, other, own, str(seed))
    assert there.shape == own.shape
    assert torch.equal(there, -back)
    assert not difference(name, own, own, str(seed)).any()
    assert not difference(name, torch.zeros(size), -torch.zeros(size), str(seed)).any()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("blocks", [1, 2, 7])
def test_cutting_into_chunks_changes_nothing(name: CodecName, blocks: int) -> None:
    """Chunks of any number of blocks, the last one ragged, anywhere in the stage: the same bits as in one piece."""
    own, other = pair(0.01)
    whole = difference(name, own, other)
    assert torch.equal(difference(name, own, other, chunk=blocks * BLOCK), whole)


@pytest.mark.parametrize("name", MODULO)
def test_a_large_chunk_is_as_many_small_ones(name: CodecName) -> None:
    """That holds also if it is longer than the pieces in which it is made."""
    own, other = pair(0.01, size=300 * BLOCK + 5)
    whole = difference(name, own, other)
    assert torch.equal(difference(name, own, other, chunk=50 * BLOCK), whole)
    assert rms(whole - (other - own)) < 0.5 * rms(other - own)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("size", [1, 7, BLOCK - 1, BLOCK, BLOCK + 1, SIZE])
def test_bytes_are_as_promised(name: CodecName, size: int) -> None:
    """`wire_bytes` is what the tensors hold."""
    codec, (own, other) = CODECS[name], pair(0.01, size=size)
    sketches = [codec.sketch("e", own), codec.sketch("e", other)]
    wire = codec.coding("e", size, sketches).encode(own, 0)
    assert len(sketches[0]) == codec.sketch_elements(size)
    assert wire.nbytes + sketches[0].nbytes == codec.wire_bytes(size)


@pytest.mark.parametrize("name", MODULO)
def test_beyond_the_range_a_difference_is_wrong_but_not_larger_than_the_range(name: CodecName) -> None:
    """Sketches that promise 1/1000 of the real difference: each block's norm stays within the promised range."""
    codec, (own, other) = CODECS[name], pair(1.0)
    sketch = codec.sketch("e", own)
    promised = sketch + 0.001 * torch.randn(len(sketch), generator=torch.Generator().manual_seed(1))
    coding = codec.coding("e", SIZE, [sketch, promised])
    wires = coding.encode(other, 0), coding.encode(own, 0)
    found = coding.difference(*wires, 0)
    largest = float((promised - sketch).double().view(-1, 8).square().mean(1).max().sqrt())
    for block in found.split(BLOCK):
        assert float(block.norm()) <= codec.range_in_deviations * largest * BLOCK**0.5 * (1 + 1e-5)
    assert torch.equal(found, -coding.difference(wires[1], wires[0], 0))


@pytest.mark.parametrize("name", ["fp32", "fp16"])
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, -1, 0x7F800000, -0x800000])
def test_what_is_not_finite_shows_in_the_difference(name: CodecName, bits: int) -> None:
    """NaN of every bit pattern stays NaN; infinity stays or, in fp16, becomes the largest number."""
    own, other = pair(0.1, size=BLOCK)
    other.view(torch.int32)[7] = bits
    found = difference(name, own, other)
    assert not bool(torch.isfinite(found[7])) or (name == "fp16" and abs(float(found[7])) > 65000)
    assert int(torch.isfinite(found).sum()) >= BLOCK - 1


@pytest.mark.parametrize("name", MODULO)
def test_weights_too_large_for_their_spread_still_meet(name: CodecName) -> None:
    """Where fp32 itself resolves no finer step, single differences are coarse, but their mean is right."""
    own, other = pair(1e-4, size=4 * BLOCK, shift=100.0)
    mean = torch.stack([difference(name, own, other, str(number)) for number in range(100)]).mean(0)
    moved = other - own
    assert float(mean @ moved / (moved @ moved)) == pytest.approx(1.0, abs=0.2)


def test_fp16_saturates() -> None:
    """Beyond the largest fp16 a difference stops growing; nothing overflows."""
    assert float(difference("fp16", torch.zeros(1), torch.tensor([1e6]))) == 65504.0


def test_the_rotation_is_orthonormal_and_its_own_way_back() -> None:
    """Lengths and angles stay; one value alone is spread evenly."""
    rows = torch.randn(5, BLOCK, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    flips = signs(11).double()
    turned = rotated(rows, flips)
    assert float((turned @ turned.T - rows @ rows.T).abs().max()) < 1e-10
    assert float((rotated_back_(turned.clone(), flips) - rows).abs().max()) < 1e-12
    lone = torch.zeros(1, BLOCK)
    lone[0, 77] = 32.0
    assert torch.equal(rotated(lone, signs(12)).abs(), torch.ones(1, BLOCK))
    assert abs(float(signs(13).mean())) < 0.1
    assert not torch.equal(signs(13), signs(14))
