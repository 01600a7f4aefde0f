"""Every format, by file, folder and glob; and nothing is read as another format than it is."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import datasets
import pytest

from noloco_node.config.data_spec import DataSpec
from noloco_node.config.files import home_place
from noloco_node.data import loaders
from noloco_node.data.documents import Document
from noloco_node.data.hub import check_files, hub_documents
from noloco_node.data.sources import check_source, read_documents
from noloco_node.errors import ExitCode, UserError
from tests.data.made_files import TABLES, lines, write_texts
from tests.data.splits import load_split
from tests.data.test_sources import text_spec

TEXTS = ['one\ntwo, "three"', "grüße 世界", "", '{"not": "a row"}', "five", " six ", "seven\\n"]


def texts(spec: DataSpec) -> list[str]:
    """Texts of all documents of the source."""
    return [document.text for document in read_documents(spec)]


def refused(spec: DataSpec) -> UserError:
    """What a person is told before anything starts."""
    with pytest.raises(UserError) as caught:
        check_source(spec)
    assert caught.value.exit_code is ExitCode.DATA
    assert caught.value.remedy
    return caught.value


@pytest.mark.parametrize("name", TABLES)
def test_a_file_a_folder_and_a_glob_of_each_format_give_the_rows_in_order(name: str, tmp_path: Path) -> None:
    """Whatever the format, the same documents; a README beside the rows is none of them."""
    for number in range(3):
        folder = tmp_path / f"part-{number}"
        folder.mkdir()
        write_texts(folder / name, [f"{number} {text}" for text in TEXTS])
    (tmp_path / "README.md").write_text("about")
    one = text_spec(tmp_path / "part-1" / name)
    check_source(one)
    assert texts(one) == [f"1 {text}" for text in TEXTS]
    everything = [f"{number} {text}" for number in range(3) for text in TEXTS]
    for path in (tmp_path, tmp_path / "part-*" / name, tmp_path / "**" / "*.*[!d]"):
        check_source(text_spec(path))
        assert texts(text_spec(path)) == everything
    folder_keys, glob_keys = (
        [document.key for document in read_documents(text_spec(path))] for path in (tmp_path, tmp_path / "*" / name)
    )
    assert folder_keys == glob_keys
    assert len(set(folder_keys)) == len(folder_keys)


def test_c4_is_read_from_its_local_copy_by_folder_or_glob(tmp_path: Path) -> None:
    """Its own file names, the validation files beside the training ones; `data.split` chooses."""
    shards = {
        "c4-train.00000-of-01024.json.gz": "a",
        "c4-train.00001-of-01024.json.gz": "b",
        "c4-validation.00000-of-00008.json.gz": "v",
    }
    for name, text in shards.items():
        (tmp_path / name).write_bytes(gzip.compress(lines([text, text * 2])))
    training = ["a", "aa", "b", "bb"]
    assert texts(text_spec(tmp_path)) == texts(text_spec(tmp_path / "c4-train.*.json.gz")) == training
    assert texts(text_spec(tmp_path, split="validation")) == ["v", "vv"]
    assert "splits train, validation" in refused(text_spec(tmp_path, split="test")).message


def test_a_place_below_the_home_folder_is_named_as_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration passes no shell that would spell it out."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "a.txt").write_text("a tale")
    assert texts(text_spec(Path("~/books"))) == texts(text_spec(Path("~/books/*.txt"))) == ["a tale"]
    assert home_place("~/books") == tmp_path / "books"
    assert home_place("~no.such.user/books") == Path("~no.such.user/books")  # as another machine's configuration says


def test_what_the_datasets_library_saved_is_read(tmp_path: Path) -> None:
    """`save_to_disk` of one split and of several."""
    table = datasets.Dataset.from_dict({"body": ["one", "two", None], "other": [1, 2, 3]})
    table.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": table, "test": table.select([0])}).save_to_disk(str(tmp_path / "several"))
    assert texts(text_spec(tmp_path / "one", text_field="body")) == ["one", "two", ""]
    assert texts(text_spec(tmp_path / "several", text_field="body")) == ["one", "two", ""]
    assert texts(text_spec(tmp_path / "several", text_field="body", split="test")) == ["one"]


def test_a_dataset_of_the_hub_gives_subset_and_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the library lays them out; a folder stands for the hub, which is not asked from here."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("noloco_node.data.hub.check_not_here", lambda _name: None)
    monkeypatch.setattr("noloco_node.data.hub.check_files", lambda _name, _files: None)
    monkeypatch.chdir(tmp_path)
    for language in ("en", "de"):
        folder = tmp_path / "owner" / "name" / language
        folder.mkdir(parents=True)
        (folder / "train.jsonl").write_bytes(lines([language, f"{language} two"]))
        (folder / "test.jsonl").write_bytes(lines([f"{language} test"]))
    about = "---\nconfigs:\n" + "".join(
        f"- config_name: {language}\n  data_files:\n"
        + "".join(f"  - split: {split}\n    path: {language}/{split}.jsonl\n" for split in ("train", "test"))
        for language in ("en", "de")
    )
    (tmp_path / "owner" / "name" / "README.md").write_text(about + "---\n")
    spec = DataSpec(source="huggingface", path="owner/name", subset="de")
    assert list(hub_documents(spec)) == [Document("0", "de"), Document("1", "de two")]
    assert [document.text for document in hub_documents(spec.model_copy(update={"split": "test"}))] == ["de test"]
    for change, words in (({"subset": "fr"}, "subset fr"), ({"text_field": "body"}, "has the columns text, url")):
        with pytest.raises(UserError, match=words):
            list(hub_documents(spec.model_copy(update=change)))


def test_what_lies_here_is_not_asked_of_thehub_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of the dataset's name would be read in its place."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    spec = DataSpec(source="huggingface", path="owner/name")
    assert "lies on this machine" in refused(spec).message
    for name in ("text", "hf://datasets/text"):
        assert "no dataset of the hub" in refused(spec.model_copy(update={"path": name})).message
    with pytest.raises(ValueError, match=r"set run\.data\.source to text"):
        DataSpec(source="huggingface", path=str(tmp_path))
    with pytest.raises(ValueError, match=r"only datasets of the hub have subsets"):
        text_spec(tmp_path, subset="en")


def test_a_datasets_card_does_not_choose_what_is_read_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library reads whatever files the card names, those of this machine too."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("noloco_node.data.hub.check_not_here", lambda _name: None)
    monkeypatch.chdir(tmp_path)
    secret = tmp_path / "diary.txt"
    secret.write_text("mine alone")
    (tmp_path / "owner" / "name").mkdir(parents=True)
    (tmp_path / "owner" / "name" / "README.md").write_text(
        f"---\nconfigs:\n- config_name: default\n  data_files: {secret}\n---\n"
    )
    for streaming in (False, True):
        with pytest.raises(UserError, match=r"diary\.txt', a place on this machine"):
            list(hub_documents(DataSpec(source="huggingface", path="owner/name", streaming=streaming)))
    check_files("owner/name", {"train": ["hf://datasets/owner/name@0/train.jsonl", "https://host/train.jsonl"]})
    for file in (f"file://{secret}", f"zip://a.txt::{secret}", f"https://host::file://{secret}"):
        with pytest.raises(UserError, match="a place on this machine"):
            check_files("owner/name", {"train": ["hf://datasets/owner/name@0/train.jsonl", file]})


def test_json_lists_and_long_texts_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the size of a piece: every row and every character comes, once."""
    rows = [{"text": "x" * random.Random(number).randrange(200)} for number in range(50)]
    (tmp_path / "rows.json").write_text("\n [" + " ,\n".join(map(json.dumps, rows)) + "]\n")
    story = "".join(f"line {number}\n" for number in range(500)) + "z" * 3000
    (tmp_path / "story.txt").write_text(story)
    for size in (16, 61, 4096):
        monkeypatch.setattr(loaders, "PIECE_LENGTH", size)
        monkeypatch.setattr(loaders, "LONGEST_TEXT", 16 * size)
        assert texts(text_spec(tmp_path / "rows.json")) == [row["text"] for row in rows]
        found = list(read_documents(text_spec(tmp_path / "story.txt")))
        assert "".join(document.text for document in found) == story
        assert len({document.key for document in found}) == len(found)
        assert max(len(document.text) for document in found) <= max(size, len(story) if size == 4096 else size)


