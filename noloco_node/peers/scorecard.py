"""The scorecard of a peer, and the book of all of them: what this node has seen of it, and how long it is left alone.

A record in the directory costs its signer nothing, so it only introduces. An answer over an authenticated link shows
that somebody is there, and only work shows a replica. What a peer said of itself over its own link
is marked so. Times are seconds on clocks that never go back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum

from noloco_node.config.run_spec import ActivationCodec
from noloco_node.identity.peer_id import PeerId
from noloco_node.pauses import BANS, NO_REST, Rest
from noloco_node.peer_table import PeerTable

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


class Offence(StrEnum):
    """What a peer did wrong."""

    MALFORMED = "malformed"
    """Frames or messages that break the protocol: no frame, a wrong checksum, a wrong header, shape or precision."""
    TOO_LARGE = "too_large"
    """More than a limit allows that both sides know."""
    NOT_FINITE = "not_finite"
    """NaN or infinity."""
    FORGED = "forged"
    """A signature that does not hold."""
    BAD_ANSWER = "bad_answer"
    """An answer to this node's own request that breaks the protocol."""


@dataclass(frozen=True, slots=True)
class BanRecord:
    """One peer's offences, and what followed."""

    offences: float = 0.0
    """The number of offences as of `since`; time forgives."""
    since: float = 0.0
    ban: Rest = NO_REST
    """The last one, and how many there were in a row."""
    reason: Offence | None = None
    """The offence that brought the last ban."""

    def banned(self, now: float) -> bool:
        """Whether a ban is in force."""
        return self.ban.holds(now)


CLEAN = BanRecord()


@dataclass(slots=True)
class Hop:
    """A peer of the next stage: the microbatches sent to it."""

    under_way: list[float] = field(default_factory=list[float])
    """When each request to it began that has not ended."""
    load: int = 0
    """Microbatches that it held besides the answered one, as it said at `load_at`."""
    load_at: float = -math.inf
    rest: Rest = NO_REST
    """Its streams that broke in a row, and until when it is passed over for them or for its slowness."""
    hangs: Rest = NO_REST
    """How often it held requests up for nothing, and until when that is remembered."""
    seconds: float | None = None
    """What an answer takes, as of `at`; None where there was none yet."""
    came: float = 1.0
    """Share of requests that brought what was asked for, as of `at`."""
    at: float = -math.inf
    repute: Reputation = UNBLEMISHED
    """What audits have said of it."""
    no_audit_until: float = -math.inf
    """It did not answer an audit, and is asked again then: it must not hold the audits up."""
    carrying: dict[ActivationCodec, float] = field(default_factory=dict[ActivationCodec, float])
    """The seconds that carrying a microbatch there and back takes, by codec."""
    least: dict[ActivationCodec, float] = field(default_factory=dict[ActivationCodec, float])
    """The least seconds that it took of late."""
    work: float = 0.0
    """The seconds that its work on one takes, as it says."""


@dataclass(slots=True)
class Partner:
    """A peer of the own stage: the exchanges with it."""

    lost: Rest = NO_REST
    """Exchanges that came to nothing since the last that did not, and when it may be met again."""
    saved: tuple[float, int] | None = None
    """Visits that it might still make, after that many outer steps of this replica."""
    seconds_per_byte: float | None = None
    """What its line takes, as of `carried_at`."""
    carried_at: float = -math.inf
    committed: int = 0
    """Outer steps taken with it."""
    came_at: float | None = None
    """This replica's inner steps when it came; -inf if it was there before or is in line, None if it was never seen."""
    slow_rate: float | None = None
    """The bytes a second that it gave as a state source, if it was left for its slowness."""


