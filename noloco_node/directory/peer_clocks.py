"""What a replica believes of other clocks: the directory's word on its stage peers against one peer's claim."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, median_high
from typing import Literal

from noloco_node import ambient

FROM_ORIGINS = 0.5
"""A partner's clock is believed within this share of the allowed lag from the origins' clocks. A replica ten times as
fast as its stage peers keeps within it, as its clock is tied to theirs."""
STANDS_BACK_SECONDS = 20.0
"""A replica that is far behind serves nobody for at most so many seconds, if no stage peer gives its state. The stage
peers' records may be lies."""


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
        """Whether the directory says that this replica lags by all that is allowed: a stage peer would give its
        state."""
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
