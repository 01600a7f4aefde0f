"""The codecs of an outer step: how the exchanged tensor travels.

A codec never reconstructs a partner's tensor for its own sake: only the difference of two contributions, s_j − s_i,
counts. Every codec gives it antisymmetrically, so that the mean over replicas is kept (see `replica.py`). Codes are
rounded by a dither that both sides know. It is a Weyl sequence within each block, moved by a hash of the exchange's
name and the block. Equal values therefore get equal codes, the difference is unbiased, and its error shrinks with the
difference itself.

`int8` and `int4` send codes modulo 2^bits. A receiver knows its own value, which lies close by, so only the difference
must fit. This is the idea of Moniqua (arXiv 2002.11787) and of lattice coding (arXiv 2002.09268). The error therefore
scales with the spread across replicas and not with the weights, and one phase is enough.

Each block of 1024 values is rotated first (`rotated`), so that a difference is spread evenly over it. The step
comes from a sketch: 8 of the rotated values, exchanged exactly beforehand. `dct` and `sign` send only a small part of
the motion (`decoupled.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from noloco_node.outer import CodecName
from noloco_node.outer.decoupled import GROUP, DecoupledCodes, Motion, Signs, Waves, decoupled_bytes, decoupled_sketch
from noloco_node.outer.modulo_codes import BLOCK, SKETCH_PER_BLOCK, ModuloCodes, sketch_of

_FP16_MAX = torch.finfo(torch.float16).max


class Coding(Protocol):
    """The codec of one exchange, both sides' sketches known.

    A chunk is a flat tensor of values; `start` is its place in the stage's vector. It begins at a multiple of the
    codec's `granule`, and ends at one or at the end of the vector. What is made of tensors lies where they lie.
    """

    def encode(self, values: Tensor, start: int, pull: Tensor | None = None) -> Tensor:
        """The chunk as it travels. `pull` is its part γφ or γτ (`OuterReplica.trail`), which decoupled codecs leave."""
        ...

    def difference(self, other: Tensor, own: Tensor, start: int) -> Tensor:
        """other − own of two encoded chunks, exactly antisymmetric. NaN and infinity show in it."""
        ...

    def measured(self, other: Tensor, own: Tensor, start: int, blocks: Tensor) -> tuple[float, Tensor] | None:
        """The sum of the squares of the difference and its values in these blocks of the chunk, flat. It is for less
        work than the whole difference takes; None where it is no less. `blocks` lie on the host."""
        ...


@dataclass(frozen=True, slots=True)
class Codec:
    """A codec's figures: the dtype on the wire and how many bits a value takes (of a decoupled codec: where it crosses
    whole)."""

    name: CodecName
    wire_dtype: torch.dtype
    bits: int
    range_in_deviations: float = 0.0
    """Modulo codes: the largest difference that fits, as a multiple of the block's root mean square difference."""
    motion_bytes: int = 0
    """Bytes for a block's motion, of codecs by which most of the pull stays away (`decoupled.py`)."""
    trails: bool = False
    """Decoupled: whether what φ has moved lately counts as motion (`OuterReplica.trail`)."""

    @property
    def decoupled(self) -> bool:
        """Whether most of the pull stays away and the rest of s travels as its motion."""
        return self.motion_bytes > 0

    @property
    def modulo(self) -> bool:
        """Whether there are codes modulo 2^bits, so that a sketch must be exchanged first."""
        return self.range_in_deviations > 0.0

    @property
    def on_a_device(self) -> bool:
        """Whether a device may do the arithmetic. A transform by a product of matrices is summed in each device's own
        order, so two partners would find two differences. Whole numbers cross so often that a device gains nothing."""
        return self.modulo and self.name != "dct"

    @property
    def granule(self) -> int:
        """Chunks are a multiple of it."""
        return BLOCK * GROUP if self.decoupled else BLOCK

    def wire_elements(self, count: int) -> int:
        """Elements of the wire's tensor for `count` values: as many, or for modulo codes those of whole blocks."""
        blocks = math.ceil(count / BLOCK)
        if self.decoupled:
            return decoupled_bytes(blocks, self.bits, self.motion_bytes)
        return blocks * BLOCK * self.bits // 8 if self.modulo else count

    def values_within(self, chunk_bytes: int) -> int:
        """Values of a chunk of at most so many bytes: whole granules, and at least one."""
        return max(1, chunk_bytes // (self.wire_elements(self.granule) * self.wire_dtype.itemsize)) * self.granule

    def sketch_elements(self, count: int) -> int:
        """Elements of the sketch of `count` values that begin at a block."""
        blocks = math.ceil(count / BLOCK) if self.modulo else 0
        return (math.ceil(blocks / GROUP) if self.decoupled else blocks) * SKETCH_PER_BLOCK

    def wire_bytes(self, count: int) -> int:
        """Bytes on the wire for `count` values that begin at a block, sketch included."""
        return self.wire_elements(count) * self.wire_dtype.itemsize + 4 * self.sketch_elements(count)

    def sketch(self, exchange: str, values: Tensor) -> Tensor:
        """What partners must know of a chunk of each other before they encode, fp32; mostly nothing."""
        if not self.modulo:
            return torch.empty(0)
        return decoupled_sketch(exchange, values) if self.decoupled else sketch_of(exchange, values)

    def coding(self, exchange: str, size: int, sketches: Sequence[Tensor]) -> Coding:
        """The coding of the exchange of that name over a vector of `size` values.

        `sketches` come from all members, in any order (empty for codecs that are not modulo).
        """
        if self.decoupled:
            motion: Motion = Waves() if self.name == "dct" else Signs(exchange)
            return DecoupledCodes(self.bits, self.range_in_deviations, motion, exchange, sketches, size)
        if self.modulo:
            return ModuloCodes(self.bits, self.range_in_deviations, exchange, sketches, size)
        return _Rounded(self.wire_dtype)


CODECS: dict[CodecName, Codec] = {
    "fp32": Codec("fp32", torch.float32, 32),
    "fp16": Codec("fp16", torch.float16, 16),
    "int8": Codec("int8", torch.uint8, 8, range_in_deviations=10.0),
    "int4": Codec("int4", torch.uint8, 4, range_in_deviations=4.5),
    "dct": Codec("dct", torch.uint8, 8, range_in_deviations=10.0, motion_bytes=Waves.bytes_per_block),
    "sign": Codec("sign", torch.uint8, 4, range_in_deviations=4.5, motion_bytes=Signs.bytes_per_block, trails=True),
}


class _Rounded:
    """fp32 as it is, fp16 to the nearest. fp16 saturates instead of overflowing."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def encode(self, values: Tensor, start: int, pull: Tensor | None = None) -> Tensor:  # noqa: ARG002
        if self._dtype == torch.float16:
            values = values.clamp(-_FP16_MAX, _FP16_MAX)
        return values.to(self._dtype)

    def difference(self, other: Tensor, own: Tensor, start: int) -> Tensor:  # noqa: ARG002
        return other.to(torch.float32) - own.to(torch.float32)

    def measured(self, other: Tensor, own: Tensor, start: int, blocks: Tensor) -> None:
        del other, own, start, blocks
