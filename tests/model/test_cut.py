"""Where a model is cut, and which configs are refused with what words."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import pytest

from noloco_node.config.model_spec import ModelSpec
from noloco_node.errors import ExitCode, UserError
from noloco_node.model.cut import build_config, check_cut, cut_model
from noloco_node.model.stage import build_stage
from tests.model.families import FAMILIES, spec_of


def sizes(**config: Any) -> list[int]:
    """Layers of each stage of a llama whose layer costs 16 hidden² (hidden 8, 1024 multiplications a token)."""
    stages = config.pop("stages")
    base = {"hidden_size": 8, "intermediate_size": 32, "num_attention_heads": 1, "vocab_size": 16}
    spec = ModelSpec(
        config={"model_type": "llama", "bos_token_id": None, "eos_token_id": None} | base | config, stages=stages
    )
    return [cut.end_layer - cut.first_layer for cut in cut_model(spec)]


@pytest.mark.parametrize(("layers", "stages"), [(1, 1), (4, 1), (4, 2), (7, 3), (12, 5), (6, 6), (32, 7)])
@pytest.mark.parametrize("vocab_size", [16, 1000])
def test_stages_cover_the_layers_in_order_without_overlap(layers: int, stages: int, vocab_size: int) -> None:
    """Each stage has at least one layer, the first starts at 0, the last ends at the last layer."""
    spec = ModelSpec(
        config={
            "model_type": "llama",
            "num_hidden_layers": layers,
            "vocab_size": vocab_size,
            "hidden_size": 8,
            "num_attention_heads": 1,
            "intermediate_size": 8,
        },
        stages=stages,
    )
    cuts = cut_model(spec)
    assert [cut.index for cut in cuts] == list(range(stages))
    assert cuts[0].first_layer == 0
    assert cuts[-1].end_layer == layers
    assert all(one.end_layer == two.first_layer for one, two in pairwise(cuts))
    assert all(cut.end_layer > cut.first_layer and cut.stages == stages for cut in cuts)
    assert [cut.is_first for cut in cuts] == [True] + [False] * (stages - 1)
    assert [cut.is_last for cut in cuts] == [False] * (stages - 1) + [True]


@pytest.mark.parametrize("vocab_size", [16, 128, 200, 256, 700])
@pytest.mark.parametrize(("layers", "stages"), [(5, 2), (7, 3), (8, 4)])
def test_no_division_has_a_cheaper_most_expensive_stage(layers: int, stages: int, vocab_size: int) -> None:
    """Against all divisions there are; a layer costs 1024, the head 8 × vocab_size."""

    def worst(counts: tuple[int, ...]) -> int:
        return max(*(1024 * count for count in counts[:-1]), 1024 * counts[-1] + 8 * vocab_size)

    choices = [c for c in product(range(1, layers + 1), repeat=stages) if sum(c) == layers]
    assert len(choices) >= 4
    found = sizes(num_hidden_layers=layers, stages=stages, vocab_size=vocab_size)
    assert worst(tuple(found)) == min(map(worst, choices))


def test_a_heavy_head_takes_the_place_of_layers() -> None:
    """The last stage gives layers away as the vocabulary grows; with a light head the cut is even."""
    assert sizes(num_hidden_layers=8, stages=2, vocab_size=16) == [4, 4]
    assert sizes(num_hidden_layers=8, stages=2, vocab_size=256) == [5, 3]
    assert sizes(num_hidden_layers=8, stages=2, vocab_size=2000) == [7, 1]


def test_layers_by_hand_are_taken_as_they_are() -> None:
    """However uneven; their sum and their number must be the model's."""
    spec = spec_of("llama", 3).model_copy(update={"layers_per_stage": (1, 4, 1)})
    assert [cut.end_layer - cut.first_layer for cut in cut_model(spec)] == [1, 4, 1]
    wrong = spec.model_copy(update={"layers_per_stage": (1, 4, 2)})
    with pytest.raises(UserError, match=r"layers_per_stage names 1 \+ 4 \+ 2 = 7 layers, but .* is 6") as caught:
        cut_model(wrong)
    assert caught.value.exit_code is ExitCode.CONFIG
    with pytest.raises(ValueError, match=r"names 2 stages, and run\.model\.stages is 3"):
        ModelSpec.model_validate(spec.model_dump() | {"layers_per_stage": (3, 3)})


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "gpt2", "embd_pdrop": 0, "resid_pdrop": 0, "attn_pdrop": 0}, "no pipeline plan"),
        ({"model_type": "gpt_neox"}, "no pipeline plan"),
        ({"model_type": "granite", "embedding_multiplier": 12.0}, "changes activations outside its layers"),
        ({"model_type": "gemma3n_text", "num_key_value_heads": 2}, "its layers differ in size"),
        ({"model_type": "gemma4_text"}, "its layers differ in size"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_the_reason(config: dict[str, Any], reason: str) -> None:
    """Before anything is built; two stages must not silently be another model than one."""
    base = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    spec = ModelSpec(config=base | tokens | {"tie_word_embeddings": False} | config, stages=2)
    with pytest.raises(UserError, match=f"cannot be cut into stages: .*{reason}") as caught:
        check_cut(spec)
    assert caught.value.exit_code is ExitCode.CONFIG


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_no_family_that_is_proved_exact_is_refused(family: str) -> None:
    """Whole or cut."""
    for stages in (1, 3):
        check_cut(spec_of(family, stages))


def refused(config: dict[str, Any], stages: int = 1) -> UserError:
    """The error that a config gets."""
    base: dict[str, Any] = {"model_type": "llama", "num_hidden_layers": 4}
    with pytest.raises(UserError) as caught:
        cut_model(ModelSpec(config=base | config, stages=stages))
    assert caught.value.exit_code is ExitCode.CONFIG
    assert caught.value.remedy
    assert "\n" not in caught.value.message
    return caught.value


def test_more_stages_than_layers_are_refused() -> None:
    """Both settings and the remedy are named."""
    error = refused({}, stages=5)
    assert "model.stages is 5" in error.message
    assert "num_hidden_layers is 4" in error.message
    assert "4 or less" in error.remedy


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "lama"}, "model.config.model_type is 'lama'"),
        ({"model_type": None}, "run.model.config.model_type is nothing"),
        ({"model_type": 7}, "model.config.model_type is 7"),
        ({"hiden_size": 64}, "model.config.hiden_size is not a setting of the 'llama'"),
        ({"hidden_size": "wide"}, "'hidden_size' expected int, got str"),
        ({"hidden_size": 100, "num_attention_heads": 3}, "hidden size (100) is not a multiple"),
        ({"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 3}, "num_key_value_heads (3)"),
        ({"num_attention_heads": 0}, "model.config.num_attention_heads is 0"),
        ({"num_hidden_layers": 0}, "model.config.num_hidden_layers is 0"),
        ({"vocab_size": -1}, "model.config.vocab_size is -1"),
        ({"attention_dropout": 0.1}, "model.config.attention_dropout is 0.1"),
        ({"pad_token_id": 32000}, "model.config.pad_token_id is 32000, outside the vocabulary of 32000"),
        ({"hidden_act": "zilu"}, "model.config.hidden_act is 'zilu'"),
    ],
)
def test_bad_configs_are_refused_naming_the_key(config: dict[str, Any], words: str) -> None:
    """One line for a person, whatever transformers raises inside."""
    assert words in refused(config).message


