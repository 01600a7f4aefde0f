"""A model out of run folders: what becomes of it is what the replicas hold, whole or not at all."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from transformers import LlamaForCausalLM

from noloco_node.cli import exporting
from noloco_node.cli.main import main
from noloco_node.config.load import load_config
from noloco_node.config.tokenizer_files import fingerprint_of_tokenizer
from noloco_node.errors import ExitCode, UserError
from noloco_node.exporting import write
from noloco_node.exporting.evaluation import Wish, continued
from noloco_node.exporting.folders import gather_folders
from noloco_node.exporting.write import merge_run
from noloco_node.model.export import generate_sample, load_exported
from noloco_node.storage.run_folder import RunFolder
from noloco_node.storage.weights import SLOW_FILE, WeightsManifest
from noloco_node.telemetry.events import EventFile
from tests.config.test_tokenizer_files import made, with_tokenizer
from tests.made_runs import MICRO, OWN_TEXT, RUN, TEXT, finished, under_way, weights
from tests.support import files_up_to

WITH_TEXT = ("--set", f"run.data.path={TEXT}")
ALICE, BOB = "12D3KooWalice", "12D3KooWbob123"


def state_of(model: Path) -> dict[str, Tensor]:
    """What plain transformers loads."""
    return {name: tensor.detach() for name, tensor in torch.nn.Module.named_parameters(load_exported(model))}


def is_near(model: Path, stage: int, shift: float) -> bool:
    """Whether a stage of an exported model is the first weights, moved on by `shift`."""
    state = state_of(model)
    return all(torch.allclose(state[name], value, atol=1e-6) for name, value in weights(stage, shift=shift).items())


def test_folders_of_several_machines_make_one_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A node's folder, one that holds several, and the weights alone: the mean of each stage, and the run's facts."""
    finished(tmp_path / "devices" / "cpu-0", 0, peer=ALICE)
    finished(tmp_path / "devices" / "cpu-1", 1, shift=0.5)
    alone = finished(tmp_path / "friend", 1, shift=0.1) / "final"
    out = tmp_path / "models" / "out"
    assert main(["export", str(tmp_path / "devices"), str(alone), "--out", str(out)]) == ExitCode.OK
    told = capsys.readouterr().out
    assert "1 of stage 0, 2 of stage 1" in told
    assert "2.5000 nats per token at 40,000 tokens" in told
    assert is_near(out, 0, 0.0)
    assert is_near(out, 1, 0.3)
    card = (out / "README.md").read_text(encoding="utf-8")
    for fact in (RUN.name, RUN.run_id, ALICE, "49,152 of 49,152", "2.5000 nats", "learning_rate: 0.003"):
        assert fact in card
    assert str(tmp_path) not in card + (out / "noloco_run.json").read_text(encoding="utf-8")
    assert str(TEXT) not in card + (out / "noloco_run.json").read_text(encoding="utf-8")
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert names <= {path.name for path in out.iterdir()}
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_replicas_that_were_trained_to_different_clocks_are_said_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint that is in time is part of the mean; a clock beyond the run's end is said to be that."""
    finished(tmp_path / "a", 0)
    finished(tmp_path / "b", 1, clock=60_000.0)
    under_way(tmp_path / "c", 1, clock=40_000.0)
    assert main(["export", str(tmp_path), "--out", str(tmp_path / "out")]) == ExitCode.OK
    told = capsys.readouterr().out
    assert "1 of stage 0, 2 of stage 1 (trained to 40,000 … 60,000 tokens)\n" in told
    for text in (told, (tmp_path / "out" / "README.md").read_text(encoding="utf-8")):
        assert "49,152 of 49,152 tokens, and 10,848 beyond its end" in text


