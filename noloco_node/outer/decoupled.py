"""The `dct` codec: of an outer step's own motion only the largest DCT coefficients cross, after "Distributed
Low-Communication Training with Decoupled Momentum Optimization" (arXiv 2510.03371) and DeMo (arXiv 2411.19870).

There, what does not cross waits as error feedback or is applied locally. Here a contribution is s = γφ + u with
u = αδ + βnwΔ, a receiver has all of its own s, and Q(s_j) − Q(s_i) replaces of it only what crosses: the rest of u is
applied locally, nothing waits, and the mean over replicas is kept as with every codec. γφ does not shrink as training
goes on and has no few large coefficients, so it cannot travel that way, and without it replicas would drift apart. So
of each 16 blocks one, drawn from the exchange's name, crosses whole as int8 modulo codes; the others send 4 of the
64 coefficients of each 64 values of u, a bf16 and an index each. That is 0.24 bytes for a weight, 1/16 of fp32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from noloco_node.outer.modulo_codes import ModuloCodes, rows_of, seed_of, sketch_of
from noloco_node.outer.rotation import BLOCK

GROUP = 16
"""Blocks of which one crosses whole."""

_WAVE = 64
_KEPT = 4
_PER_BLOCK = BLOCK // _WAVE * _KEPT
_BYTES_PER_COEFFICIENT = 3


def decoupled_bytes(blocks: int) -> int:
    """Bytes on the wire for so many blocks, sketch not included."""
    whole = math.ceil(blocks / GROUP)
    return whole * BLOCK + (blocks - whole) * _PER_BLOCK * _BYTES_PER_COEFFICIENT


def decoupled_sketch(exchange: str, values: Tensor) -> Tensor:
    """The sketch of those blocks that cross whole, fp32 [8 · groups]."""
    rows = rows_of(values)
    return sketch_of(exchange, rows[_whole(exchange, len(rows))].flatten())


def dct_matrix() -> Tensor:
    """The orthonormal DCT-II of 64 values, fp32: coefficients = matrix @ values."""
    k, i = torch.arange(_WAVE, dtype=torch.float64)[:, None], torch.arange(_WAVE, dtype=torch.float64)
    matrix = torch.cos(math.pi / _WAVE * (i + 0.5) * k) * math.sqrt(2 / _WAVE)
    matrix[0] /= math.sqrt(2)
    return matrix.float()


class DecoupledCodes:
    """A `Coding`. The blocks that cross whole are a vector of their own for their modulo codes, one block a group."""

    def __init__(
        self, range_in_deviations: float, exchange: str, sketches: Sequence[Tensor], start: int, end: int
    ) -> None:
        self._exchange = exchange
        self._start, self._end = start, end
        groups = math.ceil((end - start) / BLOCK / GROUP)
        self._codes = ModuloCodes(8, range_in_deviations, exchange, sketches, 0, groups * BLOCK)
        self._dct = dct_matrix()

    def encode(self, values: Tensor, start: int, pull: Tensor | None = None) -> Tensor:
        """See `Coding`."""
        assert pull is not None, "the motion is what remains of s without the pull"
        rows = rows_of(values)
        whole = _whole(self._exchange, len(rows))
        codes = self._codes.encode(rows[whole].flatten(), self._place(start))
        waves = rows_of(values - pull)[~whole].view(-1, _WAVE).to(torch.float32)
        coefficients = waves @ self._dct.T
        places = coefficients.abs().topk(_KEPT, dim=1).indices
        kept = coefficients.gather(1, places).to(torch.bfloat16)
        return torch.cat([codes, kept.flatten().view(torch.uint8), places.flatten().to(torch.uint8)])

    def difference(self, other: Tensor, own: Tensor, start: int) -> Tensor:
        """See `Coding`."""
        count = min(self._end - start, _blocks(len(own)) * BLOCK)
        whole = _whole(self._exchange, math.ceil(count / BLOCK))
        codes = int(whole.sum()) * BLOCK
        rows = torch.empty(len(whole), BLOCK)
        rows[whole] = self._codes.difference(other[:codes], own[:codes], self._place(start)).view(-1, BLOCK)
        moved = _coefficients(other[codes:]) - _coefficients(own[codes:])
        rows[~whole] = (moved @ self._dct).view(-1, BLOCK)
        return rows.flatten()[:count]

    def _place(self, start: int) -> int:
        return (start - self._start) // GROUP


def _blocks(wire: int) -> int:
    """The inverse of `decoupled_bytes`."""
    groups, rest = divmod(wire, decoupled_bytes(GROUP))
    return groups * GROUP + (1 + (rest - BLOCK) // (decoupled_bytes(2) - BLOCK) if rest else 0)


def _coefficients(wire: Tensor) -> Tensor:
    """All coefficients [waves, 64] of a chunk, zeros where none came."""
    waves = len(wire) // (_KEPT * _BYTES_PER_COEFFICIENT)
    kept, places = wire[: waves * _KEPT * 2], wire[waves * _KEPT * 2 :]
    values = kept.clone().view(torch.bfloat16).view(-1, _KEPT).to(torch.float32)
    found = places.view(-1, _KEPT).to(torch.int64) % _WAVE
    return torch.zeros(waves, _WAVE).scatter_(1, found, values)


def _whole(exchange: str, blocks: int) -> Tensor:
    """Which of a chunk's blocks cross whole: one of each group, a smaller one at the end included."""
    firsts = torch.arange(0, blocks, GROUP)
    whole = torch.zeros(blocks, dtype=torch.bool)
    whole[firsts + seed_of(f"window/{exchange}") % (blocks - firsts).clamp(max=GROUP)] = True
    return whole
