"""A cut model is the whole model: same outputs, same gradients, same first weights, for every family."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from noloco_node.config.model_spec import ModelSpec
from noloco_node.errors import ExitCode, UserError
from noloco_node.model.cut import build_config
from noloco_node.model.stage import Stage, build_stage
from tests.model.families import FAMILIES, LAYERS, MIXED_LAYERS, build_all, parameters_by_full_name, spec_of, token_ids


def compose(stages: list[Stage], ids: Tensor) -> Tensor:
    """Token ids through all stages."""
    flow = ids
    for stage in stages:
        flow = stage(flow)
    return flow


@functools.cache
def first_weights(family: str) -> dict[str, Tensor]:
    """Of the family's model in one stage: nobody changes them."""
    return parameters_by_full_name(build_all(spec_of(family)))


def ordinary_model(spec: ModelSpec, weights: dict[str, Tensor]) -> nn.Module:
    """The whole model as transformers builds it, without a line of ours, holding copies of `weights`."""
    model: nn.Module = AutoModelForCausalLM.from_config(build_config(spec), dtype=torch.float32)
    missing, unexpected = model.load_state_dict({k: v.detach().clone() for k, v in weights.items()}, strict=False)
    assert not missing
    assert not unexpected
    return model


@pytest.mark.parametrize("stages", [1, 3, LAYERS])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_composed_stages_equal_the_ordinary_model_in_outputs_and_gradients(family: str, stages: int) -> None:
    """Logits and the gradient of every parameter, against transformers' own model built apart from ours."""
    spec = spec_of(family, stages)
    parts = build_all(spec)
    weights = parameters_by_full_name(parts)
    reference = ordinary_model(spec, weights)
    ids = token_ids()
    logits, expected = compose(parts, ids), reference(ids, use_cache=False).logits
    assert torch.allclose(logits, expected, rtol=0, atol=1e-6)
    for output in (logits, expected):
        torch.nn.functional.cross_entropy(output.flatten(0, 1), token_ids(1).flatten()).backward()
    wanted = dict(reference.named_parameters())
    assert set(weights) == set(wanted)
    for name, weight in weights.items():
        assert weight.grad is not None, name
        assert wanted[name].grad is not None
        assert wanted[name].grad.abs().max() > 0, name
        assert torch.allclose(weight.grad, wanted[name].grad, rtol=0, atol=1e-6), name


@pytest.mark.parametrize("family", sorted(MIXED_LAYERS))
def test_the_layers_of_these_families_are_not_alike(family: str) -> None:
    """Guards the test above: were the layers alike, a wrong cut would pass it."""
    spec = spec_of(family)
    stage = build_stage(spec, 0)
    assert len(set(build_config(spec).layer_types)) == 2
    ids = token_ids()
    layers = stage.get_submodule("causal.model.layers")
    assert isinstance(layers, nn.ModuleList)
    before = stage(ids)
    types = list(stage.causal.config.layer_types)
    stage.causal.config.layer_types = types[::-1]
    assert (stage(ids) - before).abs().max() > 1e-4


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_first_weights_do_not_depend_on_the_cut(family: str) -> None:
    """Stages 1 and 4 give bitwise equal weights under each full name, and another seed gives others."""
    whole = first_weights(family)
    cut = parameters_by_full_name(build_all(spec_of(family, 4)))
    assert set(cut) == set(whole)
    assert all(torch.equal(cut[name], whole[name]) for name in whole)
    other = parameters_by_full_name(build_all(spec_of(family, 1, seed=4)))
    matrices = [name for name in whole if whole[name].dim() > 1]
    assert len(matrices) >= 4 * LAYERS + 2
    assert not any(torch.equal(other[name], whole[name]) for name in matrices)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_tensor_follows_the_rule_of_the_architecture(family: str) -> None:
    """Matrices have the architecture's spread and differ from one another; vectors and buffers are its constants."""
    spec = spec_of(family)
    stage = build_stage(spec, 0)
    ordinary: Any = AutoModelForCausalLM.from_config(build_config(spec), dtype=torch.float32)
    ours, theirs = stage.causal.state_dict(keep_vars=True), ordinary.state_dict(keep_vars=True)
    assert set(ours) == set(theirs)
    sums: set[float] = set()
    for name, tensor in theirs.items():
        if tensor.dim() == 1:
            assert torch.equal(ours[name], tensor), name
        else:
            assert 0.8 < float(ours[name].detach().std() / build_config(spec).initializer_range) < 1.2, name
            sums.add(float(ours[name].detach().sum()))
    assert len(sums) == sum(tensor.dim() > 1 for tensor in theirs.values())
    buffers = dict(ordinary.named_buffers())
    assert buffers
    for name, buffer in stage.causal.named_buffers():
        assert torch.equal(buffer, buffers[name]), name


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_embedding_alone_begins_with_the_deviation_that_is_set(family: str) -> None:
    """All other tensors are bitwise as without it."""
    plain = first_weights(family)
    spread = parameters_by_full_name(build_all(spec_of(family, 2).model_copy(update={"embedding_std": 0.3})))
    name = "model.embed_tokens.weight"
    assert float(spread[name].detach().std()) == pytest.approx(0.3, rel=0.05)
    assert float(plain[name].detach().std()) < 0.1
    assert all(torch.equal(plain[other], spread[other]) for other in plain if other != name)


