"""Where a node's first state comes from: its own checkpoint, a stage peer, or the seed. A pure decision."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import median, median_low
from typing import Literal

from noloco_node.config.run_spec import RunSpec
from noloco_node.directory.records import SERVING, PeerRecord, PeerState
from noloco_node.errors import ExitCode, UserError

BEGINNINGS = {
    "checkpoint": "its own checkpoint",
    "peer": "a stage peer's state",
    "seed": "the run's first weights",
}

ASK_SECONDS = 10.0
"""Nodes that the directory shows are asked again for so many seconds while none of them answers."""
DOUBT_SECONDS = 30.0
"""They are asked for so many seconds in case of doubt: a serving node answers and its record is missing, or most that
have a say are not past the first outer step."""
HEARD = (*SERVING, PeerState.JOINING)
"""Nodes in these states have a say if they answer."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """What a node starts from, and why, for a person."""

    source: Literal["checkpoint", "peer", "seed", "nowhere"]
    """`nowhere`: nobody trains any more, and this node has nothing to add."""
    why: str
    doubtful: bool = False
    """Most nodes that have a say are not past the first outer step. If no stage peer gives its state, the run has only
    just begun."""


def where_to_begin(
    own_clock: float | None,
    others: Sequence[PeerRecord],
    stage: int,
    max_lag: float,
    *,
    joined: bool = True,
    entrances: Collection[str] = (),
    over: str = "",
) -> Beginning:
    """The precedence: the own checkpoint, unless the swarm is more than `max_lag` tokens beyond it; then a stage peer's
    state; then the run's first weights.

    `own_clock` is the checkpoint's (None: there is none). `others` are the records of answering nodes of all stages,
    without the own. `joined`: it was let in by others. If it was not, the run begins with it, and nobody can tell it
    that it is over. `entrances`: the peers that it was told to join. Those of them that serve a stage say whether the
    run has just begun. Anybody else may answer under as many keys as it likes.

    `over` says how this node knows that the run has come to its end, if it does. Then it begins only beside others that
    go on all the same. Those that only join do not: several that come home at once would begin it again together.

    How far the swarm is, is the median of the stage peers' recorded clocks, or of all clocks if no stage peer lives.
    """
    others = [record for record in others if record.state in HEARD]
    serving = [record for record in others if record.state in SERVING]
    if over and joined and all(record.finished or record.state is PeerState.FINISHING for record in serving):
        return Beginning("nowhere", f"{over}, and nobody that answers trains any more")
    if not any(record.outer_steps_taken > 0 for record in serving):
        nobody = "nobody else answers" if not others else "nobody else that answers is past the first outer step"
        if own_clock is not None:
            return Beginning("checkpoint", nobody)
        return Beginning("seed", f"there is no checkpoint here, and {nobody}")
    asked = [record for record in serving if record.peer_id in entrances] or serving
    doubtful = not joined or 2 * sum(record.outer_steps_taken > 0 for record in asked) <= len(asked)
    stage_peers = [record.clock for record in serving if record.stage == stage]
    ahead = median(stage_peers or [record.clock for record in serving]) - (own_clock or 0.0)
    if own_clock is not None and ahead <= max_lag:
        return Beginning("checkpoint", f"the swarm is {max(0.0, ahead):,.0f} tokens beyond it, {max_lag:,} are allowed")
    if joined and all(record.state is PeerState.FINISHING for record in others):
        return Beginning("nowhere", "nobody trains any more")
    if own_clock is None:
        return Beginning("peer", "there is no checkpoint here, and the swarm is past its first outer step", doubtful)
    if stage_peers:
        why = f"the swarm is {ahead:,.0f} tokens beyond the checkpoint, {max_lag:,} are allowed"
        return Beginning("peer", why, doubtful)
    return Beginning("checkpoint", f"the swarm is {ahead:,.0f} tokens beyond it, but no other node has stage {stage}")


def is_left_behind(own_clock: float, others: Sequence[PeerRecord], stage: int, max_lag: float) -> bool:
    """Tell whether at least half of others train more than `max_lag` tokens beyond a checkpoint and none serves its
    stage. What they keep of that may be further than the checkpoint."""
    serving = [record for record in others if record.state in SERVING]
    if not any(record.outer_steps_taken > 0 for record in serving) or any(record.stage == stage for record in serving):
        return False
    return median_low(record.clock for record in serving) - own_clock > max_lag


def lacks_first_weights(spec: RunSpec) -> bool:
    """Whether the run began with weights that this node has no folder of: it must not make up others."""
    return spec.model.fingerprint is not None and spec.model.from_pretrained is None


def no_first_weights(spec: RunSpec, stage: int) -> UserError:
    """The end of a node that would have to begin with weights that it does not have."""
    return UserError(
        ExitCode.NO_STATE_SOURCE,
        f"run '{spec.name}' begins with the weights {spec.model.fingerprint}, nobody gives a state of stage {stage}, "
        "and this node has no folder of those weights",
        "get the folder from the run's owner, and say where it lies with --set "
        "run.model.from_pretrained=FOLDER; a stage that somebody serves can be joined without it",
    )
