"""How long a next-stage peer takes, and how often it brings what was asked for, beside its stage peers.

What a peer says of its load costs it nothing; the time that it takes is the sender's own. A peer that answers just
below each deadline, or fails at once each time, breaks no rule. It is asked less, in relation to its stage peers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from noloco_node.identity.peer_id import PeerId
from noloco_node.transport.errors import Refusal, Refused

TOLERANCE = 1.5
"""A peer is slow if it takes more than so many times as long as its stage peers. It is asked less by the square of the
excess."""
OF_AN_ANSWER = 1 / 8
"""The latest answer has this weight in the moving averages of a peer's time and yield."""
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
LONGEST_REST_SECONDS = 600.0
"""A peer rests at most so many seconds; a request held up for nothing is remembered as long."""
FEW = 8
"""Among so many peers the quick ones are determined at each request; among more, once in `BOUNDS_SECONDS`."""
BOUNDS_SECONDS = 1.0
BOUNDS_CHANGE = 1 / 8
"""The bounds are computed anew early only after answers from this share of the known peers. If each answer takes
seconds, every one of them would compute them."""

PASSED_UPWARD = (Refusal.OUT_OF_REACH, Refusal.DOWNSTREAM_EXHAUSTED, Refusal.BUDGET_SPENT)
"""A peer that gives one of these refusals says that others further on gave up."""


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


def outcome_of(refusal: Refused, took: float) -> RequestOutcome:
    """What a refusal that came after so many seconds says of its giver."""
    if refusal.reason is Refusal.BUSY and took < HANG_SECONDS:
        return RequestOutcome.UNTOLD
    # A request may have waited behind others on this node's own link: every peer is late then, and none beside others.
    excused = refusal.reason is Refusal.BUSY or refusal.reason in PASSED_UPWARD
    return RequestOutcome.EXCUSED if excused else RequestOutcome.FAILED


@dataclass(slots=True)
class _Pace:
    seconds: float | None = None
    """What an answer takes, as of `at`; None where there was none yet."""
    came: float = 1.0
    """Share of requests that brought what was asked for, as of `at`."""
    at: float = 0.0

    def faultless(self, most: float) -> bool:
        """Whether each request to it came to something, and none of its answers takes more than so many seconds."""
        return self.came == 1.0 and (self.seconds or 0.0) <= most

    def came_at(self, now: float) -> float:
        """`came`, as time has forgiven."""
        if self.came == 1.0:
            return 1.0
        return 1.0 - (1.0 - self.came) * 0.5 ** ((now - self.at) / FAILURES_HALVE_SECONDS)

    def forgiven(self, now: float, reference: float) -> float:
        """`seconds`; of what is beyond the reference time forgives."""
        seconds = self.seconds or 0.0
        if seconds <= reference:
            return seconds
        return reference + (seconds - reference) * 0.5 ** ((now - self.at) / (SLOWNESS_HALVES_AFTER * seconds))


class _Bounds(NamedTuple):
    """What is quick among some peers, in seconds, and the largest share of requests that bring something."""

    reference: float
    best: float


class _Kept(NamedTuple):
    """Bounds among some peers as of a time."""

    among: Sequence[PeerId]
    at: float
    bounds: _Bounds


