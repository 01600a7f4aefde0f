"""Activations checkpointed layer by layer: a microbatch holds the inputs of layers, backward computes the rest again.

A layer is computed again long after `functional_call` has taken the weights of its forward away: it takes them along.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call  # pyright: ignore[reportPrivateImportUsage, reportUnknownVariableType]
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from noloco_node.model.stage import Stage

_PREFIX = "layer."


class _Bare(nn.Module):
    """A layer as its class wrote it, without the checkpoint around it. Its weights have names of their own here."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.layer).forward(self.layer, *args, **kwargs)


def checkpoint_layers(stage: Stage) -> None:
    """From now on each layer of the stage keeps its inputs only, wherever a gradient will be asked for."""
    for layer in cast(nn.ModuleList, stage.causal.get_submodule("model.layers")):
        layer.forward = _checkpointed(_Bare(layer))


def _checkpointed(bare: _Bare) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return bare(*args, **kwargs)
        weights: dict[str, Tensor] = {_PREFIX + name: value for name, value in bare.layer.named_parameters()}

        def again(*inputs: Any) -> Any:
            return functional_call(bare, weights, inputs, kwargs)

        # A stage draws no random numbers: there is no state of a generator to restore.
        return cast(Any, checkpoint(again, *args, use_reentrant=False, preserve_rng_state=False))

    return forward
