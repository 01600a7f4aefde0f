"""Weights to start from: each stage holds its own part of them, exactly; what does not fit is refused before a run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from noloco_node.bootstrap.spec_fetch import read_agreed
from noloco_node.cli.main import main
from noloco_node.config.load import validate
from noloco_node.config.pretrained import open_pretrained
from noloco_node.config.run_spec import RunSpec
from noloco_node.errors import ExitCode, UserError
from noloco_node.model import pretrained
from noloco_node.model.cut import build_config
from noloco_node.model.export import evaluate_model, export_model, load_exported
from noloco_node.model.pretrained import pretrained_lines, with_own_weights
from noloco_node.model.stage import build_stage
from tests.model.families import FAMILIES, build_all, parameters_by_full_name, spec_of, token_ids
from tests.model.test_stage import compose

RUN: dict[str, Any] = {
    "name": "continued",
    "inner": {"target_tokens": 4096, "global_batch_tokens": 1024, "microbatch_windows": 1},
    "data": {"sequence_length": 16},
    "evaluation": {"every_tokens": 1024},
}


def run_of(folder: Path, **model: Any) -> RunSpec:
    """A run that starts from the weights of that folder, as a file would say it."""
    raw: dict[str, Any] = {"run": {**RUN, "model": {"from_pretrained": str(folder), **model}}}
    return validate(raw, "test").run


def saved(
    family: str, folder: Path, dtype: torch.dtype = torch.float32, shard: str = "1GB", **changes: Any
) -> nn.Module:
    """A model of that family as transformers saves it."""
    torch.manual_seed(7)
    model: Any = AutoModelForCausalLM.from_config(build_config(spec_of(family, 1, **changes)), dtype=dtype)
    for name, parameter in model.named_parameters():
        if "norm" in name:  # ones tell nothing
            nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(folder, max_shard_size=shard)
    return model.eval()


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_stages_begin_with_what_transformers_has_saved(family: str, tmp_path: Path) -> None:
    """For every family, whatever the names of its tensors in the files, stages built apart give the same logits."""
    model = saved(family, tmp_path)
    run = run_of(tmp_path, stages=3)
    assert run.model.config["model_type"] == family
    logits = compose(build_all(run.model), token_ids())
    assert torch.equal(logits, model(token_ids(), use_cache=False).logits)


def renamed(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Write the folder's tensors anew under other names."""
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})


OTHER_NAMES: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    "compiled": lambda tensors: {f"_orig_mod.{name}": value for name, value in tensors.items()},
    "compiled inside": lambda tensors: {name.replace("layers.", "layers._orig_mod."): v for name, v in tensors.items()},
    "no prefix": lambda tensors: {name.removeprefix("model."): value for name, value in tensors.items()},
}


@pytest.mark.parametrize("which", OTHER_NAMES)
def test_names_that_transformers_knows_are_known(which: str, tmp_path: Path) -> None:
    """Files of a compiled model, and of one that was saved without its head's class, hold the same weights."""
    model = saved("llama", tmp_path)
    renamed(tmp_path, OTHER_NAMES[which])
    run = run_of(tmp_path, stages=2)
    assert torch.equal(compose(build_all(run.model), token_ids()), model(token_ids(), use_cache=False).logits)
    assert not any("not of this model" in line for line in pretrained_lines(run.model))


def test_a_tied_model_may_be_saved_by_its_head_alone(tmp_path: Path) -> None:
    """Where its config ties the two; else a matrix is missing."""
    model = saved("llama", tmp_path, tie_word_embeddings=True)
    renamed(tmp_path, lambda t: {name.replace("model.embed_tokens", "lm_head"): value for name, value in t.items()})
    run = run_of(tmp_path, stages=2)
    assert torch.equal(compose(build_all(run.model), token_ids()), model(token_ids(), use_cache=False).logits)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with pytest.raises(UserError, match=r"it has no model\.embed_tokens\.weight"):
        list(pretrained_lines(run_of(tmp_path, stages=2).model))


