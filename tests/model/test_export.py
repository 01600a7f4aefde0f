"""An export is an ordinary Hugging Face directory, and its numbers are those of the stages."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from noloco_node.model.export import (
    build_byte_tokenizer,
    evaluate_model,
    export_model,
    generate_sample,
    load_exported,
    merge_replicas,
)
from tests.model.families import FAMILIES, build_all, parameters_by_full_name, spec_of, token_ids


def test_transformers_alone_loads_an_export(tmp_path: Path) -> None:
    """It misses no key, runs no code of the folder, and finds the logits of the composed stages. `make proof` has a
    process do so that cannot import this package.

    That stages compose to the model of every family is for `test_stage`; what an export of each holds is tested below.
    """
    spec, text = spec_of("llama", 2, vocab_size=256), "def f():\n\treturn 'größer'"
    stages = build_all(spec)
    export_model(spec, parameters_by_full_name(stages), tmp_path, "bytes")
    assert not list(tmp_path.rglob("*.py"))
    assert not any("auto_map" in path.read_text() for path in tmp_path.glob("*.json"))
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype is torch.float32
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    flow: Tensor = torch.tensor([ids])
    with torch.no_grad():
        logits = model(flow).logits
    for stage in stages:
        flow = stage(flow)
    assert torch.allclose(logits[0, -1], flow[0, -1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_an_export_holds_the_weights_it_was_given(family: str, tmp_path: Path) -> None:
    """Bit for bit, for every family; the folder has the files that people expect."""
    spec = spec_of(family, 3)
    weights = parameters_by_full_name(build_all(spec))
    export_model(spec, weights, tmp_path, "bytes")
    assert (tmp_path / "model.safetensors").stat().st_mode == (tmp_path / "config.json").stat().st_mode
    loaded = dict(torch.nn.Module.named_parameters(load_exported(tmp_path)))
    assert set(loaded) == set(weights)
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)
    names = {path.name for path in tmp_path.iterdir()}
    assert {"config.json", "model.safetensors", "generation_config.json", "tokenizer.json"} <= names
    assert "tokenizer_config.json" in names
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["num_hidden_layers"] == 6
    assert config["model_type"] == family
    assert config["architectures"][0].endswith("ForCausalLM")


def test_a_tied_model_exports_and_loads(tmp_path: Path) -> None:
    """One matrix for both ends: saved once, tied again when loaded."""
    spec = spec_of("llama", 1, tie_word_embeddings=True)
    stages = build_all(spec)
    export_model(spec, parameters_by_full_name(stages), tmp_path, "bytes")
    model: Any = load_exported(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model(token_ids()).logits, stages[0](token_ids()))


def test_special_tokens_are_those_of_the_tokenizer(tmp_path: Path) -> None:
    """Defaults of the architecture would end generated text at byte 2; a tokenizer's own end token is taken over."""
    spec = spec_of("llama", 1, bos_token_id=1, eos_token_id=2)
    weights = parameters_by_full_name(build_all(spec))
    own = build_byte_tokenizer()
    own.add_special_tokens({"eos_token": "<end>"})
    own.save_pretrained(tmp_path / "tokenizer")
    for tokenizer, end in (("bytes", None), (str(tmp_path / "tokenizer"), 256)):
        export_model(spec, weights, tmp_path / "model", tokenizer)
        for name in ("config.json", "generation_config.json"):
            written = json.loads((tmp_path / "model" / name).read_text())
            assert (written.get("bos_token_id"), written.get("eos_token_id")) == (None, end)
        assert AutoTokenizer.from_pretrained(tmp_path / "model").eos_token_id == end


def test_a_mark_of_the_tokenizer_beyond_the_vocabulary_is_left_out(tmp_path: Path) -> None:
    """A run was trained to its end, and its model could not be written."""
    spec = spec_of("llama", 1)
    own = build_byte_tokenizer()
    own.add_tokens([f"<{n}>" for n in range(spec.config["vocab_size"] - 256)])
    own.add_special_tokens({"pad_token": "<pad>"})
    own.save_pretrained(tmp_path / "tokenizer")
    export_model(spec, parameters_by_full_name(build_all(spec)), tmp_path / "model", str(tmp_path / "tokenizer"))
    assert json.loads((tmp_path / "model" / "config.json").read_text()).get("pad_token_id") is None