@pytest.mark.parametrize(("family", "ties_by_default"), [("llama", False), ("gemma3_text", True), ("smollm3", True)])
def test_tied_embeddings_with_several_stages_are_refused(family: str, ties_by_default: bool) -> None:
    """Asked for, or the architecture's default: both are seen, and one stage may tie."""
    for changes in [{"tie_word_embeddings": True}] + [{}] * ties_by_default:
        spec = spec_of(family, 2)
        config = {key: value for key, value in spec.config.items() if key != "tie_word_embeddings"} | changes
        with pytest.raises(UserError, match=r"model\.config\.tie_word_embeddings .* run\.model\.stages is 2") as caught:
            cut_model(ModelSpec(config=config, stages=2))
        assert caught.value.exit_code is ExitCode.CONFIG
        assert cut_model(ModelSpec(config=config, stages=1))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_config_is_the_architectures_own(family: str) -> None:
    """Values arrive, and what is not set has the architecture's default."""
    config = build_config(spec_of(family, hidden_size=48))
    assert (config.model_type, config.hidden_size, config.num_hidden_layers) == (family, 48, 6)
    assert config.initializer_range == 0.02


def test_a_value_that_only_the_building_refuses_is_a_users_error() -> None:
    """Some values pass the config class and fail in the model: the message still says where to look."""
    spec = spec_of("llama", rope_parameters={"rope_type": "spiral", "rope_theta": 10000.0})
    with pytest.raises(UserError, match=r"model\.config: the 'llama' architecture .*spiral") as caught:
        build_stage(spec, 0)
    assert caught.value.exit_code is ExitCode.CONFIG


def test_names_that_transformers_maps_are_accepted() -> None:
    """Settings in the older form that most published configs use."""
    config = build_config(ModelSpec(config={"model_type": "llama", "rope_theta": 5000.0, "torch_dtype": "bfloat16"}))
    assert config.rope_parameters["rope_theta"] == 5000.0
