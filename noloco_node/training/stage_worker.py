"""One replica of one stage as the event loop sees it: microbatches, inner steps, the clock, and outer steps.

All changes of weights and clock happen on the compute thread, between two device operations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from noloco_node.config.run_spec import RunSpec
from noloco_node.outer.replica import OuterReplica
from noloco_node.outer.update import OuterRule
from noloco_node.training.compute_thread import ComputeThread, Priority
from noloco_node.training.schedule import learning_rate, share_of_batch
from noloco_node.training.stage_trainer import LossResult, Passage, StageTrainer, StepResult


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a replica stands. Written by the compute thread as a whole, so any thread may read it."""

    steps: int = 0
    """Inner steps taken."""
    tokens: int = 0
    """Tokens behind them."""
    clock: float = 0.0
    """Swarm tokens: own tokens × live replicas, averaged with partners at outer steps."""
    outer_rounds: int = 0
    """Outer steps committed."""
    snapshot_steps: int = 0
    """Inner steps at the snapshot of the last committed outer step."""
    snapshot_tokens: int = 0
    """Tokens at that snapshot."""

    @property
    def steps_since_outer(self) -> int:
        """Inner steps since the last committed snapshot."""
        return self.steps - self.snapshot_steps


@dataclass(frozen=True, slots=True)
class InnerReport:
    """One inner step and the state after it."""

    result: StepResult
    progress: Progress
    learning_rate: float
    live_replicas: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What an outer step works on. The weights themselves are in `OuterReplica.snapshot`."""

    progress: Progress
    learning_rate: float
    held_seconds: float

    @property
    def tokens(self) -> int:
        """Tokens behind Δ = θ − φ."""
        return self.progress.tokens - self.progress.snapshot_tokens


@dataclass(frozen=True, slots=True)
class Commit:
    """What applying an outer step did."""

    progress: Progress
    held_seconds: float
    inner_steps_meanwhile: int


class StageWorker:
    """The stage, its optimizer and its outer state behind an asynchronous face.

    `live_replicas` is set from the directory; `on_inner_step` is called on the compute thread after each inner step.
    """

    def __init__(
        self,
        spec: RunSpec,
        trainer: StageTrainer,
        thread: ComputeThread,
        on_inner_step: Callable[[InnerReport], None],
    ) -> None:
        self._spec = spec
        self._trainer = trainer
        self._thread = thread
        self._on_inner_step = on_inner_step
        self._credit = 0.0
        self.live_replicas = 1
        self.progress = Progress()
        rule = OuterRule(spec.outer.alpha, spec.outer.beta, spec.outer.effective_gamma, spec.outer.momentum)
        item = 2 if spec.outer.codec == "fp16" else 4
        self.outer = OuterReplica(
            rule,
            trainer.master.to("cpu", copy=True),
            chunk_elements=spec.limits.chunk_bytes // item,
            codec=spec.outer.codec,
        )

    @property
    def contract(self) -> str:
        """Hash of what two replicas must share to average: order, names, shapes, codec, chunking."""
        outer = self._spec.outer
        return self._trainer.layout.contract(outer.codec, outer.momentum, str(self._spec.limits.chunk_bytes))

    @property
    def live_versions(self) -> int:
        """Published weights that are current or held by a microbatch."""
        return self._trainer.live_versions

    def current_learning_rate(self) -> float:
        """The schedule at this replica's clock."""
        inner = self._spec.inner
        return learning_rate(
            self.progress.clock,
            peak=inner.learning_rate,
            minimum_ratio=inner.min_learning_rate_ratio,
            warmup=inner.warmup_tokens,
            target=inner.target_tokens,
        )

    async def forward(self, inputs: Tensor, passage: Passage, *, draw: bool = False) -> Tensor:
        """Activations for the next stage. `draw` marks a new microbatch of stage 0, which waits for all other work."""
        priority = Priority.DRAW if draw else Priority.FORWARD
        return await self._thread.run(priority, lambda: self._trainer.forward(inputs, passage))

    async def backward(self, passage: Passage, gradient: Tensor, loss_sum: float, tokens: int) -> Tensor | None:
        """Gradient of the passage's inputs; takes an inner step when this replica's share of the batch is reached."""

        def work() -> Tensor | None:
            result = self._trainer.backward(passage, gradient, loss_sum, tokens)
            self._step_if_due()
            return result

        return await self._thread.run(Priority.BACKWARD, work)

    async def loss(self, inputs: Tensor, labels: Tensor, *, draw: bool = False) -> LossResult:
        """Last stage: loss and input gradient; takes an inner step when due."""

        def work() -> LossResult:
            result = self._trainer.loss(inputs, labels)
            self._step_if_due()
            return result

        return await self._thread.run(Priority.DRAW if draw else Priority.FORWARD, work)

    async def evaluate(self, inputs: Tensor) -> Tensor:
        """Forward only."""
        return await self._thread.run(Priority.FORWARD, lambda: self._trainer.evaluate(inputs))

    async def evaluate_loss(self, inputs: Tensor, labels: Tensor) -> float:
        """Last stage, forward only: loss summed over tokens."""
        return await self._thread.run(Priority.FORWARD, lambda: self._trainer.evaluate_loss(inputs, labels))

    async def discard(self, passage: Passage) -> None:
        """Let go of a microbatch that will have no backward."""
        await self._thread.run(Priority.STEP, lambda: self._trainer.discard(passage))

    async def snapshot(self) -> Snapshot:
        """Copy the fast weights for an outer step, between two device operations."""

        def work() -> Snapshot:
            started = time.monotonic()
            self.outer.snapshot.copy_(self._trainer.master)
            return Snapshot(self.progress, self.current_learning_rate(), time.monotonic() - started)

        return await self._thread.run(Priority.STEP, work)

    async def commit(self, snapshot: Snapshot, *, scale: float, clock_shift: float) -> Commit:
        """Apply the open outer step: φ and δ replaced, θ ← θ + (φ_new − θ_snapshot), the clock shifted.

        The inner steps taken since the snapshot are kept, and Adam's state stays.
        """

        def work() -> Commit:
            started = time.monotonic()
            self._trainer.add_to_weights(self.outer.commit(scale))
            meanwhile = self.progress.steps - snapshot.progress.steps
            self.progress = replace(
                self.progress,
                clock=self.progress.clock + clock_shift,
                outer_rounds=self.progress.outer_rounds + 1,
                snapshot_steps=snapshot.progress.steps,
                snapshot_tokens=snapshot.progress.tokens,
            )
            return Commit(self.progress, time.monotonic() - started, meanwhile)

        return await self._thread.run(Priority.STEP, work)

    async def full_state(self) -> tuple[Progress, dict[str, Tensor]]:
        """One consistent copy of everything a late joiner needs: flat host tensors by name, and the progress."""

        def work() -> tuple[Progress, dict[str, Tensor]]:
            return self.progress, {
                "fast": self._trainer.master.to("cpu", copy=True),
                "slow": self.outer.slow.clone(),
                "momentum": self.outer.momentum.clone(),
                **self._trainer.optimizer_state(),
            }

        return await self._thread.run(Priority.STEP, work)

    async def load_full_state(self, clock: float, outer_rounds: int, state: Mapping[str, Tensor]) -> None:
        """Become a copy of a fellow: its state as `full_state()` gives it, its clock and round. Own counts start anew
        from where they are."""

        def work() -> None:
            self._trainer.load(state["fast"], state)
            self.outer.slow.copy_(state["slow"])
            self.outer.momentum.copy_(state["momentum"])
            here = self.progress
            self.progress = replace(
                here, clock=clock, outer_rounds=outer_rounds, snapshot_steps=here.steps, snapshot_tokens=here.tokens
            )

        await self._thread.run(Priority.STEP, work)

    def state_sizes(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Names, dtypes and shapes of `full_state()`: what a joiner expects to receive."""
        vector = (torch.float32, (self._trainer.layout.size,))
        names = ("fast", "slow", "momentum", "exp_avg", "exp_avg_sq")
        return {**dict.fromkeys(names, vector), "optimizer_steps": (torch.int64, ())}

    async def named_weights(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Copies of the slow and the fast weights by local parameter name."""
        _, state = await self.full_state()
        views = self._trainer.layout.views
        return views(state["slow"]), views(state["fast"])

    def _step_if_due(self) -> None:
        share = share_of_batch(self._spec.inner.global_batch_tokens, self.live_replicas, self._spec.limits.max_replicas)
        gathered = self._trainer.tokens_accumulated
        if gathered + self._credit < share:
            return
        self._credit = min(gathered + self._credit - share, share)
        live = self.live_replicas
        self.progress = replace(
            self.progress,
            steps=self.progress.steps + 1,
            tokens=self.progress.tokens + gathered,
            clock=self.progress.clock + gathered * live,
        )
        rate = self.current_learning_rate()  # of the clock after these tokens, so that the first step moves
        result = self._trainer.step(rate)
        self._on_inner_step(InnerReport(result, self.progress, rate, live))
