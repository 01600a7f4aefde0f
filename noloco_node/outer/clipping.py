"""Clipped gossip (arXiv 2202.01545): how far one partner may move a replica in one outer step."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median, median_low

from noloco_node.outer.replica import OuterReplica
from noloco_node.tallies import FEW_PEERS, RECENT, SLACK, PeerTable

CLIP_MULTIPLE = 3.0
"""The multiple of the median of recent differences at which the difference to a partner is clipped."""
_TRUST = 4.0
_GROSS = 10.0
"""A peer whose difference is beyond so many times the bound is a stranger; honest differences after a partition are
smaller."""
_TALLEST = 4.0
"""A single value of a difference may be so many times the usual root mean square."""
_TAKEN = 0.5
"""A partner may take back this share of what a replica has learnt since its last outer step. Averaging with a partner
that has learnt nothing takes as much."""
_CHANCE = 0.25
"""The share of a replica's own motion that a partner may take back by chance. If little is learnt between two
exchanges, an honest partner lacks the replica's own noise. That looks as if the partner took something back."""


class DifferenceBound:
    """An adaptive bound on the norm of the difference to a partner.

    The bound is `CLIP_MULTIPLE` × the low median over distinct voices. One voice is each remembered peer's latest
    difference, as much of it as was within the bound. Another is this replica's own motion, the low median over the
    last outer steps in which it had learnt anything; zeros say nothing. One peer is one voice however often it comes.

    All peers together may belong to one attacker. They move the bound only within a factor of 4 about the own motion:
    what they have been granted never entitles them to more. A replica that has never learnt anything has no measure of
    its own, and nobody moves it.

    A peer that was within the bound before and is beyond it now was parted from this replica by something. Its
    difference is brought to the bound. A peer that never was within it is a stranger: its difference moves a replica
    the less the larger it is (decision 6).
    """

    def __init__(self) -> None:
        self._latest = PeerTable[str, float](FEW_PEERS)
        self._near = PeerTable[str, None]()
        self._motions: deque[float] = deque(maxlen=RECENT)

    def bound(self, own_motion: float) -> float:
        """Largest norm accepted whole now; 0 before anything was learnt.

        `own_motion` is the norm of what this replica itself has learnt since its last outer step
        (`OuterReplica.own_motion`). It must hold nothing that came from partners, or they would raise their own bound.
        """
        return CLIP_MULTIPLE * self.usual(own_motion)

    def usual(self, own_motion: float) -> float:
        """What `bound` is a multiple of."""
        motions = [*self._motions, own_motion] if own_motion > 0.0 else list(self._motions)
        if not motions:
            return 0.0
        own = median_low(motions)
        peers = [norm for norm in self._latest.values() if norm > 0.0]
        return min(max(median_low([own, *peers]), own / _TRUST), own * _TRUST)

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
            self._near[peer] = None
        self._latest[peer] = min(difference, bound)


class Regress:
    """The bound on how much of what a replica learns one partner may take back in an outer step.

    The bound is half of what the replica has learnt since its last step (the low median over its last steps). It is
    measured along the way that the replica has been learning lately. A quarter of its motion is allowed if that is
    more.

    Averaging with a partner that has learnt nothing takes half. After a partition, or if this replica is the one that
    is off, most of the *other* partners took more when last met. Then this one may take half as much again as their
    median. What was not granted is no voice. A replica that has met a single stage peer, and knows of no other, has no
    measure.
    """

    def __init__(self) -> None:
        self._latest = PeerTable[str, float](FEW_PEERS)
        self._learnt: deque[float] = deque(maxlen=RECENT)

    def scale(self, peer: str, taken: float, learnt: float, own_motion: float, *, stage_peers: int) -> float:
        """Factor in (0, 1] for a difference to `peer` that takes `taken` back where `learnt` was learnt
        (`OuterReplica.taken_back`) of a motion of that norm. `stage_peers` live beside this replica. Once for each step
        with a partner: it is remembered."""
        if learnt > 0.0:  # as in `DifferenceBound.scale`
            self._learnt.append(learnt)
        others = [norm for other, norm in self._latest.items() if other != peer]
        most = math.inf
        if self._learnt and (others or stage_peers > 1):
            like_others = SLACK * median(others) if others else 0.0
            most = max(_TAKEN * median_low(self._learnt), like_others, _CHANCE * own_motion)
        self._latest[peer] = min(max(0.0, taken), most)
        return min(1.0, most / taken) if taken > 0.0 else 1.0


@dataclass(frozen=True, slots=True)
class Judgement:
    """How an exchange is taken."""

    norm: float
    """The norm of the difference to the partner, as it came."""
    bound: float
    """Largest norm that would have been taken whole."""
    scale: float
    """In [0, 1]: what the difference is multiplied by."""


class PartnerBound:
    """All bounds on one partner in an outer step, for one part of the weights.

    They limit the norm of the difference, its single values, and what it takes back of what this replica has learnt. A
    bound on the norm alone lets a partner push where it hurts most. Three times what is learnt between two exchanges
    takes back all of it. Put into a few values it ruins a model (decision 6).
    """

    def __init__(self) -> None:
        self.difference = DifferenceBound()
        self._regress = Regress()

    def judge(self, replica: OuterReplica, peer: str, *, stage_peers: int) -> Judgement:
        """Decide how the open step of `replica` takes the difference to `peer`, and bring its single values within
        their bound.

        `stage_peers` live beside this replica. Call it once for each step with a partner.
        """
        norm, motion = replica.difference_norm(), replica.own_motion()
        bound, usual = self.difference.bound(motion), self.difference.usual(motion)
        scale = self.difference.scale(peer, norm, motion)
        if scale > 0.0 and not replica.codec.decoupled:  # these carry whole blocks now and then, and little else
            replica.limit_values(_TALLEST * usual / math.sqrt(replica.size) / scale)
        taken, learnt = replica.taken_back()
        return Judgement(
            norm, bound, scale * self._regress.scale(peer, scale * taken, learnt, motion, stage_peers=stage_peers)
        )

    def accept(self, peer: str, judgement: Judgement) -> None:
        """The exchange that was judged so is committed."""
        self.difference.accept(peer, judgement.norm, judgement.bound)
