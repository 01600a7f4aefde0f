"""The stage on its device: forward, backward, inner step. Synchronous; belongs to the compute thread.

The masters live in one flat vector that the optimizer updates in place, in one of the `PRECISIONS`. Every
step publishes an immutable copy; a microbatch is carried through `torch.func.functional_call` on the copy that was
current at its forward, and its backward uses that same copy. (Assigning to `p.data` instead gives silently wrong
gradients.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call  # pyright: ignore[reportPrivateImportUsage, reportUnknownVariableType]

from noloco_node.config.node_settings import ROUTERS_UNCOMPILED, UNCOMPILED
from noloco_node.config.run_spec import InnerSpec
from noloco_node.document_marks import positions_of, without_marks
from noloco_node.errors import ExitCode, UserError
from noloco_node.model.router import Routed
from noloco_node.model.stage import Stage
from noloco_node.training.bounds import MULTIPLE, GradientSigns, NormBound
from noloco_node.training.frozen_state import Vectors
from noloco_node.training.inner_optimizer import InnerOptimizer, moment_sizes
from noloco_node.training.layout import FlatLayout
from noloco_node.training.stage_forms import CheckpointedLayers, CompileBackend, CompiledStage, trying
from noloco_node.training.trainer import (
    PRECISIONS,
    ForwardContext,
    LossResult,
    MicrobatchNotFinite,
    StepResult,
    Trainer,
    Version,
)


@dataclass(frozen=True, slots=True, eq=False)
class _Gradients:
    """The gradients of a microbatch, on the device."""

    own: tuple[Tensor, ...]
    """Gradients of the stage's parameters."""
    wire: Tensor | None
    """Gradient of the inputs, in the wire precision."""
    numbers: tuple[Tensor, ...]
    """Norm of its own, and beyond stage 0 norm of the inputs' and the sum of `wire`."""


