"""One pipeline stage as a module, and its first weights.

A stage is the full model with the other stages' layers taken out, not a smaller model. Layers are made from the full
config, because some architectures give a layer a role by its number (sliding windows, layers without rotary embedding).
Only the config that the model's own forward reads is narrowed to the stage.
"""

from __future__ import annotations

import copy
import hashlib
import threading
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from noloco_node.config.model_spec import ModelSpec
from noloco_node.finite import all_finite
from noloco_node.model.cut import StageCut, build_config, build_on_meta, check_anatomy, cut_model, not_llama_type
from noloco_node.model.pretrained import Weights
from noloco_node.model.router import Router, router_of
from noloco_node.model.subspace import (
    Subspace,
    bind_to_subspace,
    factors_of,
    first_values,
    outside_subspace,
    scale_of_table,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_LAYERS = "model.layers."
_LOCAL_ROOT = "causal."


_told = threading.local()
"""Its `documents` says of this thread whether the rows that a stage runs now hold several, or None."""


class Stage(nn.Module):
    """One stage of a causal language model.

    `forward` maps token ids int64 [B, T] (first stage) or activations [B, T, width] to activations [B, T, width]. On
    the last stage it maps to logits [B, T, vocab]. It is pure: no cache, no dropout, no state. Activations and logits
    have the precision of the parameters, and incoming activations must have it too.
    """

    def __init__(
        self, cut: StageCut, causal: PreTrainedModel, router: Router | None = None, subspace: Subspace | None = None
    ) -> None:
        super().__init__()
        _answer_transformers()
        self.cut = cut
        self._is_first, self._is_last = cut.is_first, cut.is_last
        self.causal = causal
        self.router = router
        """How its routers are trained; None where it has none, or where they are not."""
        self.subspace = subspace
        """What the activations are coordinates in; None where they are the residual stream itself."""
        self.cut_width: int = causal.config.hidden_size if subspace is None else subspace.rank
        """Numbers of a token that go in and out."""
        self.vocab_size: int = causal.config.vocab_size
        self.masks_by_itself = False
        """Tells whether the attention mask is worked out here instead of by transformers, which cannot under `vmap`.
        Only models without sliding windows allow it."""

    def forward(
        self, inputs: Tensor, positions: Tensor | None = None, ids: Tensor | None = None, *, routers: bool = False
    ) -> Tensor | tuple[Tensor, tuple[Tensor, ...]]:
        """Run the stage's layers; attention is causal within each row. Positions count from 0, or are given, int64 [B,
        T]. Where they do not go on, a document begins, and no token sees beyond its own. A later stage of a subspace
        needs the token `ids`, int64 [B, T]. With `routers` the logits of its routers come beside the outputs, [B·T,
        experts] for each layer that has one."""
        source: dict[str, Any] = {"input_ids": inputs}
        if self._is_first:
            ids = inputs
        else:
            source = {"inputs_embeds": inputs if self.subspace is None else self.subspace.enter(inputs, _known(ids))}
        if positions is not None:
            source |= documents_apart(positions, masked=self.masks_by_itself)
        if self.router is not None:
            source["output_router_logits"] = routers
        whole: Any = self.causal if self._is_last else self.causal.get_submodule("model")
        found = _told_of_documents(whole, source, documents=positions is not None)
        outputs = cast(Tensor, found.logits if self._is_last else found.last_hidden_state)
        if self.subspace is not None and not self._is_last:
            outputs = self.subspace.leave(outputs, _known(ids))
        return (outputs, tuple(found.router_logits or ())) if routers else outputs

    def hold_fixed_in(self, published: torch.dtype, computed: torch.dtype) -> None:
        """Hold what is not trained in the precision of the weights that are `published`, or of products."""
        if self.subspace is not None:
            self.subspace.hold_in(published, computed)

    def full_names(self) -> dict[str, str]:
        """Each parameter's name here -> its name in the full Hugging Face model."""
        return {name: self._full_name(name) for name, _ in self.named_parameters()}

    def _full_name(self, local: str) -> str:
        return _full_name(local.removeprefix(_LOCAL_ROOT), self.cut.first_layer)


def _known(ids: Tensor | None) -> Tensor:
    assert ids is not None, "a later stage in a subspace needs the token ids"
    return ids


def _told_of_documents(whole: Any, source: dict[str, Any], *, documents: bool) -> Any:
    """Run transformers' part of a stage, and answer what it asks of documents in the rows meanwhile."""
    if torch.compiler.is_compiling():  # nothing is looked at there
        return whole(**source, use_cache=False)
    _told.documents = documents
    try:
        return whole(**source, use_cache=False)
    finally:
        _told.documents = None


def _answer_transformers() -> None:
    """Let transformers ask a stage whether rows hold several documents. By itself it looks at the positions as each
    forward begins. On a GPU that waits for all that the device has in hand, so nothing could be queued behind it."""
    masks: Any = import_module("transformers.masking_utils")
    by_looking = getattr(masks, "find_packed_sequence_indices", None)
    if by_looking is None or getattr(by_looking, "asks", False):  # a later release may look in another way
        return

    def find_packed_sequence_indices(position_ids: Tensor) -> Tensor | None:
        documents: bool | None = None if torch.compiler.is_compiling() else getattr(_told, "documents", None)
        if documents is None:
            return by_looking(position_ids)
        if not documents:
            return None
        return (torch.diff(position_ids, prepend=position_ids[:, :1] - 1) != 1).cumsum(-1)

    find_packed_sequence_indices.asks = True  # pyright: ignore[reportFunctionMemberAccess]
    masks.find_packed_sequence_indices = find_packed_sequence_indices


def documents_apart(positions: Tensor, *, masked: bool = False) -> dict[str, Tensor]:
    """What transformers is told of documents in a row, by their positions, int64 [B, T]: it parts them by itself where
    it gets no mask. `masked` says it by a mask, bool [B, 1, T, T]."""
    told = {"position_ids": positions}
    if masked:
        document = (positions == 0).cumsum(1)
        places = torch.arange(positions.shape[1], device=positions.device)
        alike = document[:, :, None] == document[:, None, :]
        told["attention_mask"] = (alike & (places[:, None] >= places[None, :]))[:, None]
    return told


def build_stage(spec: ModelSpec, index: int) -> Stage:
    """Stage `index` with its first weights: fp32, on the CPU.

    They are read where the model names a folder of weights. Else each module is drawn from (model.seed, its full name)
    by the architecture's own rule, so two builds agree bit for bit whatever the cut. Only the stage's own part is
    allocated. The global random state is left as it was.

    Raises UserError (CONFIG) as `cut_model` does, and where the architecture is not of the Llama type; DATA where the
    folder does not hold this stage.
    """
    config = build_config(spec)
    cut = cut_model(spec)[index]
    causal = build_on_meta(config)
    check_anatomy(causal, config)
    router = router_of(causal, config, cut)
    subspace = bind_to_subspace(causal, spec, config)
    _take_out_other_stages(causal, cut)
    _allocate(causal)
    if subspace is not None:
        subspace.fill(spec.seed, scale_of_table(spec, config))
    weights = None if spec.from_pretrained is None else Weights(spec)
    if weights is not None:
        for parameter in causal.parameters():
            parameter._is_hf_initialized = True  # pyright: ignore[reportAttributeAccessIssue] # nothing is drawn for it
    _initialise(causal, spec.seed, cut.first_layer)
    if subspace is not None:
        first_values(causal, subspace)
    elif cut.is_first and spec.embedding_std is not None:
        _spread_embedding(causal, spec.embedding_std)
    if weights is not None:
        _read(causal, weights, cut.first_layer, spec)
    _check_all_initialised(causal, config)
    return Stage(cut, causal, router, subspace)


def stage_without_weights(spec: ModelSpec, index: int) -> Stage:
    """Stage `index` on the meta device: its parameters' names and shapes, no memory. UserError as `build_stage`."""
    config = build_config(spec)
    causal = build_on_meta(config)
    check_anatomy(causal, config)
    cut = cut_model(spec)[index]
    subspace = bind_to_subspace(causal, spec, config)
    _take_out_other_stages(causal, cut)
    if causal.config.tie_word_embeddings:
        causal.tie_weights()
    return Stage(cut, causal, subspace=subspace)


def _take_out_other_stages(causal: PreTrainedModel, cut: StageCut) -> None:
    base = causal.get_submodule("model")
    layers = cast(nn.ModuleList, base.get_submodule("layers"))
    base.register_module("layers", layers[cut.first_layer : cut.end_layer])
    if not cut.is_first:
        base.register_module("embed_tokens", None)
    if not cut.is_last:
        base.register_module("norm", nn.Identity())
        causal.register_module("lm_head", None)
    causal.config = _narrowed(causal.config, cut)
    cast(Any, base).config = causal.config


def _narrowed(config: PretrainedConfig, cut: StageCut) -> PretrainedConfig:
    own = copy.deepcopy(config)
    own.num_hidden_layers = cut.end_layer - cut.first_layer
    layer_types: list[str] | None = getattr(config, "layer_types", None)
    if layer_types is not None:
        own.layer_types = layer_types[cut.first_layer : cut.end_layer]
    return own


def _allocate(causal: PreTrainedModel) -> None:
    causal.to_empty(device="cpu")
    if causal.config.tie_word_embeddings:
        causal.tie_weights()
    with torch.no_grad():
        for tensor in _floating_tensors(causal):
            tensor.fill_(float("nan"))


def _initialise(causal: PreTrainedModel, seed: int, first_layer: int) -> None:
    initialise: Callable[[nn.Module], None] = causal._init_weights  # pyright: ignore
    modules: list[tuple[str, nn.Module]] = list(nn.Module.named_modules(causal))  # pyright: ignore[reportUnknownArgumentType]
    state = torch.default_generator.get_state()
    try:
        with torch.no_grad():
            for name, module in reversed(modules):
                torch.default_generator.manual_seed(_module_seed(seed, _full_name(name, first_layer)))
                initialise(module)
    finally:
        torch.default_generator.set_state(state)


def _spread_embedding(causal: PreTrainedModel, std: float) -> None:
    """Scale the embedding as drawn to this standard deviation. A row of zeros, for padding, stays one."""
    rule = getattr(causal.config, "initializer_range", None)
    if not rule:
        raise not_llama_type(
            causal.config, "its config has no initializer_range for run.model.embedding_std to replace"
        )
    with torch.no_grad():
        causal.get_input_embeddings().weight.mul_(std / rule)  # pyright: ignore


def _read(causal: PreTrainedModel, weights: Weights, first_layer: int, spec: ModelSpec) -> None:
    parameters = {_full_name(name, first_layer): value for name, value in nn.Module.named_parameters(causal)}
    factored = {_full_name(name, first_layer): module for name, module in factors_of(causal).items()}
    shapes = {name: tuple(value.shape) for name, value in parameters.items()}
    weights.check(shapes | {name: module.dense_shape for name, module in factored.items()})
    for name, value in parameters.items():
        if name not in factored:
            weights.read(name, value)
            continue
        weights.read(name, dense := torch.empty(factored[name].dense_shape))
        factor = factored[name].factor_of(dense)
        if factor is None:
            raise outside_subspace(spec, name)
        with torch.no_grad():
            value.copy_(factor)


def _module_seed(seed: int, full_name: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{full_name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _check_all_initialised(causal: PreTrainedModel, config: PretrainedConfig) -> None:
    fixed = {id(own) for module in causal.modules() if isinstance(module, Subspace) for own in module.buffers()}
    for name, tensor in [*causal.named_parameters(), *causal.named_buffers()]:
        if id(tensor) in fixed:
            continue
        if not tensor.is_floating_point() or not all_finite(tensor.detach()):
            raise not_llama_type(config, f"transformers has no rule for the first values of {name}")


def _floating_tensors(module: nn.Module) -> list[Tensor]:
    tensors: list[Any] = [*module.parameters(), *module.buffers()]
    return [tensor for tensor in tensors if tensor.is_floating_point()]


def _full_name(name: str, first_layer: int) -> str:
    if not name.startswith(_LAYERS):
        return name
    number, dot, rest = name.removeprefix(_LAYERS).partition(".")
    return f"{_LAYERS}{int(number) + first_layer}{dot}{rest}"
