"""One replica of one stage as the event loop sees it: microbatches, inner steps, the clock, and outer steps.

All changes of weights and clock happen on the compute thread, between two device operations.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from noloco_node import ambient
from noloco_node.config.run_spec import RunSpec
from noloco_node.model.router import Router
from noloco_node.outer.replica import OuterReplica
from noloco_node.training.compute_device import memory_of_device
from noloco_node.training.compute_thread import OWN, Compute, DeviceLoad, DeviceWaits, Priority, QueueTurn
from noloco_node.training.frozen_state import (
    GRADIENT,
    MOMENTUM,
    TRAIL,
    FrozenState,
    Sizes,
    sizes_of,
)
from noloco_node.training.host_copies import DeviceWatch, UnderWay
from noloco_node.training.progress import (
    LastTrained,
    Progress,
    credit_after_step,
    learning_rate,
    share_of_batch,
    tied_pace,
)
from noloco_node.training.trainer import ForwardContext, LossResult, StepResult, Trainer

T = TypeVar("T")


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
    """For which training stood still. On a GPU: until the copy was given to it, which crosses beside the training."""


@dataclass(frozen=True, slots=True)
class Commit:
    """What applying an outer step did."""

    progress: Progress
    held_seconds: float
    """For which the device was kept from training, a wait for the snapshot's copy in it."""
    inner_steps_meanwhile: int


@dataclass(frozen=True, slots=True)
class CheckpointState:
    """Everything of one moment that a worker needs to go on as if never interrupted, as `FrozenState` gave it."""

    progress: Progress
    credit: float
    """Tokens by which earlier inner steps exceeded their share of the batch."""
    tokens_accumulated: int
    loss_accumulated: float
    tensors: dict[str, Tensor]
    """As `StageWorker.joiner_state()` gives them, and the accumulated `gradient` where there is any."""


class OnHost(Protocol):
    """Runs host arithmetic off the event loop and off the compute thread."""

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]: ...