class StageTrainer(Trainer):
    """One stage with its inner optimizer."""

    def __init__(self, stage: Stage, inner: InnerSpec, *, device: str, wire_dtype: torch.dtype) -> None:
        self._precision = PRECISIONS[inner.precision]
        layout = FlatLayout.of(dict(stage.named_parameters()))
        flat = layout.flatten(dict(stage.named_parameters()))
        self._tied = len(list(stage.named_parameters(remove_duplicate=False))) > len(layout.entries)
        """Tells whether a weight has two names. Only then torch looks for them at each call, in all modules."""
        master = flat.to(device=torch.device(device), dtype=self._precision.masters)
        super().__init__(stage, layout, master, published=self._precision.published)
        self.wire_dtype = wire_dtype
        self._is_first, self._is_last = stage.cut.is_first, stage.cut.is_last
        self._stage = stage.to(self.device)
        self._stage.hold_fixed_in(self._precision.published, self._precision.computed)
        _without_weights(self._stage)
        self._recompute = inner.backward == "recompute"
        self._layers = CheckpointedLayers(self._stage) if inner.backward == "checkpoint" else None
        self._compiled: CompiledStage | None = None
        self._inner = inner
        self.returned_bound = NormBound(MULTIPLE)
        """On the gradients that the next stage gives back."""
        self.caused_bound = NormBound(MULTIPLE)
        """On this stage's own gradient of each microbatch that others had a hand in."""
        self._signs = GradientSigns(self.layout, self.device)
        self._gradient_views = list(self.layout.views(self.gradient).values())
        self._optimizer = InnerOptimizer(self.layout, self.master, self.gradient, inner)

    @property
    def bounded(self) -> dict[str, int]:
        bounds = {"returned": self.returned_bound.exceeded, "caused": self.caused_bound.exceeded}
        return {**bounds, "losses": self.loss_bound.left_out}

    def compile_for(self, shape: tuple[int, int], *, documents: bool, backend: CompileBackend) -> None:
        """Train microbatches of `shape` (windows, tokens) by a compiled form from now on, which is made here: a minute
        and more on a processor. Evaluations and other shapes go by the plain one. `documents`: where they are cut apart
        in a window. Raises UserError (CONFIG) where the stage cannot be compiled, or not on this machine."""
        if self.router is not None:
            raise UserError(ExitCode.CONFIG, ROUTERS_UNCOMPILED, UNCOMPILED)
        self._compiled = CompiledStage(self._called, shape, backend, self._layers)
        starts = torch.arange(shape[1]).expand(shape)
        for positions in (None, starts) if documents else (None,):
            trying(lambda positions=positions: self._there_and_back(shape, positions))

    def try_out(self) -> None:
        """Take one token there and back. A GPU's libraries take memory at the first product, and a first microbatch
        that finds none left for them fails as if the device were broken."""
        self._there_and_back((1, 1), None)

    def _there_and_back(self, shape: tuple[int, int], positions: Tensor | None) -> None:
        """All kinds of calls that training makes, so that none is compiled while others wait; nothing accumulates."""
        ids = None if self._is_first or self._stage.subspace is None else torch.zeros(shape)
        passage = ForwardContext(positions=positions, ids=ids, version=self.versions.acquire())
        assert passage.version is not None
        try:
            inputs = self._to_device(torch.zeros(shape if self._is_first else (*shape, self._stage.cut_width)))
            if self._recompute and not self._is_last:
                with torch.no_grad():
                    self._run_routed(passage.version, inputs, passage)
            leaf, outputs, _ = self._forward_with_graph(passage, inputs)
            wanted = [*passage.version.parameters.values(), *([] if self._is_first else [leaf])]
            torch.autograd.grad(outputs, wanted, torch.ones_like(outputs))
        finally:
            self.discard(passage)

    def forward(self, inputs: Tensor, passage: ForwardContext) -> Tensor:
        assert passage.version is None, "a passage is used once"
        passage.version = self.versions.acquire()
        inputs = self._to_device(inputs)
        if self._recompute:
            passage.inputs = inputs
            with torch.no_grad():
                outputs, routed = self._run_routed(passage.version, inputs, passage)
        else:
            passage.inputs, outputs, routed = self._forward_with_graph(passage, inputs)
            passage.outputs, passage.routed = outputs, routed
        wire = outputs.detach().to(self.wire_dtype)

        def arrived(_wire: Tensor, total: Tensor, *counts: Tensor) -> None:
            passage.chosen = _counts(counts)
            self._check_fits(total)

        return self.copies.answer((wire, _sum(wire), *_chosen(routed)), arrived)[0]

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
        """See `Trainer.backward`. Norms are held to what is usual (`NormBound`)."""
        assert passage.version is not None, "backward needs a forward"
        assert passage.inputs is not None
        inputs, outputs, routed = passage.inputs, passage.outputs, passage.routed
        if outputs is None:
            inputs, outputs, routed = self._forward_with_graph(passage, inputs)
        gradient = self.copies.to_device(output_gradient, outputs.dtype)
        cause = passage.source or source
        norm = _norm(output_gradient, scale) / tokens if source else 0.0
        if source and (factor := self.returned_bound.factor(source, norm)) < 1.0:
            gradient, cause = gradient * factor, ""  # what is scaled down is no measure of what is usual here
        passage.taken_in = self._takes_in(passage.source, loss_sum, tokens)
        beside = self._router_loss(routed, self._counts_there(chosen), tokens)
        found = self._differentiate(passage, inputs, (outputs, gradient), beside)
        signs = [self._signs.of(found.own)] if source and passage.taken_in else []
        wire, numbers, signs = self._read(found.wire, found.numbers, *signs)
        passage.signs = signs[0] if signs else None
        self._check(numbers)
        self.discard(passage)
        if passage.taken_in:
            self._accumulate(found.own, cause, numbers[0] / tokens)
            self._count(loss_sum, tokens)
        return wire

    def loss(
        self,
        inputs: Tensor,
        labels: Tensor,
        ids: Tensor | None = None,
        *,
        source: str = "",
        chosen: Sequence[int] = (),
    ) -> LossResult:
        passage = ForwardContext(source, positions=positions_of(labels), ids=ids, version=self.versions.acquire())
        assert passage.version is not None
        tokens = labels.numel()
        try:
            leaf, logits, routed = self._forward_with_graph(passage, self._to_device(inputs))
            loss = _summed_loss(logits, self.copies.to_device(labels, labels.dtype))
            del logits  # the graph does without it, and it would lie beside all of the backward
            total = self._added(chosen, routed)
            found = self._differentiate(passage, leaf, (loss, None), self._router_loss(routed, total, tokens))
            beside = () if total is None else (total,)
            wire, (loss_sum, *numbers), counts = self._read(found.wire, (loss.detach(), *found.numbers), *beside)
            if not math.isfinite(loss_sum):
                raise MicrobatchNotFinite("the loss of this microbatch is not finite")
            passage.taken_in = self._takes_in(source, loss_sum, tokens)
            self._check(numbers)
        finally:
            self.discard(passage)
        if passage.taken_in:
            self._accumulate(found.own, source, numbers[0] / tokens)
            self._count(loss_sum, tokens)
        return LossResult(loss_sum, tokens, wire, passage.taken_in, _counts(counts))

    def evaluate(self, inputs: Tensor, positions: Tensor | None = None, ids: Tensor | None = None) -> Tensor:
        with torch.no_grad():
            wire = self._run(self.versions.current, self._to_device(inputs), positions, ids).to(self.wire_dtype)
            host, total = self.copies.to_host(wire, _sum(wire))
        self._check_fits(total)
        return host

    def evaluate_loss(self, inputs: Tensor, labels: Tensor, ids: Tensor | None = None) -> float:
        """See `Trainer.evaluate_loss`."""
        with torch.no_grad():
            logits = self._run(self.versions.current, self._to_device(inputs), positions_of(labels), ids)
            (loss,) = self.copies.to_host(_summed_loss(logits, self.copies.to_device(labels, labels.dtype)))
        loss_sum = cast(float, loss.tolist())  # pyright: ignore[reportUnknownMemberType]
        if not math.isfinite(loss_sum):
            raise MicrobatchNotFinite("the loss of this microbatch is not finite")
        return loss_sum

    def step(self, learning_rate: float) -> StepResult:
        """See `Trainer.step`; the mean is clipped to this stage's norm bound."""
        assert self.tokens_accumulated > 0, "a step needs tokens"
        tokens, loss = self.tokens_accumulated, self.loss_accumulated / self.tokens_accumulated
        (length,) = self.copies.to_host(torch.linalg.vector_norm(self.gradient, dtype=torch.float32))  # pyright: ignore
        norm = cast(float, length.tolist()) / tokens  # pyright: ignore[reportUnknownMemberType]
        skipped = not math.isfinite(norm)
        if not skipped:
            clip = min(1.0, self._inner.clip_norm / (norm + 1e-6))
            self.gradient.mul_(clip / tokens)
            self.copies.before_writing()
            self._optimizer.step(learning_rate)
            self._publish()
        self.clear_gradient()
        return StepResult(tokens, loss, norm, skipped)

    @property
    def moment_sizes(self) -> dict[str, int]:
        """See `Trainer.moment_sizes`."""
        return moment_sizes(self.layout, self._inner)

    def load(self, fast: Tensor, optimizer_state: Mapping[str, Tensor]) -> None:
        super().load(fast, optimizer_state)
        self._optimizer.load(optimizer_state, self.copies.fill)

    def optimizer_vectors(self) -> Vectors:
        """See `Trainer.optimizer_vectors`."""
        return self._optimizer.vectors()

    def _forward_with_graph(self, passage: ForwardContext, inputs: Tensor) -> tuple[Tensor, Tensor, Routed | None]:
        assert passage.version is not None
        leaf = inputs if self._is_first else inputs.detach().requires_grad_()
        with torch.enable_grad():
            # A view, since autocast would cast a leaf once and add up its gradients in bf16 at a cut alone.
            entry = inputs if self._is_first else leaf.view_as(leaf)
            return leaf, *self._run_routed(passage.version, entry, passage)

    def _run_routed(self, version: Version, inputs: Tensor, passage: ForwardContext) -> tuple[Tensor, Routed | None]:
        """The outputs, and what the routers did, where they are trained."""
        if self.router is None:
            compiled = self._compiled if self._compiled is not None and self._compiled.takes(inputs) else None
            return self._run(version, inputs, passage.positions, passage.ids, compiled=compiled), None
        at, ids = self._whole(passage.positions), self._whole(passage.ids)
        with self._precision.computing(self.device):
            found: Any = self._called(version.parameters, inputs, at, ids, routers=True)
        outputs, logits = cast("tuple[Tensor, tuple[Tensor, ...]]", found)
        return outputs, self.router.routed(logits, self.device)

    def _router_loss(self, routed: Routed | None, chosen: Tensor | None, tokens: int) -> Tensor | None:
        """The stage's part, to be differentiated beside the tokens' loss; None where it has none. `chosen`: the counts
        of all stages, on the device."""
        if self.router is None or routed is None or chosen is None or not routed.chances.requires_grad:
            return None
        return self.router.loss(routed.chances, chosen, tokens)

    def _counts_there(self, chosen: Sequence[int]) -> Tensor | None:
        if self.router is None:
            return None
        return self.copies.to_device(torch.tensor(chosen, dtype=torch.int64), torch.int64)

    def _added(self, before: Sequence[int], routed: Routed | None) -> Tensor | None:
        """How often all stages chose each expert, on the device, where routers are trained."""
        if routed is None:
            return None
        earlier = self._counts_there(before) if before else None
        return routed.chosen if earlier is None else routed.chosen + earlier

    def _run(
        self, version: Version, inputs: Tensor, *beside: Tensor | None, compiled: CompiledStage | None = None
    ) -> Tensor:
        given = inputs, *map(self._whole, beside)
        with self._precision.computing(self.device):
            return cast(Tensor, (compiled or self._called)(version.parameters, *given))

    def _called(self, weights: dict[str, Tensor], *inputs: Tensor | None, **options: bool) -> object:
        return functional_call(self._stage, weights, inputs, options, tie_weights=self._tied)

    def _takes_in(self, source: str, loss_sum: float, tokens: int) -> bool:
        return not source or self.loss_bound.takes_in(loss_sum / tokens, tokens)

    def _differentiate(
        self, passage: ForwardContext, inputs: Tensor, outputs: tuple[Tensor, Tensor | None], beside: Tensor | None
    ) -> _Gradients:
        """From the outputs with their gradient and a loss `beside`; nothing is read of the device."""
        assert passage.version is not None
        parameters = list(passage.version.parameters.values()) if passage.taken_in else []
        wanted = parameters if self._is_first else [*parameters, inputs]
        ends = [outputs] if beside is None else [outputs, (beside, None)]
        gradients = torch.autograd.grad([end for end, _ in ends], wanted, [given for _, given in ends])
        own = gradients[: len(parameters)]
        norm = nn.utils.get_total_norm(own) if own else torch.zeros((), device=self.device)
        if self._is_first:
            return _Gradients(own, None, (norm,))
        wire = gradients[-1].to(self.wire_dtype)
        return _Gradients(own, wire, (norm, nn.utils.get_total_norm(gradients[-1]), _sum(wire)))

    def _read(
        self, wire: Tensor | None, numbers: Sequence[Tensor], *counts: Tensor
    ) -> tuple[Tensor | None, list[float], tuple[Tensor, ...]]:
        """All that is wanted of the device for a microbatch, by one wait; or by one for the numbers, and `wire` late:
        nothing is decided by it."""
        told, answer = (*counts, torch.stack(list(numbers))), () if wire is None else (wire,)
        if self.copies.answers_late:
            read = (*self.copies.to_host(*told), *(self.copies.answer(answer, _as_it_is) if answer else ()))
        else:
            read = self.copies.to_host(*told, *answer)
        values = cast("list[float]", read[len(counts)].tolist())  # pyright: ignore[reportUnknownMemberType]
        return None if wire is None else read[-1], values, read[: len(counts)]

    def _accumulate(self, own: Sequence[Tensor], source: str, norm: float) -> None:
        factor = self.caused_bound.factor(source, norm) if source else 1.0
        with torch.no_grad():
            if factor < 1.0:
                torch._foreach_mul_(own, factor)  # pyright: ignore
            if self._precision.masters == self._precision.published:
                torch._foreach_add_(self._gradient_views, list(own))  # pyright: ignore
            else:
                for total, part in zip(self._gradient_views, own, strict=True):
                    total.add_(part)

    def _check_fits(self, total: Tensor) -> None:
        """Raise MicrobatchNotFinite if the wire precision cannot hold the numbers of which this is the sum. A peer that
        got them would take this node for a liar."""
        if not math.isfinite(cast(float, total.tolist())):  # pyright: ignore[reportUnknownMemberType]
            raise MicrobatchNotFinite(f"activations do not fit {self.wire_dtype} here")

    def _check(self, numbers: Sequence[float]) -> None:
        """Those of `_Gradients.numbers`. Raises MicrobatchNotFinite: one sender must not spoil the others' work."""
        if not math.isfinite(sum(numbers[:2])):
            raise MicrobatchNotFinite("a gradient of this microbatch is not finite")
        if not math.isfinite(numbers[-1]):
            raise MicrobatchNotFinite(f"a gradient does not fit {self.wire_dtype} here")

    def _to_device(self, inputs: Tensor) -> Tensor:
        return self.copies.to_device(inputs, torch.int64 if self._is_first else self._precision.published)

    def _whole(self, numbers: Tensor | None) -> Tensor | None:
        """Whole numbers where the stage computes."""
        return None if numbers is None else self.copies.to_device(numbers, torch.int64)


