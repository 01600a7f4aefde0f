"""The stages of a run in numbers, known before a weight is allocated: parameters, work for each token, activations.

`graph_of` counts what torch's autograd saves in a layer of the Llama type between forward and backward;
`tests/sizing/test_activations.py` holds it to what autograd says for each family.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from noloco_node.config.run_spec import RunSpec
from noloco_node.model.cut import build_config, build_on_meta, cut_model, cut_width, idle_experts
from noloco_node.model.subspace import SubspaceExperts, SubspaceLinear, bind_to_subspace
from noloco_node.process_memory import loading
from noloco_node.training.inner_optimizer import Matrices, is_for_muon, workspace_numbers
from noloco_node.training.layout import LayoutEntry, kind_of
from noloco_node.training.trainer import PRECISIONS

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FP32 = torch.float32.itemsize
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


OF_THE_BASIS = 4.0
"""Floating-point operations a token for each number of a subspace's basis in a projection: forward, and backward to
what went in. It has no gradient of its own."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """The stages of a run in numbers."""

    parameters: tuple[int, ...]
    """Parameters of each stage."""
    work: tuple[float, ...]
    """The relative work for a token at each stage, 1 on average. It counts parameters that are multiplied with. The
    table of token embeddings is only looked up, and experts that a token does not go to do not count."""
    flop_per_token: tuple[float, ...]
    """The floating-point operations a token, forward and backward, at each stage. They are 6 for each such
    parameter, and 12 x layers x hidden size x sequence length for attention, as utilization is usually counted
    (PaLM, appendix B)."""
    by_muon: tuple[int, ...]
    """Parameters of each stage that take Muon's steps."""
    step_flop: tuple[float, ...]
    """What orthogonalising their momentum costs in each inner step of a replica."""
    workspace: tuple[int, ...]
    """Numbers that this arithmetic holds of its own, at each stage."""
    cut_width: int
    """Numbers in the activations of one token, as they travel between stages."""
    fixed: int
    """Numbers of a subspace's basis, which each stage keeps beside its weights."""
    fixed_bytes: int
    """The signs that an embedding in a subspace has as its fixed part."""
    vocabulary: int
    layers: tuple[int, ...]
    """Layers of each stage."""
    graph: ActivationGraph
    """What a microbatch leaves in memory, in the precision of the run's published weights."""

    @property
    def moments(self) -> tuple[int, ...]:
        """Numbers that the optimizer of each stage keeps: two a weight that AdamW changes, one a weight of Muon's."""
        return tuple(2 * count - muon for count, muon in zip(self.parameters, self.by_muon, strict=True))

    @property
    def state_bytes(self) -> tuple[int, ...]:
        """What a joiner of each stage takes over without an outer momentum: fast and slow weights and moments, four
        bytes each."""
        pairs = zip(self.parameters, self.moments, strict=True)
        return tuple(4 * (2 * count + moments) for count, moments in pairs)


def footprint_of(run: RunSpec) -> Footprint:
    """Count the run's stages. Loads transformers, allocates no weights. UserError (CONFIG) as `cut_model` raises it."""
    with loading():
        cuts, config = cut_model(run.model), build_config(run.model)
        ends = [cut.end_layer for cut in cuts]
        whole = build_on_meta(config)
        subspace = bind_to_subspace(whole, run.model, config)
    idle = idle_experts(config)
    parameters, looked_up, by_muon = ([0] * len(ends) for _ in range(3))
    matrices: list[list[Matrices]] = [[] for _ in ends]
    for name, parameter in torch.nn.Module.named_parameters(whole):
        stage = _stage_of(name, ends)
        parameters[stage] += parameter.numel()
        if name.startswith("model.embed_tokens."):
            looked_up[stage] += parameter.numel()
        elif ".experts." in name:
            looked_up[stage] += round(parameter.numel() * idle)
        if is_for_muon(kind_of(name, parameter.dim()), run.inner):
            by_muon[stage] += parameter.numel()
            matrices[stage].append(Matrices.of(LayoutEntry(name, 0, parameter.shape)))
    multiplied = [all_of - table for all_of, table in zip(parameters, looked_up, strict=True)]
    mean = sum(multiplied) / len(multiplied)
    attention = 12.0 * int(config.hidden_size) * run.data.sequence_length
    flop = [
        6.0 * count + attention * (cut.end_layer - cut.first_layer) for count, cut in zip(multiplied, cuts, strict=True)
    ]
    if subspace is not None:
        for name, module in cast("Iterable[tuple[str, torch.nn.Module]]", torch.nn.Module.named_modules(whole)):
            if isinstance(module, SubspaceLinear | SubspaceExperts):
                flop[_stage_of(name, ends)] += OF_THE_BASIS * subspace.basis.numel()
    precision = PRECISIONS[run.inner.precision]
    element = 2 if precision.autocast else precision.published.itemsize
    return Footprint(
        parameters=tuple(parameters),
        work=tuple(max(count, 1) / mean for count in multiplied),
        flop_per_token=tuple(flop),
        by_muon=tuple(by_muon),
        step_flop=tuple(sum(each.flop for each in own) for own in matrices),
        workspace=tuple(2 * sum(workspace_numbers(own)) for own in matrices),
        cut_width=cut_width(run.model, config),
        fixed=0 if subspace is None else subspace.basis.numel(),
        fixed_bytes=0 if subspace is None else subspace.signs.numel(),
        vocabulary=int(config.vocab_size),
        layers=tuple(cut.end_layer - cut.first_layer for cut in cuts),
        graph=graph_of(whole, config, element, run.data.sequence_length, autocast=precision.autocast),
    )


def _stage_of(name: str, ends: Sequence[int]) -> int:
    layer = name.removeprefix("model.layers.")
    if layer != name:
        return next(stage for stage, end in enumerate(ends) if int(layer.partition(".")[0]) < end)
    return 0 if name.startswith("model.embed_tokens.") else len(ends) - 1