def test_the_newest_of_a_node_counts_and_who_is_far_behind_does_not(tmp_path: Path) -> None:
    """A checkpoint behind the final weights, one beyond them, a damaged one on top, and a replica left behind."""
    run = load_config(MICRO, [*OWN_TEXT, "run.inner.target_tokens=1000000"]).run
    under_way(finished(tmp_path / "a", 0, run=run, clock=200_000.0), 0, run=run, clock=150_000.0, shift=5.0)
    final = finished(tmp_path / "b", 1, run=run, clock=100_000.0, shift=5.0)
    node = under_way(final, 1, run=run, clock=190_000.0, shift=0.25)
    under_way(node, 1, run=run, clock=200_000.0, shift=7.0)
    torn = RunFolder(node).checkpoints / "00000002" / "state.safetensors"
    torn.write_bytes(torn.read_bytes()[:-1])
    under_way(tmp_path / "c", 1, run=run, clock=80_000.0, shift=3.0)
    assert run.max_lag_tokens == 100_000
    assert main(["export", str(tmp_path), "--out", str(tmp_path / "out")]) == ExitCode.OK
    assert is_near(tmp_path / "out", 0, 0.0)
    assert is_near(tmp_path / "out", 1, 0.25)


def test_a_checkpoint_that_its_node_replaces_meanwhile_is_exported(tmp_path: Path) -> None:
    """Reading the held-out text may take minutes, and a node that runs keeps two checkpoints."""
    folders = [under_way(tmp_path / str(stage), stage, clock=40_000.0, shift=0.25) for stage in (0, 1)]
    gathered = gather_folders(folders, None)
    for folder in folders:
        shutil.rmtree(RunFolder(folder).checkpoints)
    write.export(gathered, tmp_path / "out", lambda _: None)
    assert is_near(tmp_path / "out", 0, 0.25)
    assert is_near(tmp_path / "out", 1, 0.25)


def test_stages_of_far_different_times_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What was made of them was no model that was ever trained, and nothing said so."""
    run = load_config(MICRO, [*OWN_TEXT, "run.inner.target_tokens=1000000"]).run
    for stage, clock in enumerate((900_000.0, 60_000.0)):
        finished(tmp_path / str(stage), stage, run=run, clock=clock)
    gather_folders([tmp_path], None).kept()
    assert "THE MODEL IS OF NO USE YET" in caplog.text
    assert "with stage 1 far behind" in caplog.text


def test_two_copies_of_a_nodes_folder_are_one_replica(tmp_path: Path) -> None:
    """The older one counts nothing beside the newer."""
    finished(tmp_path / "a", 0, peer=ALICE)
    finished(tmp_path / "b", 1, clock=40_000.0, shift=9.0, peer=BOB)
    finished(tmp_path / "c", 1, clock=49_000.0, shift=0.5, peer=BOB)
    gathered = gather_folders([tmp_path], None)
    assert [one.clock for one in gathered.replicas[1]] == [49_000.0]


def test_a_tokenizer_of_the_owners_goes_into_the_model_and_comes_out_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder that a node has read is found again; without it, it must be named. Its place is in nothing that is
    written. An evaluation of the model itself knows it, wherever the model lies."""
    folder = made(tmp_path / "owners")
    run = with_tokenizer(folder, *OWN_TEXT).run
    nodes = [finished(tmp_path / "run" / name, stage, run=run) for stage, name in enumerate("ab")]
    command = ["export", *map(str, nodes), "--out"]
    assert main([*command, str(tmp_path / "none")]) == ExitCode.CONFIG
    assert "--set run.data.tokenizer=DIR" in capsys.readouterr().err
    RunFolder(nodes[0]).keep_tokenizer_place(folder)
    assert main([*command, str(tmp_path / "out")]) == ExitCode.OK
    told = (tmp_path / "out" / "README.md").read_text() + (tmp_path / "out" / "noloco_run.json").read_text()
    assert str(tmp_path) not in told
    assert str(run.data.tokenizer_fingerprint) in told
    folder.rename(tmp_path / "moved")
    model = str(shutil.move(tmp_path / "out", tmp_path / "taken"))
    capsys.readouterr()
    assert main(["eval", model, *WITH_TEXT]) == ExitCode.OK
    assert "the model" in capsys.readouterr().out
    named = ("--set", f"run.data.tokenizer={tmp_path / 'moved'}")
    assert main([*command, str(tmp_path / "again"), *named]) == ExitCode.OK
    assert fingerprint_of_tokenizer(tmp_path / "again") == run.data.tokenizer_fingerprint


