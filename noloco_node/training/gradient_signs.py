"""A few signs of a stage's gradients: enough to compare what different peers' answers did to it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import torch
from torch import Tensor

from noloco_node import ambient
from noloco_node.training.layout import FlatLayout

PLACES = 256
"""Weights whose gradients are looked at. Their size does not count: one in a thousand may exceed all others."""


class GradientSigns:
    """Looks at the same places of every gradient.

    Chance draws them for each node, and nobody can foretell them: a peer that knew them could do its harm elsewhere.
    """

    def __init__(self, layout: FlatLayout, device: torch.device) -> None:
        """The indices lie on the `device`, or each look would wait for them."""
        chance = ambient.chance()
        drawn = sorted(chance.randrange(layout.size) for _ in range(PLACES))
        self._places: list[tuple[int, tuple[Tensor, ...]]] = []
        """Parameters by their number in the layout, and indices into each."""
        for number, entry in enumerate(layout.entries):
            own = drawn[bisect_left(drawn, entry.offset) : bisect_left(drawn, entry.end)]
            if own:
                places = torch.unravel_index(torch.tensor(own) - entry.offset, entry.shape)
                self._places.append((number, tuple(at.to(device) for at in places)))

    def of(self, gradients: Sequence[Tensor]) -> Tensor:
        """The signs, int8 [PLACES] on the device, of one gradient for each parameter in the layout's order."""
        return torch.cat([gradients[number][place] for number, place in self._places]).sign().to(torch.int8)