def test_the_name_of_a_single_file_does_not_choose_what_is_held_out(tmp_path: Path) -> None:
    """A volunteer may call its copy of the book what it likes."""
    for name in ("book.txt", "my copy.txt"):
        (tmp_path / name).write_text("".join(f"line {number} of a story\n" for number in range(2000)))
    one, other = (load_split(text_spec(tmp_path / name)) for name in ("book.txt", "my copy.txt"))
    assert one == other


def packed(content: bytes) -> bytes:
    """By gzip, without the time: a message shows the first bytes, and some times have a quotation mark in them."""
    return gzip.compress(content, mtime=0)


DISGUISED = [
    ("rows", lines(["a", "b"]), "no ending.*begins as JSON"),
    ("rows.txt", lines(["a", "b"]), r"'\.txt', which promises text, but it begins as JSON"),
    ("rows.txt.gz", packed(lines(["a", "b"])), "promises text, but it begins as JSON"),
    ("list.txt", b'[{"text": "a"}]', "begins as JSON"),
    ("rows.csv", lines(["a", "b"]), "promises CSV, but it begins as JSON"),
    ("rows.jsonl", b"text\na\nb\n", "promises JSON, but it begins as text"),
    ("rows.jsonl.gz", lines(["a"]), r"named 'rows\.jsonl\.gz', but begins with '\{"),
    ("rows.jsonl", packed(lines(["a"])), r"named 'rows\.jsonl', but begins with '\\x1f"),
    ("rows.parquet", b"PK\x03\x04" + bytes(9), "a zip archive"),
    ("rows.parquet", lines(["a"]), "promises Parquet, but it begins as JSON"),
    ("rows.arrow", b"PAR1" + bytes(9), "promises Arrow, but it begins as Parquet"),
    ("rows.parquet.gz", packed(b"PAR1" + bytes(9)), "Parquet inside gzip: unpack it"),
    ("book.txt", b"\x7fELF\0\0\0", r"not text, and begins with '\\x7fELF"),
    ("rows.tsv", b"text\nabc\n", r"'\.tsv' files are not read"),
    ("book.xz", b"\xfd7zXZ\0\0", "it is xz"),
]


