"""A peer of the next stage: how long it takes, how often it brings what was asked for, and what audits say of it.

What a peer says of its load costs it nothing; the time that it takes is the sender's own. A peer that answers just
below each deadline, or fails at once each time, breaks no rule. It is asked less, in relation to its stage peers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum, auto
from typing import NamedTuple

from noloco_node.config.run_spec import ActivationCodec
from noloco_node.tallies import BANS, NO_REST, SLACK, Rest, moved

SLOWNESS_HALVES_AFTER = 20.0
"""Slowness halves in so many times as long as the peer takes: one slow answer costs its giver some minutes at most."""
LEAST_WEIGHT = 1 / 16
"""The least weight of a peer, even if its answers never bring anything. It costs little time, and the peer may have
recovered."""
LITTLE = 1 / 4
"""A peer that brings less than this share of what its stage peers bring does no work."""
HANG_SECONDS = 1.0
"""A failure that took more seconds has held a request up for nothing. A refused peer asks again within this time, if it
still wants a place."""
ASK_SECONDS = 0.5
"""To ask another peer takes about so many seconds."""
REST_A_SECOND = 3.0
"""What costs a second for nothing, or of a line that training needs, rests for so many seconds after it. It then costs
a quarter of the time at most."""
LONGEST_MEMORY_SECONDS = 600.0
"""A peer rests at most so many seconds, and its slow line or a request that it held up is remembered as long."""
SET_ASIDE_AT = 3.0
"""Doubt with which a peer is set aside."""
FORGIVEN = 1 / 8
"""Doubt that an audit of a peer's ordinary answer takes off if it is not decided against it: who lies in more than
every ninth of them is set aside in the end, however it spreads its lies. Also the share of a trial that a copy takes
off, and the doubt that goes with each `TRIAL_SECONDS` once a trial is over."""
TRIAL_SECONDS = BANS.first
"""How long after a contradiction a peer gets no ordinary microbatch, if no audits clear it before. Bounded, since where
too few others are left nobody can clear it. What is held against a peer that brought nothing halves in this time."""


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
    """The last time that it was set aside, and how many there were in a row."""
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


@dataclass(slots=True)
class Hop:
    """A peer of the next stage: the microbatches sent to it."""

    under_way: list[float] = field(default_factory=list[float])
    """When each request to it began that has not ended."""
    load: int = 0
    """Microbatches that it held besides the answered one, as it said at `load_at`."""
    load_at: float = -math.inf
    rest: Rest = NO_REST
    """Its streams that broke in a row, and until when it rests for them or for its slowness."""
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


class RequestOutcome(Enum):
    """How a request ended."""

    CAME = auto()
    """What was asked for came."""
    FAILED = auto()
    """Nothing came, and that is the peer's own affair."""
    EXCUSED = auto()
    """The peer says that others further on gave up, or late that it is full, which may be so."""
    UNTOLD = auto()
    """It says nothing of the peer."""


def _came_at(hop: Hop, now: float) -> float:
    """The share of requests that brought something, as time has forgiven."""
    if hop.came == 1.0:
        return 1.0
    return 1.0 - (1.0 - hop.came) * 0.5 ** ((now - hop.at) / TRIAL_SECONDS)


def _forgiven(hop: Hop, now: float, reference: float) -> float:
    """The seconds of an answer; of what is beyond the reference time forgives."""
    seconds = hop.seconds or 0.0
    if seconds <= reference:
        return seconds
    return reference + (seconds - reference) * 0.5 ** ((now - hop.at) / (SLOWNESS_HALVES_AFTER * seconds))


class Bounds(NamedTuple):
    """What is quick among some peers, in seconds, and the largest share of requests that bring something."""

    reference: float
    best: float


def after_request(hop: Hop, began: float, now: float, how: RequestOutcome, *, any_came: bool) -> float:
    """Note that the request that began then has ended; returns the seconds for which the peer is to be left alone.

    The first time in a while that it held requests up for nothing costs it none, since a node may stand still for a
    moment. Each further one adds `REST_A_SECOND` times the last failure's seconds. `any_came` says whether any peer has
    ever brought what was asked for.
    """
    if began not in hop.under_way or how is RequestOutcome.UNTOLD:
        return 0.0
    took, came = now - began, moved(_came_at(hop, now), how is RequestOutcome.CAME)
    hop.came = came if came < 1.0 else 1.0  # the same number for all: most peers have no other
    usual = took if hop.seconds is None else _forgiven(hop, now, took)
    if how is RequestOutcome.CAME or (how is RequestOutcome.EXCUSED and took > usual):
        hop.seconds = moved(usual, took)
    hop.at = now
    # One that never brought anything where others have is not excused: nothing says what it usually takes.
    excused = how is RequestOutcome.EXCUSED and (hop.seconds is not None or not any_came)
    if how is RequestOutcome.CAME or took < HANG_SECONDS or excused:
        return 0.0
    if not hop.hangs.holds(now):
        hop.hangs = NO_REST
    if began >= hop.hangs.until - LONGEST_MEMORY_SECONDS:  # those that were under way together are one
        hop.hangs = Rest(hop.hangs.times + 1, now + LONGEST_MEMORY_SECONDS)
    return min(LONGEST_MEMORY_SECONDS, REST_A_SECOND * (hop.hangs.times - 1) * took)


def yields_little(hop: Hop, others: Iterable[Hop | None], now: float) -> bool:
    """Whether asking a peer brings far less than asking the best of the others."""
    return _came_at(hop, now) < LITTLE * bounds_of(others, now).best


def bounds_of(hops: Iterable[Hop | None], now: float) -> Bounds:
    """What is quick among these peers; None is one that was never asked.

    The quickest quarter says it, or of few the second quickest. Fewer than these that answer anything at once then say
    nothing of the others: two keys of 22 had more than half of a sender's microbatches.
    """
    known = [hop for hop in hops if hop is not None]
    quick = sorted([hop.seconds for hop in known if hop.seconds is not None])
    reference = quick[max(len(quick) > 2, len(quick) // 4)] if quick else 0.0
    faultless = not known or any(hop.came == 1.0 for hop in known)
    return Bounds(reference, 1.0 if faultless else max(_came_at(hop, now) for hop in known))


def weight_of(hop: Hop, bounds: Bounds, now: float) -> float:
    """How often to ask a peer, beside 1 for one that is as quick as its stage peers."""
    reference, best = bounds
    if not hop.under_way and hop.came == 1.0 and (hop.seconds or 0.0) <= SLACK * reference:
        return 1.0
    seconds = _forgiven(hop, now, reference)
    if hop.under_way:
        seconds = max(seconds, now - hop.under_way[0])
    return slowness(seconds, reference) * _yield(_came_at(hop, now), best)


def slowness(seconds: float, reference: float) -> float:
    """The weight of a peer that takes so many seconds, beside 1 where the reference is usual; 0 is not known. It falls
    by the square of what is beyond the `SLACK`."""
    most = SLACK * reference
    return 1.0 if seconds <= most or reference <= 0.0 else (most / seconds) ** 2


def _yield(came: float, best: float) -> float:
    return 1.0 if came * SLACK >= best else max(LEAST_WEIGHT, came / best)
