"""Codes of a vector modulo 2^bits, for partners with vectors close together, and the dither that both share.

Each block of 1024 values is rotated first, by random signs and a Hadamard transform (both orthonormal), so that
whatever they are, the rotated ones look Gaussian. A few of them then tell the scale of all, and the largest is known
from the root mean square. A difference of codes takes additions and single products in a fixed order only. Equal codes
therefore give equal bits on every machine and every device. Everything is computed where the tensors lie.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from noloco_node.outer.workplace import HOST, IN_CACHE, on_host

_SIDE = 32
BLOCK = _SIDE * _SIDE
_MASK = 0xFFFFFFFF


def hashed(numbers: Tensor, seed: int) -> Tensor:
    """A hash of each int64 below 2^32: int64 in [0, 2^32), the same on every machine."""
    x = (numbers + seed) & _MASK
    for factor in (0x7FEB352D, 0x6D2B79F5):  # below 2^31, so that no product overflows
        x = ((x ^ x >> 16) * factor) & _MASK
    return x ^ x >> 15


def signs(seed: int) -> Tensor:
    """fp32 [1024] of +1 and −1."""
    return (hashed(torch.arange(BLOCK), seed) >> 8 & 1).to(torch.float32).mul_(2.0).sub_(1.0)


def rotated(rows: Tensor, signs: Tensor) -> Tensor:
    """The rows [n, 1024] rotated: H·D·x, a new tensor."""
    return _hadamard_(rows * signs.to(rows.device))


def rotated_back_(rows: Tensor, signs: Tensor) -> Tensor:
    """The inverse of `rotated`: D·H·x. The rows' memory is used up."""
    return _hadamard_(rows).mul_(signs.to(rows.device))


def _hadamard_(rows: Tensor) -> Tensor:
    """An orthonormal Hadamard transform of each row [n, 1024], its own inverse; the rows' memory is used up.

    A row is a square of 32 × 32, transformed along one side, turned, and transformed along the other. Every addition
    therefore runs over at least 32 neighbours.
    """
    source, target = rows, torch.empty_like(rows)
    for turn in (False, True):
        if turn:
            target.view(-1, _SIDE, _SIDE).copy_(source.view(-1, _SIDE, _SIDE).transpose(1, 2))
            source, target = target, source
        half = BLOCK // 2
        while half >= _SIDE:
            pairs, results = source.view(-1, 2, half), target.view(-1, 2, half)
            torch.add(pairs[:, 0], pairs[:, 1], out=results[:, 0])
            torch.sub(pairs[:, 0], pairs[:, 1], out=results[:, 1])
            source, target = target, source
            half //= 2
    return source.mul_(1 / _SIDE)


DITHER_LEVELS = 1 << 16
SKETCH_PER_BLOCK = 8

WEYL = 40503
"""An odd number by which a dither goes on from a value to the next, modulo `DITHER_LEVELS`."""
_PRIOR_SAMPLES = 2.0
_LARGEST_CODE = 1.0 / torch.finfo(torch.float32).eps
"""fp32 holds every whole number up to this one, 2^23."""
_FINEST_STEP = _SIDE / _LARGEST_CODE
_BLOCKS_IN_CACHE = 2 * IN_CACHE // BLOCK
"""The number of blocks that are worked on at once on the host. Half as many take a fifth longer."""
_BLOCKS_ON_A_DEVICE = 16 * _BLOCKS_IN_CACHE
"""The number of blocks that a device works on at once. Its memory for a chunk then grows little with the chunk."""
_AMBIGUOUS = torch.iinfo(torch.int8).min
"""This code is half the range either way, so it counts as no difference."""


def sketch_of(exchange: str, values: Tensor) -> Tensor:
    """A few rotated coordinates of each block of the values, fp32 [8 · blocks].

    Only their rows of the rotation are computed, which takes a processor a sixth of the time. Another machine may round
    otherwise, so members use each other's sketches as they came.
    """
    stride = BLOCK // SKETCH_PER_BLOCK
    drawn = hashed(torch.arange(SKETCH_PER_BLOCK), seed_of(f"sketch/{exchange}")) % stride
    places = torch.arange(0, BLOCK, stride) + drawn
    if not on_host(values.device):  # its products of matrices may have ten bits, and partners lie closer than that
        rows, there = rows_of(values), places.to(values.device)
        turned = [rotated(rows[piece], _signs_of(exchange))[:, there] for piece in pieces_of(len(rows), rows.device)]
        return torch.cat(turned).flatten()
    basis = rotated_back_(torch.zeros(SKETCH_PER_BLOCK, BLOCK).scatter_(1, places[:, None], 1.0), _signs_of(exchange))
    return (rows_of(values) @ basis.to(values.dtype).T).to(torch.float32).flatten()


