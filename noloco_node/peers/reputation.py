"""What audits have said of a next-stage peer, and what follows for the microbatches that it gets: pure decisions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

from noloco_node.pauses import BANS, NO_REST, Rest

SET_ASIDE_AT = 3.0
"""Doubt with which a peer gets no microbatch."""
FORGIVEN = 1 / 8
"""Doubt that an audit of a peer's ordinary answer takes off if it is not decided against it: who lies in more than
every ninth of them is set aside in the end, however it spreads its lies. Also the share of a trial that a copy takes
off, and the doubt that goes with each `TRIAL_SECONDS` once a trial is over."""
TRIAL_SECONDS = BANS.first
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
class Reputation:
    """One peer's repute with one sender. Times are seconds on a clock that never goes back."""

    audits: int = 0
    doubt: float = 0.0
    """As it stood at `since`; see `doubt_at`."""
    since: float = 0.0
    aside: Rest = NO_REST
    """The last time that it got nothing, and how many there were in a row."""
    trial_until: float = 0.0

    def doubt_at(self, now: float) -> float:
        """What is left of the doubt. Time forgives too, once a trial is over: else a stage in which most have been
        doubted would have nobody left to decide."""
        return max(0.0, self.doubt - FORGIVEN * max(0.0, now - self.since) / TRIAL_SECONDS)

    def unseen(self, seconds: float) -> Reputation:
        """The same after so many seconds in which the sender did not see the peer: they forgive nothing, and no trial
        and no set-aside passes in them."""
        return replace(
            self,
            since=self.since + seconds,
            aside=self.aside._replace(until=self.aside.until + seconds),
            trial_until=self.trial_until + seconds,
        )

    def trust(self, now: float) -> Trust:
        """What the peer may be given now."""
        if self.aside.holds(now):
            return Trust.SET_ASIDE
        return Trust.ON_TRIAL if now < self.trial_until and self.doubt_at(now) > 0.0 else Trust.ORDINARY


UNBLEMISHED = Reputation()


def after_audit(repute: Reputation, against: bool | None, now: float, *, by_copy: bool = False) -> Reputation:
    """The repute after one more audit, decided against the peer, for it, or not at all (None).

    `by_copy` where the peer was asked in order to compare it with others. A copy can be told from an ordinary
    microbatch, if only by being all that one gets: so honesty there shortens a trial and takes no doubt away.
    Who was set aside comes back on trial, with a doubt that makes the next contradiction set it aside again, and for
    twice as long. While it is set aside nothing counts: what it still had in hand is neither a new lie nor a merit.
    """
    repute = replace(repute, audits=repute.audits + 1)
    if repute.aside.holds(now):
        return repute
    if not against and by_copy:
        return replace(repute, trial_until=repute.trial_until - FORGIVEN * TRIAL_SECONDS)
    doubt = repute.doubt_at(now)
    if not against:
        return replace(repute, doubt=max(0.0, doubt - FORGIVEN), since=max(now, repute.since))
    if doubt + 1.0 < SET_ASIDE_AT:
        return replace(repute, doubt=doubt + 1.0, since=now + TRIAL_SECONDS, trial_until=now + TRIAL_SECONDS)
    return set_aside(repute, now)


def set_aside(repute: Reputation, now: float) -> Reputation:
    """The repute of a peer that gets nothing for a while, and then comes back on trial."""
    aside = repute.aside.ban(now)
    trial = aside.until + TRIAL_SECONDS
    return Reputation(repute.audits, SET_ASIDE_AT - 1.0, trial, aside, trial)
