"""What is asked of a stage and of whatever trains it, a real stage (`StageTrainer`) or a model of one; and the part of
it that all have in common: weights, what has gathered for the next step, and published versions of the weights, so
that a backward uses those of its forward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from noloco_node.config.run_spec import ActivationCodec, PrecisionName
from noloco_node.model.cut import StageCut
from noloco_node.model.router import Routed, Router
from noloco_node.process_memory import refused_memory
from noloco_node.training.bounds import LossBound
from noloco_node.training.frozen_state import PIECE, Vectors
from noloco_node.training.host_copies import HostCopies
from noloco_node.training.layout import FlatLayout


@dataclass(frozen=True, slots=True)
class Precision:
    """One of `PRECISIONS`. Slow weights and all else of the outer step stay fp32 whatever it is."""

    masters: torch.dtype
    """Type of the weights that the optimizer changes, of its moments, and of the gradient that accumulates."""
    published: torch.dtype
    """Type of the copies that forward and backward use, and of the activations that come in."""
    autocast: bool = False
    """Whether products are computed in bf16 although all tensors are fp32."""

    @property
    def computed(self) -> torch.dtype:
        """The type of what goes into products."""
        return torch.bfloat16 if self.autocast else self.published

    def computing(self, device: torch.device) -> AbstractContextManager[object]:
        """The context of a forward on `device`; backward needs none."""
        return torch.autocast(device.type, torch.bfloat16, enabled=self.autocast)


PRECISIONS: dict[PrecisionName, Precision] = {
    "fp32": Precision(torch.float32, torch.float32),
    "bf16": Precision(torch.float32, torch.bfloat16),
    "bf16-mixed": Precision(torch.float32, torch.float32, autocast=True),
    "bf16-pure": Precision(torch.bfloat16, torch.bfloat16),
}

NUMBERS: dict[ActivationCodec, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Codecs of activations that are rounded numbers, and their types. Others are codes."""


def carried_dtype(allowed: tuple[ActivationCodec, ...]) -> torch.dtype:
    """In which activations are held on the host: the widest that may travel, fp32 where only codes may."""
    return NUMBERS.get(allowed[0], torch.float32)


@dataclass(slots=True, eq=False)
class Version:
    """One published copy. `parameters` are autograd leaves; nothing writes to them while `users` > 0."""

    number: int
    flat: Tensor
    parameters: dict[str, Tensor]
    users: int = 0


class VersionStore:
    """Publishes copies of the master weights and reuses the memory of those that no microbatch needs any more.

    Not thread-safe: it belongs to the compute thread. Versions alive are bounded by the microbatches that hold one,
    plus the current one.

    Where there is no memory for one more, the work that holds the current one ends first. New work is refused until
    that memory is free for the next.
    """

    def __init__(self, layout: FlatLayout, dtype: torch.dtype) -> None:
        self._layout = layout
        self._dtype = dtype
        self._free: list[Version] = []
        self._held: set[Version] = set()
        self._current: Version | None = None
        self._late: Tensor | None = None
        """Master weights that are newer than the current version, and have had no memory yet."""
        self._published = 0

    @property
    def live(self) -> int:
        """Versions that are current or held by a microbatch."""
        return len(self._held) + (self._current is not None and self._current not in self._held)

    @property
    def current(self) -> Version:
        """The version that new work takes. Raises what refuses memory where there is none for what is late."""
        self._publish_late()
        assert self._current is not None, "publish() comes first"
        return self._current

    def publish(self, master: Tensor) -> None:
        """Copy the master weights [size] into a fresh version and make it current: now, or where there is no memory for
        it before the next work begins. `master` must be the same tensor each time."""
        self._late = master
        try:
            self._publish_late()
        except (MemoryError, RuntimeError) as refusal:
            if self._current is None or refused_memory(refusal) is None:
                raise

    def _publish_late(self) -> None:
        if (master := self._late) is None:
            return
        previous = self._current
        if previous is not None and previous.users == 0:
            self._free.append(previous)
        version = self._free.pop() if self._free else self._allocate(master.device)
        with torch.no_grad():
            version.flat.copy_(master)
        self._published += 1
        version.number = self._published
        self._current, self._late = version, None

    def acquire(self) -> Version:
        """The current version, held until `release`."""
        version = self.current
        version.users += 1
        self._held.add(version)
        return version

    def release(self, version: Version) -> None:
        """Give a version back; its memory is reused once nobody holds it and a newer one is current."""
        version.users -= 1
        assert version.users >= 0, "released more often than acquired"
        if version.users == 0:
            self._held.discard(version)
            if version is not self._current:
                self._free.append(version)

    def _allocate(self, device: torch.device) -> Version:
        flat = torch.empty(self._layout.size, dtype=self._dtype, device=device)
        leaves = {name: view.detach().requires_grad_() for name, view in self._layout.views(flat).items()}
        return Version(0, flat, leaves)


