"""A residual stream in a subspace: x = T[token] + U·c, so that c alone has to cross a cut between stages.

U is one orthonormal basis [hidden, rank] of the whole run, and T a fixed table of signs: both come from the run's seed
and are never trained. What writes into the stream writes into U's span: `o_proj` = U·A, `down_proj` = U·B. So c holds
all of it, and the stages before need no more of a gradient than Uᵀ of it. Multiplied out, the model is an ordinary one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from noloco_node.config.model_spec import ModelSpec
from noloco_node.errors import ExitCode, UserError
from noloco_node.model.cut import StageCut, build_config, cut_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

WRITERS = ("self_attn.o_proj", "mlp.down_proj")
"""The projections of a layer that write into the residual stream."""
EXPERTS = "mlp.experts"
"""The experts of a layer, in one tensor for each of their projections: `down_proj` writes into the stream."""
WRITTEN = (*(f"{place}.weight" for place in WRITERS), f"{EXPERTS}.down_proj")
"""The weights of a layer that write into the stream; a layer has either experts or one projection of its own."""
EMBEDDING = "model.embed_tokens.weight"
OUTSIDE = 1e-2
"""The most of a matrix, by its norm, that may lie outside the subspace. A file in bf16 has 0.002 there by rounding;
weights that know nothing of the basis have about all."""


class Subspace(nn.Module):
    """The basis U and the table T of a run. It holds no parameter."""

    basis: Tensor
    factor: Tensor
    signs: Tensor
    patterns: Tensor

    def __init__(self, hidden: int, rank: int, vocabulary: int) -> None:
        """Without values, on the meta device, until `fill`."""
        super().__init__()
        self.hidden, self.rank = hidden, rank
        shapes = {"basis": (hidden, rank), "factor": (hidden, rank), "patterns": (256, 8)}
        for name, shape in shapes.items():
            self.register_buffer(name, torch.empty(shape, device="meta"), persistent=False)
        signs = torch.empty((vocabulary, -(-hidden // 8)), dtype=torch.uint8, device="meta")
        self.register_buffer("signs", signs, persistent=False)

    def fill(self, seed: int, scale: float) -> None:
        """Take both from the seed: fp32, on the CPU. `scale` is the size of each number of T, rounded to bf16."""
        vocabulary, packed = self.signs.shape
        drawn = bytearray(_drawn(seed, "table", vocabulary * packed))
        self.signs = torch.frombuffer(drawn, dtype=torch.uint8).view(vocabulary, packed)
        bits = torch.arange(256).unsqueeze(1).bitwise_right_shift(torch.arange(8)) & 1
        size = torch.tensor(scale, dtype=torch.bfloat16).to(torch.float32)
        self.patterns = (2 * bits - 1) * size
        self.basis = self.factor = basis_of(seed, self.hidden, self.rank)

    def hold_in(self, published: torch.dtype, computed: torch.dtype) -> None:
        """Hold U and T in the precision of the stream, and U for the layers in that of their products."""
        self.basis, self.patterns = self.basis.to(published), self.patterns.to(published)
        self.factor = self.basis.to(computed)

    def fixed(self, ids: Tensor) -> Tensor:
        """T's rows [..., hidden] of token ids [...]."""
        packed = self.signs[ids].to(torch.int32)
        return F.embedding(packed, self.patterns).flatten(-2)[..., : self.hidden]

    def enter(self, own: Tensor, ids: Tensor) -> Tensor:
        """The stream [..., hidden] of coordinates c [..., rank] and token ids [...]."""
        with _as_it_is(own):
            return self.fixed(ids) + F.linear(own, self.basis)

    def leave(self, stream: Tensor, ids: Tensor) -> Tensor:
        """The coordinates c [..., rank] of a stream [..., hidden]."""
        with _as_it_is(stream):
            return F.linear(stream - self.fixed(ids), self.basis.t())


