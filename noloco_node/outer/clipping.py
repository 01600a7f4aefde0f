"""Clipped gossip (arXiv 2202.01545): how far one partner may move a replica in one outer step."""

from __future__ import annotations

import math
from collections import OrderedDict
from statistics import median_low

_PEERS_REMEMBERED = 64


class DifferenceBound:
    """An adaptive bound on the norm of the difference to a partner.

    The bound is `multiple` × the low median over distinct voices: each remembered peer's latest accepted (clipped)
    difference, and this replica's own motion since its last outer step; zeros say nothing and are left out.
    One peer is one voice however often it comes, so a single peer cannot ratchet the bound up against a replica that
    moves.
    """

    def __init__(self, multiple: float) -> None:
        self._multiple = multiple
        self._latest: OrderedDict[str, float] = OrderedDict()

    def bound(self, own_motion: float) -> float:
        """Largest norm accepted whole now; infinite while no voice is above zero.

        `own_motion` is the norm of this replica's own part of the step.
        """
        voices = [norm for norm in (own_motion, *self._latest.values()) if norm > 0.0]
        return self._multiple * median_low(voices) if voices else math.inf

    def scale(self, difference: float, own_motion: float) -> float:
        """Factor in (0, 1] that brings a difference of that norm within the bound."""
        bound = self.bound(own_motion)
        return 1.0 if difference <= bound else bound / difference

    def accept(self, peer: str, clipped_difference: float) -> None:
        """Remember the clipped norm of a committed exchange with `peer`."""
        self._latest[peer] = clipped_difference
        self._latest.move_to_end(peer)
        while len(self._latest) > _PEERS_REMEMBERED:
            self._latest.popitem(last=False)
