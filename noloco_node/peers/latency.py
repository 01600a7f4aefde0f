"""How long a next-stage peer takes, and how often it brings what was asked for, beside its stage peers.

What a peer says of its load costs it nothing; the time that it takes is the sender's own. A peer that answers just
below each deadline, or fails at once each time, breaks no rule. It is asked less, in relation to its stage peers.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto
from typing import NamedTuple

from noloco_node.pauses import NO_REST, Rest, moved
from noloco_node.peers.scorecard import Hop

TOLERANCE = 1.5
"""A peer is slow if it takes more than so many times as long as its stage peers. It is asked less by the square of the
excess."""
SLOWNESS_HALVES_AFTER = 20.0
"""Slowness halves in so many times as long as the peer takes: one slow answer costs its giver some minutes at most."""
FAILURES_HALVE_SECONDS = 30.0
LEAST_WEIGHT = 1 / 16
"""The least weight of a peer, even if its answers never bring anything. It costs little time, and the peer may have
recovered."""
LITTLE = 1 / 4
"""A peer that brings less than this share of what its stage peers bring does no work."""
HANG_SECONDS = 1.0
"""A failure that took more seconds has held a request up for nothing."""
REST_MULTIPLE = 3.0
"""A peer that has held requests up rests for so many times the last failure's seconds. Each time but the first adds as
much again."""
LONGEST_MEMORY_SECONDS = 600.0
"""A peer rests at most so many seconds, and its slow line or a request that it held up is remembered as long."""


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
    return 1.0 - (1.0 - hop.came) * 0.5 ** ((now - hop.at) / FAILURES_HALVE_SECONDS)


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
    moment. `any_came` says whether any peer has ever brought what was asked for.
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
    return min(LONGEST_MEMORY_SECONDS, REST_MULTIPLE * (hop.hangs.times - 1) * took)


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
    if not hop.under_way and hop.came == 1.0 and (hop.seconds or 0.0) <= TOLERANCE * reference:
        return 1.0
    seconds = _forgiven(hop, now, reference)
    if hop.under_way:
        seconds = max(seconds, now - hop.under_way[0])
    return slowness(seconds, reference) * _yield(_came_at(hop, now), best)


def slowness(seconds: float, reference: float) -> float:
    """The weight of a peer that takes so many seconds, beside 1 where the reference is usual; 0 is not known."""
    most = TOLERANCE * reference
    return 1.0 if seconds <= most or reference <= 0.0 else (most / seconds) ** 2


def _yield(came: float, best: float) -> float:
    return 1.0 if came * TOLERANCE >= best else max(LEAST_WEIGHT, came / best)
