"""The books of a node as one event: what it trained, served, refused, sent and received so far."""

from __future__ import annotations

from collections.abc import Callable

from noloco_node.accounting.surroundings import surroundings
from noloco_node.aio import LoopLag
from noloco_node.config.run_spec import RunSpec
from noloco_node.directory.membership import Membership
from noloco_node.pipeline.messages import Ledger
from noloco_node.pipeline.passing import Downstream, PipelineServer
from noloco_node.pipeline.routing import RoutingBook
from noloco_node.pipeline.source import Origin
from noloco_node.placement.start_barrier import MissingStages
from noloco_node.telemetry.events import Account, Strangers, Warned, bytes_by_kind
from noloco_node.telemetry.state import Surroundings
from noloco_node.training.stage_worker import StageWorker
from noloco_node.transport.interface import Transport


class Books:
    """What a replica's parts have counted, brought together. `origin` is that of stage 0."""

    def __init__(
        self,
        spec: RunSpec,
        transport: Transport,
        membership: Membership,
        worker: StageWorker,
        server: PipelineServer,
        ledger: Ledger,
        missing: MissingStages,
        downstream: Downstream | None,
        book: RoutingBook,
        *,
        origin: Origin | None,
        emit: Callable[[Account | Warned], None],
    ) -> None:
        self._target = spec.inner.target_tokens
        self._transport = transport
        self._membership = membership
        self._worker = worker
        self._server = server
        self._ledger = ledger
        self._missing = missing
        self._downstream = downstream
        self._book = book
        self._origin = origin
        self._emit = emit
        self.lag = LoopLag()

    @property
    def in_hand(self) -> int:
        """Microbatches that this node holds: its own under way on stage 0, else those of others."""
        return self._server.pending if self._origin is None else self._origin.under_way

    def surroundings(self) -> Surroundings:
        """Whom this node sees, and what it holds."""
        known, clock = self._transport.acquaintances, self._worker.progress.clock
        in_hand, queued = self.in_hand, self._worker.queued
        return surroundings(self._membership, known, self._book, clock, in_hand=in_hand, queued=queued)

    def write(self) -> None:
        """The account of this moment, as an event, and a warning of each part of the text that could not be read since
        the last one."""
        for detail in self._origin.passed_over() if self._origin else ():
            self._emit(Warned(what="text_damaged", detail=detail))
        progress, ledger, traffic = self._worker.progress, self._ledger, self._transport.traffic
        conduct = self._transport.conduct
        self._emit(
            Account(
                clock=progress.clock,
                target=self._target,
                tokens=progress.tokens,
                drawn=ledger.drawn,
                trained=ledger.trained,
                dropped=ledger.dropped,
                held_at_end=self._origin.held if self._origin else len(ledger.waiting),
                put_back=ledger.put_back,
                retried=ledger.retried,
                repeated=ledger.repeated,
                served=ledger.served,
                refused={reason.value: count for reason, count in self._transport.refusals_given.items()},
                bytes_sent=bytes_by_kind(traffic.sent),
                bytes_received=bytes_by_kind(traffic.received),
                nodes_per_stage=self._membership.nodes_per_stage(),
                missing_stages=self._missing.stages,
                loop_lag_seconds=self.lag.take(),
                busy_seconds=self._worker.busy_seconds,
                busy_by_work=self._worker.busy_by_work,
                in_hand=self.in_hand,
                queued=self._worker.queued,
                hop_seconds=self._downstream and self._downstream.hop_seconds.distribution(),
                data_wait_seconds=self._origin.data_wait_seconds if self._origin else 0.0,
                directory_records=len(self._membership.introduced()),
                directory_age_seconds=self._membership.directory_age,
                text_slots=self._membership.text.counts if self._membership.text else {},
                device_memory=self._worker.device_memory,
                strangers=Strangers(
                    offences=dict(conduct.offences),
                    bans=dict(conduct.bans),
                    banned_now=conduct.banned_now,
                    audits=dict(self._downstream.auditor.findings) if self._downstream else {},
                    set_aside_now=self._downstream.set_aside_now if self._downstream else 0,
                    bounded={"activations": self._server.out_of_scale, **self._worker.bounded},
                ),
            )
        )
