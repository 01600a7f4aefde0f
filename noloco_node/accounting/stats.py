"""What a node tells of itself: what it does or waits for, never idle without a word, and its books as one event."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from noloco_node import ambient
from noloco_node.aio import LoopLag
from noloco_node.directory.live_estimate import is_there
from noloco_node.directory.membership import Membership, too_few
from noloco_node.directory.records import SERVING, PeerRecord, PeerState
from noloco_node.directory.summary import node_seen
from noloco_node.identity.peer_id import PeerId
from noloco_node.participant import ReplicaContext
from noloco_node.peers.scorecard import PeerStats
from noloco_node.pipeline.participant import Pipeline
from noloco_node.pipeline.routing import LoadBalancer
from noloco_node.placement.arrival import MissingStages
from noloco_node.telemetry.events import Account, Doing, Strangers, Warned
from noloco_node.telemetry.node_state import FEW_STEPS, MOST_NODES, NodeSeen, Surroundings
from noloco_node.telemetry.words import as_many
from noloco_node.transport.interface import DIRECTORY, RELAYED

IDLE_SECONDS = 10.0
"""A node is waiting after so many seconds without a trained token, and after the usual time of five inner steps. Two
reports of the same thing, with only its details changed, are as far apart: details are told no oftener than waits."""
CUT_OFF = "; none of the peers that have answered does any more: THIS MACHINE SEEMS CUT OFF, or all others have left"

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
    deserted: bool = False
    """Peers have answered this node, and none does any more."""


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
        deserted=membership.deserted,
    )


def doing(facts: Facts) -> tuple[What, str]:
    """What the node does, and one line about it."""
    if facts.state is PeerState.DRAINING:
        return "draining", "leaving: finishing what is under way"
    if facts.state is PeerState.FINISHING:
        return "finishing", "its training is over: serving others, and averaging a last time"
    if not facts.missing and facts.idle_seconds <= max(IDLE_SECONDS, FEW_STEPS * facts.step_seconds):
        return "training", "training alone" + CUT_OFF if facts.deserted else "training"
    if facts.missing:
        few = "" if facts.deserted else too_few(facts.nodes, facts.stages)
        return "waiting_for_peers", _wanted(facts, *facts.missing) + few
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
    return f"a replica of stage {', '.join(map(str, stages))}: {why}{CUT_OFF * facts.deserted}"


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
            since = now if what == "training" else said.since
        else:
            since = now
        self._said = Doing(time=now, what=what, detail=detail, since=since)
        self._emit(self._said)


class NodeStats:
    """What a replica's participants have counted, brought together."""

    def __init__(
        self, context: ReplicaContext, membership: Membership, pipeline: Pipeline, missing: MissingStages
    ) -> None:
        self._target = context.spec.inner.target_tokens
        self._transport = context.transport
        self._worker = context.worker
        self._emit = context.emit
        self._membership = membership
        self._pipeline = pipeline
        self._missing = missing
        self.lag = LoopLag()

    def surroundings(self) -> Surroundings:
        """The peers that this node sees, and what it holds."""
        known, clock = self._transport.peer_stats, self._worker.progress.clock
        in_hand, queued = self._pipeline.in_hand, self._worker.queued
        return surroundings(self._membership, known, self._pipeline.balancer, clock, in_hand=in_hand, queued=queued)

    def write(self) -> None:
        """Write the account of this moment, as an event. It also warns of each part of the text that could not be read
        since the last one."""
        progress, traffic, conduct = self._worker.progress, self._transport.traffic, self._transport.conduct
        pipeline, ledger, downstream = self._pipeline, self._pipeline.ledger, self._pipeline.downstream
        for detail in pipeline.passed_over():
            self._emit(Warned(what="text_damaged", detail=detail))
        self._emit(
            Account(
                clock=progress.clock,
                target=self._target,
                tokens=progress.tokens,
                drawn=ledger.drawn,
                trained=ledger.trained,
                dropped=ledger.dropped,
                held_at_end=pipeline.held,
                requeued=ledger.requeued,
                retried=ledger.retried,
                repeated=ledger.repeated,
                served=ledger.served,
                refused={reason.value: count for reason, count in self._transport.refusals_given.items()},
                bytes_sent=_bytes_by_kind(traffic.sent),
                bytes_received=_bytes_by_kind(traffic.received),
                bytes_nearby=traffic.nearby,
                nodes_per_stage=self._membership.nodes_per_stage(),
                missing_stages=self._missing.stages,
                loop_lag_seconds=self.lag.take(),
                busy_seconds=self._worker.busy_seconds,
                busy_by_work=self._worker.busy_by_work,
                in_hand=pipeline.in_hand,
                queued=self._worker.queued,
                hop_seconds=downstream and downstream.hop_seconds.distribution(),
                data_wait_seconds=pipeline.data_wait_seconds,
                directory_records=len(self._membership.others()),
                directory_age_seconds=self._membership.directory_age,
                text_slots=self._membership.text.counts if self._membership.text else {},
                device_memory=self._worker.device_memory,
                strangers=Strangers(
                    offences=dict(conduct.offences),
                    bans=dict(conduct.bans),
                    banned_now=conduct.banned_now,
                    audits=dict(downstream.auditor.findings) if downstream else {},
                    set_aside_now=pipeline.balancer.set_aside_now,
                    no_room=dict(self._membership.no_room),
                    bounded={"activations": pipeline.server.out_of_scale, **self._worker.bounded},
                ),
            )
        )


def _bytes_by_kind(by_method: Mapping[str, int]) -> dict[str, int]:
    """Traffic by what it carries instead of by method: microbatches, exchange, state (copies of it too), directory,
    relayed, other."""
    kinds = {"microbatch": "microbatches", "outer": "exchange", "state": "state", "copy": "state"}
    kinds |= {DIRECTORY: DIRECTORY, RELAYED: RELAYED}
    totals: dict[str, int] = {}
    for method, count in by_method.items():
        kind = kinds.get(method.split(".")[0], "other")
        totals[kind] = totals.get(kind, 0) + count
    return totals


def surroundings(
    membership: Membership,
    known: PeerStats,
    balancer: LoadBalancer,
    clock: float,
    *,
    in_hand: int,
    queued: int,
) -> Surroundings:
    """The surroundings of a node whose clock stands at `clock`, at this moment."""
    records = membership.others()
    there = [record for record in records if is_there(known, record)]
    replicas = Counter(record.stage for record in there if record.state is PeerState.TRAINING)
    replicas[membership.stage] += membership.state is PeerState.TRAINING
    answering = {record.peer_id for record in there}
    shown = [*there, *(record for record in records if record.peer_id not in answering)][:MOST_NODES]

    def peer_of(record: PeerRecord) -> NodeSeen:
        peer = PeerId(record.peer_id)
        training = round(replicas[record.stage] * membership.scale(record.stage))
        present = membership.present_clock(record, training)
        under_way, load = balancer.burden_of(peer)
        card = known.of(peer)
        reasons = (
            card.left_alone(ambient.monotonic()),
            "it said a moment ago that it is full" * balancer.is_full(peer),
        )
        own = {"together": card.tokens, "under_way": under_way, "load": load}
        made = node_seen(record, clock=present, against=clock, answers=record.peer_id in answering)
        return made.model_copy(update={**own, "left_alone": "; ".join(filter(None, reasons))})

    peers = tuple(peer_of(record) for record in sorted(shown, key=lambda record: (record.stage, record.peer_id)))
    return Surroundings(peers, len(records), in_hand, queued)
