"""A stream in a subspace: whatever the cut, k numbers a token carry all of it, and what comes out is ordinary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from noloco_node.config.model_spec import ModelSpec
from noloco_node.errors import ExitCode, UserError
from noloco_node.model.cut import TAKES_SUBSPACE, build_config, cut_model
from noloco_node.model.export import evaluate_model, export_model, load_exported, merge_replicas, parameters_of
from noloco_node.model.pretrained import pretrained_lines
from noloco_node.model.stage import Stage, build_stage, stage_without_weights
from noloco_node.model.subspace import WRITTEN, Subspace, basis_of, dense_state
from tests.model.families import FAMILIES, LAYERS, build_all, parameters_by_full_name, spec_of, token_ids
from tests.model.test_pretrained import run_of, saved
from tests.model.test_stage import ordinary_model

RANK = 8


def in_subspace(family: str, stages: int, *, rank: int = RANK, free: bool = False, **changes: Any) -> ModelSpec:
    """A tiny model of the family in a subspace."""
    chosen = {"subspace_rank": rank, "subspace_last_stage_free": free, "embedding_std": 0.3}
    return ModelSpec.model_validate(spec_of(family, stages, **changes).model_dump() | chosen)


def disturbed(stages: list[Stage]) -> list[Stage]:
    """Weights as after some training: nothing is zero or one."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for stage in stages:
            for weight in stage.parameters():
                weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
    return stages


