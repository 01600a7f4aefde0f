"""What a microbatch leaves in a device's memory between its forward and its backward, by a formula.

The formula counts what torch's autograd saves in a layer of the Llama type; `tests/sizing/test_activations.py` holds it
to what autograd says for each family.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from torch import nn

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FP32 = 4
HEAD_TENSORS = 3
"""The number of fp32 tensors of the size of the logits: their log softmax, the gradient of that, and the gradient of
the logits. The logits themselves are gone by then."""


@dataclass(frozen=True, slots=True)
class ActivationGraph:
    """Bytes a token, in one precision of the published weights."""

    layers: tuple[float, ...]
    """What each layer's graph holds."""
    head: float
    """What the final norm and the loss hold beside the logits' tensors."""
    logits: float
    """Logits and what the loss makes of them, at the highest."""
    entry: float
    """The activations at a stage's door."""
    peak: float
    """Gradients inside one layer while it is differentiated, a norm's in fp32 among them."""


def graph_of(
    causal: nn.Module, config: PretrainedConfig, element: int, length: int, *, autocast: bool = False
) -> ActivationGraph:
    """The graph of the whole model `causal` (on the meta device will do).

    Published weights have `element` bytes, windows `length` tokens. Attention with capped scores holds them all, in
    fp32; experts hold what goes in and out of each. Under `autocast` the stream of activations is fp32, and each
    product casts its inputs for itself. The weights that it casts are not in the graph.
    """
    heads = int(config.num_attention_heads)
    hidden, vocabulary = int(config.hidden_size), int(config.vocab_size)
    width = int(getattr(config, "head_dim", None) or hidden // heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    shape = _Shape(hidden, heads, kv_heads, width, _inner_width(config), element)
    inside = FP32 if str(config.model_type).startswith(("gemma", "olmo")) else element
    on_stream = FP32 if autocast else inside
    capped = bool(getattr(config, "attn_logit_softcapping", None))
    experts = int(getattr(config, "num_experts_per_tok", None) or 0)
    extra = 2 * FP32 * heads * length * capped + 2 * element * experts * hidden + 3 * element * hidden * autocast
    layers = [
        shape.layer(_norms(layer), on_stream, inside) + shape.fused(layer) + extra
        for layer in causal.get_submodule("model.layers").children()
    ]
    return ActivationGraph(
        layers=tuple(layers),
        head=shape.norm(hidden, 1, on_stream) + element * hidden,
        logits=float(vocabulary * HEAD_TENSORS * FP32),
        entry=float((FP32 if autocast else element) * hidden),
        peak=float(element * (3 * shape.inner + 2 * hidden) + FP32 * hidden),
    )


@dataclass(frozen=True, slots=True)
class _Shape:
    hidden: int
    heads: int
    kv_heads: int
    head_width: int
    inner: int
    element: int

    def norm(self, width: int, rows: int, element: int) -> float:
        """Its input in fp32, its normalised input, and the root of each row's mean square."""
        return FP32 * width + element * width + FP32 * rows

    def layer(self, norms: tuple[int, bool], stream_element: int, inside_element: int) -> float:
        """`norms`: how many act on the residual stream, and whether queries and keys have their own."""
        query, key = self.heads * self.head_width, self.kv_heads * self.head_width
        on_stream, inside = norms
        saved = on_stream * self.norm(self.hidden, 1, stream_element)
        if inside:
            saved += self.norm(query, self.heads, inside_element) + self.norm(key, self.kv_heads, inside_element)
        # Both blocks' inputs; queries, keys, values, what attention gives; gate, its activation, up and their product.
        saved += self.element * (2 * self.hidden + 2 * query + 2 * key + 4 * self.inner)
        return saved + FP32 * self.heads

    def fused(self, layer: nn.Module) -> float:
        """Queries, keys and values that are made by one matrix stay, since values are a view of them."""
        made_at_once = any(name.endswith("qkv_proj") for name, _ in _modules(layer))
        return self.element * (self.heads + 2 * self.kv_heads) * self.head_width if made_at_once else 0.0


def _norms(layer: nn.Module) -> tuple[int, bool]:
    names = [name for name, module in _modules(layer) if type(module).__name__.endswith("Norm")]
    inside = [name for name in names if name.rpartition(".")[2] in ("q_norm", "k_norm")]
    return len(names) - len(inside), bool(inside)


def _modules(layer: nn.Module) -> list[tuple[str, nn.Module]]:
    return list(cast(Iterable[tuple[str, nn.Module]], nn.Module.named_modules(layer)))


def _inner_width(config: PretrainedConfig) -> int:
    """The inner width of a layer's feed-forward part for one token: experts that it goes through count, the others do
    not."""
    experts = int(getattr(config, "num_experts_per_tok", None) or 1)
    return experts * int(getattr(config, "moe_intermediate_size", None) or config.intermediate_size)