def test_a_run_goes_on_from_an_export_at_its_loss(tmp_path: Path) -> None:
    """Continued pre-training: what was exported and is loaded again in three stages starts at the exported loss."""
    spec = spec_of("qwen3", 2, vocab_size=256)
    state = {
        name: value + 0.05 * torch.randn_like(value) for name, value in parameters_by_full_name(build_all(spec)).items()
    }
    export_model(spec, state, tmp_path, "bytes", shard_bytes=30_000)
    assert (tmp_path / "model.safetensors.index.json").exists()
    batches = [(token_ids(seed), token_ids(seed + 1)) for seed in range(4)]
    exported = evaluate_model(load_exported(tmp_path), batches)
    stages = build_all(run_of(tmp_path, stages=3).model)
    losses = [nn.functional.cross_entropy(compose(stages, x).flatten(0, 1), y.flatten()).item() for x, y in batches]
    assert sum(losses) / 4 == pytest.approx(exported, abs=1e-4)


@pytest.mark.parametrize("name", ["model2", "model2/", "runs/model2", "./model2"])
def test_a_folder_that_is_not_there_is_not_looked_for_on_the_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bare name, and a path whose beginning is a folder here: said is where it was looked for, and from where a
    relative path counts."""

    def asked(name: str) -> Path:
        raise AssertionError(f"the hub was asked for {name}")

    monkeypatch.setattr("noloco_node.config.pretrained._fetched", asked)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    with pytest.raises(UserError, match="there is no folder") as caught:
        open_pretrained(name)
    assert str(tmp_path / Path(name)) in caught.value.message
    assert "not from its configuration file" in caught.value.message
    with pytest.raises(AssertionError, match="asked for owner/model2"):
        open_pretrained("owner/model2")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_becomes_masters_in_fp32(dtype: torch.dtype, tmp_path: Path) -> None:
    """Each number as it is, in a wider type."""
    model = saved("llama", tmp_path, dtype)
    state = parameters_by_full_name(build_all(run_of(tmp_path, stages=2).model))
    assert all(value.dtype == torch.float32 for value in state.values())
    assert all(torch.equal(state[name], value.float()) for name, value in model.named_parameters())


def test_tied_embeddings_are_two_matrices_across_stages_and_one_on_one(tmp_path: Path) -> None:
    """The head begins as a copy, which is said; one stage keeps them one."""
    model = saved("qwen3", tmp_path, tie_word_embeddings=True)
    several, one = run_of(tmp_path, stages=3), run_of(tmp_path)
    logits = model(token_ids(), use_cache=False).logits
    for run in (several, one):
        assert torch.equal(compose(build_all(run.model), token_ids()), logits)
    assert (several.model.config["tie_word_embeddings"], one.model.config["tie_word_embeddings"]) == (False, True)
    assert any("the head starts as a copy" in line for line in pretrained_lines(several.model))
    assert not any("copy" in line for line in pretrained_lines(one.model))
    state = parameters_by_full_name(build_all(several.model))
    export_model(several.model, state, tmp_path / "out", "bytes")
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= load_file(tmp_path / "out" / "model.safetensors").keys()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False


def test_a_stage_reads_its_own_tensors_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes that the four stages read are those of the model, each once."""
    saved("llama", tmp_path, torch.bfloat16, "20KB")
    model = run_of(tmp_path, stages=4).model
    read: list[int] = []
    real: Callable[..., bool] = pretrained._filled

    def counted(file: Any, room: memoryview) -> bool:
        read[-1] += len(room)
        return real(file, room)

    monkeypatch.setattr(pretrained, "_filled", counted)
    for index in range(4):
        read.append(0)
        stage = build_stage(model, index)
        assert read[index] == 2 * sum(value.numel() for value in stage.parameters())
    assert sum(read) == open_pretrained(str(tmp_path)).size


