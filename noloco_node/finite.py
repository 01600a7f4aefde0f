"""Whether tensors are numbers, and how large they are, in one pass over them and without a copy in another precision:
one of 8 million numbers costs ten times as much as the looking itself."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_IN_CACHE = 1 << 18
"""Elements whose copy in fp32 stays there."""


def all_finite(values: Tensor) -> bool:
    """Whether none is NaN or infinite. Their sum says so, unless it is too large itself; of 16 bits the least and the
    most of them, since a sum makes fp32 of each."""
    if not values.numel() or (values.element_size() >= 4 and math.isfinite(values.sum().item())):
        return True
    least, most = torch.aminmax(values)
    return math.isfinite(least.item()) and math.isfinite(most.item())


def root_mean_square(values: Tensor) -> float:
    """Of all elements, 0 where there is none; NaN or infinite where one is, or where fp32 does not hold the sum of some
    squares."""
    flat = values.reshape(-1)
    parts = (flat[start : start + _IN_CACHE] for start in range(0, flat.numel(), _IN_CACHE))
    norms = [float(torch.linalg.vector_norm(part, dtype=torch.float32)) for part in parts]  # pyright: ignore
    return math.hypot(*norms) / math.sqrt(max(1, values.numel()))