def test_large_models_are_written_in_files_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each below the largest size, and whole together."""
    monkeypatch.setattr(write, "export_model", partial(write.export_model, shard_bytes=60_000))
    finished(tmp_path / "run" / "a", 0)
    finished(tmp_path / "run" / "b", 1, shift=0.5)
    out = tmp_path / "out"
    assert main(["export", str(tmp_path / "run"), "--out", str(out)]) == ExitCode.OK
    files = sorted(out.glob("model-*.safetensors"))
    assert len(files) > 1
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {file.name for file in files}
    assert is_near(out, 0, 0.0)
    assert is_near(out, 1, 0.5)
    files[0].unlink()
    assert main(["generate", str(out), "--prompt", "x"]) == ExitCode.RUN_FOLDER


def test_eval_gives_the_loss_of_the_run_and_of_single_replicas(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exported model's is the merged one's, by whichever way; each single replica stands beside it."""
    folders = [finished(tmp_path / name, stage, shift=0.05 * n) for n, (name, stage) in enumerate([("a", 0), ("b", 1)])]
    folders.append(finished(tmp_path / "c", 1, peer=BOB))
    told: list[str] = []
    expected = merge_run(RUN, [folder / "final" for folder in folders], tmp_path / "merged", told.append).loss
    assert [words.split(" ")[0] for words in told] == ["stage", "stage", "scoring", "writing", "letting"]
    card = (tmp_path / "merged" / "model" / "README.md").read_text(encoding="utf-8")
    assert f"held-out loss of this model | {expected:.4f} nats" in card
    capsys.readouterr()
    assert main(["eval", str(tmp_path / "merged" / "model"), *WITH_TEXT]) == ExitCode.OK
    assert float(capsys.readouterr().out.splitlines()[2].split()[-3]) == pytest.approx(expected, abs=1e-4)
    out = tmp_path / "out"
    assert main(["export", *map(str, folders), "--out", str(out)]) == ExitCode.OK
    capsys.readouterr()
    assert main(["eval", str(out), *WITH_TEXT]) == ExitCode.OK
    _, _, row = capsys.readouterr().out.splitlines()
    loss, perplexity, bits = (float(word) for word in row.split()[-3:])
    assert loss == pytest.approx(expected, abs=1e-4)
    assert (perplexity, bits) == (pytest.approx(math.exp(loss), rel=1e-3), pytest.approx(loss / math.log(2), abs=1e-3))
    assert main(["eval", *map(str, folders), *WITH_TEXT]) == ExitCode.OK
    rows = {row.rsplit(None, 3)[0]: float(row.split()[-3]) for row in capsys.readouterr().out.splitlines()[2:]}
    assert list(rows) == ["merged", "stage 1 of b alone", f"stage 1 of c …{BOB[-6:]} alone"]
    assert rows["merged"] == pytest.approx(expected, abs=1e-4)
    assert len(set(rows.values())) == 3
    assert main(["eval", str(out)]) == ExitCode.CONFIG
    scored = tmp_path / "scored"
    assert main(["export", *map(str, folders), "--out", str(scored), "--eval"]) == ExitCode.CONFIG
    assert main(["export", *map(str, folders), "--out", str(scored), "--eval", *WITH_TEXT]) == ExitCode.OK
    assert f"held-out loss of this model | {expected:.4f} nats" in (scored / "README.md").read_text(encoding="utf-8")
    assert "run.data.path" in capsys.readouterr().err


