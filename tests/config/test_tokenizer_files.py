"""A tokenizer's folder has one name, wherever it lies: equal ones part nobody, and a different one is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from noloco_node.config.load import Config, load_config
from noloco_node.config.tokenizer_files import files_to_copy, fingerprint_of_tokenizer
from noloco_node.data.tokenizers import PretrainedTokenizer, load_tokenizer
from noloco_node.errors import ExitCode, UserError

MICRO = Path(__file__).parent.parent / "configs" / "micro.yaml"
TEXT = "the tale is told, and told anew; " * 8


def made(folder: Path, vocab_size: int = 262) -> Path:
    """A small tokenizer of bytes and a few words, in a folder."""
    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=alphabet, special_tokens=["<end>"], show_progress=False
    )
    fast.train_from_iterator([TEXT], trainer)
    PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<end>").save_pretrained(folder)
    return folder


def with_tokenizer(folder: Path, *more: str) -> Config:
    """The micro run with the tokenizer of that folder."""
    return load_config(MICRO, [f"run.data.tokenizer={folder}", "run.model.config.vocab_size=300", *more])


def test_the_same_tokenizer_elsewhere_is_the_same_run(tmp_path: Path) -> None:
    """It is copied, loaded and saved by the library, used for cut texts, and has a model beside it. The run's id stays,
    and the path is not in what peers are told."""
    one, two, three = made(tmp_path / "one"), tmp_path / "two", tmp_path / "three"
    shutil.copytree(one, two)
    (two / "README.md").write_text("mine")
    (two / "config.json").write_text('{"model_type": "llama"}')
    backend = AutoTokenizer.from_pretrained(two)
    backend(TEXT, truncation=True, max_length=3)
    backend.save_pretrained(three)
    runs = [with_tokenizer(folder).run for folder in (one, two, three)]
    assert len({run.run_id for run in runs}) == 1
    assert str(tmp_path) not in runs[0].agreed_json
    assert runs[0].data.tokenizer_fingerprint is not None
    assert runs[0].data.tokenizer_fingerprint in runs[0].agreed_json


def _altered(name: str, change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def alter(folder: Path) -> None:
        said = json.loads((folder / name).read_text())
        change(said)
        (folder / name).write_text(json.dumps(said))

    return alter


@pytest.mark.parametrize(
    "alter",
    [
        pytest.param(_altered("tokenizer.json", lambda said: said["model"]["merges"].pop()), id="a merge less"),
        pytest.param(_altered("tokenizer.json", lambda said: said.update(normalizer={"type": "NFC"})), id="normalizer"),
        pytest.param(_altered("tokenizer_config.json", lambda said: said.pop("eos_token")), id="no end of a text"),
    ],
)
def test_another_tokenizer_is_another_run_and_the_fingerprint_tells(
    alter: Callable[[Path], None], tmp_path: Path
) -> None:
    """Whatever changes a text's tokens changes the id; a node that is held to the fingerprint is told both, and the
    remedy."""
    folder = made(tmp_path / "one")
    mine = with_tokenizer(folder).run
    alter(folder)
    assert with_tokenizer(folder).run.run_id != mine.run_id
    with pytest.raises(UserError) as caught:
        with_tokenizer(folder, f"run.data.tokenizer_fingerprint={mine.data.tokenizer_fingerprint}")
    assert caught.value.exit_code is ExitCode.DATA
    assert str(mine.data.tokenizer_fingerprint) in caught.value.message
    assert fingerprint_of_tokenizer(folder) in caught.value.message
    assert "get the folder" in caught.value.remedy


def test_files_of_older_forms_count_where_there_is_no_tokenizer_json(tmp_path: Path) -> None:
    """Beside a whole one they are not read, and say nothing."""
    folder = made(tmp_path / "one")
    whole = fingerprint_of_tokenizer(folder)
    (folder / "merges.txt").write_text("a b")
    assert fingerprint_of_tokenizer(folder) == whole
    (folder / "tokenizer.json").unlink()
    older = fingerprint_of_tokenizer(folder)
    (folder / "merges.txt").write_text("a c")
    assert len({whole, older, fingerprint_of_tokenizer(folder)}) == 3


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"model":', "damaged"),
        ("[]", "no JSON object"),
        ('{"model": NaN}', "damaged"),
        ("[" * 100_000, "damaged"),
        (None, "holds no tokenizer"),
    ],
)
def test_a_folder_without_a_sound_tokenizer_is_refused_before_anything_starts(
    text: str | None, why: str, tmp_path: Path
) -> None:
    """With the file, the reason, what to do, and the exit code of a text that cannot be used."""
    if text is not None:
        (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(UserError, match=why) as caught:
        with_tokenizer(tmp_path)
    assert caught.value.exit_code is ExitCode.DATA
    assert str(tmp_path) in caught.value.message


def test_a_place_that_is_not_there_is_refused_unless_the_fingerprint_says_what_is_meant(tmp_path: Path) -> None:
    """A node of a later stage, or a seed, needs no tokenizer. With the fingerprint in the file it has the run's id
    without the folder, and is never sent to the hub for it."""
    owners = with_tokenizer(made(tmp_path / "one")).run
    away = tmp_path / "away"
    with pytest.raises(UserError, match="does not exist") as caught:
        with_tokenizer(away)
    assert caught.value.exit_code is ExitCode.DATA
    held = f"run.data.tokenizer_fingerprint={owners.data.tokenizer_fingerprint}"
    for name in (str(away), "owner/name"):
        later = with_tokenizer(Path(name), held).run
        assert later.run_id == owners.run_id
        with pytest.raises(UserError, match="it is no folder here") as caught:
            load_tokenizer(later.data)
        assert caught.value.exit_code is ExitCode.DATA
        assert "--set run.data.tokenizer=DIR" in caught.value.remedy


def test_a_folder_that_is_changed_after_it_was_looked_at_is_not_loaded(tmp_path: Path) -> None:
    """What is loaded is held to the run's fingerprint, too."""
    spec = with_tokenizer(made(tmp_path / "one")).run.data
    assert load_tokenizer(spec).decode(load_tokenizer(spec).encode(TEXT).tolist()) == TEXT
    made(tmp_path / "one", vocab_size=259)
    with pytest.raises(UserError, match="is not the run's"):
        load_tokenizer(spec)


