"""How the exchanged tensor travels: the codecs of an outer step.

A codec never reconstructs a partner's tensor for its own sake: what counts is the difference of two contributions,
s_j − s_i, and every codec gives it antisymmetrically, so that the mean over replicas is kept (see `replica.py`).
Rounding is by a dither that both sides know (a Weyl sequence over the positions, moved by the exchange's name): equal
values get equal codes, the difference is unbiased, and its error shrinks with the difference itself.

`int8` and `int4` send codes modulo 2^bits: a receiver knows its own value, which lies close by, so only the difference
must fit (the idea of Moniqua, arXiv 2002.11787, and of lattice coding, arXiv 2002.09268). The error therefore scales
with the spread across replicas and not with the weights, and one phase is enough. The step of each block of 1024 values
comes from a sketch: 8 values of it, exchanged exactly beforehand.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

CodecName = Literal["fp32", "fp16", "bf16", "int8", "int4"]

BLOCK = 1024
"""Values that share a step; chunks and fragments begin at a multiple of it."""

SKETCH_PER_BLOCK = 8

_FP16_MAX = 65504.0
_WEYL = 2654435769
_MASK = 0xFFFFFFFF
_PRIOR_SAMPLES = 2.0
_FINEST_STEP = 2.0**-18
_LARGEST_CODE = 2.0**23


class Coding(Protocol):
    """The codec of one exchange, both sides' sketches known. `start` is a chunk's place in the stage's vector."""

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
        """Elements of the wire's tensor for `count` values."""
        return (count * self.bits + 7) // 8 if self.modulo else count

    def wire_bytes(self, count: int) -> int:
        """Bytes on the wire for `count` values that begin at a block, sketch included."""
        sketch = 4 * len(sketch_coordinates("", 0, count)) if self.modulo else 0
        return self.wire_elements(count) * self.wire_dtype.itemsize + sketch

    def coding(self, exchange: str, start: int, end: int, sketches: Sequence[Tensor]) -> Coding:
        """The coding of the exchange of that name over the values [start, end).

        `sketches` are those of all members, in any order (empty for codecs that are not modulo).
        """
        seed = _seed(exchange)
        if self.modulo:
            return _Modulo(self.bits, _steps(self, sketches), seed, start, end)
        return _Stochastic(seed) if self.name == "bf16" else _Rounded(self.wire_dtype)


CODECS: dict[CodecName, Codec] = {
    "fp32": Codec("fp32", torch.float32, 32),
    "fp16": Codec("fp16", torch.float16, 16),
    "bf16": Codec("bf16", torch.bfloat16, 16),
    "int8": Codec("int8", torch.uint8, 8, range_in_deviations=10.0),
    "int4": Codec("int4", torch.uint8, 4, range_in_deviations=4.5),
}


def sketch_coordinates(exchange: str, start: int, end: int) -> Tensor:
    """Places (int64) in [start, end) whose values are exchanged exactly: 8 for each block, drawn from the exchange's
    name, one in each eighth. `start` is the beginning of a block."""
    assert start % BLOCK == 0
    stride = BLOCK // SKETCH_PER_BLOCK
    digest = hashlib.blake2b(f"sketch/{exchange}".encode(), digest_size=SKETCH_PER_BLOCK * 2).digest()
    drawn = torch.frombuffer(bytearray(digest), dtype=torch.int16).to(torch.int64) % stride
    blocks = torch.arange(start, end, BLOCK)
    places = blocks[:, None] + torch.arange(0, BLOCK, stride) + drawn
    return places.clamp(max=end - 1).flatten()


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
        dither = _weyl(self._seed, start, len(values)) >> 16
        bits = (exact.view(torch.int32).to(torch.int64) + dither) & ~0xFFFF
        rounded = bits.to(torch.int32).view(torch.float32)
        return torch.where(torch.isfinite(exact), rounded, exact).to(torch.bfloat16)

    def difference(self, other: Tensor, own: Tensor, start: int) -> Tensor:  # noqa: ARG002
        return other.to(torch.float32) - own.to(torch.float32)


class _Modulo:
    """Codes floor(s/step + dither) modulo 2^bits, a step for each block."""

    def __init__(self, bits: int, steps: Tensor, seed: int, start: int, end: int) -> None:
        self._bits = bits
        self._steps = steps
        self._seed = seed
        self._start, self._end = start, end

    def encode(self, values: Tensor, start: int) -> Tensor:
        dither = _weyl(self._seed, start, len(values)).to(values.dtype) / (_MASK + 1)
        codes = (values / self._steps_of(start, len(values)).to(values.dtype) + dither).floor_()
        codes = codes.clamp_(-_LARGEST_CODE, _LARGEST_CODE).to(torch.int32) & ((1 << self._bits) - 1)
        return _packed(codes.to(torch.uint8), self._bits)

    def difference(self, other: Tensor, own: Tensor, start: int) -> Tensor:
        size, half = 1 << self._bits, 1 << (self._bits - 1)
        moved = (_unpacked(other, self._bits).to(torch.int32) - _unpacked(own, self._bits)) & (size - 1)
        moved = torch.where(moved > half, moved - size, moved).masked_fill_(moved == half, 0)  # ±half are one code
        count = min(len(moved), self._end - start)  # an odd number of 4-bit codes was padded
        return moved[:count].to(torch.float32).mul_(self._steps_of(start, count))

    def _steps_of(self, start: int, count: int) -> Tensor:
        first = (start - self._start) // BLOCK
        blocks = self._steps[first : first + math.ceil(count / BLOCK)]
        return blocks.repeat_interleave(BLOCK)[:count]


def _steps(codec: Codec, sketches: Sequence[Tensor]) -> Tensor:
    """Step of each block, fp32: from the root mean square over the block's samples of how far the members lie apart.

    A block's few samples are taken together with the mean over all blocks, which counts as two samples more. In fp64
    and symmetric in the members, so that both sides find the same. Values must stay below 2^23 steps: the step is never
    finer than 2^-18 of the largest sample.
    """
    stacked = torch.stack([sketch.double() for sketch in sketches])
    apart = (stacked.amax(0) - stacked.amin(0)).view(-1, SKETCH_PER_BLOCK)
    squares = apart.square().sum(1)
    overall = squares.mean() / SKETCH_PER_BLOCK
    mean = (squares + _PRIOR_SAMPLES * overall) / (SKETCH_PER_BLOCK + _PRIOR_SAMPLES)
    step = mean.sqrt() * (codec.range_in_deviations / ((1 << (codec.bits - 1)) - 1))
    largest = float(stacked.abs().max()) if stacked.numel() else 0.0
    return step.clamp(min=max(largest * _FINEST_STEP, 1e-30)).float()


def _packed(codes: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return codes
    if len(codes) % 2:
        codes = torch.cat([codes, codes.new_zeros(1)])
    return codes[0::2] | codes[1::2] << 4


def _unpacked(wire: Tensor, bits: int) -> Tensor:
    """Codes of a packed chunk: one more than was packed where that was an odd number."""
    if bits == 8:
        return wire
    return torch.stack([wire & 0xF, wire >> 4], 1).flatten()


def _weyl(seed: int, start: int, count: int) -> Tensor:
    """int64 in [0, 2^32) for each place: evenly spread, and the same on every machine."""
    return (torch.arange(start, start + count) * _WEYL + seed) & _MASK


def _seed(exchange: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"dither/{exchange}".encode(), digest_size=4).digest(), "big")
