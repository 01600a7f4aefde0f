"""How far others are: the clocks of stage peers by the directory, those of origins by their microbatches trained here.

One peer's word moves nobody far. What a microbatch says of its origin is only its sender's word. It is therefore kept
by the sender, whose id the link authenticates, and a sender is one voice however many origins it names. A voice weighs
what was trained of it here: names cost nothing, work does.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median, median_high
from typing import Literal, NamedTuple

from noloco_node import ambient
from noloco_node.identity.peer_id import PeerId
from noloco_node.tallies import FEW_PEERS, PeerTable

FROM_ORIGINS = 0.5
"""A partner's clock is believed within this share of the allowed lag from the origins' clocks. A replica ten times as
fast as its stage peers keeps within it, as its clock is tied to theirs."""
STANDS_BACK_SECONDS = 20.0
"""A replica that is far behind serves nobody for at most so many seconds, if no stage peer gives its state. The stage
peers' records may be lies."""
RECENT_MICROBATCHES = 32
"""The number of latest microbatches that tell how far ahead the origins are. They are enough for a burst to be
outvoted. They are few enough for a clock that follows them to be moved before it has run far."""


def _unknown() -> None:
    return None


@dataclass(frozen=True, slots=True)
class PeerClocks:
    """This replica's clock and its stage peers', read anew for every question; all in tokens."""

    max_lag: float
    own: Callable[[], float]
    estimated: Callable[[], Sequence[float]]
    """Present clocks of the live stage peers as estimated from their records."""
    recorded: Callable[[], Sequence[float]]
    """Clocks of the same stage peers as they stand in their records."""
    origins_lead: Callable[[], float | None] = _unknown
    """How far the origins whose microbatches are trained here are ahead of this clock, in tokens; None on stage 0 and
    if it is not known."""

    def met(self, claimed: float) -> float:
        """The clock of a partner to meet half-way, within bounds; around the own clock if the directory knows no stage
        peer.

        The directory's clocks run away with the own one if one partner lies to all, again and again. Those of the
        origins do not: work stands behind them. They only hold a partner back, and never move a clock by themselves.
        Otherwise an origin that has most of the work for a while could say what it likes.
        """
        own, lead = self.own(), self.origins_lead()
        estimated, recorded = heard(self.estimated(), own) or (own,), heard(self.recorded(), own) or (own,)
        believed = believed_clock(claimed, estimated=estimated, recorded=recorded, max_lag=self.max_lag)
        believed = min(believed, max(claimed, own))  # what only records say moves nobody forward
        if lead is None:
            return believed
        bound = FROM_ORIGINS * self.max_lag
        return min(own + max(0.0, lead + bound), max(own + min(0.0, lead - bound), believed))

    def not_beyond(self, claimed: float) -> float:
        """A donor's clock, unless it is far ahead of what the directory says: it could end this replica's run.

        If the directory knows no stage peer, the claim is taken: a newcomer has no clock to hold it against.
        """
        estimated, recorded = heard(self.estimated(), self.own()), heard(self.recorded(), self.own())
        return min(claimed, believed_clock(claimed, estimated=estimated, recorded=recorded, max_lag=self.max_lag))

    def laggard(self, claimed: float) -> Literal["own", "other"] | None:
        """Which of this replica and a partner lags the other too far, if one does (`laggard`)."""
        return laggard(self.own(), claimed, estimated=self.estimated(), recorded=self.recorded(), max_lag=self.max_lag)

    def own_lags(self) -> bool:
        """Whether the directory agrees that this replica is behind (`lags`), by half of what is allowed."""
        return lags(self.own(), self.recorded(), by=self.max_lag / 2)

    def far_behind(self) -> bool:
        """Whether the directory says that this replica lags by all that is allowed, and is to take a state."""
        return lags(self.own(), self.recorded(), by=self.max_lag)