def test_the_run_id_is_of_the_weights_and_not_of_their_place(tmp_path: Path) -> None:
    """Another folder, and another division into files, is the same run; one number changed is another."""
    saved("llama", tmp_path / "one")
    saved("llama", tmp_path / "two", shard="20KB")
    one, two = run_of(tmp_path / "one", stages=2), run_of(tmp_path / "two", stages=2)
    assert one.run_id == two.run_id
    assert str(tmp_path) not in one.agreed_json
    weights = load_file(tmp_path / "one" / "model.safetensors")
    weights["model.norm.weight"][3] += 1e-3
    save_file(weights, tmp_path / "one" / "model.safetensors")
    other = run_of(tmp_path / "one", stages=2)
    assert other.run_id != one.run_id
    with pytest.raises(UserError, match=r"are not the run's: .*" + str(other.model.fingerprint)) as caught:
        run_of(tmp_path / "one", fingerprint=one.model.fingerprint)
    assert caught.value.exit_code is ExitCode.DATA


def test_who_joins_names_his_own_folder_and_is_held_to_the_runs_weights(tmp_path: Path) -> None:
    """A peer names none; without one the run is as it is, and with another's weights the volunteer is told at once."""
    saved("llama", tmp_path / "one")
    saved("llama", tmp_path / "other", rms_norm_eps=1e-5, hidden_size=64)
    run = run_of(tmp_path / "one", stages=2)
    told = json.loads(run.agreed_json)
    told["model"]["from_pretrained"] = "/etc"
    fetched = read_agreed(json.dumps(told).encode())
    assert fetched.model.from_pretrained is None
    assert fetched.run_id == run.run_id
    assert with_own_weights(fetched, None) == fetched
    own = with_own_weights(fetched, str(tmp_path / "one"))
    assert own.run_id == run.run_id
    ours, theirs = parameters_by_full_name(build_all(own.model)), parameters_by_full_name(build_all(run.model))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    with pytest.raises(UserError, match="are not the run's") as caught:
        with_own_weights(fetched, str(tmp_path / "other"))
    assert caught.value.exit_code is ExitCode.DATA
    seeded = fetched.model_copy(update={"model": spec_of("llama", 2)})
    with pytest.raises(UserError, match="does not begin with existing weights"):
        with_own_weights(seeded, str(tmp_path / "one"))


def test_what_is_not_as_the_folder_has_it_is_said(tmp_path: Path) -> None:
    """Settings that a person changed, keys that transformers does not know, and tensors that nobody needs."""
    saved("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "kind_of_cheese": "Gouda"}))
    weights = load_file(tmp_path / "model.safetensors")
    save_file({**weights, "model.rotary_emb.inv_freq": torch.ones(4)}, tmp_path / "model.safetensors")
    run = run_of(tmp_path, config={"max_position_embeddings": 32})
    said = "\n".join(pretrained_lines(run.model))
    assert "max_position_embeddings is 32, where config.json says 64" in said
    assert "kind_of_cheese of config.json is not known" in said
    assert "1 tensors are not of this model, and stay out: model.rotary_emb.inv_freq" in said
    assert run.model.config["hidden_size"] == 32


def _without_a_shard(folder: Path) -> None:
    sorted(folder.glob("model-*.safetensors"))[1].unlink()


def _with_a_shape(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 50}))


def _without_a_tensor(folder: Path) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    del index["weight_map"]["model.layers.2.mlp.up_proj.weight"]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _cut_short(folder: Path) -> None:
    path = sorted(folder.glob("model-*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:-100])


def _pickled(folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")


def _damaged(folder: Path) -> None:
    path = sorted(folder.glob("model-*.safetensors"))[0]
    path.write_bytes(b"\x01" * 100)


def _with_header(folder: Path, change: Callable[[str], str]) -> None:
    path = sorted(folder.glob("model-*.safetensors"))[0]
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = change(content[8 : 8 + length].decode()).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])


def _over_others(folder: Path) -> None:
    _with_header(folder, lambda header: re.sub(r'"data_offsets":\[\d+,\d+\]', '"data_offsets":[0,4]', header))


def _beyond_numbers(folder: Path) -> None:
    _with_header(folder, lambda header: re.sub(r'"data_offsets":\[\d+,', '"data_offsets":[1e999,', header))


def _without_end(folder: Path) -> None:
    _with_header(folder, lambda header: '{"__metadata__":' * 100_000)


def _nowhere(folder: Path) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] |= {"model.norm.weight": [1]}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _of_integers(folder: Path) -> None:
    path = next(path for path in folder.glob("model-*") if "model.norm.weight" in load_file(path))
    weights: dict[str, Tensor] = load_file(path)
    save_file({**weights, "model.norm.weight": weights["model.norm.weight"].to(torch.int8)}, path)


