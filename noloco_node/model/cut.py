"""The model's config and parts, and where its layers are cut into stages. Nothing here allocates a weight."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from noloco_node.config.model_spec import ModelSpec
from noloco_node.config.pretrained import setting_names
from noloco_node.config.wording import value_in_words
from noloco_node.errors import ExitCode, UserError, near_words, suggestion

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


_POSITIVE_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
_ACTIVATION_KEYS = frozenset({"hidden_act", "hidden_activation"})
_TOKEN_KEYS = ("pad_token_id", "bos_token_id", "eos_token_id")


PARTS_DOCUMENTS = frozenset(
    ["llama", "mistral", "qwen2", "qwen3", "gemma3_text", "smollm3", "olmo2", "gemma2", "phi3", "qwen3_moe", "mixtral"]
)
"""The architectures for which it is proved that documents in one row, told apart by positions, are as if each stood by
itself."""


TAKES_SUBSPACE = frozenset(["llama", "mistral", "qwen2", "qwen3", "smollm3", "phi3", "mixtral", "qwen3_moe"])
"""The architectures for which it is proved that a subspace holds all that crosses a cut, and that the export is
exact."""


@dataclass(frozen=True, slots=True)
class StageCut:
    """The layers `first_layer <= i < end_layer` that stage `index` of `stages` holds."""

    index: int
    stages: int
    first_layer: int
    end_layer: int

    @property
    def is_first(self) -> bool:
        """True where the stage holds the embedding and takes token ids."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """True where the stage holds the final norm and the head and returns logits."""
        return self.index == self.stages - 1


def build_config(spec: ModelSpec) -> PretrainedConfig:
    """The transformers config that `model.config` describes, checked.

    Raises UserError (CONFIG) for an unknown `model_type` or key, a value the architecture refuses, dropout, tied
    embeddings with more than one stage, and a subspace that this model cannot have.
    """
    model_type = spec.config.get("model_type")
    if not isinstance(model_type, str):
        raise _config_error(
            f"run.model.config.model_type is {value_in_words(model_type)}",
            "name a transformers architecture, such as llama or qwen3",
        )
    config = _make_config(model_type, spec.config)
    _check_keys(model_type, spec.config, config)
    _check_activation(spec.config)
    _check_values(config)
    _check_untied(spec, config)
    if spec.subspace_rank is not None:
        _check_subspace(spec.subspace_rank, config)
    return config


def cut_width(spec: ModelSpec, config: PretrainedConfig) -> int:
    """Numbers of a token that travel between two stages."""
    return spec.subspace_rank or int(config.hidden_size)


def check_parts_documents(spec: ModelSpec, *, laboratory: bool = False) -> None:
    """Raise UserError (CONFIG) for an architecture that is not proved to keep documents apart. For the `laboratory`,
    whose replicas share one call, it is raised for one with sliding windows as well."""
    config = build_config(spec)
    if config.model_type not in PARTS_DOCUMENTS:
        raise _config_error(
            f"run.data.attention is 'document', and nothing proves that the '{config.model_type}' architecture keeps "
            "documents apart",
            f"set run.data.attention to whole, or take one of {', '.join(sorted(PARTS_DOCUMENTS))}",
        )
    slides = any("sliding" in kind for kind in getattr(config, "layer_types", None) or ())
    without_types = getattr(config, "layer_types", None) is None and getattr(config, "sliding_window", None)
    if laboratory and (slides or without_types):
        raise _config_error(
            "run.data.attention is 'document', which the laboratory has for models without sliding windows only",
            "set run.data.attention to whole, or take a model without them, such as llama",
        )


def cut_model(spec: ModelSpec) -> tuple[StageCut, ...]:
    """Divide the model's layers among `model.stages` so that the most expensive stage is as cheap as can be.

    If `model.layers_per_stage` is set, the division is as it says. A layer or head costs the multiplications per token
    of its matrices; the embedding's look-up costs nothing. If several cuts are as good, the most even one is taken,
    with longer stages first. The answer depends on the spec only, so all peers find the same.

    Raises UserError (CONFIG) as `build_config` does, and when there are more stages than layers. It does so too if the
    layers by hand are not those of the model in number.
    """
    config = build_config(spec)
    layers: int = config.num_hidden_layers
    if spec.stages > layers:
        raise _config_error(
            f"run.model.stages is {spec.stages} but run.model.config.num_hidden_layers is {layers}: "
            "every stage needs at least one layer",
            f"set run.model.stages to {layers} or less, or give the model more layers",
        )
    counts = _by_hand(spec.layers_per_stage, layers) or _layers_per_stage(
        layers,
        spec.stages,
        _cost_of_each_layer(config, spec.subspace_rank),
        _cost_of_each_layer(config, None if spec.subspace_last_stage_free else spec.subspace_rank),
        config.hidden_size * config.vocab_size,
    )
    ends = [sum(counts[: index + 1]) for index in range(spec.stages)]
    return tuple(
        StageCut(index=index, stages=spec.stages, first_layer=end - count, end_layer=end)
        for index, (count, end) in enumerate(zip(counts, ends, strict=True))
    )


def _by_hand(counts: Sequence[int] | None, layers: int) -> list[int]:
    if counts is not None and sum(counts) != layers:
        raise _config_error(
            f"run.model.layers_per_stage names {' + '.join(map(str, counts))} = {sum(counts)} layers, but "
            f"run.model.config.num_hidden_layers is {layers}",
            f"change one of them: the sum must be {layers}",
        )
    return list(counts or ())


def _layers_per_stage(layers: int, stages: int, layer_cost: int, last_cost: int, head_cost: int) -> list[int]:
    if stages == 1:
        return [layers]

    def division(in_last: int) -> list[int]:
        share, longer = divmod(layers - in_last, stages - 1)
        return [share + 1] * longer + [share] * (stages - 1 - longer) + [in_last]

    def badness(counts: Sequence[int]) -> tuple[int, int]:
        costs = [count * layer_cost for count in counts[:-1]]
        costs.append(counts[-1] * last_cost + head_cost)
        return max(costs), sum(cost * cost for cost in costs)

    return min((division(in_last) for in_last in range(1, layers - stages + 2)), key=badness)


def idle_experts(config: PretrainedConfig) -> float:
    """Share of a mixture's experts that a token does not go to; 0 where there is no mixture."""
    experts: int = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 0
    active: int = getattr(config, "num_experts_per_tok", None) or experts
    return 1.0 - active / experts if experts else 0.0