class FarBehind:
    """Tells whether this replica stands back because it is far behind its stage peers (its machine slept, it was cut
    off).

    It looks for a stage peer whose state it can take. Until then it works for nobody: its old weights would mislead
    others, and they would take it for a liar. It stands back for a bounded time, and again only after it was with the
    others.
    """

    def __init__(self, clocks: PeerClocks, clock: Callable[[], float] = ambient.monotonic) -> None:
        self._clocks = clocks
        self._clock = clock
        self._since: float | None = None

    def look(self) -> None:
        """The directory was read, or a state taken."""
        if not self._clocks.far_behind():
            self._since = None
        elif self._since is None:
            self._since = self._clock()

    @property
    def stands_back(self) -> bool:
        """Tell whether it stands back, as of the last look."""
        return self._since is not None and self._clock() - self._since < STANDS_BACK_SECONDS


def heard(clocks: Sequence[float], own: float) -> Sequence[float]:
    """The stage peers' clocks of which the median is taken; if they are even in number, the own one is added.

    Of two stage peers one may lie. Half-way between the two is nobody's clock, and one lie would move it without bound.
    """
    return [*clocks, own] if clocks and len(clocks) % 2 == 0 else clocks


def believed_clock(claimed: float, *, estimated: Sequence[float], recorded: Sequence[float], max_lag: float) -> float:
    """A partner's clock as far as the directory bears it out: one peer's claim cannot push the swarm's time.

    It is believed up to `max_lag` above the median of the stage peers' `estimated` present clocks. Downwards it is
    believed to `max_lag` below the median of their `recorded` ones. An estimate may be ahead of the truth, so it never
    raises a claim. Otherwise the raised clocks would be recorded and estimated on, and time would run away. The upper
    bound is that of the higher middle one: of two stage peers, one that lags must not take the word from the other.
    """
    if not estimated or not recorded:
        return claimed
    ceiling, floor = median_high(estimated) + max_lag, median(recorded) - max_lag
    return min(ceiling, max(floor, claimed))


def lags(own_clock: float, directory_clocks: Sequence[float], *, by: float) -> bool:
    """Whether the directory agrees that this replica is behind: its clock is more than `by` tokens below the median of
    its stage peers' records (`heard`). One peer's word alone would let it push its state."""
    return bool(directory_clocks) and median(heard(directory_clocks, own_clock)) - own_clock > by


def laggard(
    own_clock: float, claimed: float, *, estimated: Sequence[float], recorded: Sequence[float], max_lag: float
) -> Literal["own", "other"] | None:
    """Which of two clocks lags the other by more than `max_lag`, else None.

    The partner's claim is believed as `believed_clock` says, but never beyond its own word. Otherwise it would not be
    told that it is behind, and this replica would lag one that does not say that it is ahead. This replica lags only if
    the `recorded` clocks, which are never ahead of the truth, agree by half. The partner lags only if this replica is
    not itself ahead of its stage peers by as much. It would find no peer that agrees, and train alone from then on;
    averaging brings it back.
    """
    votes, records = heard(estimated, own_clock), heard(recorded, own_clock)
    other = min(claimed, believed_clock(claimed, estimated=votes, recorded=records, max_lag=max_lag))
    if other - own_clock > max_lag and lags(own_clock, recorded, by=max_lag / 2):
        return "own"
    ahead_of_all = bool(estimated) and own_clock - median_high(estimated) > max_lag
    return "other" if own_clock - other > max_lag and not ahead_of_all else None


@dataclass(frozen=True, slots=True)
class DrawnBy:
    """The origin of a microbatch, and its clock (tokens) once that and all drawn before it are trained."""

    origin: PeerId
    clock: float


@dataclass(frozen=True, slots=True)
class OriginSeen:
    """What one sender's last microbatch of one origin said. Times are seconds on a clock that never goes back."""

    sender: PeerId
    origin: PeerId
    clock: float
    """Tokens. The last word and no maximum: a moment's lie does not stay."""
    rose_at: float
    """When it was last above the one before it."""
    seen_at: float
    tokens: int
    """Tokens of this origin by this sender that were trained here."""


class Voice(NamedTuple):
    """A value that a sender gives for an origin, and the tokens trained here that stand behind it."""

    sender: PeerId
    origin: PeerId
    value: float
    tokens: int


@dataclass(frozen=True, slots=True)
class _Trained:
    """One microbatch: how far ahead of this stage's clock its origin's was, and when it was trained."""

    voice: Voice
    at: float