class SubspaceLinear(nn.Linear):
    """A projection U·A that writes into the stream: its weight is A [rank, in]."""

    def __init__(self, inside: int, subspace: Subspace) -> None:
        super().__init__(inside, subspace.rank, bias=False, device="meta")  # pyright: ignore[reportUnknownMemberType]
        self.subspace = subspace

    @property
    def dense_shape(self) -> tuple[int, int]:
        return self.subspace.hidden, self.in_features

    def factor_of(self, dense: Tensor) -> Tensor | None:
        """The A of which this U·A is made; None where it lies outside the subspace."""
        basis = self.subspace.basis
        return basis.t() @ dense if is_in_span(dense, basis) else None

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., hidden]."""
        return F.linear(F.linear(input, self.weight), self.subspace.factor)


class SubspaceExperts(nn.Module):
    """Experts whose down projections are U·A: their weight is A [experts, rank, in].

    It stands before the architecture's own class, which it becomes a kind of (`bind_experts`). That class gives as many
    numbers as it takes, so A is filled up with rows of zeros for it, and they are cut off again.
    """

    subspace: Subspace

    def forward(self, hidden_states: Tensor, *routes: Tensor) -> Tensor:
        """[..., hidden] with their routes -> [..., hidden]."""
        weights = cast("dict[str, Tensor]", self._parameters)
        own = weights["down_proj"]
        weights["down_proj"] = F.pad(own, (0, 0, 0, self.subspace.hidden - self.subspace.rank))
        try:
            found = cast(Tensor, super().forward(hidden_states, *routes))
        finally:
            weights["down_proj"] = own
        return F.linear(found[..., : self.subspace.rank], self.subspace.factor)

    @property
    def dense_shape(self) -> tuple[int, int, int]:
        experts, _, inside = cast(Tensor, self.down_proj).shape
        return experts, self.subspace.hidden, inside

    def factor_of(self, dense: Tensor) -> Tensor | None:
        """The A of which this U·A is made; None where it lies outside the subspace."""
        basis = self.subspace.basis
        return basis.t() @ dense if is_in_span(dense, basis) else None


def bind_experts(experts: nn.Module, subspace: Subspace) -> None:
    """Make the experts of a layer, on the meta device, write into the subspace."""
    own = experts.get_parameter("down_proj")
    shape = (own.shape[0], subspace.rank, own.shape[2])
    experts.register_parameter("down_proj", nn.Parameter(torch.empty(shape, device="meta", dtype=own.dtype)))
    experts.__class__ = type(f"Subspace{type(experts).__name__}", (SubspaceExperts, type(experts)), {})
    experts.register_module("subspace", subspace)


class SubspaceEmbedding(nn.Embedding):
    """An embedding T[token] + U·c[token]: its weight is c [vocabulary, rank]."""

    def __init__(self, plain: nn.Embedding, subspace: Subspace) -> None:
        super().__init__(  # pyright: ignore[reportUnknownMemberType]
            plain.num_embeddings, subspace.rank, plain.padding_idx, device="meta"
        )
        self.subspace = subspace

    @property
    def dense_shape(self) -> tuple[int, int]:
        """The shape of T + c·Uᵀ."""
        return self.num_embeddings, self.subspace.hidden

    def factor_of(self, dense: Tensor) -> Tensor | None:
        """The c of which this table is made; None where it lies outside the subspace, or has another T."""
        ids = torch.arange(len(dense))
        factor = self.subspace.leave(dense, ids)
        return factor if _is_little(dense - self.subspace.enter(factor, ids), dense) else None

    def forward(self, input: Tensor) -> Tensor:
        """Token ids [...] -> [..., hidden]."""
        return self.subspace.enter(super().forward(input), input)


def basis_of(seed: int, hidden: int, rank: int) -> Tensor:
    """An orthonormal basis [hidden, rank], fp32: a function of its arguments. It is worked out in fp64, so that
    machines whose libraries add up in another order still round to the same."""
    drawn = bytearray(_drawn(seed, f"basis/{rank}", 4 * hidden * rank))
    matrix = torch.frombuffer(drawn, dtype=torch.int32).view(hidden, rank).to(torch.float64)
    basis, triangle = cast("tuple[Tensor, Tensor]", torch.linalg.qr(matrix))  # pyright: ignore
    return (basis * triangle.diagonal().sign()).to(torch.float32).contiguous()


def is_in_span(dense: Tensor, basis: Tensor) -> bool:
    """Whether the columns of matrices [..., hidden, in] lie in the span of a basis [hidden, rank]."""
    return _is_little(dense - basis @ (basis.t() @ dense), dense)


def bind_to_subspace(causal: PreTrainedModel, spec: ModelSpec, config: PretrainedConfig) -> Subspace | None:
    """Put factors in the place of what writes into the stream of a whole model on the meta device. None where the run
    has no subspace, and the model stays as it is."""
    if spec.subspace_rank is None:
        return None
    subspace = Subspace(int(config.hidden_size), spec.subspace_rank, int(config.vocab_size))
    bound = bound_layers(spec)
    base = causal.get_submodule("model")
    layers = cast(nn.ModuleList, base.get_submodule("layers"))
    for number in bound:
        parts = dict(cast("Iterable[tuple[str, nn.Module]]", nn.Module.named_modules(layers[number])))
        if EXPERTS in parts:
            bind_experts(parts[EXPERTS], subspace)
        for place in WRITERS:
            parent, _, name = place.rpartition(".")
            if isinstance(plain := parts.get(place), nn.Linear):
                parts[parent].register_module(name, SubspaceLinear(plain.in_features, subspace))
    plain_embedding = cast(nn.Embedding, base.get_submodule("embed_tokens"))
    base.register_module("embed_tokens", SubspaceEmbedding(plain_embedding, subspace))
    return subspace


def bound_layers(spec: ModelSpec) -> range:
    """The layers that write into the subspace: all, or all but the last stage's."""
    last: StageCut = cut_model(spec)[-1]
    return range(last.first_layer if spec.subspace_last_stage_free else last.end_layer)