def _cost_of_each_layer(config: PretrainedConfig, rank: int | None) -> int:
    try:
        return _layer_cost(config, rank)
    except (TypeError, AttributeError, RuntimeError):  # a list for each layer, or transformers' own word for that
        raise not_llama_type(config, "its layers differ in size") from None


def _layer_cost(config: PretrainedConfig, rank: int | None) -> int:
    hidden: int = config.hidden_size
    heads: int = config.num_attention_heads
    key_value_heads: int = getattr(config, "num_key_value_heads", None) or heads
    head_dim: int = getattr(config, "head_dim", None) or hidden // heads
    active_experts: int = getattr(config, "num_experts_per_tok", None) or 1
    width: int = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    dense = 2 * hidden * head_dim * (heads + key_value_heads) + 3 * hidden * width * active_experts
    if rank is None:
        return dense
    inside = heads * head_dim + width * active_experts
    return dense - hidden * inside + rank * (inside + 2 * hidden)


def _config_error(message: str, remedy: str) -> UserError:
    return UserError(ExitCode.CONFIG, message, remedy)


def _make_config(model_type: str, values: dict[str, Any]) -> PretrainedConfig:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, AutoConfig

    if model_type not in CONFIG_MAPPING:
        raise _config_error(
            f"run.model.config.model_type is '{model_type}', which this version of transformers does not know",
            "name an architecture that transformers has, such as llama, mistral, qwen3 or gemma3_text",
        )
    for key in _POSITIVE_KEYS:
        if isinstance(value := values.get(key), int) and value < 1:
            raise _config_error(f"run.model.config.{key} is {value}", "set it to 1 or more")
    arguments = {key: value for key, value in values.items() if key != "model_type"}
    try:
        return AutoConfig.for_model(model_type, **arguments)  # pyright: ignore[reportUnknownMemberType]
    except (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError) as error:
        reason = " ".join(str(error).split())
        raise _config_error(
            f"run.model.config is refused by the '{model_type}' architecture: {reason}", "correct the key that it names"
        ) from error


def _check_keys(model_type: str, values: dict[str, Any], config: PretrainedConfig) -> None:
    known = {field.name for field in fields(config)}
    unknown = sorted(values.keys() - (setting_names(model_type) or frozenset()))
    if unknown:
        meant = suggestion(near_words(unknown[0], known))
        raise _config_error(
            f"run.model.config.{unknown[0]} is not a setting of the '{model_type}' architecture",
            f"{meant + ' ' if meant else ''}correct or remove it; the architecture has: {', '.join(sorted(known))}",
        )