class ModuloCodes:
    """A `Coding`: floor(x/step + dither) modulo 2^bits of the rotated values x, with a step for each block.

    The dither goes up to 2 instead of 1: a whole step more moves both sides' codes alike.
    4-bit codes are packed by halves of a chunk. The second half lies in the upper bits.
    """

    def __init__(
        self, bits: int, range_in_deviations: float, exchange: str, sketches: Sequence[Tensor], size: int
    ) -> None:
        self._bits = bits
        self._steps = _steps(bits, range_in_deviations, sketches)
        self._seed = seed_of(f"dither/{exchange}")
        self._signs = _signs_of(exchange)
        self._size = size

    def encode(self, values: Tensor, start: int, pull: Tensor | None = None) -> Tensor:  # noqa: ARG002
        rows = rows_of(values)
        wire = torch.empty(rows.shape, dtype=torch.uint8, device=rows.device)
        steps = self._steps_of(start, len(rows)).to(rows.device)
        begins = offsets(self._seed, start, rows.numel()).to(rows.device)
        for piece in pieces_of(len(rows), rows.device):
            wire[piece] = self._codes(rows[piece], steps[piece], begins[piece])
        if self._bits == 8:
            return wire.flatten()
        lower, upper = wire.flatten().chunk(2)
        return lower.bitwise_and_(0xF).bitwise_or_(upper.bitwise_left_shift_(4))

    def difference(self, other: Tensor, own: Tensor, start: int) -> Tensor:
        moved, steps = self._moved(other, own, start)
        rows = torch.empty(moved.shape, device=moved.device)
        for piece in pieces_of(len(moved), moved.device):
            rows[piece] = self._decoded(moved[piece], steps[piece])
        return rows.flatten()[: self._size - start]

    def measured(self, other: Tensor, own: Tensor, start: int, blocks: Tensor) -> tuple[float, Tensor]:
        """See `Coding`: the rotation keeps the sum of the squares, so the codes say it."""
        moved, steps = self._moved(other, own, start)
        squares = torch.empty(len(moved), device=moved.device)
        for piece in pieces_of(len(moved), moved.device):
            codes = moved[piece]
            torch.sum(codes.to(torch.float32).masked_fill_(codes == _AMBIGUOUS, 0.0).square_(), 1, out=squares[piece])
        square = float(squares.to(HOST).double().dot(steps[:, 0].to(HOST).double().square_()))
        looked_at = blocks.to(moved.device)
        return square, self._decoded(moved[looked_at], steps[looked_at]).flatten()

    def _moved(self, other: Tensor, own: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """The differences of codes, int8 [blocks, 1024], and the step of one, fp32 [blocks, 1]."""
        if self._bits == 8:
            moved, unit = other - own, 1
        else:  # a 4-bit difference in a byte's upper half wraps by itself, as 16 times its value
            moved, unit = torch.cat([(other - own) << 4, (other & 0xF0) - (own & 0xF0)]), 16
        moved = moved.view(torch.int8).view(-1, BLOCK)
        return moved, (self._steps_of(start, len(moved)) / unit).to(moved.device)

    def _decoded(self, moved: Tensor, steps: Tensor) -> Tensor:
        found = moved.to(torch.float32).masked_fill_(moved == _AMBIGUOUS, 0.0).mul_(steps)
        return rotated_back_(found, self._signs)

    def _codes(self, rows: Tensor, steps: Tensor, begins: Tensor) -> Tensor:
        """Codes modulo 256 of so many blocks, with the beginnings of their dithers."""
        kind = rows.dtype
        dither = begins.to(kind)[:, None] + within_block().to(rows.device, kind)
        codes = dither.div_(DITHER_LEVELS).addcdiv_(rotated(rows, self._signs.to(kind)), steps.to(kind))
        codes.clamp_(-_LARGEST_CODE, _LARGEST_CODE).floor_()
        return codes.to(torch.int32).to(torch.uint8)  # by way of int32 it is modulo 256

    def _steps_of(self, start: int, blocks: int) -> Tensor:
        first = start // BLOCK
        return self._steps[first : first + blocks, None]


def _steps(bits: int, range_in_deviations: float, sketches: Sequence[Tensor]) -> Tensor:
    """Step of each block, fp32: from the root mean square over the block's samples of how far the members lie apart.

    A block's few samples are taken together with the mean over all blocks, which counts as two samples more. Symmetric
    in the members and, by fp64 and sums in a fixed order, the same on every machine. Values must stay below 2^23 steps:
    the step is never finer than 2^-18 of the block's largest sample.
    """
    stacked = torch.stack([sketch.double().view(-1, SKETCH_PER_BLOCK) for sketch in sketches])
    columns = (stacked.amax(0) - stacked.amin(0)).square_().unbind(1)
    squares = torch.zeros_like(columns[0])
    for column in columns:
        squares += column
    overall = math.fsum(squares.numpy()) / (SKETCH_PER_BLOCK * max(1, len(squares)))
    mean = (squares + _PRIOR_SAMPLES * overall) / (SKETCH_PER_BLOCK + _PRIOR_SAMPLES)
    step = mean.sqrt() * (range_in_deviations / ((1 << (bits - 1)) - 1))
    finest = (stacked.abs().amax(2).amax(0) * _FINEST_STEP).clamp_(min=1e-30)
    return step.maximum(finest).float()


def rows_of(values: Tensor) -> Tensor:
    """Values by blocks [n, 1024], the last one filled up with zeros."""
    missing = -len(values) % BLOCK
    return (functional.pad(values, (0, missing)) if missing else values).view(-1, BLOCK)


def _signs_of(exchange: str) -> Tensor:
    return signs(seed_of(f"signs/{exchange}"))


def pieces_of(blocks: int, device: torch.device) -> list[slice]:
    """So many blocks in pieces that stay in a processor's cache, or in the larger ones of another device."""
    most = _BLOCKS_IN_CACHE if on_host(device) else _BLOCKS_ON_A_DEVICE
    return [slice(first, first + most) for first in range(0, blocks, most)]


def within_block() -> Tensor:
    """The dither's Weyl sequence in a block: int32 in [0, 2^16), evenly spread."""
    return torch.arange(BLOCK, dtype=torch.int32).mul_(WEYL).bitwise_and_(DITHER_LEVELS - 1)


def offsets(seed: int, start: int, count: int) -> Tensor:
    """Where the dither of each block begins: int32 in [0, 2^16)."""
    blocks = torch.arange(start // BLOCK, math.ceil((start + count) / BLOCK))
    return (hashed(blocks, seed) & (DITHER_LEVELS - 1)).to(torch.int32)


def seed_of(name: str) -> int:
    """A seed below 2^32 from a name, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big")
