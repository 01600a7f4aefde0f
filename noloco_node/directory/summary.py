"""How far a swarm is, as its directory says: what a joiner is shown before it trains."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median, median_low

from noloco_node.directory.records import SERVING, DirectoryView, PeerRecord, PeerState
from noloco_node.telemetry.node_state import NodeSeen, seconds_to

CREDIBLE_STRENGTH = 8.0
"""A node counts at most for this many of the median one: what a record claims is only a claim. In the choice of a stage
it does so only if it has worked with this node; of others nothing beyond the median is believed."""


@dataclass(frozen=True, slots=True)
class SwarmSummary:
    """A swarm at one moment."""

    clock: float
    """Median clock of the replicas that train, in swarm tokens."""
    target_tokens: int
    replicas: tuple[int, ...]
    """Live replicas of each stage, joining and leaving ones included."""
    tokens_per_second: float
    """The tokens a second that the replicas of stage 0 claim together, each one's word `believed`."""

    @property
    def seconds_left(self) -> float | None:
        """Time to the target at this speed; None where nothing is known, or while a stage has no replica."""
        return seconds_to(self.target_tokens, self.clock, self.tokens_per_second) if all(self.replicas) else None


def believed(claimed: Iterable[float]) -> float:
    """The sum of what nodes claim, tokens/s.

    Each word is believed up to a multiple of the median of those that say anything.
    """
    said = [value for value in claimed if value > 0.0]
    return sum(min(value, CREDIBLE_STRENGTH * median_low(said)) for value in said)


def outlook_of(view: DirectoryView, now: float, target_tokens: int) -> SwarmSummary:
    """Read the view at DHT time `now`. Records are their owners' claims.

    The median of clocks bears a few false ones. So does the sum of speeds, in which each word counts for at most a
    multiple of the median.
    """
    stages = range(len(view.stages))
    clocks = [record.clock for stage in stages for record in view.live(stage, now, *SERVING)]
    return SwarmSummary(
        clock=median(clocks) if clocks else 0.0,
        target_tokens=target_tokens,
        replicas=tuple(view.number(stage, now) for stage in stages),
        tokens_per_second=view.scale(0).each
        * believed(record.tokens_per_second for record in view.live(0, now, PeerState.TRAINING)),
    )


def node_seen(record: PeerRecord, *, clock: float, against: float, answers: bool) -> NodeSeen:
    """A node by its record, whose clock has moved on to `clock`, beside one that stands at `against`. One that comes or
    rests says nothing of its clock."""
    shown, tells = record.shown, record.clock > 0.0 or record.state in SERVING
    return NodeSeen(
        peer_id=record.peer_id,
        stage=record.stage,
        state=record.shown_state,
        version=record.version,
        answers=answers,
        clock=clock if tells else None,
        lag=against - clock if tells else None,
        tokens_per_second=record.tokens_per_second,
        capacity=record.capacity,
        outer_steps_taken=record.outer_steps_taken,
        newcomer=record.newcomer,
        name=shown.name,
        tokens=shown.tokens,
        training_loss=shown.training_loss,
        validation_loss=shown.validation_loss,
        replica_divergence=shown.replica_divergence,
    )
