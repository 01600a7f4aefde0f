"""The senders of microbatches that this node has trained, and how far their origins were: pure bookkeeping, bounded.

What a microbatch says of its origin is only its sender's word. It is therefore kept by the sender, whose id the link
authenticates, and a sender is one voice however many origins it names. A voice weighs what was trained of it here:
names cost nothing, work does.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from noloco_node import ambient
from noloco_node.identity.peer_id import PeerId
from noloco_node.tallies import QUIET_PAUSES
from noloco_node.tallies import FEW_PEERS, PeerTable

RECENT_MICROBATCHES = 32
"""The number of latest microbatches that tell how far ahead the origins are. They are enough for a burst to be
outvoted. They are few enough for a clock that follows them to be moved before it has run far."""
QUIET_LAG = 0.25
"""An origin says nothing any more after the own clock has run this part of the allowed lag without a word of it. It has
come to its end or stands still, and how far ahead it was is no news."""


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
    """One microbatch: how far ahead of this stage's clock its origin's was, and when it was trained by either time."""

    voice: Voice
    at: float
    own_clock: float


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
    """The furthest clock of an origin (tokens) that is believed: at most `lead` beyond the median. None where nothing
    was heard."""
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
    """The latest clock of each origin by each previous-stage peer that sent a microbatch which was then trained.
    `max_lag` (tokens) is by how much clocks may differ."""

    def __init__(self, max_lag: float, now: Callable[[], float] = ambient.monotonic) -> None:
        self._quiet = QUIET_LAG * max_lag
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
        self._recent.append(_Trained(Voice(sender, drawn.origin, drawn.clock - own_clock, tokens), now, own_clock))

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
        recent = [trained for trained in self._recent if trained.at >= since]
        quiet = self._quiet_among(recent)
        return median_voice(trained.voice for trained in recent if trained.voice.origin not in quiet)

    def _quiet_among(self, recent: Sequence[_Trained]) -> set[PeerId]:
        """Origins of which nothing is heard any more, by the microbatches that were trained last."""
        places: dict[PeerId, list[int]] = {}
        for place, trained in enumerate(recent):
            places.setdefault(trained.voice.origin, []).append(place)
        return {origin for origin, heard in places.items() if self._is_quiet(recent, heard)}

    def _is_quiet(self, recent: Sequence[_Trained], heard: Sequence[int]) -> bool:
        first, last, now = heard[0], heard[-1], len(recent) - 1
        if recent[now].own_clock - recent[last].own_clock <= self._quiet:
            return False
        usual = (last - first) / (len(heard) - 1) if len(heard) > 1 else len(recent)
        return now - last > QUIET_PAUSES * usual
