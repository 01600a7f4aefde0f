"""The pipeline in the life of one replica: it draws microbatches or answers them, and sends them on."""

from __future__ import annotations

from noloco_node import ambient
from noloco_node.data.samples import Position, Samples
from noloco_node.directory.clocks import FarBehind
from noloco_node.participant import Participant, ReplicaContext
from noloco_node.pipeline.messages import Ledger, Sample
from noloco_node.pipeline.microbatch import Downstream, MicrobatchSource
from noloco_node.pipeline.routing import LoadBalancer, patience
from noloco_node.pipeline.server import PipelineServer
from noloco_node.training.trainer import StageFacts
from noloco_node.transport.interface import Withdraw


class Pipeline(Participant):
    """What one replica of `stage` has to do with microbatches. `samples` is the text of stage 0; `ledger` that of the
    node, which outlives its replicas."""

    def __init__(
        self, context: ReplicaContext, stage: StageFacts, samples: Samples | None, ledger: Ledger, behind: FarBehind
    ) -> None:
        assert (samples is not None) == context.cut.is_first, "stage 0, and only it, has the text"
        spec, transport, rng = context.spec, context.transport, context.rng
        self._context = context
        self._samples = samples
        self.ledger = ledger
        self.balancer = LoadBalancer(spec.pipeline.routing, rng, ambient.monotonic, transport.peer_stats.book)
        self.downstream = (
            None
            if context.cut.is_last
            else Downstream(spec, context.stage, transport, self.balancer, ledger, rng, router=stage.router)
        )
        self.server = PipelineServer(context, stage, self.downstream, ledger, behind)
        in_flight = context.settings.in_flight
        self.origin = (
            MicrobatchSource(spec, context.worker, self.downstream, ledger, samples, rng, in_flight)
            if samples
            else None
        )

    def serve(self) -> tuple[Withdraw, ...]:
        """Register the methods; stage 0 answers no microbatch."""
        return (self.server.serve(self._context.transport),) if self.origin is None else ()

    def open(self) -> None:
        self.server.accepting = True

    def shut(self) -> None:
        """Accept nothing from now on; what is under way goes on."""
        self.server.accepting = False

    async def run(self) -> None:
        """Audit what the next stage answers."""
        if self.downstream is not None:
            await self.downstream.auditor.run()

    @property
    def in_hand(self) -> int:
        """The microbatches that this node holds: on stage 0 its own under way, elsewhere other nodes'."""
        return self.server.pending if self.origin is None else self.origin.under_way

    @property
    def under_way(self) -> bool:
        return self.in_hand > 0

    def hand_back(self) -> None:
        self.server.hand_back()

    def close(self) -> None:
        """Keep in the ledger where the text goes on."""
        self.ledger.walk = self.walk_position()

    def walk_position(self) -> Position:
        """Where the next sample comes from, also on a later stage: this node may return to stage 0."""
        return self._samples.position() if self._samples else self.ledger.walk

    @property
    def held_samples(self) -> list[Sample]:
        """Samples drawn and neither trained nor dropped; on a later stage those from this node's time at stage 0."""
        return self.origin.held_samples if self.origin else list(self.ledger.waiting)

    @property
    def held(self) -> int:
        return self.origin.held if self.origin else len(self.ledger.waiting)

    @property
    def data_wait_seconds(self) -> float:
        return self._samples.waited_seconds() if self._samples else 0.0

    def passed_over(self) -> list[str]:
        """What of the text could not be read since it was asked for last, for a person."""
        return self._samples.passed_over() if self._samples else []

    @property
    def next_stage_shut(self) -> bool:
        """Whether nothing that this replica sends gets through to its next stage, for long enough to call it lost."""
        if self.downstream is None:
            return False
        spec = self._context.spec
        behind = spec.stages - self._context.stage - 2
        return self.downstream.circuit_breaker.lasts(
            patience(spec.limits.record_seconds, spec.pipeline.budget_seconds, behind)
        )