def first_values(causal: nn.Module, subspace: Subspace) -> None:
    """From values as the architecture draws them to those that training begins with. U·A gets the size that the
    projection would have had, and c begins at 0."""
    with torch.no_grad():
        for module in causal.modules():
            if isinstance(module, SubspaceLinear):
                module.weight.mul_(math.sqrt(subspace.hidden / subspace.rank))
            elif isinstance(module, SubspaceExperts):
                module.get_parameter("down_proj").mul_(math.sqrt(subspace.hidden / subspace.rank))
            elif isinstance(module, SubspaceEmbedding):
                module.weight.zero_()


def scale_of_table(spec: ModelSpec, config: PretrainedConfig) -> float:
    """The size of T's numbers: `embedding_std`, or the architecture's own rule."""
    return spec.embedding_std if spec.embedding_std is not None else float(config.initializer_range)


def factors_of(causal: nn.Module) -> dict[str, SubspaceLinear | SubspaceExperts | SubspaceEmbedding]:
    """The modules of a model whose weights are factors, by the names of these weights."""
    found: dict[str, SubspaceLinear | SubspaceExperts | SubspaceEmbedding] = {}
    for name, module in cast("Iterable[tuple[str, nn.Module]]", nn.Module.named_modules(causal)):
        if isinstance(module, SubspaceLinear | SubspaceEmbedding):
            found[f"{name}.weight"] = module
        elif isinstance(module, SubspaceExperts):
            found[f"{name}.down_proj"] = module
    return found


def dense_state(spec: ModelSpec, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The weights of a model, or of a part of it, by full name as an ordinary model has them: fp32, multiplied out.
    They are the same ones where the run has no subspace."""
    if spec.subspace_rank is None:
        return state
    config, bound = build_config(spec), bound_layers(spec)
    subspace = Subspace(int(config.hidden_size), spec.subspace_rank, int(config.vocab_size))
    subspace.fill(spec.seed, scale_of_table(spec, config))
    names = {f"model.layers.{number}.{written}" for number in bound for written in WRITTEN}
    found = dict(state)
    for name, weight in state.items():
        if weight.dim() < 2 or weight.shape[-2 if name in names else -1] != subspace.rank:
            continue
        own = weight.to("cpu", torch.float32)
        if name in names:
            found[name] = subspace.basis @ own
        elif name == EMBEDDING:
            found[name] = subspace.enter(own, torch.arange(len(own)))
    return found


def outside_subspace(spec: ModelSpec, name: str) -> UserError:
    """The refusal of weights that the run's subspace does not hold."""
    return UserError(
        ExitCode.DATA,
        f"the weights of run.model.from_pretrained ('{spec.from_pretrained}') are not in the subspace of rank "
        f"{spec.subspace_rank} that run.model.seed {spec.seed} draws: {name} is not",
        "leave out run.model.subspace_rank, or take the export of a run with the same subspace_rank, seed, "
        "embedding_std, stages and subspace_last_stage_free",
    )


def _is_little(rest: Tensor, whole: Tensor) -> bool:
    return float(rest.square().sum()) <= OUTSIDE**2 * float(whole.square().sum())


def _drawn(seed: int, what: str, count: int) -> bytes:
    return hashlib.shake_256(f"{seed}/subspace/{what}".encode()).digest(count)


def _as_it_is(tensor: Tensor) -> torch.autocast:
    """At a cut nothing may be rounded to what products are computed in."""
    return torch.autocast(tensor.device.type, enabled=False)