def _summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    wanted = without_marks(labels).reshape(-1).to(torch.int64)
    return F.cross_entropy(logits.float().flatten(0, 1), wanted, reduction="sum")


def _chosen(routed: Routed | None) -> tuple[Tensor, ...]:
    return () if routed is None else (routed.chosen,)


def _counts(chosen: Sequence[Tensor]) -> tuple[int, ...]:
    """The numbers of none or one vector on the host."""
    return tuple(cast("list[int]", chosen[0].tolist())) if chosen else ()  # pyright: ignore[reportUnknownMemberType]


def _as_it_is(_wire: Tensor) -> None:
    """What has arrived needs no look."""


def _sum(wire: Tensor) -> Tensor:
    """Finite only if every element is."""
    return wire.sum(dtype=torch.float32)


def _norm(gradient: Tensor, scale: float | None) -> float:
    """The norm of a gradient on the host, from its root mean square `scale` where that is known: a large one takes
    milliseconds of the device's thread. Raises MicrobatchNotFinite where fp32 does not hold it."""
    if scale is not None:
        norm = scale * math.sqrt(gradient.numel())
    else:
        norm = float(torch.linalg.vector_norm(gradient, dtype=torch.float32))  # pyright: ignore
    if not math.isfinite(norm):
        raise MicrobatchNotFinite("the gradient that came back is too large to have a norm")
    return norm


def _without_weights(stage: Stage) -> None:
    """Drop the stage's own copy of its weights: `functional_call` supplies them, the buffers stay.

    A parameter that two modules share stays shared, or `functional_call` would supply only one of them.
    """
    shells: dict[nn.Parameter, nn.Parameter] = {}
    for module in stage.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in shells:
                shells[parameter] = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
            setattr(module, name, shells[parameter])