def test_eval_refuses_the_configuration_of_a_larger_vocabulary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ended with an IndexError out of torch."""
    nodes = [finished(tmp_path / name, stage) for stage, name in enumerate("ab")]
    assert main(["export", *map(str, nodes), "--out", str(tmp_path / "out")]) == ExitCode.OK
    other = yaml.safe_load(MICRO.read_text(encoding="utf-8"))
    other["run"]["model"]["config"]["vocab_size"] = 512
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(other), encoding="utf-8")
    command = ["eval", str(tmp_path / "out"), "--config", str(tmp_path / "other.yaml")]
    assert main(command) == ExitCode.CONFIG
    assert "knows 256 token ids, and run" in capsys.readouterr().err


def test_generate_continues_a_text_as_the_seed_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same seed gives the same text, temperature 0 the likeliest; what cannot be used is said in one screen."""
    finished(tmp_path / "run" / "a", 0)
    finished(tmp_path / "run" / "b", 1)
    out = tmp_path / "out"
    assert main(["export", str(tmp_path / "run"), "--out", str(out)]) == ExitCode.OK

    def said(*options: str) -> str:
        capsys.readouterr()
        assert main(["generate", str(out), "--prompt", "def f(", "--max-tokens", "8", *options]) == ExitCode.OK
        return capsys.readouterr().out

    assert said("--seed", "1").startswith("def f(")
    assert said("--seed", "1") == said("--seed", "1") != said("--seed", "2")
    assert said("--temperature", "0") == said("--temperature", "0", "--seed", "5")
    for wrong, code in [
        (["generate", str(out), "--prompt", ""], ExitCode.USAGE),
        (["generate", str(out), "--prompt", "a", "--temperature", "-1"], ExitCode.USAGE),
        (["generate", str(out), "--prompt", "a", "--seed", "99999999999999999999"], ExitCode.USAGE),
        (["generate", str(tmp_path), "--prompt", "a"], ExitCode.RUN_FOLDER),
    ]:
        assert main(wrong) == code
        assert "remedy" in capsys.readouterr().err


def test_a_folders_model_is_heard_token_by_token_and_says_what_transformers_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each piece is written before the next token is drawn, in whole characters. Together they are what plain
    `generate` draws by the seed, without the end of the text; the positions of the model are the last."""
    finished(tmp_path / "run" / "a", 0)
    finished(tmp_path / "run" / "b", 1)
    out = tmp_path / "out"
    assert main(["export", str(tmp_path / "run"), "--out", str(out)]) == ExitCode.OK
    order, forward = list[str](), LlamaForCausalLM.forward

    def watched(self: LlamaForCausalLM, *arguments: Any, **options: Any) -> Any:
        order.append("")
        return forward(self, *arguments, **options)

    monkeypatch.setattr(LlamaForCausalLM, "forward", watched)
    spoken = continued(out, Wish("día", 12, 0.0, seed=3), order.append)
    assert (spoken.tokens, spoken.full) == (12, False)
    assert order[:2] == ["día", ""]
    pieces = [piece for piece in order if piece]
    assert len(pieces) > 6
    assert all(not piece.endswith("\ufffd") for piece in pieces[:-1])
    assert max(len(piece) for piece in pieces[1:]) <= 4, "what came was held back"
    assert "".join(pieces) == generate_sample(out, "día", 12, seed=3, temperature=0.0)
    assert order.index(pieces[1]) < 4, "what came waited for what was to come"
    positions = load_exported(out).config.max_position_embeddings
    full = continued(out, Wish("día", positions, 0.0, seed=3), lambda _: None)
    assert (full.tokens, full.full) == (positions - 4, True)
    with pytest.raises(UserError, match="positions"):
        continued(out, Wish("a" * positions, 1, 0.0, seed=3), order.append)
    tokenizer = SimpleNamespace(encode=lambda *_, **__: [10**6], eos_token_id=None)
    monkeypatch.setattr("noloco_node.exporting.evaluation.pretrained_tokenizer", lambda _: tokenizer)
    with pytest.raises(UserError, match="vocabulary"):
        continued(out, Wish("a", 1, 0.0, seed=3), order.append)


def test_what_a_swarms_model_says_does_not_speak_to_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Strangers have trained it; lines stay lines."""
    exporting._write("one\ttwo\n\x1b]52;c;cm0=\x07\r\u202e…ü")  # pyright: ignore[reportPrivateUsage]
    assert capsys.readouterr().out == "one\ttwo\n\ufffd]52;c;cm0=\ufffd\ufffd\ufffd…ü"


