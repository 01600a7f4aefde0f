"""How the exchanged tensor travels: the codecs of an outer step.

A codec never reconstructs a partner's tensor for its own sake: what counts is the difference of two contributions,
s_j − s_i, and every codec gives it antisymmetrically, so that the mean over replicas is kept (see `replica.py`).
Rounding is by a dither that both sides know (a Weyl sequence within each block, moved by a hash of the exchange's name
and the block): equal values get equal codes, the difference is unbiased, and its error shrinks with the difference
itself.

`int8` and `int4` send codes modulo 2^bits: a receiver knows its own value, which lies close by, so only the difference
must fit (the idea of Moniqua, arXiv 2002.11787, and of lattice coding, arXiv 2002.09268). The error therefore scales
with the spread across replicas and not with the weights, and one phase is enough. Each block of 1024 values is rotated
first (`rotation.py`), so that a difference is spread evenly over it, and its step comes from a sketch: 8 of the rotated
values, exchanged exactly beforehand.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from noloco_node.outer.rotation import BLOCK, hashed, rotated, rotated_back_, signs

CodecName = Literal["fp32", "fp16", "bf16", "int8", "int4"]

__all__ = ["BLOCK", "CODECS", "Codec", "CodecName", "Coding"]

_SKETCH_PER_BLOCK = 8
_FP16_MAX = 65504.0
_DITHER_LEVELS = 1 << 16
_WEYL = 40503
_PRIOR_SAMPLES = 2.0
_FINEST_STEP = 2.0**-18
_LARGEST_CODE = 2.0**23
_SMALLEST_STEP = 1e-30
_AMBIGUOUS = -128
"""Half the range either way is one code, so it counts as no difference."""


class Coding(Protocol):
    """The codec of one exchange, both sides' sketches known.

    A chunk is a flat tensor of values; `start` is its place in the stage's vector. It begins at a block, and ends at
    one or at the end of the exchanged range.
    """

    def encode(self, values: Tensor, start: int) -> Tensor:
        """The chunk as it travels."""
        ...

    def difference(self, other: Tensor, own: Tensor, start: int) -> Tensor:
        """other − own of two encoded chunks, exactly antisymmetric. NaN and infinity show in it."""
        ...


@dataclass(frozen=True, slots=True)
class Codec:
    """A codec's figures: the dtype on the wire and how many bits a value takes."""

    name: CodecName
    wire_dtype: torch.dtype
    bits: int
    range_in_deviations: float = 0.0
    """Modulo codecs: the largest difference that fits, as a multiple of the block's root mean square difference."""

    @property
    def modulo(self) -> bool:
        """Whether codes are modulo 2^bits, so that a sketch must be exchanged first."""
        return self.range_in_deviations > 0.0

    def wire_elements(self, count: int) -> int:
        """Elements of the wire's tensor for `count` values. Modulo codecs send whole blocks."""
        return math.ceil(count / BLOCK) * BLOCK * self.bits // 8 if self.modulo else count

    def sketch_elements(self, count: int) -> int:
        """Elements of the sketch of `count` values that begin at a block."""
        return math.ceil(count / BLOCK) * _SKETCH_PER_BLOCK if self.modulo else 0

    def wire_bytes(self, count: int) -> int:
        """Bytes on the wire for `count` values that begin at a block, sketch included."""
        return self.wire_elements(count) * self.wire_dtype.itemsize + 4 * self.sketch_elements(count)

    def sketch(self, exchange: str, values: Tensor) -> Tensor:
        """A few rotated coordinates of each block of the values, fp32: what partners must know of each other before
        they encode. Empty for codecs that are not modulo."""
        if not self.modulo:
            return torch.empty(0)
        stride = BLOCK // _SKETCH_PER_BLOCK
        drawn = hashed(torch.arange(_SKETCH_PER_BLOCK), _seed(f"sketch/{exchange}")) % stride
        rows = rotated(_rows(values), signs(_seed(f"signs/{exchange}")).to(values.dtype))
        return rows[:, torch.arange(0, BLOCK, stride) + drawn].to(torch.float32).flatten()

    def coding(self, exchange: str, start: int, end: int, sketches: Sequence[Tensor]) -> Coding:
        """The coding of the exchange of that name over the values [start, end).

        `sketches` are those of all members, in any order (empty for codecs that are not modulo).
        """
        seed = _seed(f"dither/{exchange}")
        if self.modulo:
            return _Modulo(self.bits, _steps(self, sketches), seed, signs(_seed(f"signs/{exchange}")), start, end)
        return _Stochastic(seed) if self.name == "bf16" else _Rounded(self.wire_dtype)


CODECS: dict[CodecName, Codec] = {
    "fp32": Codec("fp32", torch.float32, 32),
    "fp16": Codec("fp16", torch.float16, 16),
    "bf16": Codec("bf16", torch.bfloat16, 16),
    "int8": Codec("int8", torch.uint8, 8, range_in_deviations=10.0),
    "int4": Codec("int4", torch.uint8, 4, range_in_deviations=4.5),
}


