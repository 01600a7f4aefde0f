"""Precisions by name (`inner.precision`): how weights, optimizer and gradients are kept, and what computes."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from noloco_node.config.run_spec import PrecisionName


@dataclass(frozen=True, slots=True)
class Precision:
    """One of `PRECISIONS`. Slow weights and all else of the outer step stay fp32 whatever it is."""

    masters: torch.dtype
    """Type of the weights that the optimizer changes, of its moments, and of the gradient that accumulates."""
    published: torch.dtype
    """Type of the copies that forward and backward use, and of the activations that come in."""
    autocast: bool = False
    """Whether products are computed in bf16 although all tensors are fp32."""

    @property
    def computed(self) -> torch.dtype:
        """The type of what goes into products."""
        return torch.bfloat16 if self.autocast else self.published

    def computing(self, device: torch.device) -> AbstractContextManager[object]:
        """The context of a forward on `device`; backward needs none."""
        return torch.autocast(device.type, torch.bfloat16, enabled=self.autocast)


PRECISIONS: dict[PrecisionName, Precision] = {
    "fp32": Precision(torch.float32, torch.float32),
    "bf16": Precision(torch.float32, torch.bfloat16),
    "bf16-mixed": Precision(torch.float32, torch.float32, autocast=True),
    "bf16-pure": Precision(torch.bfloat16, torch.bfloat16),
}
