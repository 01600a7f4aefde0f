"""Codecs that treat a replica's motion apart from its weights: `dct` and `sign`.

They follow "Distributed Low-Communication Training with Decoupled Momentum Optimization" (arXiv 2510.03371). There,
what does not cross waits as error feedback. Here a contribution is s = γφ + u with u = αδ + βnwΔ, and a receiver has
all of its own s. Q(s_j) − Q(s_i) replaces of it only what crosses. The rest of u is applied locally, nothing waits, and
the mean over replicas is kept as with every codec. (`sign` takes γτ for γφ and the rest for u: `OuterReplica.trail`.)

γφ does not shrink as training goes on, so a few bits cannot carry it, and without it replicas would drift apart. One of
each 16 blocks, drawn from the exchange's name, therefore crosses whole as modulo codes. Of the others a part of u
crosses: `dct` sends 0.24 bytes for a weight in all, `sign` 0.15.

`Waves` sends the largest DCT coefficients, after that paper and DeMo (arXiv 2411.19870). `Signs` sends one bit a value
and one scale a block, as 1-bit Adam (arXiv 2102.02888) does with the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from noloco_node.outer.modulo_codes import (
    BLOCK,
    ModuloCodes,
    pieces_of,
    rotated,
    rotated_back_,
    rows_of,
    seed_of,
    signs,
    sketch_of,
)
from noloco_node.outer.workplace import HOST

_WAVE = 64
_KEPT = 4
_PER_BLOCK = BLOCK // _WAVE * _KEPT


class Motion(Protocol):
    """Encodes blocks of a motion, and gives back what of them has crossed."""

    bytes_per_block: int

    def encode(self, rows: Tensor) -> Tensor:
        """Blocks fp32 [n, 1024] as they travel, uint8 [n, bytes_per_block]."""
        ...

    def difference(self, other: Tensor, own: Tensor) -> Tensor:
        """What has crossed of other − own, blocks uint8 [n, bytes_per_block] each, fp32 [n, 1024]. It is exactly
        antisymmetric. NaN and infinity show in it."""
        ...

    def squares(self, other: Tensor, own: Tensor) -> Tensor:
        """The sum of the squares of each block's difference, fp64 [n] on the host, for less work than `difference`
        takes."""
        ...


class Waves:
    """The 4 largest of each 64 DCT coefficients: a bf16 and an index each."""

    bytes_per_block = 3 * _PER_BLOCK

    def __init__(self) -> None:
        self._dct = dct_matrix()

    def encode(self, rows: Tensor) -> Tensor:
        coefficients = rows.reshape(-1, _WAVE) @ self._dct.T  # on the host alone: see `Codec.on_a_device`
        places = coefficients.abs().topk(_KEPT, dim=1).indices
        kept = coefficients.gather(1, places).to(torch.bfloat16).view(len(rows), _PER_BLOCK)
        return torch.cat([kept.view(torch.uint8), places.to(torch.uint8).view(len(rows), _PER_BLOCK)], dim=1)

    def difference(self, other: Tensor, own: Tensor) -> Tensor:
        """See `Motion`: the transform is linear, so one for both will do."""
        return ((_coefficients(other) - _coefficients(own)) @ self._dct).view(-1, BLOCK)

    def squares(self, other: Tensor, own: Tensor) -> Tensor:
        """See `Motion`: the transform keeps the sum of the squares."""
        moved = _coefficients(other) - _coefficients(own)
        return moved.view(-1, BLOCK).double().square_().sum(1)


def _coefficients(wire: Tensor) -> Tensor:
    """The DCT coefficients that blocks [n, bytes] say, fp32 [16·n, 64]."""
    kept, places = wire[:, : 2 * _PER_BLOCK].contiguous(), wire[:, 2 * _PER_BLOCK :]
    values = kept.view(torch.bfloat16).view(-1, _KEPT).to(torch.float32)
    found = places.reshape(-1, _KEPT).to(torch.int64) % _WAVE
    return torch.zeros(len(values), _WAVE).scatter_(1, found, values)


class Signs:
    """The sign of each value after a rotation of its block, and the mean of their absolute values as a bf16.

    Rotated values look Gaussian, and ± their mean absolute value then holds 2/π of a block's energy, whatever the block
    was like.
    """

    bytes_per_block = BLOCK // 8 + 2

    def __init__(self, exchange: str) -> None:
        self._signs = signs(seed_of(f"signs/{exchange}"))
        bits = (torch.arange(256)[:, None] >> torch.arange(8)) & 1
        self._of_byte = bits.to(torch.float32).mul_(2.0).sub_(1.0)
        """The eight signs that a byte says, fp32 [256, 8]."""
        self._raised = bits.sum(1)
        """How many bits of a byte are set, int64 [256]."""

    def encode(self, rows: Tensor) -> Tensor:
        turned = rotated(rows, self._signs)
        scales = turned.abs().mean(1, keepdim=True).to(torch.bfloat16)
        eight = (turned >= 0).view(torch.int64)  # a byte for each of eight values, the first one lowest
        packed = eight.mul_(_GATHER).bitwise_right_shift_(56).to(torch.uint8)
        return torch.cat([packed, scales.view(torch.uint8)], dim=1)

    def difference(self, other: Tensor, own: Tensor) -> Tensor:
        """See `Motion`: the rotation is linear, so one for both will do."""
        return rotated_back_(self._turned(other).sub_(self._turned(own)), self._signs)

    def squares(self, other: Tensor, own: Tensor) -> Tensor:
        """See `Motion`: where two signs differ the scales add up, elsewhere their difference counts."""
        raised = self._raised.to(other.device)
        unlike = raised[(other[:, : BLOCK // 8] ^ own[:, : BLOCK // 8]).int()].sum(1).to(HOST).double()
        scales, own_scales = (_scales(each).to(HOST).double().squeeze(1) for each in (other, own))
        return unlike * (scales + own_scales).square() + (BLOCK - unlike) * (scales - own_scales).square()

    def _turned(self, wire: Tensor) -> Tensor:
        """What blocks [n, bytes] say of their rotated values, fp32 [n, 1024]."""
        said = self._of_byte.to(wire.device)[wire[:, : BLOCK // 8].int()].view(len(wire), BLOCK)
        return said.mul_(_scales(wire).to(torch.float32))


_GATHER = sum(1 << 7 * (8 - place) for place in range(8))
"""Times this, the lowest bits of the eight bytes of a number stand side by side in its highest byte."""


def _scales(wire: Tensor) -> Tensor:
    """The scale of each block of signs, bf16 [n, 1]."""
    return wire[:, BLOCK // 8 :].contiguous().view(torch.bfloat16)


def dct_matrix() -> Tensor:
    """The orthonormal DCT-II of 64 values, fp32: coefficients = matrix @ values."""
    k, i = torch.arange(_WAVE, dtype=torch.float64)[:, None], torch.arange(_WAVE, dtype=torch.float64)
    matrix = torch.cos(math.pi / _WAVE * (i + 0.5) * k) * math.sqrt(2 / _WAVE)
    matrix[0] /= math.sqrt(2)
    return matrix.float()


GROUP = 16
"""One block of each group of so many blocks crosses whole."""


def decoupled_bytes(blocks: int, bits: int, motion_bytes: int) -> int:
    """Bytes on the wire for so many blocks, sketch not included: `bits` a value of the whole ones, and `motion_bytes`
    for each of the others."""
    whole = math.ceil(blocks / GROUP)
    return whole * BLOCK * bits // 8 + (blocks - whole) * motion_bytes


def decoupled_sketch(exchange: str, values: Tensor) -> Tensor:
    """The sketch of the blocks that cross whole, fp32 [8 · groups]."""
    rows = rows_of(values)
    whole, _ = _kinds(exchange, len(rows), rows.device)
    return sketch_of(exchange, rows[whole].flatten())


class DecoupledCodes:
    """A `Coding`. The blocks that cross whole are a vector of their own for their modulo codes, one block a group."""

    def __init__(
        self,
        bits: int,
        range_in_deviations: float,
        motion: Motion,
        exchange: str,
        sketches: Sequence[Tensor],
        size: int,
    ) -> None:
        self._exchange = exchange
        self._motion = motion
        self._bits = bits
        self._size = size
        groups = math.ceil(size / BLOCK / GROUP)
        self._codes = ModuloCodes(bits, range_in_deviations, exchange, sketches, groups * BLOCK)

    def encode(self, values: Tensor, start: int, pull: Tensor | None = None) -> Tensor:
        assert pull is not None, "the motion is what remains of s without the pull"
        rows, pulls = rows_of(values), rows_of(pull)
        whole, moving = _kinds(self._exchange, len(rows), rows.device)
        size = decoupled_bytes(len(rows), self._bits, self._motion.bytes_per_block)
        wire = torch.empty(size, dtype=torch.uint8, device=rows.device)
        codes, motion = self._parts(wire, len(whole))
        codes.copy_(self._codes.encode(rows[whole].flatten(), start // GROUP))
        for piece in pieces_of(len(moving), rows.device):
            places = moving[piece]
            motion[piece] = self._motion.encode(rows[places].sub_(pulls[places]).to(torch.float32))
        return wire

    def difference(self, other: Tensor, own: Tensor, start: int) -> Tensor:
        count = min(self._size - start, self._blocks(len(own)) * BLOCK)
        whole, moving = _kinds(self._exchange, math.ceil(count / BLOCK), other.device)
        (codes, motion), (own_codes, own_motion) = (self._parts(wire, len(whole)) for wire in (other, own))
        rows = torch.empty(len(whole) + len(moving), BLOCK, device=other.device)
        rows[whole] = self._codes.difference(codes, own_codes, start // GROUP).view(-1, BLOCK)
        for piece in pieces_of(len(moving), other.device):
            rows[moving[piece]] = self._motion.difference(motion[piece], own_motion[piece])
        return rows.flatten()[:count]

    def measured(self, other: Tensor, own: Tensor, start: int, blocks: Tensor) -> tuple[float, Tensor]:
        whole = _whole(self._exchange, self._blocks(len(own)))
        (codes, motion), (own_codes, own_motion) = (self._parts(wire, int(whole.sum())) for wire in (other, own))
        place = torch.where(whole, whole.cumsum(0), (~whole).cumsum(0))[blocks] - 1
        crossed, moved = whole[blocks].nonzero().squeeze(1), (~whole[blocks]).nonzero().squeeze(1)
        square, seen = self._codes.measured(codes, own_codes, start // GROUP, place[crossed])
        rows, looked_at = torch.empty(len(blocks), BLOCK, device=other.device), place[moved].to(other.device)
        rows[crossed.to(other.device)] = seen.view(-1, BLOCK)
        rows[moved.to(other.device)] = self._motion.difference(motion[looked_at], own_motion[looked_at])
        return square + float(self._motion.squares(motion, own_motion).sum()), rows.flatten()

    def _parts(self, wire: Tensor, whole: int) -> tuple[Tensor, Tensor]:
        """A chunk's codes of the blocks that cross whole, of which there are so many, and the motion of the others
        [n, bytes]."""
        codes = whole * BLOCK * self._bits // 8
        return wire[:codes], wire[codes:].view(-1, self._motion.bytes_per_block)

    def _blocks(self, wire: int) -> int:
        """The inverse of `decoupled_bytes`."""
        moving = self._motion.bytes_per_block
        groups, rest = divmod(wire, decoupled_bytes(GROUP, self._bits, moving))
        return groups * GROUP + (1 + (rest - BLOCK * self._bits // 8) // moving if rest else 0)


def add_where_whole_(exchange: str, values: Tensor, others: Tensor, alpha: float) -> None:
    """Add `others`, `alpha` times, to a chunk's values of the blocks that cross whole."""
    full = len(values) // BLOCK * BLOCK
    whole = _whole(exchange, math.ceil(len(values) / BLOCK))
    blocks = whole[: full // BLOCK].nonzero().squeeze(1).to(values.device)
    rows, added = values[:full].view(-1, BLOCK), others[:full].view(-1, BLOCK)
    rows[blocks] = rows[blocks].add_(added[blocks], alpha=alpha)
    if full < len(values) and bool(whole[-1]):
        values[full:].add_(others[full:], alpha=alpha)


def _kinds(exchange: str, blocks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The numbers of a chunk's blocks that cross whole, and of the others."""
    whole = _whole(exchange, blocks)
    return whole.nonzero().squeeze(1).to(device), (~whole).nonzero().squeeze(1).to(device)


def _whole(exchange: str, blocks: int) -> Tensor:
    """Which of a chunk's blocks cross whole: one of each group, a smaller one at the end included."""
    firsts = torch.arange(0, blocks, GROUP)
    whole = torch.zeros(blocks, dtype=torch.bool)
    whole[firsts + seed_of(f"window/{exchange}") % (blocks - firsts).clamp(max=GROUP)] = True
    return whole
