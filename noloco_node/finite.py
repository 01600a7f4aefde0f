"""Tells whether tensors are numbers, how large they are and how alike two are, in one pass.

A copy of 8 million numbers in another precision costs ten times as much as the check itself.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from noloco_node import ambient

INLINE_ELEMENTS = 1 << 18
"""Tensors of up to so many elements are checked on the event loop: handing them to a thread would take longer (0.1 ms).
"""
ALIKE = 0.5
"""Two vectors are alike if at least this share of each, or of the way of each, lies in the other."""


def all_finite(values: Tensor) -> bool:
    """Tell whether none is NaN or infinite. Their sum says so, unless it is too large itself. For 16 bits the least and
    the most of them say it, since a sum makes fp32 of each."""
    if not values.numel() or (values.element_size() >= 4 and math.isfinite(values.sum().item())):
        return True
    least, most = torch.aminmax(values)
    return math.isfinite(least.item()) and math.isfinite(most.item())


def root_mean_square(values: Tensor) -> float:
    """The root mean square of all elements, 0 if there is none. It is NaN or infinite if one is, or if fp32 does not
    hold the sum of some squares."""
    flat = values.reshape(-1)
    parts = (flat[start : start + INLINE_ELEMENTS] for start in range(0, flat.numel(), INLINE_ELEMENTS))
    norms = [float(torch.linalg.vector_norm(part, dtype=torch.float32)) for part in parts]  # pyright: ignore
    return math.hypot(*norms) / math.sqrt(max(1, values.numel()))


def products(one: Tensor, other: Tensor, origin: Tensor | None = None) -> tuple[float, float, float]:
    """The product of two tensors of one shape, and the square of each; of their ways from `origin` where it is
    given."""
    product, squares = 0.0, [0.0, 0.0]
    one, other = one.flatten(), other.flatten()
    for start in range(0, one.numel(), INLINE_ELEMENTS):
        piece = slice(start, start + INLINE_ELEMENTS)
        a, b = one[piece].double(), other[piece].double()
        if origin is not None:
            zero = origin[piece].double()
            a, b = a - zero, b - zero
        product += float(torch.dot(a, b))
        squares = [total + float(torch.dot(each, each)) for total, each in zip(squares, (a, b), strict=True)]
    return product, squares[0], squares[1]


async def found_finite(values: Tensor) -> bool:
    """See `all_finite`. A large tensor is looked at off the event loop."""
    if values.numel() <= INLINE_ELEMENTS:
        return all_finite(values)
    return await ambient.elsewhere(all_finite, values)


async def scale_of(values: Tensor) -> float:
    """See `root_mean_square`. A large tensor is looked at off the event loop."""
    if values.numel() <= INLINE_ELEMENTS:
        return root_mean_square(values)
    return await ambient.elsewhere(root_mean_square, values)
