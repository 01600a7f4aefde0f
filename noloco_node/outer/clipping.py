"""Clipped gossip (arXiv 2202.01545): how far one partner may move a replica in one outer step."""

from __future__ import annotations

from collections import OrderedDict, deque
from statistics import median_low

_PEERS_REMEMBERED = 64
_MOTIONS_REMEMBERED = 8
_TRUST = 4.0
_GROSS = 10.0
"""Honest differences after a partition are some times the bound; so many times it, they are none."""


class DifferenceBound:
    """An adaptive bound on the norm of the difference to a partner. One for each fragment: it sees that part's norms.

    The bound is `multiple` × the low median over distinct voices: each remembered peer's latest accepted (clipped)
    difference, and this replica's own motion, itself the low median over the last outer steps for which it had learnt
    anything; zeros say nothing. One peer is one voice however often it comes. All peers together, were they one
    person's, move the bound only within a factor of 4 about the own motion: what they have been granted never entitles
    them to more. A replica that has never learnt anything has no measure of its own, and nobody moves it.
    """

    def __init__(self, multiple: float) -> None:
        self._multiple = multiple
        self._latest: OrderedDict[str, float] = OrderedDict()
        self._motions: deque[float] = deque(maxlen=_MOTIONS_REMEMBERED)

    def bound(self, own_motion: float) -> float:
        """Largest norm accepted whole now; 0 before anything was learnt.

        `own_motion` is the norm of what this replica itself has learnt since its last outer step
        (`OuterReplica.own_motion`). It must hold nothing that came from partners, or they would raise their own bound.
        """
        motions = [*self._motions, own_motion] if own_motion > 0.0 else list(self._motions)
        if not motions:
            return 0.0
        own = median_low(motions)
        peers = [norm for norm in self._latest.values() if norm > 0.0]
        return self._multiple * min(max(median_low([own, *peers]), own / _TRUST), own * _TRUST)

    def scale(self, difference: float, own_motion: float) -> float:
        """Factor in [0, 1] that brings a difference of that norm within the bound; one of more than ten times the bound
        is scaled to less, the less the larger it is. Once for each step with a partner: the own motion is remembered.
        """
        bound = self.bound(own_motion)
        if own_motion > 0.0:  # steps without learning must not push out the memory of those with it
            self._motions.append(own_motion)
        if difference <= bound:
            return 1.0
        return bound / difference * min(1.0, _GROSS * bound / difference)

    def accept(self, peer: str, clipped_difference: float) -> None:
        """Remember the clipped norm of a committed exchange with `peer`."""
        self._latest[peer] = clipped_difference
        self._latest.move_to_end(peer)
        while len(self._latest) > _PEERS_REMEMBERED:
            self._latest.popitem(last=False)
