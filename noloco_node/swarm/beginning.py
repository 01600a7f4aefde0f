"""Where a node's first state comes from: its own checkpoint, a fellow, or the seed. A pure decision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from noloco_node.config.run_spec import RunSpec
from noloco_node.errors import ExitCode, UserError
from noloco_node.swarm.directory import PeerRecord, PeerState

BEGINNINGS = {
    "checkpoint": "its own checkpoint",
    "peer": "a fellow's state",
    "seed": "the first weights, which the run's seed gives",
}


@dataclass(frozen=True, slots=True)
class Beginning:
    """What a node starts from, and why, for a person."""

    source: Literal["checkpoint", "peer", "seed", "nowhere"]
    """`nowhere`: nobody trains any more, and this node has nothing to add."""
    why: str


def where_to_begin(own_clock: float | None, others: Sequence[PeerRecord], stage: int, max_lag: float) -> Beginning:
    """The precedence: the own checkpoint unless the swarm is more than `max_lag` tokens beyond it; else a fellow's
    state; else the first weights, which the run's seed gives.

    `own_clock` is the checkpoint's (None: there is none), `others` are the live records of all stages without the own.
    How far the swarm is, is the median of the fellows' recorded clocks, or of everyone's where no fellow lives.
    """
    under_way = any(record.outer_rounds for record in others)
    if not under_way:
        nobody = "nobody else lives" if not others else "nobody else is past the first outer round"
        if own_clock is None:
            return Beginning("seed", f"there is no checkpoint here, and {nobody}")
        return Beginning("checkpoint", nobody)
    fellows = [record.clock for record in others if record.stage == stage]
    ahead = median(fellows or [record.clock for record in others]) - (own_clock or 0.0)
    if own_clock is not None and ahead <= max_lag:
        return Beginning("checkpoint", f"the swarm is {max(0.0, ahead):,.0f} tokens beyond it, {max_lag:,} are allowed")
    if not any(record.state is PeerState.TRAINING for record in others):
        return Beginning("nowhere", "nobody trains any more")
    if own_clock is None:
        return Beginning("peer", "there is no checkpoint here, and the swarm is past its first outer round")
    if fellows:
        return Beginning("peer", f"the swarm is {ahead:,.0f} tokens beyond the checkpoint, {max_lag:,} are allowed")
    return Beginning("checkpoint", f"the swarm is {ahead:,.0f} tokens beyond it, but no other node has stage {stage}")


def run_has_ended(spec: RunSpec) -> UserError:
    """The error for a node that comes when nobody trains any more."""
    return UserError(
        ExitCode.NO_DONOR,
        f"run {spec.run_id[:8]} ({spec.name}) has reached its end: nobody trains any more",
        "start a new run, with another run.name or a higher run.inner.target_tokens",
    )