def carried(stages: list[Stage], ids: Tensor, positions: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
    """Token ids through all stages, and what crossed each cut."""
    flow, crossed = ids, list[Tensor]()
    for stage in stages:
        flow = stage(flow, positions, ids)
        crossed.append(flow)
    return flow, crossed[:-1]


def factored(spec: ModelSpec, name: str, gradient: Tensor) -> Tensor:
    """The gradient of a weight's factor, from that of the ordinary weight."""
    basis = basis_of(spec.seed, 32, spec.subspace_rank or 0)
    if name == "model.embed_tokens.weight":
        return gradient @ basis
    bound = range(cut_model(spec)[-1].first_layer if spec.subspace_last_stage_free else LAYERS)
    writers = {f"model.layers.{layer}.{written}" for layer in bound for written in WRITTEN}
    return basis.T @ gradient if name in writers else gradient


@pytest.mark.parametrize(("stages", "free"), [(1, False), (3, True)])
@pytest.mark.parametrize("family", sorted(TAKES_SUBSPACE))
def test_stages_in_a_subspace_are_the_ordinary_model_in_outputs_and_gradients(
    family: str, stages: int, free: bool
) -> None:
    """Against transformers' own model with the weights multiplied out: logits, and every factor's gradient. A document
    begins within each row."""
    spec = in_subspace(family, stages, free=free)
    parts, ids = disturbed(build_all(spec)), token_ids()
    weights = parameters_by_full_name(parts)
    reference = ordinary_model(spec, dict(dense_state(spec, weights)))
    positions = (torch.arange(16) % 9).expand(2, -1)
    logits, crossed = carried(parts, ids, positions)
    expected = reference(ids, position_ids=positions, use_cache=False).logits
    assert [part.shape[-1] for part in crossed] == [RANK] * (stages - 1)
    assert logits.std() > 0.05
    assert torch.allclose(logits, expected, rtol=0, atol=1e-5)
    for output in (logits, expected):
        nn.functional.cross_entropy(output.flatten(0, 1), token_ids(1).flatten()).backward()
    wanted = {name: factored(spec, name, weight.grad) for name, weight in reference.named_parameters()}  # pyright: ignore[reportArgumentType]
    assert set(weights) == set(wanted)
    for name, weight in weights.items():
        assert weight.grad is not None, name
        assert wanted[name].abs().max() > 0, name
        assert torch.allclose(weight.grad, wanted[name], rtol=0, atol=1e-5), name


@pytest.mark.parametrize(("family", "written"), [("llama", "down_proj.weight"), ("qwen3_moe", "experts.down_proj")])
def test_first_weights_are_of_the_size_that_the_architecture_draws(family: str, written: str) -> None:
    """Multiplied out, projections have the plain ones' spread, and the embedding is its fixed part."""
    spec = in_subspace(family, 2, rank=16)
    state = dense_state(spec, merge_replicas([parameters_by_full_name(build_all(spec))]))
    assert float(state[f"model.layers.0.mlp.{written}"].std()) == pytest.approx(0.02, rel=0.15)
    table = state["model.embed_tokens.weight"]
    assert set(table.unique().tolist()) == {-0.30078125, 0.30078125}
    assert len(table.unique(dim=0)) == len(table)
    assert abs(float(table.mean())) < 0.03
    one, other = build_stage(spec, 0).subspace, build_stage(spec, 1).subspace
    assert one is not None
    assert other is not None
    assert torch.equal(one.basis, other.basis)
    assert torch.equal(one.signs, other.signs)
    assert torch.allclose(one.basis.T @ one.basis, torch.eye(16), atol=1e-6)


def test_the_basis_is_what_every_machine_draws() -> None:
    """A change of these numbers parts a run's nodes from those of the version before."""
    basis = basis_of(3, 32, 8)
    assert basis[0, :4].tolist() == pytest.approx([-0.2270026, 0.2637607, 0.0702152, 0.2375033], abs=1e-6)


def test_products_in_bf16_round_nothing_at_a_cut() -> None:
    """What crosses it stays fp32, and comes back as it went; the layers' products have their basis ready in bf16."""
    subspace = Subspace(32, RANK, 256)
    subspace.fill(3, 0.3)
    subspace.hold_in(torch.float32, torch.bfloat16)
    assert (subspace.basis.dtype, subspace.factor.dtype) == (torch.float32, torch.bfloat16)
    own, ids = torch.randn(2, 16, RANK, generator=torch.Generator().manual_seed(1)), token_ids()
    with torch.autocast("cpu", torch.bfloat16):
        back = subspace.leave(subspace.enter(own, ids), ids)
    assert torch.allclose(back, own, rtol=0, atol=1e-5)


def test_an_export_has_as_many_parameters_as_it_is_said_to_have(tmp_path: Path) -> None:
    """The card of one in a subspace told those that were trained, and the disk was asked for their room alone."""
    spec = in_subspace("llama", 2, vocab_size=256)
    state = merge_replicas([parameters_by_full_name(build_all(spec))])
    export_model(spec, state, tmp_path / "out", "bytes")
    made = sum(value.numel() for value in load_exported(tmp_path / "out").parameters())
    assert parameters_of(spec) == made > sum(value.numel() for value in state.values())


def test_without_weights_names_and_shapes_are_the_same() -> None:
    """As export and planner ask for them."""
    spec = in_subspace("qwen3", 3, free=True)
    for index in range(3):
        built, bare = build_stage(spec, index), stage_without_weights(spec, index)
        shapes = {name: value.shape for name, value in built.named_parameters()}
        assert shapes == {name: value.shape for name, value in bare.named_parameters()}
        assert built.cut_width == bare.cut_width == RANK


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_an_export_is_ordinary_and_a_run_goes_on_from_it(family: str, tmp_path: Path) -> None:
    """transformers alone scores as the stages do; another cut with the same basis begins with the same weights."""
    spec = in_subspace(family, 2, vocab_size=256)
    state = merge_replicas([parameters_by_full_name(disturbed(build_all(spec)))])
    export_model(spec, state, tmp_path, "bytes")
    batches = [(token_ids(seed), token_ids(seed + 1)) for seed in range(3)]
    exported = evaluate_model(load_exported(tmp_path), batches)
    same = {"subspace_rank": RANK, "seed": spec.seed, "embedding_std": 0.3}
    again = build_all(run_of(tmp_path, stages=3, **same).model)
    losses = [nn.functional.cross_entropy(carried(again, x)[0].flatten(0, 1), y.flatten()).item() for x, y in batches]
    assert sum(losses) / 3 == pytest.approx(exported, abs=1e-4)
    for name, weight in parameters_by_full_name(again).items():
        assert torch.allclose(weight, state[name], rtol=0, atol=1e-5), name


@pytest.mark.parametrize("change", [{"seed": 4}, {"embedding_std": 0.2}, {"subspace_rank": 16, "seed": 4}])
def test_weights_outside_the_subspace_are_refused(change: dict[str, Any], tmp_path: Path) -> None:
    """Of another basis, of another table, and of a model that was never in one."""
    spec = in_subspace("llama", 1, vocab_size=256)
    export_model(spec, parameters_by_full_name(disturbed(build_all(spec))), tmp_path / "of-a-run", "bytes")
    same = {"subspace_rank": RANK, "seed": spec.seed, "embedding_std": 0.3}
    with pytest.raises(UserError, match="not in the subspace") as caught:
        build_stage(run_of(tmp_path / "of-a-run", stages=1, **(same | change)).model, 0)
    assert caught.value.exit_code is ExitCode.DATA
    saved("llama", tmp_path / "plain")
    with pytest.raises(UserError, match=r"layers\.0\.self_attn\.o_proj\.weight is not"):  # without reading all of it
        list(pretrained_lines(run_of(tmp_path / "plain", stages=1, **same).model))
    with pytest.raises(UserError, match="not in the subspace of rank 8 that"):
        build_stage(run_of(tmp_path / "plain", stages=1, **same).model, 0)


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("olmo2", {}, "may have a norm behind"),
        ("gemma3_text", {}, "may have a norm behind"),
        ("llama", {"rank": 40}, r"more than run\.model\.config\.hidden_size \(32\)"),
        ("llama", {"tie_word_embeddings": True}, "embedding and head are one matrix"),
        ("llama", {"mlp_bias": True}, "a bias would add"),
        ("qwen3", {"attention_bias": True}, "a bias would add"),
    ],
)
def test_models_that_a_subspace_does_not_fit_are_refused(family: str, changes: dict[str, Any], reason: str) -> None:
    """With the reason, before a weight is allocated."""
    with pytest.raises(UserError, match=reason) as caught:
        build_config(in_subspace(family, 1, **changes))
    assert caught.value.exit_code is ExitCode.CONFIG
    assert caught.value.remedy


@pytest.mark.parametrize("rank", [0, 4, 12, -8])
def test_a_rank_that_is_none_is_refused(rank: int) -> None:
    """None of these is a multiple of 8 above 0."""
    with pytest.raises(ValueError, match="subspace_rank"):
        in_subspace("llama", 1, rank=rank)


def test_nothing_is_free_of_a_subspace_that_is_not_there() -> None:
    """The two settings belong together."""
    with pytest.raises(ValueError, match=r"set run\.model\.subspace_rank"):
        ModelSpec.model_validate(spec_of("llama").model_dump() | {"subspace_last_stage_free": True})


def test_families_that_take_a_subspace_are_those_tried_here() -> None:
    """Guards the first test: a family without a tiny config would not be tried."""
    assert set(FAMILIES) >= TAKES_SUBSPACE
