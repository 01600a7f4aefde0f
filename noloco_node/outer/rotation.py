"""A random rotation of blocks of 1024 values, so that whatever they are, the rotated ones look Gaussian.

Random signs followed by a Hadamard transform (both orthonormal): a block's energy is spread evenly over its
coordinates. A few of them then tell the scale of all, and the largest is known from the root mean square. Additions in
a fixed order only, so that equal values give equal results on every machine.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 1024

_SIDE = 32
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
    return _hadamard_(rows * signs)


def rotated_back_(rows: Tensor, signs: Tensor) -> Tensor:
    """The inverse of `rotated`: D·H·x. The rows' memory is used up."""
    return _hadamard_(rows).mul_(signs)


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
