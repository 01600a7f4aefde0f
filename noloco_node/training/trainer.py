"""What a replica asks of its stage and of whatever trains it: `Stage` and `StageTrainer`, or a model of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from noloco_node.model.cut import StageCut
from noloco_node.model.router import Router
from noloco_node.training.layout import FlatLayout
from noloco_node.training.loss_bound import LossBound
from noloco_node.training.stage_trainer import ForwardContext, LossResult, StepResult


class StageFacts(Protocol):
    """What is known of a stage without its weights. See `Stage`."""

    @property
    def cut(self) -> StageCut:
        """Which part of the model it is."""
        ...

    @property
    def hidden_size(self) -> int:
        """Numbers of a token's activations."""
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


class Trainer(Protocol):
    """A stage with its optimizer, as `StageTrainer` says it; synchronous, and belongs to the compute thread.

    Many methods: see `StageTrainer`.
    """

    loss_bound: LossBound

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        ...

    @property
    def layout(self) -> FlatLayout:
        """Its parameters as one vector."""
        ...

    @property
    def master(self) -> Tensor:
        """That vector; written to in place."""
        ...

    @property
    def router(self) -> Router | None:
        """See `StageTrainer.router`."""
        ...

    @property
    def bounded(self) -> dict[str, int]:
        """See `StageTrainer.bounded`."""
        ...

    @property
    def tokens_accumulated(self) -> int:
        """See `StageTrainer.tokens_accumulated`."""
        ...

    @property
    def loss_accumulated(self) -> float:
        """See `StageTrainer.loss_accumulated`."""
        ...

    @property
    def live_versions(self) -> int:
        """See `StageTrainer.live_versions`."""
        ...

    def forward(self, inputs: Tensor, passage: ForwardContext) -> Tensor:
        """See `StageTrainer.forward`."""
        ...

    def backward(
        self,
        passage: ForwardContext,
        output_gradient: Tensor,
        loss_sum: float,
        tokens: int,
        *,
        source: str = "",
        chosen: Sequence[int] = (),
    ) -> Tensor | None:
        """See `StageTrainer.backward`."""
        ...

    def loss(self, inputs: Tensor, labels: Tensor, *, source: str = "", chosen: Sequence[int] = ()) -> LossResult:
        """See `StageTrainer.loss`."""
        ...

    def evaluate(self, inputs: Tensor, positions: Tensor | None = None) -> Tensor:
        """See `StageTrainer.evaluate`."""
        ...

    def evaluate_loss(self, inputs: Tensor, labels: Tensor) -> float:
        """See `StageTrainer.evaluate_loss`."""
        ...

    def last_logits(self, inputs: Tensor) -> Tensor:
        """See `StageTrainer.last_logits`."""
        ...

    def discard(self, passage: ForwardContext) -> None:
        """See `StageTrainer.discard`."""
        ...

    def step(self, learning_rate: float) -> StepResult:
        """See `StageTrainer.step`."""
        ...

    def add_to_weights(self, correction: Tensor, part: slice = slice(None)) -> None:
        """See `StageTrainer.add_to_weights`."""
        ...

    def optimizer_state(self) -> dict[str, Tensor]:
        """See `StageTrainer.optimizer_state`."""
        ...

    def load(self, fast: Tensor, optimizer_state: Mapping[str, Tensor]) -> None:
        """See `StageTrainer.load`."""
        ...

    def copy_into(self, room: Mapping[str, Tensor]) -> None:
        """See `StageTrainer.copy_into`."""
        ...

    def load_gradient(self, gradient: Tensor, tokens: int, loss_sum: float) -> None:
        """See `StageTrainer.load_gradient`."""
        ...