def _quantised(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"bits": 4}}))


def _without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (_without_a_shard, "it is missing, and model.safetensors.index.json names it"),
        (_with_a_shape, "[48, 32] where [50, 32] belongs"),
        (_without_a_tensor, "it has no model.layers.2.mlp.up_proj.weight"),
        (_cut_short, "it is cut short"),
        (_pickled, "pickled files (pytorch_model.bin)"),
        (_damaged, "no safetensors file"),
        (_over_others, "no safetensors file"),
        (_beyond_numbers, "no safetensors file"),
        (_without_end, "no safetensors file"),
        (_nowhere, "says nothing of where the tensors lie"),
        (_of_integers, "model.norm.weight holds I8"),
        (_quantised, "quantised"),
        (_without_config, "config.json': it does not exist"),
    ],
)
def test_unusable_weights_end_the_command_with_one_screen(
    harm: Callable[[Path], None], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`config validate` as every other command: what is wrong, the remedy and the exit code, before anything trains."""
    saved("llama", tmp_path / "model", shard="20KB")
    harm(tmp_path / "model")
    capsys.readouterr()
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps({"run": {**RUN, "model": {"from_pretrained": str(tmp_path / "model"), "stages": 2}}}))
    assert main(["config", "validate", str(file)]) == ExitCode.DATA
    told = capsys.readouterr().err
    assert words in " ".join(told.split())
    assert "remedy: " in told
    assert len(told.splitlines()) <= 4
    assert "Traceback" not in told


def test_numbers_that_are_none_are_refused_when_they_are_read(tmp_path: Path) -> None:
    """The header does not tell; the stage that holds them does."""
    saved("llama", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.5.mlp.up_proj.weight"][0, 0] = float("inf")
    save_file(weights, tmp_path / "model.safetensors")
    model = run_of(tmp_path, stages=2).model
    build_stage(model, 0)
    with pytest.raises(UserError, match=r"model\.layers\.5\.mlp\.up_proj\.weight holds NaN") as caught:
        build_stage(model, 1)
    assert caught.value.exit_code is ExitCode.DATA


@pytest.mark.parametrize(
    ("model", "code", "words"),
    [
        ({"from_pretrained": "/nowhere/at/all"}, ExitCode.DATA, "'/nowhere/at/all': it does not exist"),
        ({}, ExitCode.CONFIG, "run.model.config is not set"),
    ],
)
def test_a_model_must_be_named(model: dict[str, Any], code: ExitCode, words: str) -> None:
    """By its config or by its weights."""
    with pytest.raises(UserError) as caught:
        validate({"run": {**RUN, "model": model}}, "test")
    assert caught.value.exit_code is code
    assert words in caught.value.message


def test_the_bare_name_of_a_hubs_model_is_refused_with_how_it_is_named() -> None:
    """A bare name is that of a folder; the hub's own old names without an owner are no exception."""
    with pytest.raises(UserError, match=r"'gpt2': it does not exist: .*no model of the hub") as caught:
        validate({"run": {**RUN, "model": {"from_pretrained": "gpt2"}}}, "test")
    assert caught.value.exit_code is ExitCode.DATA
    assert "OWNER/NAME of the hub, such as openai-community/gpt2" in caught.value.remedy


def test_another_architecture_than_the_folders_is_refused(tmp_path: Path) -> None:
    """A config that is given with weights must be that of these weights."""
    saved("llama", tmp_path)
    with pytest.raises(UserError, match=r"model_type is 'qwen3', but the weights .* are those of a 'llama'"):
        run_of(tmp_path, config={"model_type": "qwen3"})
