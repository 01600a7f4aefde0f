"""Tiny configs of every architecture whose cut is proved exact, each with its traps switched on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from noloco_node.config.model_spec import ModelSpec
from noloco_node.model.stage import Stage, build_stage

LAYERS = 6
VOCABULARY = 97

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
    "mistral": {"sliding_window": 5, "head_dim": 12},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    "qwen3": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3, "head_dim": 8},
    "gemma3_text": {"sliding_window": 5, "query_pre_attn_scalar": 8, "head_dim": 8},
    "smollm3": {"use_sliding_window": True, "sliding_window": 5},
    "olmo2": {},
    "gemma2": {
        "sliding_window": 5,
        "query_pre_attn_scalar": 8,
        "head_dim": 8,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 0.2,
    },
    "phi3": {"sliding_window": 5, "partial_rotary_factor": 0.5, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
        "head_dim": 8,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5},
}
"""Settings that make the layers of each family differ from one another, where they can."""
MIXED_LAYERS = frozenset({"qwen2", "qwen3", "gemma3_text", "smollm3", "gemma2"})
"""Families whose layers attend in two ways, by their number."""


def spec_of(family: str, stages: int = 1, seed: int = 3, **changes: Any) -> ModelSpec:
    """A tiny model of the family."""
    config = {**_COMMON, **FAMILIES.get(family, {}), "model_type": family, **changes}
    return ModelSpec(config=config, stages=stages, seed=seed)


def build_all(spec: ModelSpec) -> list[Stage]:
    """Every stage of the model."""
    return [build_stage(spec, index) for index in range(spec.stages)]


def parameters_by_full_name(stages: list[Stage]) -> dict[str, Tensor]:
    """Parameters of all stages under the full model's names; a name on two stages is an error."""
    found: dict[str, Tensor] = {}
    for stage in stages:
        own = dict(stage.named_parameters())
        for local, full in stage.full_names().items():
            assert full not in found, full
            found[full] = own[local]
    return found


def token_ids(seed: int = 0, batch: int = 2, length: int = 16) -> Tensor:
    """Random token ids [batch, length]."""
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))