def test_a_name_of_the_hub_stays_a_name_and_is_loaded_in_the_runs_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are in the run's id: everybody can load it by them."""
    asked: list[tuple[str, str]] = []
    folder, load = made(tmp_path / "one"), AutoTokenizer.from_pretrained

    def from_hub(name: str, *, revision: str, **_: object) -> object:
        asked.append((name, revision))
        return load(folder)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", from_hub)
    pinned = "run.data.tokenizer_fingerprint=revision-" + "ab" * 20
    run, free = with_tokenizer(Path("owner/name"), pinned).run, with_tokenizer(Path("owner/name")).run
    assert isinstance(load_tokenizer(run.data), PretrainedTokenizer)
    load_tokenizer(free.data)
    assert asked == [("owner/name", "ab" * 20), ("owner/name", "main")]
    assert '"owner/name"' in run.agreed_json
    assert run.run_id != free.run_id


@pytest.mark.parametrize("name", ["bytes", "none"])
def test_a_fingerprint_of_no_files_is_refused(name: str) -> None:
    """The package's own tokenizer is its version's."""
    held = "run.data.tokenizer_fingerprint=tokenizer-" + "ab" * 16
    with pytest.raises(UserError, match=r"tokenizer_fingerprint is set but .*tokenizer is"):
        load_config(MICRO, ["run.data.source=text", "run.data.path=x", f"run.data.tokenizer={name}", held])


def test_what_is_copied_beside_a_model_is_the_tokenizer_and_nothing_else(tmp_path: Path) -> None:
    """A folder may hold a model's weights and programs, too; one that the model beside it explains is not copied."""
    folder, beside = made(tmp_path / "one"), tmp_path / "two"
    for name in ("config.json", "model.safetensors", "theirs.py"):
        (folder / name).write_text("{}")
    beside.mkdir()
    for file in files_to_copy(folder):
        shutil.copyfile(file, beside / file.name)
    assert {path.name for path in beside.iterdir()} == {"tokenizer.json", "tokenizer_config.json"}
    assert fingerprint_of_tokenizer(beside) == fingerprint_of_tokenizer(folder)
    _altered("tokenizer_config.json", lambda said: said.pop("tokenizer_class"))(folder)
    assert files_to_copy(folder) == []
