"""Folders as people have them: with links, brackets, results beside the rows, and pointers in place of files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from unicodedata import normalize

import datasets
import pytest

from noloco_node.config.pretrained import open_pretrained
from noloco_node.config.tokenizer_files import fingerprint_of_tokenizer
from noloco_node.data.prepared import fingerprint_of
from noloco_node.data.shards import TextShards, fingerprint_of_shards, shard_files
from noloco_node.data.sources import read_documents
from noloco_node.data.tokenizers import ByteTokenizer
from noloco_node.errors import ExitCode, UserError
from tests.data.made_files import write_texts
from tests.data.test_formats import refused, texts
from tests.data.test_sources import keys, text_spec

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "a1" * 32 + "\nsize 12345\n"


def test_results_beside_the_rows_of_datasets_are_no_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A map over a saved folder leaves `cache-*.arrow` in it, with every document again."""
    saved = tmp_path / "saved"
    datasets.Dataset.from_dict({"text": [f"tale {number}" for number in range(30)]}).save_to_disk(str(saved))
    datasets.load_from_disk(str(saved)).map(lambda row: {"text": row["text"].upper()})
    assert len(list(saved.glob("cache-*.arrow"))) == 1
    expected = [f"tale {number}" for number in range(30)]
    for path in (saved, saved / "*.arrow"):
        assert texts(text_spec(path)) == expected
    assert "results that the datasets library keeps beside its rows are left out" in caplog.text
    assert texts(text_spec(saved / "cache-*.arrow")) == [text.upper() for text in expected]
    (saved / "state.json").unlink()
    assert texts(text_spec(saved)) == expected
    (saved / "dataset_info.json").unlink()
    assert len(texts(text_spec(saved))) == 60


def test_a_saved_folder_that_lacks_a_file_is_refused(tmp_path: Path) -> None:
    """Its rows would be fewer than the run's."""
    data = datasets.Dataset.from_dict({"text": [f"tale {number}" for number in range(30)]})
    data.save_to_disk(str(tmp_path / "saved"), num_shards=3)
    (tmp_path / "saved" / "data-00001-of-00003.arrow").unlink()
    assert "names the file data-00001-of-00003.arrow, which is not there" in refused(text_spec(tmp_path)).message
    assert len(texts(text_spec(tmp_path / "saved" / "*.arrow"))) == 20


def test_linked_folders_are_read_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A large part may lie on another disk; links that lead back, or again to the same place, add nothing."""
    disk, root = tmp_path / "disk", tmp_path / "books"
    for folder, name in ((disk / "old", "one.txt"), (root, "two.txt"), (root / "new", "three.txt")):
        folder.mkdir(parents=True)
        (folder / name).write_text(name)
    (root / "far").symlink_to(disk)
    (root / "again").symlink_to(disk / "old")
    (root / "new" / "up").symlink_to(root)
    (disk / "old" / "round").symlink_to(disk)
    (root / "gone.txt").symlink_to(disk / "unmounted.txt")
    (root / ".hidden").symlink_to(disk)
    wanted = ["again/one.txt", "new/three.txt", "two.txt"]
    for path in (root, root / "**" / "*.txt"):
        assert keys(text_spec(path)) == wanted
    assert "links that lead nowhere are left out" in caplog.text
    assert keys(text_spec(root / "*" / "*.txt")) == ["again/one.txt", "new/three.txt"]
    (root / "same").symlink_to(root / "new")
    assert keys(text_spec(root / "*" / "three.txt")) == ["new/three.txt"]
    caplog.clear()
    TextShards(text_spec(root, streaming=True), ByteTokenizer())
    assert "gone.txt" in caplog.text


def test_a_folder_that_cannot_be_read_is_not_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text without it would be another one."""
    (tmp_path / "shut").mkdir()
    (tmp_path / "book.txt").write_text("a tale")
    real = os.scandir

    def scandir(path: str) -> object:
        if path.endswith("shut"):
            raise PermissionError(13, "Permission denied", path)
        return real(path)

    monkeypatch.setattr("os.scandir", scandir)
    with pytest.raises(UserError, match=r"shut' cannot be read: Permission denied"):
        list(read_documents(text_spec(tmp_path)))


def test_brackets_in_a_folders_name_are_its_name(tmp_path: Path) -> None:
    """As far as there is such a folder; else they are a set of characters."""
    folder = tmp_path / "[2024] books"
    folder.mkdir()
    (folder / "a.txt").write_text("a tale")
    (folder / "b.txt").write_text("b tale")
    for pattern in ("*.txt", "[ab].txt", "**/*.txt"):
        assert keys(text_spec(folder / pattern)) == ["a.txt", "b.txt"]
    assert keys(text_spec(tmp_path / "[[]2024] *" / "[a].txt")) == ["[2024] books/a.txt"]
    assert "`[` begins a set" in refused(text_spec(tmp_path / "[1999] books" / "*.txt")).remedy


@pytest.mark.parametrize("streaming", [False, True])
def test_a_name_is_the_same_however_its_characters_are_composed(streaming: bool, tmp_path: Path) -> None:
    """A Mac writes ü in two characters where others write it in one: the text is the same."""
    found: list[tuple[str, list[str]]] = []
    for form in ("NFC", "NFD"):
        folder = tmp_path / form
        folder.mkdir()
        for name in ("Tür", "Zürich", "ä", "z", "a"):
            (folder / f"{normalize(form, name)}.txt").write_text(f"tale of {name} " * 30)
        spec = text_spec(folder)
        found.append((fingerprint_of_shards(shard_files(spec)) if streaming else fingerprint_of(spec), keys(spec)))
    assert found[0] == found[1]
    both = tmp_path / "NFC" / f"{normalize('NFD', 'ä')}.txt"
    both.write_text("another")
    assert len(set(keys(text_spec(tmp_path / "NFC")))) == 6


def test_pointers_in_place_of_files_are_named(tmp_path: Path) -> None:
    """A repository that was cloned without Git LFS has them: as files, among others, for tokenizers and weights."""
    for name in ("book.txt", "rows.jsonl", "rows.parquet", "rows.json.gz", "book"):
        folder = tmp_path / name.replace(".", "-")
        folder.mkdir()
        (folder / name).write_text(POINTER)
        (folder / "README.md").write_text("about " * 100)
        for path in (folder, folder / name, folder / f"{name[:5]}*"):
            error = refused(text_spec(path))
            assert "a pointer of Git LFS" in error.message
            assert "git lfs pull" in error.remedy
    code = tmp_path / "code"
    code.mkdir()
    write_texts(code / "a.jsonl", ["one"])
    (code / "picture.png").write_text(POINTER)
    (code / "about.jsonl").write_text(json.dumps({"text": POINTER}))
    assert texts(text_spec(code)) == ["one", POINTER]
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer.json").write_text(POINTER)
    with pytest.raises(UserError, match="a pointer of Git LFS") as caught:
        fingerprint_of_tokenizer(model)
    assert caught.value.exit_code is ExitCode.DATA
    (model / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (model / "model.safetensors").write_text(POINTER)
    with pytest.raises(UserError, match=r"model\.safetensors': it is a pointer of Git LFS"):
        open_pretrained(str(model))