class _Rounded:
    """fp32 as it is, fp16 to the nearest. fp16 saturates instead of overflowing."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def encode(self, values: Tensor, start: int) -> Tensor:  # noqa: ARG002
        if self._dtype == torch.float16:
            values = values.clamp(-_FP16_MAX, _FP16_MAX)
        return values.to(self._dtype)

    def difference(self, other: Tensor, own: Tensor, start: int) -> Tensor:  # noqa: ARG002
        return other.to(torch.float32) - own.to(torch.float32)


class _Stochastic:
    """bf16 with stochastic rounding: the lower 16 bits of an fp32 decide, by the shared dither, the upper ones."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def encode(self, values: Tensor, start: int) -> Tensor:
        exact = values.to(torch.float32)
        dither = _offsets(self._seed, start, len(values))[:, None] + _within_block()
        bits = dither.bitwise_and_(_DITHER_LEVELS - 1).flatten()[: len(values)]
        bits.add_(exact.view(torch.int32)).bitwise_right_shift_(16)
        rounded = bits.to(torch.int16).view(torch.bfloat16)
        if not bool(torch.isfinite(exact.sum())):  # a NaN of many ones would have overflowed into a number
            rounded = torch.where(torch.isfinite(exact), rounded, exact.to(torch.bfloat16))
        return rounded

    def difference(self, other: Tensor, own: Tensor, start: int) -> Tensor:  # noqa: ARG002
        return other.to(torch.float32) - own.to(torch.float32)


class _Modulo:
    """Codes floor(x/step + dither) modulo 2^bits of the rotated values x, a step for each block.

    The dither goes up to 2 instead of 1: a whole step more moves both sides' codes alike. 4-bit codes are packed by
    halves of a chunk, the second half in the upper bits.
    """

    def __init__(self, bits: int, steps: Tensor, seed: int, signs: Tensor, start: int, end: int) -> None:
        self._bits = bits
        self._steps = steps
        self._seed = seed
        self._signs = signs
        self._start, self._end = start, end

    def encode(self, values: Tensor, start: int) -> Tensor:
        kind = values.dtype
        rows = rotated(_rows(values), self._signs.to(kind))
        codes = _offsets(self._seed, start, len(values)).to(kind).div_(_DITHER_LEVELS)[:, None] + (
            _within_block().to(kind).div_(_DITHER_LEVELS)
        )
        codes.addcdiv_(rows, self._steps_of(start, len(rows)).to(kind))
        codes.clamp_(-_LARGEST_CODE, _LARGEST_CODE).floor_()
        wire = codes.flatten().to(torch.int32).to(torch.uint8)  # by way of int32 it is modulo 256
        if self._bits == 8:
            return wire
        lower, upper = wire.chunk(2)
        return lower.bitwise_and_(0xF).bitwise_or_(upper.bitwise_left_shift_(4))

    def difference(self, other: Tensor, own: Tensor, start: int) -> Tensor:
        if self._bits == 8:
            moved, unit = other - own, 1
        else:  # a 4-bit difference in a byte's upper half wraps by itself, as 16 times its value
            moved, unit = torch.cat([(other - own) << 4, (other & 0xF0) - (own & 0xF0)]), 16
        signed = moved.view(torch.int8)
        rows = signed.to(torch.float32).masked_fill_(signed == _AMBIGUOUS, 0.0).view(-1, BLOCK)
        rows.mul_(self._steps_of(start, len(rows)) / unit)
        return rotated_back_(rows, self._signs).flatten()[: self._end - start]

    def _steps_of(self, start: int, blocks: int) -> Tensor:
        first = (start - self._start) // BLOCK
        return self._steps[first : first + blocks, None]


def _steps(codec: Codec, sketches: Sequence[Tensor]) -> Tensor:
    """Step of each block, fp32: from the root mean square over the block's samples of how far the members lie apart.

    A block's few samples are taken together with the mean over all blocks, which counts as two samples more. Symmetric
    in the members and, by fp64 and sums in a fixed order, the same on every machine. Values must stay below 2^23 steps:
    the step is never finer than 2^-18 of the block's largest sample.
    """
    stacked = torch.stack([sketch.double().view(-1, _SKETCH_PER_BLOCK) for sketch in sketches])
    columns = (stacked.amax(0) - stacked.amin(0)).square_().unbind(1)
    squares = torch.zeros_like(columns[0])
    for column in columns:
        squares += column
    overall = math.fsum(squares.numpy()) / (_SKETCH_PER_BLOCK * max(1, len(squares)))
    mean = (squares + _PRIOR_SAMPLES * overall) / (_SKETCH_PER_BLOCK + _PRIOR_SAMPLES)
    step = mean.sqrt() * (codec.range_in_deviations / ((1 << (codec.bits - 1)) - 1))
    finest = (stacked.abs().amax(2).amax(0) * _FINEST_STEP).clamp_(min=_SMALLEST_STEP)
    return step.maximum(finest).float()


def _rows(values: Tensor) -> Tensor:
    """Values by blocks [n, 1024], the last one filled up with zeros."""
    missing = -len(values) % BLOCK
    return (functional.pad(values, (0, missing)) if missing else values).view(-1, BLOCK)


def _within_block() -> Tensor:
    """The dither's Weyl sequence in a block: int32 in [0, 2^16), evenly spread."""
    return torch.arange(BLOCK, dtype=torch.int32).mul_(_WEYL).bitwise_and_(_DITHER_LEVELS - 1)


def _offsets(seed: int, start: int, count: int) -> Tensor:
    """Where the dither of each block begins: int32 in [0, 2^16)."""
    blocks = torch.arange(start // BLOCK, math.ceil((start + count) / BLOCK))
    return (hashed(blocks, seed) & (_DITHER_LEVELS - 1)).to(torch.int32)


def _seed(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big")