def weighted_median(weighted: Iterable[tuple[float, float]]) -> float:
    """The low median of values with weights, at least one of them above zero."""
    ordered = sorted(weighted)
    passed = list(accumulate(weight for _, weight in ordered))
    if not passed:
        raise ValueError("nothing has weight")
    return ordered[bisect_left(passed, passed[-1] / 2)][0]


def median_voice(voices: Iterable[Voice]) -> float | None:
    """The median over senders of each one's median over its origins, all weighed by tokens; None if there is no voice.
    A minority of the work therefore moves it no further than to another's value."""
    by_sender: dict[PeerId, list[tuple[float, int]]] = {}
    for voice in voices:
        by_sender.setdefault(voice.sender, []).append((voice.value, voice.tokens))
    if not by_sender:
        return None
    return weighted_median((weighted_median(said), sum(tokens for _, tokens in said)) for said in by_sender.values())


def median_clock(heard: Iterable[OriginSeen]) -> float | None:
    """Where origins were (tokens) when they were last heard. None where nothing was."""
    return median_voice(Voice(seen.sender, seen.origin, seen.clock, seen.tokens) for seen in heard)


def furthest_clock(heard: Sequence[OriginSeen], lead: float) -> float | None:
    """The furthest clock of an origin (tokens) that is believed: at most `lead` beyond the median. None if none is."""
    middle = median_clock(heard)
    return None if middle is None else max(seen.clock for seen in heard if seen.clock <= middle + lead)


def places(heard: Iterable[OriginSeen]) -> dict[PeerId, float]:
    """What the word of each origin weighs (tokens) where few are kept. A sender's first origin weighs all of its work,
    the second half of that, the third a third. Senders thus fill places in proportion to their work, however many names
    they give."""
    by_sender: dict[PeerId, list[OriginSeen]] = {}
    for seen in heard:
        by_sender.setdefault(seen.sender, []).append(seen)
    weights: dict[PeerId, float] = {}
    for named in by_sender.values():
        work = sum(seen.tokens for seen in named)
        for place, seen in enumerate(sorted(named, key=lambda seen: -seen.tokens), start=1):
            weights[seen.origin] = max(weights.get(seen.origin, 0.0), work / place)
    return weights


class OriginsSeen:
    """The latest clock of each origin by each previous-stage peer that sent a microbatch which was then trained."""

    def __init__(self, now: Callable[[], float] = ambient.monotonic) -> None:
        self._now = now
        self._by_sender = PeerTable[PeerId, PeerTable[PeerId, OriginSeen]](FEW_PEERS)
        self._recent: deque[_Trained] = deque(maxlen=RECENT_MICROBATCHES)

    def saw(self, drawn: DrawnBy, sender: PeerId, *, tokens: int, own_clock: float) -> None:
        """A microbatch of so many tokens that `sender` sent was trained here; this stage's clock is `own_clock`
        (tokens) after it."""
        now = self._now()
        heard = self._by_sender[sender] = self._by_sender.get(sender) or PeerTable(FEW_PEERS)
        before = heard.get(drawn.origin)
        rose_at = now if before is None or drawn.clock > before.clock else before.rose_at
        in_all = tokens + (0 if before is None else before.tokens)
        heard[drawn.origin] = OriginSeen(sender, drawn.origin, drawn.clock, rose_at, now, in_all)
        self._recent.append(_Trained(Voice(sender, drawn.origin, drawn.clock - own_clock, tokens), now))

    def latest(self, within: float = math.inf) -> list[OriginSeen]:
        """All that was heard in the last `within` seconds."""
        since = self._now() - within
        return [seen for heard in self._by_sender.values() for seen in heard.values() if seen.seen_at >= since]

    def lead(self, since: float = -math.inf) -> float | None:
        """How far the origins are ahead of this stage's clock (tokens; below zero: behind it); None if there is no word
        of them.

        The latest microbatches that were trained after `since` (seconds) count. Each says by how much when it was
        trained, so that it does not matter how long ago that is. Last words, some of them many steps old, claimed that
        a stage is ahead which is not.
        """
        return median_voice(trained.voice for trained in self._recent if trained.at >= since)
