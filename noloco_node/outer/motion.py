"""How a replica's own motion travels where a codec is decoupled: the part of it that crosses, a block at a time.

`Waves` sends the largest DCT coefficients, after arXiv 2510.03371 and DeMo (arXiv 2411.19870). `Signs` sends one bit a
value and one scale a block, as 1-bit Adam (arXiv 2102.02888) does with the gradient.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from noloco_node.outer.modulo_codes import BLOCK, rotated, rotated_back_, seed_of, signs

_WAVE = 64
_KEPT = 4
_PER_BLOCK = BLOCK // _WAVE * _KEPT


class Motion(Protocol):
    """Encodes blocks of a motion, and gives back what of them has crossed."""

    bytes_per_block: int

    def encode(self, rows: Tensor) -> Tensor:
        """Blocks fp32 [n, 1024] as they travel, uint8 [n, bytes_per_block]."""
        ...

    def decode(self, wire: Tensor) -> Tensor:
        """What has crossed of the blocks uint8 [n, bytes_per_block], fp32 [n, 1024]. NaN and infinity show in it."""
        ...


class Waves:
    """The 4 largest of each 64 DCT coefficients: a bf16 and an index each."""

    bytes_per_block = 3 * _PER_BLOCK

    def __init__(self) -> None:
        self._dct = dct_matrix()

    def encode(self, rows: Tensor) -> Tensor:
        """See `Motion`."""
        coefficients = rows.reshape(-1, _WAVE) @ self._dct.T
        places = coefficients.abs().topk(_KEPT, dim=1).indices
        kept = coefficients.gather(1, places).to(torch.bfloat16).view(len(rows), _PER_BLOCK)
        return torch.cat([kept.view(torch.uint8), places.to(torch.uint8).view(len(rows), _PER_BLOCK)], dim=1)

    def decode(self, wire: Tensor) -> Tensor:
        """See `Motion`."""
        kept, places = wire[:, : 2 * _PER_BLOCK].contiguous(), wire[:, 2 * _PER_BLOCK :]
        values = kept.view(torch.bfloat16).view(-1, _KEPT).to(torch.float32)
        found = places.reshape(-1, _KEPT).to(torch.int64) % _WAVE
        return (torch.zeros(len(values), _WAVE).scatter_(1, found, values) @ self._dct).view(-1, BLOCK)


class Signs:
    """The sign of each value after a rotation of its block, and the mean of their absolute values as a bf16.

    Rotated values look Gaussian, and ± their mean absolute value then holds 2/π of a block's energy, whatever the block
    was like.
    """

    bytes_per_block = BLOCK // 8 + 2

    def __init__(self, exchange: str) -> None:
        self._signs = signs(seed_of(f"signs/{exchange}"))
        self._bits = torch.arange(8, dtype=torch.uint8)

    def encode(self, rows: Tensor) -> Tensor:
        """See `Motion`."""
        turned = rotated(rows, self._signs)
        scales = turned.abs().mean(1, keepdim=True).to(torch.bfloat16)
        upper = (turned >= 0).view(len(rows), BLOCK // 8, 8).to(torch.uint8)
        packed = (upper << self._bits).sum(2, dtype=torch.uint8)
        return torch.cat([packed, scales.view(torch.uint8)], dim=1)

    def decode(self, wire: Tensor) -> Tensor:
        """See `Motion`."""
        packed, scales = wire[:, : BLOCK // 8, None], wire[:, BLOCK // 8 :].contiguous().view(torch.bfloat16)
        upper = (packed >> self._bits).bitwise_and_(1).view(len(wire), BLOCK).to(torch.float32)
        return rotated_back_(upper.mul_(2.0).sub_(1.0).mul_(scales.to(torch.float32)), self._signs)


def dct_matrix() -> Tensor:
    """The orthonormal DCT-II of 64 values, fp32: coefficients = matrix @ values."""
    k, i = torch.arange(_WAVE, dtype=torch.float64)[:, None], torch.arange(_WAVE, dtype=torch.float64)
    matrix = torch.cos(math.pi / _WAVE * (i + 0.5) * k) * math.sqrt(2 / _WAVE)
    matrix[0] /= math.sqrt(2)
    return matrix.float()
