"""What audits have said of a next-stage peer, and what follows for the microbatches that it gets: pure decisions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

from noloco_node.swarm.conduct import ban_seconds

SET_ASIDE_AT = 3.0
"""Doubt with which a peer gets no microbatch."""
FORGIVEN = 1 / 8
"""Doubt that an audit takes off which is not decided against a peer. So who lies in more than every ninth answer is set
aside in the end, however it spreads its lies; honest replicas contradict each other more seldom (decision 128)."""
TRIAL_SECONDS = 60.0
"""How long after a contradiction a peer gets no ordinary microbatch, if no audits clear it before. Bounded, since where
too few others are left nobody can clear it."""


class Trust(IntEnum):
    """Which microbatches a peer gets."""

    ORDINARY = 0
    ON_TRIAL = 1
    """Copies of others', to compare; ordinary ones only where all others fail."""
    SET_ASIDE = 2
    """None, unless the stage has nobody else."""


@dataclass(frozen=True, slots=True)
class Repute:
    """One peer's repute with one sender. Times are seconds on a clock that never goes back."""

    audits: int = 0
    doubt: float = 0.0
    """One more with each audit that was decided against it, `FORGIVEN` less (0 at least) with each other."""
    set_asides: int = 0
    aside_until: float = 0.0
    trial_until: float = 0.0

    def trust(self, now: float) -> Trust:
        """What the peer may be given now."""
        if now < self.aside_until:
            return Trust.SET_ASIDE
        return Trust.ON_TRIAL if self.doubt > 0.0 and now < self.trial_until else Trust.ORDINARY


def after_audit(repute: Repute, against: bool | None, now: float) -> Repute:
    """The repute after one more audit, decided against the peer, for it, or not at all (None).

    Who was set aside comes back on trial, with a doubt that makes the next contradiction set it aside again, and for
    twice as long. While it is set aside nothing counts: what it still had in hand is neither a new lie nor a merit.
    """
    repute = replace(repute, audits=repute.audits + 1)
    if now < repute.aside_until:
        return repute
    if not against:
        return replace(repute, doubt=max(0.0, repute.doubt - FORGIVEN))
    doubt = repute.doubt + 1.0
    if doubt < SET_ASIDE_AT:
        return replace(repute, doubt=doubt, trial_until=now + TRIAL_SECONDS)
    seconds, set_asides = ban_seconds(repute.set_asides, repute.aside_until, now)
    until = now + seconds
    return Repute(repute.audits, SET_ASIDE_AT - 1.0, set_asides, until, until + TRIAL_SECONDS)
