"""Clipped gossip (arXiv 2202.01545): how far one partner may move a replica in one outer step."""

from __future__ import annotations

from collections import OrderedDict, deque
from statistics import median_low
from typing import TypeVar

T = TypeVar("T")

_PEERS_REMEMBERED = 64
_NEAR_REMEMBERED = 4096
_MOTIONS_REMEMBERED = 8
_TRUST = 4.0
_GROSS = 10.0
"""Honest differences after a partition are some times the bound; so many times it, they are none."""


class DifferenceBound:
    """An adaptive bound on the norm of the difference to a partner. One for each fragment: it sees that part's norms.

    The bound is `multiple` × the low median over distinct voices: each remembered peer's latest difference, as much of
    it as was within the bound, and this replica's own motion, itself the low median over the last outer steps for which
    it had learnt anything; zeros say nothing. One peer is one voice however often it comes. All peers together, were
    they one person's, move the bound only within a factor of 4 about the own motion: what they have been granted never
    entitles them to more. A replica that has never learnt anything has no measure of its own, and nobody moves it.

    Who was within the bound before and is beyond it now was parted from this replica by something, and is brought to
    the bound. Who never was is a stranger: its difference moves a replica the less the larger it is (decision 129).
    """

    def __init__(self, multiple: float) -> None:
        self._multiple = multiple
        self._latest: OrderedDict[str, float] = OrderedDict()
        self._near: OrderedDict[str, None] = OrderedDict()
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

    def scale(self, peer: str, difference: float, own_motion: float) -> float:
        """Factor in [0, 1] for a difference to `peer` of that norm: 1 within the bound, at most bound / difference
        beyond it. Once for each step with a partner: the own motion is remembered."""
        bound = self.bound(own_motion)
        if own_motion > 0.0:  # steps without learning must not push out the memory of those with it
            self._motions.append(own_motion)
        if difference <= bound:
            return 1.0
        whole_up_to = _GROSS if peer in self._near else 1.0
        return bound / difference * min(1.0, whole_up_to * bound / difference)

    def accept(self, peer: str, difference: float, bound: float) -> None:
        """Remember the norm of a committed exchange with `peer`; beyond the bound that held, it counts as that."""
        if difference <= bound:
            _remember(self._near, peer, None, _NEAR_REMEMBERED)
        _remember(self._latest, peer, min(difference, bound), _PEERS_REMEMBERED)


def _remember(table: OrderedDict[str, T], peer: str, value: T, most: int) -> None:
    table[peer] = value
    table.move_to_end(peer)
    if len(table) > most:
        table.popitem(last=False)
