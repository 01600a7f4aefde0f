"""What a node is doing, or what it waits for: never idle without a word."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from noloco_node import ambient
from noloco_node.directory.membership import Membership, too_few
from noloco_node.directory.records import SERVING, PeerState
from noloco_node.telemetry.events import Doing
from noloco_node.telemetry.words import as_many

IDLE_SECONDS = 10.0
"""A node is waiting after so many seconds without a trained token, and after the usual time of five inner steps. Two
reports of the same thing, with only its details changed, are as far apart: details are told no oftener than waits."""
USUAL_STEPS = 5

What = Literal[
    "joining", "downloading", "training", "waiting_for_work", "waiting_for_peers", "finishing", "draining", "paused"
]


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a node at one moment."""

    state: PeerState
    stage: int
    stages: int
    idle_seconds: float
    """Since the last token was trained here, or since the start."""
    step_seconds: float
    """What an inner step usually takes."""
    before: int
    """The number of live replicas of the stage before; on stage 0 those of its own stage."""
    after: int
    """The number of live replicas of the next stage; on the last stage those of its own."""
    in_hand: int
    """The number of microbatches that this node holds: on stage 0 its own under way, elsewhere other nodes'."""
    missing: Sequence[int] = ()
    """Stages that are waited for."""
    nodes: int = 0
    """Replicas of whatever stage that are there, this one included."""
    paused: Collection[int] = ()
    """Stages with a node that says that it is paused."""
    introduced: Collection[int] = ()
    """Stages with a node that says that it serves, whether it answers or not."""


def facts_of(
    membership: Membership, idle_seconds: float, step_seconds: float, in_hand: int, missing: Sequence[int]
) -> Facts:
    """The facts of this moment, the others as the directory says."""
    stage, stages = membership.stage, membership.stages
    return Facts(
        state=membership.state,
        stage=stage,
        stages=stages,
        idle_seconds=idle_seconds,
        step_seconds=step_seconds,
        before=membership.number(max(0, stage - 1), *SERVING),
        after=membership.number(min(stage + 1, stages - 1), *SERVING),
        in_hand=in_hand,
        missing=missing,
        nodes=sum(membership.replicas_per_stage()),
        paused=membership.paused(),
        introduced={each for each in range(stages) if membership.live(each, *SERVING)},
    )


def doing(facts: Facts) -> tuple[What, str]:
    """What the node does, and one line about it."""
    if facts.state is PeerState.DRAINING:
        return "draining", "leaving: finishing what is under way"
    if facts.state is PeerState.FINISHING:
        return "finishing", "its training is over: serving others, and averaging a last time"
    if not facts.missing and facts.idle_seconds <= max(IDLE_SECONDS, USUAL_STEPS * facts.step_seconds):
        return "training", "training"
    if facts.missing:
        return "waiting_for_peers", _wanted(facts, *facts.missing) + too_few(facts.nodes, facts.stages)
    last = facts.stage == facts.stages - 1
    if not last and not facts.after:
        return "waiting_for_peers", _wanted(facts, facts.stage + 1)
    if facts.stage > 0 and not facts.before:
        return "waiting_for_peers", _wanted(facts, facts.stage - 1)
    if facts.in_hand and not last:
        return "waiting_for_work", (
            f"answers from stage {facts.stage + 1}, which has {as_many(facts.after, 'replica')}: {facts.in_hand} "
            "microbatches are under way"
        )
    if facts.in_hand or facts.stage == 0:
        return "waiting_for_work", f"the device: {facts.in_hand} microbatches are in hand"
    return (
        "waiting_for_work",
        f"microbatches from stage {facts.stage - 1}, which has {as_many(facts.before, 'replica')}",
    )


def _wanted(facts: Facts, *stages: int) -> str:
    """What a node waits for that has no replica of these stages. One that is paused comes back by its owner's word."""
    why = "only paused nodes have it" if {*stages} <= {*facts.paused} else "none is known"
    if {*stages} <= {*facts.introduced}:
        why = "those that are known have not answered this node"
    return f"a replica of stage {', '.join(map(str, stages))}: {why}"


class Activity:
    """Follows what a node does and emits it when it changes."""

    def __init__(self, emit: Callable[[Doing], None]) -> None:
        self._emit = emit
        self._began = ambient.monotonic()
        self._said: Doing | None = None

    def idle_seconds(self, last_trained: float) -> float:
        """Since the node last trained (monotonic seconds, 0 before the first time), or since the watch began."""
        return ambient.monotonic() - max(self._began, last_trained)

    def say(self, what: What, detail: str) -> None:
        """The node does this now."""
        now, said = ambient.wall(), self._said
        if said is not None and said.what == what:
            if said.detail == detail or 0.0 <= now - said.time < IDLE_SECONDS:
                return
            since = said.since
        else:
            since = now
        self._said = Doing(time=now, what=what, detail=detail, since=since)
        self._emit(self._said)