class LatencyTracker:
    """One sender's view of its next-stage peers. Times are seconds of `clock`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._paces: dict[PeerId, _Pace] = {}
        self._under_way: dict[PeerId, list[float]] = {}
        """When each request to a peer began that has not ended."""
        self._hangs: dict[PeerId, list[float]] = {}
        """When a peer held requests up for nothing; those that were under way together are one."""
        self._kept: _Kept | None = None
        self._among: Sequence[PeerId] = ()
        self._answers = 0
        """Requests that ended since bounds were looked for."""
        self._known: list[_Pace] = []
        """The known peers among those that the bounds were last computed for. Every microbatch asks, and of a large
        stage few were ever asked."""

    def began(self, peer: PeerId) -> float:
        """A request is under way; returns when it began."""
        now = self._clock()
        if peer not in self._paces:
            pace = self._paces[peer] = _Pace(at=now)
            self._known.append(pace)
        self._under_way.setdefault(peer, []).append(now)
        return now

    def ended(self, peer: PeerId, began: float, how: RequestOutcome) -> float:
        """The request has ended. Returns the seconds for which the peer is to be left alone.

        The first time in a while that it held requests up for nothing costs it none, since a node may stand still for a
        moment.
        """
        pace, now = self._paces[peer], self._clock()
        under_way = self._under_way[peer]
        under_way.remove(began)
        self._answers += 1
        if not under_way:
            del self._under_way[peer]
        if how is RequestOutcome.UNTOLD:
            return 0.0
        took, before = now - began, pace.came_at(now)
        came = before + OF_AN_ANSWER * ((how is RequestOutcome.CAME) - before)
        pace.came = came if came < 1.0 else 1.0  # the same number for all: most peers have no other
        usual = took if pace.seconds is None else pace.forgiven(now, took)
        if how is RequestOutcome.CAME or (how is RequestOutcome.EXCUSED and took > usual):
            pace.seconds = usual + OF_AN_ANSWER * (took - usual)
        pace.at = now
        if how is RequestOutcome.CAME or took < HANG_SECONDS or self._excused(pace, how):
            return 0.0
        return self._rest(peer, began, now)

    def _excused(self, pace: _Pace, how: RequestOutcome) -> bool:
        """Not one that never brought anything where others have, since nothing says what it usually takes."""
        if how is not RequestOutcome.EXCUSED:
            return False
        return pace.seconds is not None or all(other.seconds is None for other in self._known)

    def _rest(self, peer: PeerId, began: float, now: float) -> float:
        hangs = [at for at in self._hangs.get(peer, ()) if now - at < LONGEST_REST_SECONDS]
        if not hangs or began >= hangs[-1]:
            hangs.append(now)
        self._hangs[peer] = hangs
        return min(LONGEST_REST_SECONDS, REST_MULTIPLE * (len(hangs) - 1) * (now - began))

    def weights(self, peers: Sequence[PeerId], among: Sequence[PeerId] | None = None) -> dict[PeerId, float]:
        """How often to ask each peer, beside 1 for one as quick as its stage peers, which are those in `among`.

        A peer that is not in the result has 1. The second quickest peer says what is quick, so that one that answers
        anything at once says nothing of the others.
        """
        now, paces, weights = self._clock(), self._paces, dict[PeerId, float]()
        reference, best = self._bounds(peers if among is None else among, now)
        for peer in peers:
            pace = paces.get(peer)
            if pace is None or (pace.faultless(TOLERANCE * reference) and peer not in self._under_way):
                continue
            slowness = _slowness(self._seconds_at(peer, pace, now, reference), reference)
            weights[peer] = slowness * _yield(pace.came_at(now), best)
        return weights

    def _seconds_at(self, peer: PeerId, pace: _Pace, now: float, reference: float) -> float:
        """What it takes, requests that are under way included."""
        seconds, under_way = pace.forgiven(now, reference), self._under_way.get(peer)
        return max(seconds, now - under_way[0]) if under_way else seconds

    def yields_little(self, peer: PeerId, peers: Sequence[PeerId]) -> bool:
        """Whether asking `peer` brings far less than asking the best of `peers`."""
        if peer not in self._paces:
            return False
        now = self._clock()
        return self._paces[peer].came_at(now) < LITTLE * self._bounds(peers, now).best

    def _bounds(self, peers: Sequence[PeerId], now: float) -> _Bounds:
        """The bounds among `peers`; for a large stage as of a moment ago, since every microbatch asks."""
        kept = self._kept
        if len(peers) > FEW and kept is not None and kept.among is peers and self._serves(kept, now):
            return kept.bounds
        if peers is not self._among:
            self._forget(peers)
            self._among, self._known = peers, [*filter(None, map(self._paces.get, peers))]
        known = self._known
        quick = sorted([pace.seconds for pace in known if pace.seconds is not None])
        reference = quick[len(quick) > 2] if quick else 0.0
        faultless = not known or any(pace.came == 1.0 for pace in known)
        bounds = _Bounds(reference, 1.0 if faultless else max(pace.came_at(now) for pace in known))
        self._kept, self._answers = _Kept(peers, now, bounds), 0
        return bounds

    def _serves(self, kept: _Kept, now: float) -> bool:
        """Whether bounds are of late enough: of this moment, or as little has changed since as a few answers change."""
        passed, few = now - kept.at, BOUNDS_CHANGE * len(self._known)
        return 0.0 <= passed < BOUNDS_SECONDS or (0.0 <= passed < FAILURES_HALVE_SECONDS and self._answers < few)

    def _forget(self, peers: Sequence[PeerId]) -> None:
        if len(self._paces) > 2 * len(peers) + 64:
            live = set(peers)
            self._paces = {peer: pace for peer, pace in self._paces.items() if peer in live or peer in self._under_way}
            self._hangs = {peer: hangs for peer, hangs in self._hangs.items() if peer in self._paces}


def _slowness(seconds: float, reference: float) -> float:
    most = TOLERANCE * reference
    return 1.0 if seconds <= most or reference <= 0.0 else (most / seconds) ** 2


def _yield(came: float, best: float) -> float:
    return 1.0 if came * TOLERANCE >= best else max(LEAST_WEIGHT, came / best)
