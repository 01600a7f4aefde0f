"""Two other forms of a stage's forward: compiled by torch (`node.compile`), and checkpointed layer by layer.

What is compiled is for microbatches of one shape. All else goes by the plain form: a shape that a stranger chooses has
nothing compiled here.

A stage that is checkpointed holds the inputs of its layers, and backward computes the rest again. torch's own
checkpoint costs the host twice as much a layer: it follows every saved tensor through hooks. A layer with one input and
one output is an autograd function of ours. A layer with trained routers gives their logits away, too, which only
torch's hooks see. Of such a stage what a layer does is compiled: the way around it stays Python, and all layers of a
kind share what is made for one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from noloco_node.config.node_settings import UNCOMPILED
from noloco_node.errors import ExitCode, UserError
from noloco_node.model.stage import Stage

T = TypeVar("T")

_Work = Callable[..., Any]
CompileBackend = str | Callable[..., Any]
"""A backend of torch.compile: a name, or a function that turns a graph into something that can be called."""
INDUCTOR = "inductor"
"""torch's own backend, which needs a C++ compiler."""


class CompiledStage:
    """One stage, compiled at its first calls: its `forward` with given weights, or of checkpointed `layers` what each
    kind of them does. A process has one at a time: what was compiled before is forgotten."""

    def __init__(
        self, forward: _Work, shape: tuple[int, int], backend: CompileBackend, layers: CheckpointedLayers | None
    ) -> None:
        torch.compiler.reset()  # else the stages that a node has left would fill torch's list of forms
        self._shape, self._layers, self._forward = shape, layers, forward
        work = forward if layers is None else as_written
        self._form: _Work = torch.compile(work, fullgraph=True, dynamic=False, backend=backend)  # pyright: ignore[reportUnknownMemberType]

    def takes(self, inputs: Tensor) -> bool:
        """Whether these inputs, [B, T] or [B, T, hidden], have the shape that it is made for."""
        return inputs.shape[:2] == self._shape

    def __call__(self, weights: dict[str, Tensor], *inputs: Tensor | None) -> object:
        """Outputs of the stage with these weights, for inputs that it takes."""
        given = [None if each is None else each.contiguous() for each in inputs]
        if self._layers is None:
            return self._form(weights, *given)
        self._layers.body = self._form
        try:
            return self._forward(weights, *given)
        finally:
            self._layers.body = as_written


def trying(work: Callable[[], T]) -> T:
    """What `work` gives. Raises UserError (CONFIG) in place of what torch.compile raises."""
    try:
        return work()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # torch's own errors of compiling are such, by way of several private classes
        reason = " ".join(str(error).split("\n")[:2]).strip() or repr(error)  # who raised it, and what that says
        raise UserError(
            ExitCode.CONFIG,
            f"node.compile is true, but torch.compile fails here: {reason}",
            f"install a C++ compiler (g++) where none was found, or {UNCOMPILED}",
        ) from error


_Layer = Callable[[Tensor, Sequence[Tensor]], Tensor]
"""A layer as its class wrote it: its outputs for an input, with these weights."""
_Place = tuple[nn.Module, str]
"""A module and the name of a weight in it."""


class CheckpointedLayers:
    """The layers of a stage, each of which from now on keeps its inputs only, wherever a gradient will be asked for."""

    def __init__(self, stage: Stage) -> None:
        self.body: Callable[..., Tensor] = as_written
        """What a layer does in the forwards that run now, and in their backwards."""
        self._way = _run_again if stage.router is None else _run_again_with_hooks
        for layer in cast(nn.ModuleList, stage.causal.get_submodule("model.layers")):
            layer.forward = self._checkpointed(layer)

    def _checkpointed(self, layer: nn.Module) -> Callable[..., Tensor]:
        places = _places_of(layer)

        def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            body = self.body

            def run(hidden: Tensor, weights: Sequence[Tensor]) -> Tensor:
                before = _put(places, weights)
                try:
                    return body(layer, hidden, *args, **kwargs)
                finally:
                    _put(places, before)

            # The weights are taken along: `functional_call` has taken them out of the layer when backward comes.
            weights = [_at(group[0]) for group in places]
            return self._way(run, hidden, weights) if torch.is_grad_enabled() else run(hidden, weights)

        return forward


def as_written(layer: nn.Module, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A layer as its class has it."""
    return cast(Tensor, type(layer).forward(layer, hidden, *args, **kwargs))


def _run_again(run: _Layer, hidden: Tensor, weights: Sequence[Tensor]) -> Tensor:
    return cast(Tensor, _Again.apply(run, hidden, *weights))  # pyright: ignore[reportUnknownMemberType]


def _run_again_with_hooks(run: _Layer, hidden: Tensor, weights: Sequence[Tensor]) -> Tensor:
    return cast(Tensor, checkpoint(run, hidden, weights, use_reentrant=False, preserve_rng_state=False))


class _Again(torch.autograd.Function):
    """A layer that backward runs once more. A stage draws no random numbers, so no generator has to be set back."""

    @staticmethod
    def forward(ctx: Any, run: _Layer, hidden: Tensor, *weights: Tensor) -> Tensor:
        ctx.run, ctx.computing = run, _autocast_now(hidden.device.type)
        ctx.save_for_backward(hidden, *weights)
        return run(hidden, weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, *weights = cast(tuple[Tensor, ...], ctx.saved_tensors)
        needed = cast(tuple[bool, ...], ctx.needs_input_grad)[1:]
        leaf = hidden.detach().requires_grad_(needed[0])
        with torch.enable_grad(), ctx.computing():
            # A view, since autocast would cast a leaf once and add up its gradients in bf16.
            outputs = ctx.run(leaf.view_as(leaf), weights)
        asked = [tensor for tensor, wanted in zip((leaf, *weights), needed, strict=True) if wanted]
        found = iter(torch.autograd.grad(outputs, asked, gradients))
        return (None, *(next(found) if wanted else None for wanted in needed))


def _autocast_now(kind: str) -> Callable[[], AbstractContextManager[object]]:
    """What makes the same autocast again, or none, on a kind of device."""
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return nullcontext
    return partial(torch.autocast, kind, torch.get_autocast_dtype(kind))


def _places_of(layer: nn.Module) -> list[list[_Place]]:
    """Where each weight of the layer lies: a weight in two places is one."""
    places: dict[int, list[_Place]] = {}
    for module in layer.modules():
        for name, weight in module.named_parameters(recurse=False):
            places.setdefault(id(weight), []).append((module, name))
    return list(places.values())


def _at(place: _Place) -> Tensor:
    module, name = place
    return cast(Tensor, module._parameters[name])  # pyright: ignore[reportPrivateUsage]


def _put(places: Iterable[Sequence[_Place]], weights: Sequence[Tensor]) -> list[Tensor]:
    """Put these weights into the layer; the ones that were there come back."""
    before: list[Tensor] = []
    for group, weight in zip(places, weights, strict=True):
        before.append(_at(group[0]))
        for module, name in group:
            cast(dict[str, Tensor], module._parameters)[name] = weight  # pyright: ignore[reportPrivateUsage]
    return before