@dataclass(slots=True)
class Scorecard:
    """All that this node has seen of one peer. -inf stands for never."""

    answered_at: float = -math.inf
    silences: int = 0
    """Calls that the link lost since the last answer."""
    worked_at: float = -math.inf
    tokens: int = 0
    """The tokens of the work that was seen, where it is counted in tokens."""
    asks: int = 0
    """How often this node asked it for work since work of it was last seen: each window counts once, work that was
    given and came to nothing more."""
    asked_at: float = -math.inf
    """When the last ask was that counts."""
    asks_began_at: float = -math.inf
    """The time of the first ask that counts; -inf if the peer is let down for good."""
    chances: int = 0
    """How often all that it was asked came to nothing, since work of it was last seen."""
    stage: int | None = None
    """The stage of this node's run that it serves, as it said itself over its own link; None where it has not."""
    earned: int = 0
    """Tokens that it sent and that were trained here."""
    evaluated: int = 0
    """Tokens that this node evaluated for it on that account."""
    conduct: BanRecord = CLEAN
    hop: Hop | None = None
    partner: Partner | None = None

    def left_alone(self, now: float) -> str:
        """Why this node leaves the peer alone now, or asks it last, and for how long; empty if neither. That it is slow
        or full is not told here."""
        reasons = [(self.conduct.ban.until, f"it is banned ({self.conduct.reason})")]
        if self.hop is not None:
            reasons.append((self.hop.repute.aside.until, "its gradients contradict those of others"))
            if self.hop.repute.trust(now) is Trust.ON_TRIAL:
                reasons.append((self.hop.repute.trial_until, "it is on trial: a gradient of it contradicted others"))
            reasons.append((self.hop.rest.until, "a request to it failed, or it was slow"))
        if self.partner is not None:
            reasons.append((self.partner.lost.until, "exchanges with it came to nothing"))
        return "; ".join(f"{why}, {until - now:.0f} s more" for until, why in reasons if until > now)


NOBODY = Scorecard()
"""The scorecard of a peer that this node knows nothing of. Nobody writes on it."""


class PeerBook:
    """The scorecards of one node's peers, bounded in number.

    Peers that have never worked are forgotten before peers that have, what was not heard of for longest first.
    """

    def __init__(self) -> None:
        self.met = PeerTable[PeerId, Scorecard](forgotten=self._forget)
        self.workers = PeerTable[PeerId, Scorecard](forgotten=self._forget)
        self.bans_forgotten = 0
        """Scorecards with a ban that had to go."""

    def of(self, peer: PeerId) -> Scorecard:
        """What is known of `peer`; to be read only."""
        return self.workers.get(peer) or self.met.get(peer, NOBODY)

    def card(self, peer: PeerId) -> Scorecard:
        """The scorecard of `peer`, to be written on."""
        known = self.workers.get(peer) or self.met.get(peer)
        if known is None:
            known = self.met[peer] = Scorecard()
        return known

    def worker(self, peer: PeerId) -> Scorecard:
        """The scorecard of a peer of which work was just seen."""
        known = self.workers.get(peer)
        if known is None:
            known = self.workers[peer] = self.met.pop(peer, None) or Scorecard()
        else:
            self.workers.move_to_end(peer)
        return known

    def heard(self, peer: PeerId) -> Scorecard:
        """The scorecard of a peer that was just heard."""
        known = self.card(peer)
        if peer in self.met:
            self.met.move_to_end(peer)
        return known

    def hop(self, peer: PeerId) -> Hop:
        """What is known of `peer` as one of the next stage, to be written on."""
        card = self.card(peer)
        if card.hop is None:
            card.hop = Hop()
        return card.hop

    def partner(self, peer: PeerId) -> Partner:
        """What is known of `peer` as one of the own stage, to be written on."""
        card = self.card(peer)
        if card.partner is None:
            card.partner = Partner()
        return card.partner

    def gives(self, peer: PeerId, rate: float | None) -> None:
        """As a state source `peer` gives so many bytes a second, which is too slow; None where it is quick enough."""
        self.partner(peer).slow_rate = rate

    @property
    def cards(self) -> Iterator[Scorecard]:
        """All of them."""
        yield from self.workers.values()
        yield from self.met.values()

    @property
    def partners(self) -> Iterator[tuple[PeerId, Partner]]:
        """What is known of all peers as peers of the own stage."""
        for peer, card in (*self.workers.items(), *self.met.items()):
            if card.partner is not None:
                yield peer, card.partner

    def begin_stage(self) -> None:
        """This node serves a stage from now on: who stood where in its former one says nothing."""
        for card in self.cards:
            card.hop = card.partner = None

    def _forget(self, _peer: PeerId, card: Scorecard) -> None:
        self.bans_forgotten += card.conduct.ban.times > 0
