"""Of a stage's gradients a few signs: enough to compare what different peers' answers did to it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from noloco_node import ambient
from noloco_node.training.layout import FlatLayout

PLACES = 256
"""Weights that are looked at. Of signs, since one gradient in a thousand may be larger than all the others together."""


class GradientSigns:
    """Looks at the same places of every gradient.

    Chance draws them for each node, and nobody can foretell them: a peer that knew them could do its harm elsewhere.
    """

    def __init__(self, layout: FlatLayout, device: torch.device) -> None:
        """The indices lie on the `device`, or each look would wait for them."""
        chance = ambient.chance()
        drawn = torch.tensor(sorted(chance.randrange(layout.size) for _ in range(PLACES)))
        self._places: list[tuple[int, tuple[Tensor, ...]]] = []
        """Parameters by their number in the layout, and indices into each."""
        for number, entry in enumerate(layout.entries):
            own = drawn[(drawn >= entry.offset) & (drawn < entry.end)] - entry.offset
            if own.numel():
                self._places.append((number, tuple(at.to(device) for at in torch.unravel_index(own, entry.shape))))

    def of(self, gradients: Sequence[Tensor]) -> Tensor:
        """Of one gradient for each parameter, in the layout's order: int8 [PLACES], on the device."""
        return torch.cat([gradients[number][place] for number, place in self._places]).sign().to(torch.int8)
