"""How far a swarm is, as its directory says: what a joiner is shown before it trains."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from noloco_node.directory.records import SERVING, DirectoryView, PeerState


@dataclass(frozen=True, slots=True)
class SwarmSummary:
    """A swarm at one moment."""

    clock: float
    """Median clock of the replicas that train, in swarm tokens."""
    target_tokens: int
    replicas: tuple[int, ...]
    """Live replicas of each stage, joining and leaving ones included."""
    tokens_per_second: float
    """What the replicas of stage 0 say they train, together."""

    @property
    def seconds_left(self) -> float | None:
        """Time to the target at this speed; None where nothing is known, or while a stage has no replica."""
        if self.tokens_per_second <= 0.0 or not all(self.replicas):
            return None
        return max(0.0, self.target_tokens - self.clock) / self.tokens_per_second


def outlook_of(view: DirectoryView, now: float, target_tokens: int) -> SwarmSummary:
    """Read the view at DHT time `now`. Records are their owners' claims: the median of clocks bears a few false ones,
    the sum of speeds does not."""
    stages = range(len(view.stages))
    clocks = [record.clock for stage in stages for record in view.live(stage, now, *SERVING)]
    return SwarmSummary(
        clock=median(clocks) if clocks else 0.0,
        target_tokens=target_tokens,
        replicas=tuple(view.number(stage, now) for stage in stages),
        tokens_per_second=view.scale(0).each
        * sum(record.tokens_per_second for record in view.live(0, now, PeerState.TRAINING)),
    )