class StageWorker:
    """The stage, its optimizer and its outer state behind an asynchronous face.

    `live_replicas` is set from the directory; `on_inner_step` is called on the compute thread after each inner step.
    """

    def __init__(
        self,
        spec: RunSpec,
        trainer: Trainer,
        outer: OuterReplica,
        thread: Compute,
        on_inner_step: Callable[[InnerReport], None],
    ) -> None:
        self._spec, self._max_lag = spec, spec.max_lag_tokens
        self._trainer = trainer
        self.outer = outer
        self._thread = thread
        self._on_inner_step = on_inner_step
        self._credit = 0.0
        self.live_replicas = 1
        self.origins_lead: float | None = None
        """How far ahead of this clock the origins are whose microbatches are trained here (tokens), as they say; None
        on stage 0 and where it is not known. Set from the event loop like `live_replicas`."""
        self.copied_at = -math.inf
        """Monotonic seconds at which it became a copy of a stage peer: leads that were heard of before are void."""
        self.shifted_at = -math.inf
        """Monotonic seconds at which its clock last moved otherwise than by counting."""
        self.last_trained = LastTrained(0, 0.0)
        """As of the last gradient that was added, with the inner step where one was due. One value, since others read
        it while the device's thread works."""
        self.progress = Progress()
        self._frozen: tuple[FrozenState, ...] = ()
        """States that are being read."""
        self._stepping = asyncio.Lock()
        """Held while an outer step is in φ and not in θ yet: no state is frozen then."""

    @property
    def contract(self) -> str:
        """Hash of what two replicas must share to average: order, names, shapes, codec, momentum, chunks."""
        outer = self._spec.outer
        return self._trainer.layout.contract(outer.codec, outer.momentum, f"{self._spec.limits.chunk_bytes} bytes")

    def let_go(self) -> None:
        """The replica has left: its vectors are freed now, and not when a collector of cycles comes by. Nothing may be
        asked of the worker any more but where it stood."""
        self._frozen = ()
        del self._trainer, self.outer

    @property
    def router(self) -> Router | None:
        """How the model's routers are trained; None where it has none, or where they are not."""
        return self._trainer.router

    @property
    def live_versions(self) -> int:
        """Published weights that are current or held by a microbatch."""
        return self._trainer.versions.live

    @property
    def trained_tokens(self) -> int:
        """Tokens behind all gradients so far, those that no inner step has used yet among them."""
        return self.progress.tokens + self._trainer.tokens_accumulated

    @property
    def busy_seconds(self) -> float:
        """Time that the device has worked, for this worker and those before it on its thread."""
        return self._thread.busy_seconds

    @property
    def busy_by_work(self) -> dict[str, float]:
        """`busy_seconds` by what the device worked on: step, backward, forward, draw."""
        return self._thread.busy_by_work

    @property
    def device_memory(self) -> dict[str, int]:
        """Bytes of the GPU: allocated and reserved by this process, free and total; empty for the processor."""
        return memory_of_device(self._trainer.device)

    @property
    def queued(self) -> int:
        return self._thread.waiting

    @property
    def load(self) -> DeviceLoad:
        return self._thread.load

    @property
    def bounded(self) -> dict[str, int]:
        return self._trainer.bounded

    @property
    def tokens_missing(self) -> float:
        share = share_of_batch(self._spec.inner.global_batch_tokens, self.live_replicas)
        return share - self._credit - self._trainer.tokens_accumulated

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

    async def forward(
        self,
        inputs: Tensor,
        passage: ForwardContext,
        *,
        draw: bool = False,
        turn: QueueTurn = OWN,
        waits: DeviceWaits | None = None,
    ) -> Tensor:
        """Activations [B, T, width] for the next stage, of `inputs`: token ids [B, T] at stage 0, else activations of
        that shape. `draw` marks a new microbatch of stage 0, which waits for all other work; `turn` says on whose
        account others' goes, `waits` is told what it waits."""
        priority = Priority.DRAW if draw else Priority.FORWARD
        copies = self._trainer.copies

        def work() -> Tensor | UnderWay[Tensor]:
            return copies.late(lambda: self._trainer.forward(inputs, passage))

        return await self._thread.run(priority, work, turn, waits, copies.ahead(inputs))

    async def backward(
        self,
        passage: ForwardContext,
        gradient: Tensor,
        loss_sum: float,
        tokens: int,
        *,
        source: str = "",
        scale: float | None = None,
        chosen: Sequence[int] = (),
        waits: DeviceWaits | None = None,
    ) -> Tensor | None:
        """Gradient [B, T, width] of the passage's inputs, None on stage 0. `gradient` [B, T, width] is that of its
        outputs as the peer `source` gave it back, of root mean square `scale` where that is known. `chosen` is how
        often all stages chose each expert, `waits` as in `forward`. Takes an inner step when the share is reached."""

        def work() -> Tensor | None:
            self._free(GRADIENT)
            given = passage, gradient, loss_sum, tokens
            result = self._trainer.backward(*given, source=source, scale=scale, chosen=chosen)
            self._count_gradient()
            return result

        copies = self._trainer.copies
        return await self._thread.run(Priority.BACKWARD, lambda: copies.late(work), OWN, waits, copies.ahead(gradient))

    async def loss(
        self,
        inputs: Tensor,
        labels: Tensor,
        ids: Tensor | None = None,
        *,
        draw: bool = False,
        source: str = "",
        turn: QueueTurn = OWN,
        chosen: Sequence[int] = (),
        waits: DeviceWaits | None = None,
    ) -> LossResult:
        """Last stage: loss and gradient of `inputs` [B, T, width], or ids [B, T] where it is the only stage, that the
        peer `source` sent. `labels` are int [B, T], with marks where documents begin. `chosen` is how often the stages
        before chose each expert, `ids` as a passage has them, `waits` as in `forward`. Takes an inner step when due."""

        def work() -> LossResult:
            self._free(GRADIENT)
            result = self._trainer.loss(inputs, labels, ids, source=source, chosen=chosen)
            self._count_gradient()
            return result

        priority, copies = Priority.DRAW if draw else Priority.FORWARD, self._trainer.copies
        return await self._thread.run(priority, lambda: copies.late(work), turn, waits, copies.ahead(inputs, labels))

    async def evaluate(
        self, inputs: Tensor, positions: Tensor | None = None, turn: QueueTurn = OWN, *, ids: Tensor | None = None
    ) -> Tensor:
        """Forward only, with shapes as in `forward`; `positions` and `ids` as a passage has them."""
        return await self._thread.run(Priority.FORWARD, lambda: self._trainer.evaluate(inputs, positions, ids), turn)

    async def evaluate_loss(
        self, inputs: Tensor, labels: Tensor, turn: QueueTurn = OWN, *, ids: Tensor | None = None
    ) -> float:
        """Last stage, forward only, with shapes as in `loss`: loss summed over tokens."""
        return await self._thread.run(Priority.FORWARD, lambda: self._trainer.evaluate_loss(inputs, labels, ids), turn)

    async def discard(self, passage: ForwardContext) -> None:
        """Let go of a microbatch that will have no backward."""
        await self._thread.run(Priority.STEP, lambda: self._trainer.discard(passage))

    async def snapshot(self) -> Snapshot:
        """Copy the fast weights for an outer step, as they are between two device operations. A device with memory of
        its own works on meanwhile."""

        def work() -> tuple[Snapshot, Callable[[], None] | None]:
            started = ambient.monotonic()
            under_way = self._trainer.begin_copy(self.outer.snapshot)
            held = ambient.monotonic() - started
            return Snapshot(self.progress, self.current_learning_rate(), held), under_way

        snapshot, under_way = await self._thread.run(Priority.STEP, work)
        if under_way is not None:
            await ambient.elsewhere(under_way)
        return snapshot

    async def commit(
        self, snapshot: Snapshot, *, scale: float, clock_shift: float, on_host: OnHost = ambient.elsewhere
    ) -> Commit:
        """Apply the open outer step: φ and δ replaced, θ ← θ + (φ_new − θ_snapshot), the clock shifted.

        The inner steps taken since the snapshot are kept, and the optimizer's state stays. All but the change of θ is
        done beside the training, by `on_host`.
        """

        def step() -> Tensor:
            self._free("slow", MOMENTUM, TRAIL)
            return self._trainer.bring(self.outer.commit(scale))

        async with self._stepping:
            correction = await on_host(step)
            progress, watch = await self._thread.run(
                Priority.STEP, lambda: self._apply(snapshot, correction, clock_shift)
            )
        return Commit(progress, await on_host(watch.seconds), progress.steps - snapshot.progress.steps)

    def _apply(self, snapshot: Snapshot, correction: Tensor, clock_shift: float) -> tuple[Progress, DeviceWatch]:
        watch = self._trainer.copies.watch()
        self._free("fast")
        self._trainer.add_to_weights(correction)
        self.progress = self.progress.after_outer_step(snapshot.progress, clock_shift)
        self.shifted_at = ambient.monotonic()
        watch.stop()
        return self.progress, watch

    @asynccontextmanager
    async def frozen(self, *names: str) -> AsyncGenerator[FrozenState]:
        """The state as it is between two device operations, or the vectors of it with these names, to be read in this
        block. Without names it is a checkpoint's: the gathered gradient is there if there is any.

        The block begins in the same turn of the event loop in which it would have learnt of every microbatch that is in
        the state, and of none that is not: what it then reads of its books belongs to the state.
        """
        state = FrozenState()

        def work() -> None:
            vectors = self._vectors()
            if names:
                vectors = {name: vectors[name] for name in names}
            elif not self._trainer.tokens_accumulated:
                del vectors[GRADIENT]
            state.progress, state.credit = self.progress, self._credit
            state.tokens_accumulated = self._trainer.tokens_accumulated
            state.loss_accumulated = self._trainer.loss_accumulated
            state.freeze(vectors, self._trainer.copies.piece_to_host)
            self._frozen = (*self._frozen, state)

        try:
            async with self._stepping:
                await self._thread.run(Priority.STEP, work)
            yield state
        finally:
            state.leave_alone()

    def _vectors(self) -> dict[str, Sequence[tuple[int, Tensor]]]:
        """What a state is made of, in the order in which it is read: what changes soonest comes first."""
        vectors: dict[str, Sequence[tuple[int, Tensor]]] = dict(self._trainer.state_vectors())
        vectors["slow"] = [(0, self.outer.slow)]
        if self.outer.momentum is not None:
            vectors[MOMENTUM] = [(0, self.outer.momentum)]
        if self.outer.trail is not None:
            vectors[TRAIL] = [(0, self.outer.trail)]
        return vectors

    def _free(self, *names: str) -> None:
        """Vectors of these names are about to be changed; none named: all."""
        if self._frozen:
            self._frozen = tuple(state for state in self._frozen if not state.thawed)
            for state in self._frozen:
                state.free(names or state.sizes)

    async def _copies(self, *names: str) -> tuple[Progress, dict[str, Tensor]]:
        async with self.frozen(*names) as state:
            return state.progress, await ambient.elsewhere(state.collect)

    async def joiner_state(self) -> tuple[Progress, dict[str, Tensor]]:
        """One consistent copy of everything a late joiner needs: flat host tensors by name, and the progress."""
        return await self._copies(*self.state_sizes())

    async def slow_weights(self) -> tuple[Progress, Tensor]:
        """A copy of the slow weights, flat fp32 on the host, and the progress that they belong to."""
        progress, state = await self._copies("slow")
        return progress, state["slow"]

    async def load_slow_weights(self, clock: float, outer_rounds: int, weights: Tensor) -> None:
        """Begin anew at these slow weights (flat, host): fast weights equal to them, all momenta and moments zero."""

        def state() -> dict[str, Tensor]:
            state = {name: torch.zeros(size) for name, size in self._trainer.moment_sizes.items()}
            return state | dict.fromkeys(("fast", "slow"), weights.float()) | {"optimizer_steps": torch.tensor(0)}

        await self.load_full_state(clock, outer_rounds, await ambient.elsewhere(state))

    async def load_full_state(self, clock: float, outer_rounds: int, state: Mapping[str, Tensor]) -> None:
        """Become a copy of a stage peer: its state as `joiner_state()` gives it, its clock and round. Own counts go
        on from where they are; what gathered for the next inner step is dropped."""

        def work() -> None:
            self._free()
            self._trainer.load(state["fast"], state)
            self._trainer.clear_gradient()
            self.outer.load(state["slow"], state.get(MOMENTUM), state.get(TRAIL))
            self.progress = self.progress.as_copy_of(clock, outer_rounds)
            self.origins_lead, self.copied_at = None, ambient.monotonic()
            self.shifted_at = self.copied_at

        await self._thread.run(Priority.STEP, work)

    async def resume(self, state: CheckpointState) -> None:
        """Go on where `state` was taken. ValueError, and no change, where it is not of this stage and run. It has a
        gradient only if one had gathered."""
        own, there = self.state_sizes(), sizes_of(state.tensors)
        gradient = {GRADIENT: own["fast"]} if GRADIENT in there else {}
        if there != {**own, **gradient} or (state.tokens_accumulated and not gradient):
            raise ValueError("its tensors are not those of this stage")
        if abs(state.credit) > (batch := self._spec.inner.global_batch_tokens):
            raise ValueError(f"its credit is {state.credit:,.0f} tokens, and a batch has {batch:,}")

        def work() -> None:
            self._free()
            tensors = state.tensors
            self._trainer.load(tensors["fast"], tensors)
            self._trainer.clear_gradient()
            if GRADIENT in tensors:
                self._trainer.load_gradient(tensors[GRADIENT], state.tokens_accumulated, state.loss_accumulated)
            self.outer.load(tensors["slow"], tensors.get(MOMENTUM), tensors.get(TRAIL))
            self.progress, self._credit = state.progress, state.credit

        await self._thread.run(Priority.STEP, work)

    def state_sizes(self) -> Sizes:
        """Names, dtypes and shapes of `joiner_state()`: what a joiner expects to receive."""
        vector = (torch.float32, (self._trainer.layout.size,))
        beside = [MOMENTUM] * (self.outer.momentum is not None) + [TRAIL] * (self.outer.trail is not None)
        sizes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = dict.fromkeys(["fast", "slow", *beside], vector)
        sizes |= {name: (torch.float32, (size,)) for name, size in self._trainer.moment_sizes.items()}
        return sizes | {"optimizer_steps": (torch.int64, ())}

    async def named_weights(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Copies of the slow and the fast weights by local parameter name."""
        _, state = await self._copies("slow", "fast")
        views = self._trainer.layout.views
        return views(state["slow"]), views(state["fast"])

    def _count_gradient(self) -> None:
        self._step_if_due()
        self.last_trained = LastTrained(self.trained_tokens, ambient.monotonic())

    def _step_if_due(self) -> None:
        live = self.live_replicas  # once: the event loop may replace it at any moment
        share = share_of_batch(self._spec.inner.global_batch_tokens, live)
        gathered = self._trainer.tokens_accumulated
        credit = credit_after_step(gathered, self._credit, share)
        if credit is None:
            return
        self._credit = credit
        pace = tied_pace(self.origins_lead, self._max_lag)
        self.progress = self.progress.after_inner_step(gathered, live, pace)
        self._trainer.loss_bound.holds = self.progress.clock >= self._spec.inner.warmup_tokens
        rate = self.current_learning_rate()  # of the clock after these tokens, so that the first step moves
        if self._frozen:
            self._free(*self._trainer.state_vectors())
        result = self._trainer.step(rate)
        self._on_inner_step(InnerReport(result, self.progress, rate, live))