class MicrobatchNotFinite(ValueError):
    """A microbatch's loss, one of its gradients or what would travel of it is NaN or infinite; nothing was
    accumulated."""


@dataclass(slots=True, eq=False)
class ForwardContext:
    """A microbatch's stay at this stage, between its forward and its backward. Made by the caller, filled by `forward`,
    emptied by `backward` or `discard`; so that the caller can always clean up."""

    source: str = ""
    """The peer that sent the inputs; empty for this node's own."""
    taken_in: bool = True
    """Whether its gradient was accumulated (`LossBound`); set by `backward`."""
    chosen: tuple[int, ...] = ()
    """How often this stage chose each expert, where its routers are trained; set by `forward`."""
    positions: Tensor | None = None
    """Positions of the tokens in their documents, int64 [B, T]; None where they count from the row's beginning."""
    ids: Tensor | None = None
    """The token ids, int [B, T], for a later stage in a subspace."""
    version: Version | None = None
    inputs: Tensor | None = None
    outputs: Tensor | None = field(default=None, repr=False)
    routed: Routed | None = field(default=None, repr=False)
    signs: Tensor | None = field(default=None, repr=False)
    """Signs of the stage's own gradient at the same places each time, int8 [n] on the host; `Leanings` compares
    peers by them. `backward` sets them where a peer gave the outputs' gradient and it was accumulated."""


@dataclass(frozen=True, slots=True)
class LossResult:
    """The last stage's answer: the loss summed over tokens, the tokens, and the gradient of that sum with respect to
    the inputs (None on a first stage, whose inputs are token ids)."""

    loss_sum: float
    tokens: int
    input_gradient: Tensor | None
    taken_in: bool = True
    """Whether the stage's own gradient was accumulated (`LossBound`)."""
    chosen: tuple[int, ...] = ()
    """How often all stages chose each expert, where routers are trained."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What an inner step did. `gradient_norm` is that of the mean gradient, before clipping."""

    tokens: int
    loss: float
    gradient_norm: float
    skipped: bool


class StageFacts(Protocol):
    """What is known of a stage without its weights. See `Stage`."""

    @property
    def cut(self) -> StageCut: ...

    @property
    def cut_width(self) -> int:
        """Numbers of a token's activations, as they go in and out."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids of the model."""
        ...

    @property
    def router(self) -> Router | None:
        """How its routers are trained; None where it has none."""
        ...

    def full_names(self) -> dict[str, str]:
        """Each parameter's name here -> its name in the whole model."""
        ...


