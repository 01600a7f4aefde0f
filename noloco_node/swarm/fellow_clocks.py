"""What a replica believes of other clocks: the directory's word on its fellows against one peer's claim."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from noloco_node import ambient
from noloco_node.swarm.pairing import believed_clock, laggard, lags

FROM_ORIGINS = 0.5
"""Share of the lag that is allowed by which a partner's clock may differ from the origins' to be believed: a replica
ten times as fast as its fellows keeps within it, as its clock is tied to theirs."""
STANDS_BACK_SECONDS = 20.0
"""How long who is far behind serves nobody, if no fellow gives its state: for the fellows' records may be lies."""


def _unknown() -> None:
    return None


@dataclass(frozen=True, slots=True)
class FellowClocks:
    """This replica's clock and its fellows', read anew for every question; all in tokens."""

    max_lag: float
    own: Callable[[], float]
    estimated: Callable[[], Sequence[float]]
    """Present clocks of the live fellows as estimated from their records."""
    recorded: Callable[[], Sequence[float]]
    """Clocks of the same fellows as they stand in their records."""
    origins_lead: Callable[[], float | None] = _unknown
    """How far ahead of this clock those origins are whose microbatches are trained here; None on stage 0 and where it
    is not known."""

    def met(self, claimed: float) -> float:
        """The clock of a partner to meet half-way, within bounds; where the directory knows no fellow, around the own
        clock.

        The directory's clocks run away with the own one where one partner lies to everybody, again and again. Those of
        the origins do not: work stands behind them. They only hold a partner back, and never move a clock by
        themselves, since whoever has most of the work for a while may say what it likes.
        """
        own, lead = self.own(), self.origins_lead()
        estimated, recorded = self.estimated() or (own,), self.recorded() or (own,)
        believed = believed_clock(claimed, estimated=estimated, recorded=recorded, max_lag=self.max_lag)
        if lead is None:
            return believed
        bound = FROM_ORIGINS * self.max_lag
        return min(own + max(0.0, lead + bound), max(own + min(0.0, lead - bound), believed))

    def not_beyond(self, claimed: float) -> float:
        """A donor's clock, unless it is far ahead of what the directory says: it could end this replica's run. Where
        the directory knows no fellow, as it is claimed: who comes has no clock to hold it against."""
        believed = believed_clock(claimed, estimated=self.estimated(), recorded=self.recorded(), max_lag=self.max_lag)
        return min(claimed, believed)

    def laggard(self, claimed: float) -> Literal["own", "other"] | None:
        """Which of this replica and a partner lags the other too far, if one does (`pairing.laggard`)."""
        return laggard(self.own(), claimed, estimated=self.estimated(), recorded=self.recorded(), max_lag=self.max_lag)

    def own_lags(self) -> bool:
        """Whether the directory agrees that this replica is behind (`pairing.lags`)."""
        return lags(self.own(), self.recorded(), self.max_lag)

    def far_behind(self) -> bool:
        """Whether the directory says that this replica lags by all that is allowed: a fellow would give its state."""
        return lags(self.own(), self.recorded(), 2 * self.max_lag)


class FarBehind:
    """Whether this replica stands back: it has found itself far behind its fellows (its machine slept, it was cut off),
    looks for one whose state it can take, and until then works for nobody, whom its old weights would mislead and who
    would take it for a liar. For a bounded time, and again only after it was with the others."""

    def __init__(self, clocks: FellowClocks, clock: Callable[[], float] = ambient.monotonic) -> None:
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
        """As of the last look."""
        return self._since is not None and self._clock() - self._since < STANDS_BACK_SECONDS
