"""The books of a node as one event: what it trained, served, refused, sent and received so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from noloco_node import ambient
from noloco_node.aio import LoopLag
from noloco_node.directory.live_estimate import is_there
from noloco_node.directory.membership import Membership
from noloco_node.directory.records import PeerRecord, PeerState
from noloco_node.directory.summary import node_seen
from noloco_node.identity.peer_id import PeerId
from noloco_node.participant import ReplicaContext
from noloco_node.peers.scorecard import PeerStats
from noloco_node.pipeline.participant import Pipeline
from noloco_node.pipeline.routing import LoadBalancer
from noloco_node.placement.arrival import MissingStages
from noloco_node.telemetry.events import Account, Strangers, Warned
from noloco_node.telemetry.node_state import MOST_NODES, NodeSeen, Surroundings
from noloco_node.transport.interface import DIRECTORY, RELAYED


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