def test_a_node_that_has_saved_nothing_yet_is_not_taken_for_no_node(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its folder is named rightly: the remedy is to wait, and for what."""
    kept = RunFolder.create(tmp_path / "runs" / "h")
    kept.keep_spec(RUN.agreed_json)
    EventFile(kept.events).close()
    kept.checkpoints.mkdir()
    for named in (kept.path, tmp_path):
        assert main(["export", str(named), "--out", str(tmp_path / "out")]) == ExitCode.RUN_FOLDER
        told = capsys.readouterr().err
        assert f"a node has begun in '{kept.path}', and has saved nothing" in told
        assert "node.checkpoint_outer_steps (5 where it is not set)" in told
        assert "node.checkpoint_seconds (60)" in told


def tear(path: Path) -> None:
    """Cut a file short."""
    path.write_bytes(path.read_bytes()[:-8])


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda top: tear(top / "b" / "final" / SLOW_FILE), "does not match the hash"),
        (lambda top: (top / "b" / "final" / "manifest.json").write_text("{"), "damaged or incomplete"),
        (lambda top: (top / "b" / "final" / SLOW_FILE).unlink(), "damaged or incomplete"),
        (lambda top: (top / "b").rename(top.parent / "gone"), "there are no weights of stage 1 of 2"),
        (lambda top: finished(top / "z", 1, run=RUN.model_copy(update={"name": "other"})), "holds weights of run"),
        (lambda top: finished(top / "z", 1, shift=math.nan), "holds NaN or infinity"),
        (lambda top: (top / "out").mkdir(), "exists already"),
        (lambda top: [path.unlink() for path in top.glob("*/run_spec.json")], "says which run it is of"),
        (lambda top: [path.write_text("{}") for path in top.glob("*/run_spec.json")], "cannot be read"),
    ],
    ids=["torn", "manifest", "missing file", "missing stage", "other run", "nan", "out exists", "no spec", "bad spec"],
)
def test_what_makes_no_whole_model_is_refused_and_leaves_nothing(
    spoil: Callable[[Path], object], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One screen, a remedy, the exit code of run folders, and nothing under the final name or beside it."""
    top = tmp_path / "top"
    finished(top / "a", 0)
    finished(top / "b", 1)
    spoil(top)
    before = sorted(path.name for path in top.iterdir())
    assert main(["export", str(top), "--out", str(top / "out")]) == ExitCode.RUN_FOLDER
    told = capsys.readouterr().err
    assert words in told
    assert "remedy: " in told
    assert "Traceback" not in told
    assert sorted(path.name for path in top.iterdir()) == before


def test_weights_of_another_shape_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sealed under the run's id all the same, as a hostile or a strange node may."""
    small = RUN.model.model_copy(update={"config": {**RUN.model.config, "intermediate_size": 32}})
    finished(tmp_path / "a", 0)
    finished(tmp_path / "b", 1, run=RUN.model_copy(update={"model": small}))
    manifest = tmp_path / "b" / "final" / "manifest.json"
    text = json.loads(manifest.read_text())
    forged = WeightsManifest.model_validate({**text, "run_id": RUN.run_id})
    manifest.write_text(forged.sealed().model_dump_json())
    out = tmp_path / "out"
    assert main(["export", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(out)]) == ExitCode.RUN_FOLDER
    assert "do not fit stage 1" in capsys.readouterr().err


def test_a_full_disk_leaves_nothing_half_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen before it is begun, and where it fills while the weights are written."""
    finished(tmp_path / "run" / "a", 0)
    finished(tmp_path / "run" / "b", 1)
    command = ["export", str(tmp_path / "run"), "--out", str(tmp_path / "models" / "out")]
    with monkeypatch.context() as small:
        small.setattr("noloco_node.exporting.write.free_disk", lambda _: 1000)
        assert main(command) == ExitCode.RUN_FOLDER
        assert "1.0 kB are free" in capsys.readouterr().err
    for room in (64 << 10, 1 << 10):  # enough for the configuration, and not even for that
        with files_up_to(room):
            assert main(command) == ExitCode.RUN_FOLDER
        assert "File too large" in capsys.readouterr().err
        assert list((tmp_path / "models").iterdir()) == []


def test_a_folder_of_an_older_version_is_exported_with_the_runs_configuration(tmp_path: Path) -> None:
    """It does not say which run it is of."""
    finished(tmp_path / "run" / "a", 0)
    finished(tmp_path / "run" / "b", 1)
    for path in tmp_path.rglob("run_spec.json"):
        path.unlink()
    given = [word for setting in OWN_TEXT for word in ("--set", setting)]
    command = ["export", str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--config", str(MICRO), *given]
    assert main(command) == ExitCode.OK
    with contextlib.suppress(UserError):
        gather_folders([tmp_path / "run"], None)
        pytest.fail("it says nothing of itself")
