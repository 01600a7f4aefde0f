"""The stages of a run in numbers: parameters, layers, work for each token. Known before a weight is allocated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from noloco_node.config.run_spec import RunSpec
from noloco_node.model.cut import build_config, build_on_meta, cut_model, cut_width, idle_experts
from noloco_node.model.subspace import SubspaceExperts, SubspaceLinear, bind_to_subspace
from noloco_node.process_memory import loading
from noloco_node.sizing.activations import ActivationGraph, graph_of
from noloco_node.training.inner_optimizer import Matrices, is_for_muon, workspace_numbers
from noloco_node.training.layout import LayoutEntry, kind_of
from noloco_node.training.trainer import PRECISIONS

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
