"""All replicas of one stage, stacked: one vectorised forward and backward for microbatches of many replicas at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, vmap  # pyright: ignore[reportPrivateImportUsage, reportUnknownVariableType]
from torch.nn.attention import SDPBackend, sdpa_kernel

from noloco_node.config.model_spec import ModelSpec
from noloco_node.config.run_spec import InnerSpec
from noloco_node.document_marks import without_marks
from noloco_node.model.stage import build_stage
from noloco_node.training.inner_optimizer import InnerOptimizer
from noloco_node.training.layout import FlatLayout
from noloco_node.training.trainer import PRECISIONS

AT_ONCE = 64
"""One vectorised call has so many microbatches: enough to hide Python, few enough for the caches and for memory."""


@dataclass(frozen=True, slots=True, eq=False)
class StackedForward:
    """Microbatches on their way through a stage, until their backward."""

    rows: Tensor
    weights: list[Tensor]
    inputs: Tensor
    outputs: Tensor


class StackedStage:
    """R replicas of a stage: fast weights and gradients as [R, size], the optimizer of each, and their tokens.

    The arithmetic of a row is that of `training.stage_trainer.StageTrainer`. Losses are summed over tokens and divided
    at the step by the tokens counted. The gradient of each replica is clipped by its own norm.
    """

    def __init__(self, model: ModelSpec, inner: InnerSpec, index: int, replicas: int) -> None:
        self._stage = build_stage(model, index)
        self._stage.masks_by_itself = True
        precision = PRECISIONS[inner.precision]
        self._stage.hold_fixed_in(precision.published, precision.computed)
        self._is_first, self._is_last = self._stage.cut.is_first, self._stage.cut.is_last
        parameters = dict(self._stage.named_parameters())
        self.layout = FlatLayout.of(parameters)
        self._names = [entry.name for entry in self.layout.entries]
        self._precision = precision
        self.fast = self.layout.flatten(parameters).to(self._precision.masters).repeat(replicas, 1)
        self.gradient = torch.zeros_like(self.fast)
        self.tokens = [0] * replicas
        self._clip_norm = inner.clip_norm
        rows = zip(self.fast, self.gradient, strict=True)
        self._optimizers = [InnerOptimizer(self.layout, fast, gradient, inner) for fast, gradient in rows]

    @property
    def replicas(self) -> int:
        """R."""
        return len(self.fast)

    def forward(
        self, rows: Tensor, inputs: Tensor, positions: Tensor | None = None, ids: Tensor | None = None
    ) -> StackedForward:
        """Microbatch m through replica rows[m]: `inputs` [M, B, T] ids or [M, B, T, width]; outputs accordingly.
        `positions` [M, B, T] are those in documents, where attention ends there, and `ids` [M, B, T] the tokens, which
        a later stage in a subspace needs."""
        if not self._is_first:
            inputs = inputs.detach().to(self._precision.published).requires_grad_()
        weights = [weight.requires_grad_() for weight in self._weights(self.fast.detach()[rows])]
        return StackedForward(rows, weights, inputs, self._run(weights, inputs, positions, ids))

    def evaluate(
        self, weights: Tensor, inputs: Tensor, positions: Tensor | None = None, ids: Tensor | None = None
    ) -> Tensor:
        """Outputs only, of replicas with these weights [M, size] on a microbatch each."""
        inputs = inputs if self._is_first else inputs.to(self._precision.published)
        with torch.no_grad():
            return self._run(self._weights(weights), inputs, positions, ids)

    def backward(self, passage: StackedForward, gradient: Tensor | None, tokens: int) -> Tensor | None:
        """Accumulate gradients from the gradient of the outputs (None if the outputs are a summed loss). Returns the
        gradient of the inputs; None on the first stage. `tokens` are those of one microbatch."""
        wanted = passage.weights if self._is_first else [*passage.weights, passage.inputs]
        gradients = torch.autograd.grad(passage.outputs, wanted, gradient)
        whole = len(passage.rows) == self.replicas and bool((passage.rows == torch.arange(self.replicas)).all())
        for entry, part in zip(self.layout.entries, gradients, strict=False):
            columns = slice(entry.offset, entry.end)
            flat = part.reshape(len(passage.rows), -1).to(self.gradient.dtype)
            if whole:
                self.gradient[:, columns].add_(flat)
            else:
                self.gradient[:, columns].index_add_(0, passage.rows, flat)
        rows = cast(list[int], passage.rows.tolist())  # pyright: ignore[reportUnknownMemberType]
        for row in rows:
            self.tokens[row] += tokens
        return None if self._is_first else gradients[-1]

    def with_loss(self, passage: StackedForward, labels: Tensor) -> tuple[StackedForward, Tensor]:
        """Last stage: the passage whose output is the loss summed over everything, and the loss of each microbatch. The
        latter are [M], summed over its tokens. `labels` int64 [M, B, T]."""
        losses = token_losses(passage.outputs, labels).sum((1, 2))
        return StackedForward(passage.rows, passage.weights, passage.inputs, losses.sum()), losses.detach()

    def step(self, rows: Sequence[int], rates: Sequence[float]) -> None:
        """An inner step of each of these replicas on the mean gradient of its tokens, at its own learning rate."""
        counts = torch.tensor([self.tokens[row] for row in rows])
        picked = self.gradient[list(rows)] if len(rows) < self.replicas else self.gradient
        norms = torch.sqrt(picked.float().square().sum(1)) / counts
        clips = torch.clamp(self._clip_norm / (norms + 1e-6), max=1.0)
        factors = cast(list[float], (clips / counts).tolist())  # pyright: ignore[reportUnknownMemberType]
        for row, factor, rate in zip(rows, factors, rates, strict=True):
            self.gradient[row].mul_(factor)
            self._optimizers[row].step(rate)
            self.gradient[row].zero_()
            self.tokens[row] = 0

    def copy(self, source: int, target: int) -> None:
        """Make one replica a copy of another: weights and the optimizer's state."""
        self.fast[target].copy_(self.fast[source])
        self._optimizers[target].load(self._optimizers[source].state())

    def _weights(self, flat: Tensor) -> list[Tensor]:
        """Parameters [M, *shape] each, in the layout's order, of replicas with weights [M, size]."""
        flat = flat.to(self._precision.published)
        return [flat[:, entry.offset : entry.end].view(len(flat), *entry.shape) for entry in self.layout.entries]

    def _run(self, weights: Sequence[Tensor], inputs: Tensor, positions: Tensor | None, ids: Tensor | None) -> Tensor:
        given = {"positions": positions, "ids": None if self._stage.subspace is None or self._is_first else ids}
        beside = {name: tensor for name, tensor in given.items() if tensor is not None}

        def one(own: dict[str, Tensor], own_inputs: Tensor, *batch: Tensor) -> Tensor:
            named = dict(zip(beside, batch, strict=True))
            return cast(Tensor, functional_call(self._stage, own, (own_inputs,), named))

        batches = (inputs, *beside.values())

        if self._precision.autocast:  # vmap would take attention apart before autocast sees it
            with self._precision.computing(inputs.device):
                rows = [dict(zip(self._names, own, strict=True)) for own in zip(*weights, strict=True)]
                return torch.stack([one(*each) for each in zip(rows, *batches, strict=True)])
        run = cast(Callable[..., Tensor], vmap(one))
        parts: list[Tensor] = []
        with sdpa_kernel(SDPBackend.MATH):  # the other kernels have no batching rule and would run one by one
            for low in range(0, len(inputs), AT_ONCE):
                part = slice(low, low + AT_ONCE)
                own = {name: weight[part] for name, weight in zip(self._names, weights, strict=True)}
                parts.append(run(own, *(batch[part] for batch in batches)))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of each token in nats: `logits` [..., vocab], `labels` int64 [...], marks among them."""
    flat = F.cross_entropy(logits.float().flatten(0, -2), without_marks(labels).flatten(), reduction="none")
    return flat.view(labels.shape)
