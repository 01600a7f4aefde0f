"""Activations checkpointed layer by layer: a microbatch holds the inputs of layers, backward computes the rest again.

torch's own checkpoint costs the host twice as much a layer: it follows every saved tensor through hooks. A layer with
one input and one output is an autograd function of ours. A layer with trained routers gives their logits away, too,
which only torch's hooks see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from noloco_node.model.stage import Stage

_Layer = Callable[[Tensor, Sequence[Tensor]], Tensor]
"""A layer as its class wrote it: its outputs for an input, with these weights."""
_Place = tuple[nn.Module, str]
"""A module and the name of a weight in it."""


def checkpoint_layers(stage: Stage) -> None:
    """From now on each layer of the stage keeps its inputs only, wherever a gradient will be asked for."""
    way = _run_again if stage.router is None else _run_again_with_hooks
    for layer in cast(nn.ModuleList, stage.causal.get_submodule("model.layers")):
        layer.forward = _checkpointed(layer, way)


def _checkpointed(layer: nn.Module, way: Callable[[_Layer, Tensor, Sequence[Tensor]], Tensor]) -> Callable[..., Tensor]:
    places = _places_of(layer)

    def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        def run(hidden: Tensor, weights: Sequence[Tensor]) -> Tensor:
            before = _put(places, weights)
            try:
                return cast(Tensor, type(layer).forward(layer, hidden, *args, **kwargs))
            finally:
                _put(places, before)

        # The weights are taken along: `functional_call` has taken them out of the layer when backward comes.
        weights = [_at(group[0]) for group in places]
        return way(run, hidden, weights) if torch.is_grad_enabled() else run(hidden, weights)

    return forward


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
