"""The formula for what a microbatch leaves in memory is what autograd saves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call  # pyright: ignore[reportPrivateImportUsage]

from noloco_node.config.model_spec import ModelSpec
from noloco_node.model.cut import build_config, build_on_meta
from noloco_node.model.stage import build_stage
from noloco_node.sizing.footprint import graph_of

BATCH, LENGTH = 2, 64
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"num_key_value_heads": 2}),
    ("mistral", {}),
    ("qwen2", {}),
    ("qwen3", {"head_dim": 32}),
    ("gemma3_text", {"head_dim": 16}),
    ("smollm3", {}),
    ("olmo2", {}),
    ("gemma2", {"head_dim": 16}),
    ("phi3", {}),
    ("qwen3_moe", {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}),
]


def spec_of(family: str, layers: int, extra: dict[str, Any]) -> ModelSpec:
    """A small model of that family."""
    config = {
        "model_type": family,
        "vocab_size": 300,
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "max_position_embeddings": LENGTH,
        "tie_word_embeddings": False,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return ModelSpec(config={**config, **extra}, stages=1)


def saved_bytes(spec: ModelSpec, dtype: torch.dtype, *, autocast: bool = False) -> float:
    """What autograd holds after a forward, published weights aside, in bytes a token."""
    stage = build_stage(spec, 0).to(dtype)
    leaves = {name: p.detach().clone().requires_grad_() for name, p in stage.named_parameters()}
    weights = {leaf.untyped_storage().data_ptr() for leaf in leaves.values()}
    found: dict[int, int] = {}
    held: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and tensor.numel() > 1024:
            held.append(tensor)
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.randint(0, stage.vocab_size, (BATCH, LENGTH))
    mixed = torch.autocast("cpu", torch.bfloat16, enabled=autocast)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), mixed:
        functional_call(stage, leaves, (ids,))
    return sum(found.values()) / (BATCH * LENGTH)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("family", "extra"), FAMILIES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_layers_graph_is_as_large_as_autograd_says(family: str, extra: dict[str, Any], dtype: torch.dtype) -> None:
    """Within 2 %: the difference between models of three layers and of one is two layers."""
    small, large = (spec_of(family, layers, extra) for layers in (1, 3))
    measured = (saved_bytes(large, dtype) - saved_bytes(small, dtype)) / 2
    config = build_config(large)
    graph = graph_of(build_on_meta(config), config, dtype.itemsize, LENGTH)
    assert graph.layers[1] == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize(("family", "extra"), [FAMILIES[0], FAMILIES[4]], ids=["llama", "qwen3"])
def test_autocast_holds_weights_that_it_has_cast_and_an_fp32_stream(family: str, extra: dict[str, Any]) -> None:
    """Within 2 %, the cast weights of two layers being counted by themselves."""
    small, large = (spec_of(family, layers, extra) for layers in (1, 3))
    stages = [build_stage(spec, 0) for spec in (small, large)]
    matrices = [sum(p.numel() for p in stage.parameters() if p.dim() > 1) for stage in stages]
    cast = (matrices[1] - matrices[0]) / 2 * torch.bfloat16.itemsize / (BATCH * LENGTH)
    saved = [saved_bytes(spec, torch.float32, autocast=True) for spec in (small, large)]
    config = build_config(large)
    graph = graph_of(build_on_meta(config), config, torch.bfloat16.itemsize, LENGTH, autocast=True)
    assert graph.layers[1] + cast == pytest.approx((saved[1] - saved[0]) / 2, rel=0.02)