@pytest.mark.parametrize(("name", "content", "words"), DISGUISED)
def test_what_is_not_what_its_name_says_is_refused_with_what_was_seen(
    name: str, content: bytes, words: str, tmp_path: Path
) -> None:
    """As a file, in a folder that is mostly such, and in a glob."""
    (tmp_path / name).write_bytes(content)
    for path in (tmp_path / name, tmp_path, tmp_path / "*"):
        spec = text_spec(path)
        error = refused(spec)
        assert name in error.message
        with pytest.raises(UserError, match=words):
            check_source(spec)
        with pytest.raises(UserError, match=words):
            list(read_documents(spec))


def test_a_folder_is_what_most_of_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A source tree has its package.json, which is no text, and is said to be passed over; halves are refused."""
    (tmp_path / "package.json").write_text("{}")
    (tmp_path / "code.py").write_text("pass\n" * 10)
    (tmp_path / "__init__.py").write_text("")
    assert [document.key for document in read_documents(text_spec(tmp_path))] == ["code.py"]
    assert "1 files of other formats in it are passed over (package.json)" in caplog.text
    (tmp_path / "code.py").write_text("ab")
    assert "1 JSON" in refused(text_spec(tmp_path)).message
    (tmp_path / "code.py").write_text("pass\n" * 10)
    assert "several formats" in refused(text_spec(tmp_path / "*")).message
