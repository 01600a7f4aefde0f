"""Whether what a peer sent are numbers: large tensors are looked at off the event loop."""

from __future__ import annotations

import torch
from torch import Tensor

from noloco_node import ambient

INLINE_ELEMENTS = 1 << 18
"""Tensors up to this size are checked on the event loop: handing them to a thread would take longer (0.1 ms)."""


async def all_finite(tensor: Tensor) -> bool:
    """True where no element is NaN or infinite. A large tensor is looked at off the event loop."""
    if tensor.numel() <= INLINE_ELEMENTS:
        return _finite(tensor)
    return await ambient.elsewhere(_finite, tensor)


async def scale_of(tensor: Tensor) -> float:
    """Root mean square of a tensor, 0 of an empty one; NaN or infinite where an element is, or where fp32 does not hold
    its square.

    A large one is looked at off the event loop.
    """
    if tensor.numel() <= INLINE_ELEMENTS:
        return _scale(tensor)
    return await ambient.elsewhere(_scale, tensor)


def _scale(tensor: Tensor) -> float:
    norm = float(torch.linalg.vector_norm(tensor, dtype=torch.float32))  # pyright: ignore
    return norm / max(1, tensor.numel()) ** 0.5


def _finite(tensor: Tensor) -> bool:
    """One pass: a sum is finite only if every element is."""
    return bool(torch.isfinite(tensor.sum(dtype=torch.float64)))
