"""Whether an architecture can be cut into stages: what it is made of, and that nothing happens but in its parts."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from noloco_node.config.model_spec import ModelSpec
from noloco_node.errors import ExitCode, UserError
from noloco_node.model.cut import build_config, cut_model, not_llama_type

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def build_on_meta(config: PretrainedConfig) -> PreTrainedModel:
    """The whole model without memory behind its weights. Raises UserError (CONFIG) where there is no such model."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise not_llama_type(config, "it has no causal language model")
    try:
        with torch.device("meta"):
            return cast("PreTrainedModel", AutoModelForCausalLM.from_config(config, dtype=torch.float32))  # pyright: ignore[reportUnknownMemberType]
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError, AssertionError) as error:
        raise UserError(
            ExitCode.CONFIG,
            f"run.model.config: the '{config.model_type}' architecture cannot be built from it "
            f"({type(error).__name__}: {' '.join(str(error).split())})",
            "correct the value that the reason points to",
        ) from error


def check_anatomy(causal: PreTrainedModel, config: PretrainedConfig) -> None:
    """Raise UserError (CONFIG) where the model is not an embedding, layers, a norm and a head."""
    children = {name for name, _ in causal.named_children()}
    if children != {"model", "lm_head"}:
        raise not_llama_type(config, f"its parts are {', '.join(sorted(children))}")
    parts = dict(causal.get_submodule("model").named_children())
    missing = {"embed_tokens", "layers", "norm"} - set(parts)
    if missing:
        raise not_llama_type(config, f"it has no {', '.join(sorted(missing))}")
    strangers = {name for name, part in parts.items() if any(True for _ in part.parameters())}
    strangers -= {"embed_tokens", "layers", "norm"}
    if strangers:
        raise not_llama_type(config, f"it has further weights: {', '.join(sorted(strangers))}")
    if len(cast(nn.ModuleList, parts["layers"])) != config.num_hidden_layers:
        raise not_llama_type(config, "its layers are not num_hidden_layers in number")


def check_cut(spec: ModelSpec) -> None:
    """Raise UserError (CONFIG) where the model cannot be cut into its stages. Allocates no weights."""
    cut_model(spec)
    config = build_config(spec)
    check_anatomy(build_on_meta(config), config)
    if spec.stages > 1:
        check_only_layers_work(config)


def check_only_layers_work(config: PretrainedConfig) -> None:
    """Raise UserError (CONFIG) if the model changes activations between its embedding and its head outside its layers
    and norm. A later stage would do it once more. Some models scale what comes from the embedding."""
    if _changes_without_layers(config):
        raise not_llama_type(config, "it changes activations outside its layers, which each stage would do again")


def _changes_without_layers(whole: PretrainedConfig) -> bool:
    config = copy.deepcopy(whole)
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = config.layer_types[:1]
    base = build_on_meta(config).get_submodule("model")
    base.register_module("layers", nn.ModuleList())
    base.register_module("embed_tokens", None)
    base.register_module("norm", nn.Identity())
    cast(Any, base).config.num_hidden_layers = 0
    base.to_empty(device="cpu")
    activations = torch.linspace(-1.0, 1.0, 2 * int(config.hidden_size)).view(1, 2, -1)
    with torch.no_grad():
        for buffer in base.buffers():
            buffer.zero_()
        found: Any = base(inputs_embeds=activations, use_cache=False)
    return not torch.equal(found.last_hidden_state, activations)