class Trainer(ABC):
    """A stage's weights, the gradient that gathers for its next step, and what computes with both. Gradients of losses
    summed over tokens accumulate until `step` divides them. Synchronous; belongs to the compute thread.
    """

    def __init__(self, stage: StageFacts, layout: FlatLayout, master: Tensor, *, published: torch.dtype) -> None:
        """`master` is taken over, with its device: all parameters in one vector, written to in place. Versions of it
        are `published` in that precision."""
        self.layout = layout
        self.master = master
        self.device = master.device
        """Where it computes."""
        self.copies = HostCopies(self.device)
        """Between there and the host."""
        self.router = stage.router
        self.loss_bound = LossBound(stage.vocab_size)
        """On the loss of each microbatch that others drew."""
        self.gradient = torch.zeros_like(master)
        """Sum over the tokens gathered since the last step; the step takes the mean."""
        self.tokens_accumulated = 0
        """Tokens behind the gradient that no step has used yet."""
        self.loss_accumulated = 0.0
        """The loss of those tokens, summed."""
        self.versions = VersionStore(layout, published)
        self._publish()

    @property
    def bounded(self) -> dict[str, int]:
        """Gradients scaled down so far: those that the next stage `returned`, and those that microbatches `caused`; and
        microbatches answered and not taken in, since their `losses` are a guesser's. Only what can be bounded here."""
        return {}

    @abstractmethod
    def forward(self, inputs: Tensor, passage: ForwardContext) -> Tensor:
        """Activations [B, T, width] on the host in the wire precision; `passage` holds what the backward needs.
        Raises MicrobatchNotFinite; the passage stays for `discard` then."""

    @abstractmethod
    def backward(
        self,
        passage: ForwardContext,
        output_gradient: Tensor,
        loss_sum: float,
        tokens: int,
        *,
        source: str = "",
        scale: float | None = None,
        chosen: Sequence[int] = (),
    ) -> Tensor | None:
        """Accumulate the gradient of a microbatch; returns that of its inputs (host, wire precision; None on stage 0).

        `output_gradient` [B, T, width] is that of the loss summed over the microbatch's `tokens`, as the peer `source`
        gave it back, of root mean square `scale` where the caller has it (else it is taken here); its norm, and that of
        the stage's own gradient, are held to what is usual (`NormBound`), and so is the loss (`LossBound`). Where
        routers are trained, `chosen` is how often all stages chose each expert. Raises MicrobatchNotFinite; the passage
        stays for `discard` then.
        """

    @abstractmethod
    def loss(
        self, inputs: Tensor, labels: Tensor, ids: Tensor | None = None, *, source: str = "", chosen: Sequence[int] = ()
    ) -> LossResult:
        """Last stage: forward, loss and backward in one. `inputs` [B, T, width] (ids [B, T] where P = 1) of the peer
        `source`, `labels` int [B, T], with marks where documents begin, `ids` as a passage has them; where routers are
        trained, `chosen` is how often the stages before chose each expert. The routers' loss is no part of the one that
        is given back. Raises MicrobatchNotFinite."""

    @abstractmethod
    def evaluate(self, inputs: Tensor, positions: Tensor | None = None, ids: Tensor | None = None) -> Tensor:
        """Forward only: activations on the host in the wire precision; `positions` and `ids` as a passage has them.
        Raises MicrobatchNotFinite."""

    @abstractmethod
    def evaluate_loss(self, inputs: Tensor, labels: Tensor, ids: Tensor | None = None) -> float:
        """Last stage, forward only: loss summed over tokens. Raises MicrobatchNotFinite."""

    @abstractmethod
    def step(self, learning_rate: float) -> StepResult:
        """One inner step on the mean gradient of the accumulated tokens. A gradient that is not finite is thrown away
        and the weights stay as they are."""

    @property
    @abstractmethod
    def moment_sizes(self) -> dict[str, int]:
        """Names of the optimizer's vectors, and the numbers in each."""

    @abstractmethod
    def optimizer_vectors(self) -> Vectors:
        """The live memory of the optimizer's moments, flat vectors, and of its step count, an int64 scalar."""

    def discard(self, passage: ForwardContext) -> None:
        """Let go of a passage's graph and weights; harmless for one that is empty."""
        version, passage.version = passage.version, None
        passage.inputs = passage.outputs = passage.routed = None
        if version is not None:
            self.versions.release(version)

    def begin_copy(self, room: Tensor) -> Callable[[], None] | None:
        """Copy the weights, as they are now, into `room` (host, fp32). None where that is done, else what waits for it
        on another thread; the weights may be changed meanwhile."""
        return self.copies.begin_to_host(room, self.master)

    def bring(self, vector: Tensor) -> Tensor:
        """A flat vector of the host where `add_to_weights` wants it. For another thread than all else here."""
        return self.copies.bring(vector)

    def add_to_weights(self, correction: Tensor) -> None:
        """θ ← θ + correction (flat, fp32, as `bring` gives it), rounded once, and publish."""
        self.copies.before_writing()
        own = self.master
        with torch.no_grad():
            if len(correction) <= PIECE:
                own.add_(correction.to(own.device))
            else:
                for begin in range(0, len(correction), PIECE):
                    piece = slice(begin, begin + PIECE)
                    own[piece].add_(correction[piece].to(own.device))
        self._publish()

    def load(self, fast: Tensor, optimizer_state: Mapping[str, Tensor]) -> None:
        """Replace weights (flat, any device) and the optimizer state, of the names of `optimizer_vectors()`."""
        del optimizer_state
        self.copies.before_writing()
        with torch.no_grad():
            self.copies.fill(self.master, fast)
        self._publish()

    def state_vectors(self) -> Vectors:
        """The live memory of what inner steps change, in the order in which that is to be read: the `gradient`, the
        weights `fast`, and the optimizer's vectors."""
        return {"gradient": [(0, self.gradient)], "fast": [(0, self.master)], **self.optimizer_vectors()}

    def load_gradient(self, gradient: Tensor, tokens: int, loss_sum: float) -> None:
        """Replace what has accumulated: the flat gradient of a loss summed over `tokens`, and that loss."""
        self.copies.fill(self.gradient, gradient)
        self.tokens_accumulated, self.loss_accumulated = tokens, loss_sum

    def _count(self, loss_sum: float, tokens: int) -> None:
        """Count a microbatch whose gradient was added."""
        self.loss_accumulated += loss_sum
        self.tokens_accumulated += tokens

    def clear_gradient(self) -> None:
        """What had gathered is used, or of weights that are no more."""
        self.gradient.zero_()
        self.tokens_accumulated, self.loss_accumulated = 0, 0.0

    def _publish(self) -> None:
        """The weights have changed: from now on new work takes these."""
        self.versions.publish(self.master)
