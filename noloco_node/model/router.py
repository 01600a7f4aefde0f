"""The router's loss of a mixture of experts, as transformers trains it, for a model that is cut into stages.

transformers takes the loss of all layers at once: experts x Σ over experts of (share of choices) x (mean chance). The
share counts the choices that fell on an expert, the chance is what the router gave it, both over all layers and tokens.
Choices have no gradient. A stage therefore needs from the others only how often each expert was chosen in their layers.
With these counts each stage has its own part of the loss, the parts add up to the whole, and so do their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from noloco_node.model.cut import StageCut


@dataclass(frozen=True, slots=True, eq=False)
class Routed:
    """What a stage's routers did with a microbatch."""

    chosen: Tensor
    """int64 [experts]: how often each expert was chosen, over the stage's layers."""
    chances: Tensor
    """fp32 [experts]: the chances that each was given, summed over the stage's layers and tokens."""


@dataclass(frozen=True, slots=True)
class Router:
    """How the routers of a model are trained."""

    experts: int
    chosen: int
    """Experts that each token goes to."""
    coefficient: float
    """Weight of the router's loss beside that of a token."""
    layers: int
    """With experts, of the whole model."""
    layers_before: int
    """The number of such layers in the stages before this one."""

    def routed(self, logits: Sequence[Tensor], device: torch.device) -> Routed:
        """The choices and chances in the routers' logits [tokens, experts], one tensor for each of the stage's layers
        with experts."""
        chosen = torch.zeros(self.experts, dtype=torch.int64, device=device)
        chances = torch.zeros(self.experts, device=device)
        for each in logits:
            given = torch.softmax(each, dim=-1)
            best = torch.topk(given, self.chosen, dim=-1).indices
            chosen = chosen.index_add(0, best.flatten(), torch.ones_like(best.flatten()))  # bincount would wait for it
            chances = chances + given.float().sum(0)
        return Routed(chosen, chances)

    def loss(self, chances: Tensor, chosen: Tensor, tokens: int) -> Tensor:
        """The stage's part of the loss of a microbatch, summed over its `tokens` as the tokens' own loss is. `chosen`
        are the counts of all stages."""
        rows = self.layers * tokens
        return self.coefficient * tokens * self.experts / rows**2 * (chosen.to(chances) * chances).sum()

    def whole(self, chosen: Sequence[int], tokens: int) -> bool:
        """Whether these can be the counts of all stages."""
        return self._are_counts(chosen, tokens * self.layers)

    def before(self, chosen: Sequence[int], tokens: int) -> bool:
        """Whether these can be the counts of the stages before this one."""
        return self._are_counts(chosen, tokens * self.layers_before)

    def _are_counts(self, chosen: Sequence[int], rows: int) -> bool:
        fits = len(chosen) == self.experts and sum(chosen) == rows * self.chosen
        return fits and all(0 <= count <= rows for count in chosen)


def router_of(causal: PreTrainedModel, config: PretrainedConfig, cut: StageCut) -> Router | None:
    """How the routers of this model are trained, seen from a stage; `causal` is the whole model. None if it has none,
    or if `output_router_logits` does not ask for their loss, as transformers has it."""
    if not getattr(config, "output_router_logits", False):
        return None
    layers = cast(nn.ModuleList, causal.get_submodule("model").get_submodule("layers"))
    kinds = _router_kinds(causal)
    with_experts = [any(isinstance(part, kinds) for part in layer.modules()) for layer in layers]
    if not any(with_experts):
        return None
    experts: int = getattr(config, "num_experts", None) or config.num_local_experts
    return Router(
        experts=experts,
        chosen=config.num_experts_per_tok,
        coefficient=config.router_aux_loss_coef,
        layers=sum(with_experts),
        layers_before=sum(with_experts[: cut.first_layer]),
    )


def _router_kinds(causal: PreTrainedModel) -> tuple[type[nn.Module], ...]:
    """The classes that transformers records as the source of `router_logits`."""
    recorded: Any = getattr(causal.get_submodule("model"), "_can_record_outputs", None) or {}
    found: Any = recorded.get("router_logits", ())
    each = cast("Sequence[Any]", found if isinstance(found, list | tuple) else (found,))
    return tuple(getattr(one, "target_class", one) for one in each)
