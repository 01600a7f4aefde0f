"""How far a swarm is, as its directory says: what a joiner is shown before it trains."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median, median_low

from noloco_node.directory.records import SERVING, DirectoryView, PeerState

CREDIBLE_STRENGTH = 8.0
"""A node counts at most for this many of the median one: what a record claims is only a claim. Where stages are chosen
it is so only for a node that has worked with this one; of the others nothing beyond the median is believed."""


@dataclass(frozen=True, slots=True)
class SwarmSummary:
    """A swarm at one moment."""

    clock: float
    """Median clock of the replicas that train, in swarm tokens."""
    target_tokens: int
    replicas: tuple[int, ...]
    """Live replicas of each stage, joining and leaving ones included."""
    tokens_per_second: float
    """What the replicas of stage 0 say they train, together, each one's word `believed`."""

    @property
    def seconds_left(self) -> float | None:
        """Time to the target at this speed; None where nothing is known, or while a stage has no replica."""
        if self.tokens_per_second <= 0.0 or not all(self.replicas):
            return None
        return max(0.0, self.target_tokens - self.clock) / self.tokens_per_second


def believed(claimed: Iterable[float]) -> float:
    """The sum of what nodes claim, tokens/s, each one's word believed up to a multiple of the median of those that say
    anything."""
    said = [value for value in claimed if value > 0.0]
    return sum(min(value, CREDIBLE_STRENGTH * median_low(said)) for value in said)


def outlook_of(view: DirectoryView, now: float, target_tokens: int) -> SwarmSummary:
    """Read the view at DHT time `now`. Records are their owners' claims: the median of clocks bears a few false ones,
    and so does the sum of speeds, in which nobody's word counts for more than a multiple of the median."""
    stages = range(len(view.stages))
    clocks = [record.clock for stage in stages for record in view.live(stage, now, *SERVING)]
    return SwarmSummary(
        clock=median(clocks) if clocks else 0.0,
        target_tokens=target_tokens,
        replicas=tuple(view.number(stage, now) for stage in stages),
        tokens_per_second=view.scale(0).each
        * believed(record.tokens_per_second for record in view.live(0, now, PeerState.TRAINING)),
    )