def test_weights_that_are_there_keep_their_embedding() -> None:
    """The two settings contradict each other."""
    with pytest.raises(ValueError, match="embedding_std is set, but the run begins with weights"):
        ModelSpec(config={"model_type": "llama"}, fingerprint="weights-" + "0" * 32, embedding_std=0.1)


def test_building_leaves_the_global_random_state_alone() -> None:
    """Neither the state before nor the draws after depend on a build."""
    torch.manual_seed(11)
    before = torch.get_rng_state()
    build_stage(spec_of("llama", 2), 1)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_first_weights_do_not_depend_on_the_global_random_state() -> None:
    """Two builds after different global seeds agree."""
    torch.manual_seed(1)
    one = parameters_by_full_name([build_stage(spec_of("llama", 2), 0)])
    torch.manual_seed(2)
    two = parameters_by_full_name([build_stage(spec_of("llama", 2), 0)])
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_stage_computes_with_the_parameters_it_is_handed(index: int) -> None:
    """Under functional_call outputs and gradients follow the dictionary, and the module's own weights stay."""
    stage = build_stage(spec_of("qwen3", 3), index)
    inputs: Tensor = token_ids() if index == 0 else torch.randn(2, 16, stage.cut_width)
    own = dict(stage.named_parameters())
    other = {name: (value * 1.5).detach().requires_grad_() for name, value in own.items()}
    output = torch.func.functional_call(stage, other, (inputs,))
    gradients = torch.autograd.grad(output.square().sum(), list(other.values()))
    assert not torch.allclose(output, stage(inputs))
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(other[name])
    direct = stage(inputs)
    assert torch.equal(direct, output)
    expected = torch.autograd.grad(direct.square().sum(), list(own.values()))
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_stage_works_in_bf16_and_without_a_graph(family: str) -> None:
    """bf16 parameters give bf16 outputs close to fp32; no_grad and eval give no graph and the same numbers."""
    parts = build_all(spec_of(family, 2))
    ids = token_ids()
    exact = compose(parts, ids)
    flow: Tensor = ids
    for part in parts:
        half = {name: value.bfloat16() for name, value in part.named_parameters()}
        flow = torch.func.functional_call(part, half, (flow,))
        assert flow.dtype == torch.bfloat16
    assert (flow.float() - exact).abs().max() < 0.05 * exact.abs().max()
    with torch.no_grad():
        quiet = compose([part.eval() for part in parts], ids)
    assert not quiet.requires_grad
    assert torch.equal(quiet, exact)


def test_shapes_and_attributes_are_as_promised() -> None:
    """Activations are [B, T, hidden], logits [B, T, vocab], and only the ends hold embedding and head."""
    parts = build_all(spec_of("llama", 3))
    ids = token_ids(batch=3, length=7)
    first = parts[0](ids)
    assert first.shape == (3, 7, parts[0].cut_width)
    assert compose(parts, ids).shape == (3, 7, parts[0].vocab_size)
    names = [set(part.full_names().values()) for part in parts]
    assert ["model.embed_tokens.weight" in own for own in names] == [True, False, False]
    assert ["lm_head.weight" in own for own in names] == [False, False, True]
    assert ["model.norm.weight" in own for own in names] == [False, False, True]
    assert "model.layers.5.self_attn.q_proj.weight" in names[2]


def test_tied_embeddings_stay_tied_on_one_stage() -> None:
    """One stage holds one matrix for both ends, as the ordinary model does, also under functional_call."""
    stage = build_stage(spec_of("llama", 1, tie_word_embeddings=True), 0)
    own = dict(stage.named_parameters())
    assert stage.causal.get_submodule("lm_head").weight is stage.causal.get_submodule("model.embed_tokens").weight
    assert "lm_head.weight" not in stage.full_names().values()
    doubled = {name: value * 2 if "embed" in name else value for name, value in own.items()}
    # An embedding scaled by 2 feeds the first norm the same direction, so the head's factor is what is left to see.
    assert not torch.allclose(torch.func.functional_call(stage, doubled, (token_ids(),)), stage(token_ids()))


def test_only_the_slice_is_allocated() -> None:
    """The last of 32 stages is built without the memory of the other 31."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "vocab_size": 512}
    stage = build_stage(ModelSpec(config={"model_type": "llama", **sizes}, stages=32), 31)
    parameters = sum(value.numel() for value in stage.parameters())
    assert 13e6 < parameters < 14e6
    assert all(value.device.type == "cpu" for value in stage.parameters())


@pytest.mark.parametrize("model_type", ["gpt2", "bert", "mamba", "gemma3", "phi"])
def test_other_architectures_are_refused_by_name(model_type: str) -> None:
    """What cannot be cut is a user's error with the setting's name, not a traceback from inside."""
    config = {"model_type": model_type} | ({"embd_pdrop": 0.0, "resid_pdrop": 0.0} if model_type == "phi" else {})
    with pytest.raises(UserError) as caught:
        build_stage(ModelSpec(config=config), 0)
    assert caught.value.exit_code is ExitCode.CONFIG
    assert f"model.config.model_type is '{model_type}'" in caught.value.message


def test_a_tensor_without_a_rule_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that no initialiser wrote must never be trained on."""
    rule = PreTrainedModel._init_weights

    def forget_norms(self: PreTrainedModel, module: nn.Module) -> None:
        if "Norm" not in type(module).__name__:
            rule(self, module)

    monkeypatch.setattr(PreTrainedModel, "_init_weights", forget_norms)
    with pytest.raises(UserError, match=r"no rule for the first values of model\.layers\.0\..*norm"):
        build_stage(spec_of("llama"), 0)
