"""Whether what a peer sent are numbers: large tensors are looked at off the event loop."""

from __future__ import annotations

from torch import Tensor

from noloco_node import ambient, finite

INLINE_ELEMENTS = 1 << 18
"""Tensors of up to so many elements are checked on the event loop: handing them to a thread would take longer (0.1 ms).
"""


async def all_finite(tensor: Tensor) -> bool:
    """True where no element is NaN or infinite. A large tensor is looked at off the event loop."""
    if tensor.numel() <= INLINE_ELEMENTS:
        return finite.all_finite(tensor)
    return await ambient.elsewhere(finite.all_finite, tensor)


async def scale_of(tensor: Tensor) -> float:
    """See `finite.root_mean_square`. A large tensor is looked at off the event loop."""
    if tensor.numel() <= INLINE_ELEMENTS:
        return finite.root_mean_square(tensor)
    return await ambient.elsewhere(finite.root_mean_square, tensor)