def _check_activation(values: dict[str, Any]) -> None:
    for key in _ACTIVATION_KEYS & values.keys():
        from transformers.activations import ACT2FN  # slow to import: only where there is something to check

        if values[key] not in ACT2FN:
            raise _config_error(
                f"run.model.config.{key} is {value_in_words(values[key])}, which transformers does not know",
                f"choose one of {', '.join(sorted(ACT2FN))}",
            )


def _check_values(config: PretrainedConfig) -> None:
    parts: dict[str, Any] = config.base_model_pp_plan or {}
    if not {"embed_tokens", "layers", "norm"} <= parts.keys() or not hasattr(config, "num_hidden_layers"):
        raise not_llama_type(config, "transformers declares no pipeline plan of embedding, layers and norm for it")
    heads: int = config.num_attention_heads
    key_value_heads: int = getattr(config, "num_key_value_heads", None) or heads
    if heads % key_value_heads:
        raise _config_error(
            f"run.model.config.num_attention_heads ({heads}) is not a multiple of num_key_value_heads "
            f"({key_value_heads})",
            "change one of them",
        )
    for key, value in vars(config).items():
        if "dropout" in key and isinstance(value, int | float) and value:
            raise _config_error(
                f"run.model.config.{key} is {value}: a microbatch that is recomputed or retried must give the same "
                "result",
                "set it to 0",
            )
    for key in _TOKEN_KEYS:
        value = getattr(config, key, None)
        if isinstance(value, int) and not 0 <= value < config.vocab_size:
            raise _config_error(
                f"run.model.config.{key} is {value}, outside the vocabulary of {config.vocab_size}",
                f"set run.model.config.{key} to null or to a token below vocab_size",
            )


def not_llama_type(config: PretrainedConfig, reason: str) -> UserError:
    """The refusal of an architecture that the recipe does not fit."""
    return _config_error(
        f"run.model.config.model_type is '{config.model_type}', which cannot be cut into stages: {reason}",
        "use a Llama-type text model: llama, mistral, qwen2, qwen3, gemma3_text, smollm3 or a relative",
    )


def _check_untied(spec: ModelSpec, config: PretrainedConfig) -> None:
    if spec.stages == 1 or not getattr(config, "tie_word_embeddings", False):
        return
    origin = (
        "is true" if "tie_word_embeddings" in spec.config else f"is not set, and '{config.model_type}' ties by default"
    )
    raise _config_error(
        f"run.model.config.tie_word_embeddings {origin}, but run.model.stages is {spec.stages}: "
        "embedding and head would be one matrix on two stages",
        "set run.model.config.tie_word_embeddings to false, or run.model.stages to 1",
    )


def _check_subspace(rank: int, config: PretrainedConfig) -> None:
    setting, leave_out = f"run.model.subspace_rank is {rank}", "or leave out run.model.subspace_rank"
    if rank > config.hidden_size:
        raise _config_error(
            f"{setting}, more than run.model.config.hidden_size ({config.hidden_size})",
            f"set it to a quarter or an eighth of the hidden size, {leave_out}",
        )
    if config.model_type not in TAKES_SUBSPACE:
        raise _config_error(
            f"{setting}, and the '{config.model_type}' architecture may have a norm behind what its layers add, so "
            "that a subspace is not proved to hold it",
            f"take one of {', '.join(sorted(TAKES_SUBSPACE))}, {leave_out}",
        )
    if getattr(config, "tie_word_embeddings", False):
        raise _config_error(
            f"{setting}, but embedding and head are one matrix (tie_word_embeddings), and only an embedding is made of "
            "a fixed part and a factor",
            f"set run.model.config.tie_word_embeddings to false, {leave_out}",
        )
    for key in ("attention_bias", "mlp_bias"):
        if getattr(config, key, False):
            raise _config_error(
                f"{setting}, but run.model.config.{key} is true: a bias would add what the subspace does not hold",
                f"set run.model.config.{key} to false, {leave_out}",
            )


class _Undrawn(TorchFunctionMode):
    """Leaves new weights as they are. To draw values that no memory will hold takes half of the time of building."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        draws = getattr(func, "__module__", "") == nn.init.__name__ and "tensor" in given
        return given["tensor"] if draws else func(*args, **given)


def build_on_meta(config: PretrainedConfig) -> PreTrainedModel:
    """The whole model without memory behind its weights. Raises UserError (CONFIG) where there is no such model."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise not_llama_type(config, "it has no causal language model")
    try:
        with torch.device("meta"), _Undrawn():
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