@pytest.mark.parametrize("change", ["missing", "unknown", "misshapen"])
def test_an_incomplete_state_is_refused(change: str, tmp_path: Path) -> None:
    """A forgotten stage must not become a half-random model; nothing is written."""
    spec = spec_of("llama", 2)
    weights: dict[str, Tensor] = parameters_by_full_name(build_all(spec))
    if change == "missing":
        del weights["model.layers.4.mlp.up_proj.weight"]
    elif change == "unknown":
        weights["model.layers.6.mlp.up_proj.weight"] = torch.zeros(48, 32)
    else:
        weights["model.norm.weight"] = torch.ones(33)
    with pytest.raises(ValueError, match=r"does not fit the model at model\."):
        export_model(spec, weights, tmp_path / "model", "bytes")
    assert not (tmp_path / "model").exists()


def test_the_byte_tokenizer_maps_every_byte_to_its_value(tmp_path: Path) -> None:
    """All 256 tokens, by name, before and after a round through its files."""
    build_byte_tokenizer().save_pretrained(tmp_path)
    for tokenizer in (build_byte_tokenizer(), AutoTokenizer.from_pretrained(tmp_path)):
        assert len(tokenizer) == 256
        assert tokenizer("".join(map(chr, range(128))))["input_ids"] == list(range(128))
        everything = "".join(chr(point) for point in [*range(0x800), 0x20AC, 0xFFFD, 0x1F600, 0x10FFFF])
        assert tokenizer(everything)["input_ids"] == list(everything.encode())
        # 0xC0, 0xC1 and 0xF5 to 0xFF never occur in UTF-8: a model may still say them.
        for byte in range(256):
            assert tokenizer.decode([byte]) == bytes([byte]).decode(errors="replace")


@given(st.text())
def test_any_text_comes_back_from_the_byte_tokenizer(text: str) -> None:
    """decode(encode(text)) == text, and the ids are the bytes."""
    ids = BYTE_TOKENIZER(text)["input_ids"]
    assert ids == list(text.encode())
    assert BYTE_TOKENIZER.decode(ids) == text


BYTE_TOKENIZER = build_byte_tokenizer()


def test_merging_takes_the_mean_without_rounding_on_the_way() -> None:
    """Summed in fp64: fp32 sums of these would lose the small part."""
    states = [{"w": torch.tensor([1e8, 1.0])}, {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([-1e8, 6.0])}]
    merged = merge_replicas(states)
    assert merged["w"].dtype == torch.float32
    assert merged["w"].tolist() == pytest.approx([1 / 3, 3.0], rel=1e-6)
    assert states[0]["w"].tolist() == [1e8, 1.0]


def test_merging_refuses_replicas_that_do_not_match() -> None:
    """Other names, other shapes, or none at all."""
    one = {"w": torch.zeros(2)}
    for others in ([{"v": torch.zeros(2)}], [{"w": torch.zeros(3)}], [{**one, "v": torch.zeros(1)}]):
        with pytest.raises(ValueError, match="differ"):
            merge_replicas([one, *others])
    with pytest.raises(ValueError, match="no replica"):
        merge_replicas([])


def test_loss_is_the_mean_over_tokens_in_nats(tmp_path: Path) -> None:
    """Batches of different size weigh by their tokens; a uniform model has log(vocabulary)."""
    spec = spec_of("llama", 1)
    weights = {name: value.detach().clone() for name, value in parameters_by_full_name(build_all(spec)).items()}
    export_model(spec, weights, tmp_path / "random", "bytes")
    model: Any = load_exported(tmp_path / "random")
    batches = [(token_ids(0, 3), token_ids(1, 3)), (token_ids(2, 1), token_ids(3, 1))]
    inputs, labels = (torch.cat(part) for part in zip(*batches, strict=True))
    expected = torch.nn.functional.cross_entropy(model(inputs).logits.flatten(0, 1), labels.flatten())
    assert evaluate_model(model, batches) == pytest.approx(expected.item(), rel=1e-5)
    weights["lm_head.weight"].zero_()
    export_model(spec, weights, tmp_path / "uniform", "bytes")
    assert evaluate_model(load_exported(tmp_path / "uniform"), batches) == pytest.approx(math.log(97), rel=1e-6)
    with pytest.raises(ValueError, match="no window"):
        evaluate_model(model, [])


def test_a_sample_follows_its_seed_and_keeps_the_prompt(tmp_path: Path) -> None:
    """The same seed gives the same text, another seed another, and the global random state does not move."""
    spec = spec_of("llama", 1, vocab_size=256)
    export_model(spec, parameters_by_full_name(build_all(spec)), tmp_path, "bytes")
    before = torch.get_rng_state()
    one, again, other = (generate_sample(tmp_path, "import ", 20, seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert one == again
    assert one != other
    assert one.startswith("import ")
    assert len(one) > len("import ")
    with pytest.raises(ValueError, match="prompt"):
        generate_sample(tmp_path, "", 5, 0)
