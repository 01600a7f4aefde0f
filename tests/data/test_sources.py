"""Documents: which files count as text, which are held out, and what a person reads when there are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from noloco_node.config.data_spec import DataSpec
from noloco_node.data.documents import Document
from noloco_node.data.sources import read_documents
from noloco_node.errors import ExitCode, UserError
from tests.data.splits import load_split, split_documents


def text_spec(path: Path | str, **changes: object) -> DataSpec:
    """A spec that reads own text."""
    return DataSpec.model_validate({"source": "text", "path": str(path), "sequence_length": 16, **changes})


def keys(spec: DataSpec) -> list[str]:
    """Keys of all documents of the source."""
    return [document.key for document in read_documents(spec)]


def test_the_standard_library_is_whole_files_without_tests_and_packages() -> None:
    """Source files in order of their paths, the same each time, none from tests or installed packages."""
    first = list(read_documents(DataSpec()))
    found = [document.key for document in first]
    assert found == sorted(set(found))
    assert {"os.py", "asyncio/tasks.py"} <= set(found)
    assert all(key.endswith(".py") for key in found)
    assert not [key for key in found if {"test", "tests", "site-packages", "dist-packages"} & set(key.split("/"))]
    assert sum(len(document.text) for document in first) > 5_000_000
    assert first == list(read_documents(DataSpec()))


def test_the_standard_library_is_split_by_whole_files() -> None:
    """No file is in both parts, none is lost, and about the asked share is held out."""
    split = load_split(DataSpec(holdout=0.05))
    training = {document.key for document in split.training}
    validation = {document.key for document in split.validation}
    assert not training & validation
    everything = {document.key for document in read_documents(DataSpec()) if document.text.strip()}
    assert training | validation == everything
    assert 0.02 < len(validation) / len(everything) < 0.09


def test_a_document_stays_in_its_part_when_others_come_and_go() -> None:
    """The split looks at a document's own key only."""
    documents = [Document(f"folder/{number}", "text") for number in range(400)]
    whole, half = split_documents(documents, 0.1), split_documents(documents[::2], 0.1)
    assert set(half.validation) == set(whole.validation) & set(documents[::2])
    assert 20 < len(whole.validation) < 60


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("holdout", [0.0001, 0.4999])
def test_neither_part_is_ever_empty(count: int, holdout: float) -> None:
    """With few documents and any share there is something to train on and something to validate on."""
    for start in range(50):
        documents = [Document(f"{start}-{number}", "text") for number in range(count)]
        split = split_documents(documents, holdout)
        assert split.training
        assert split.validation
        assert set(split.training) | set(split.validation) == set(documents)


def test_a_folder_is_read_recursively_without_hidden_and_binary_files(tmp_path: Path) -> None:
    """Text of any extension counts; dot files, dot folders and files with zero bytes do not."""
    for name, content in {
        "b.txt": b"bee",
        "a/deep/x.md": "grüße".encode(),
        "a/latin1.txt": b"caf\xe9",
        ".hidden": b"no",
        ".git/config": b"no",
        "picture.bin": b"\x89PNG\0\0",
        "a/__pycache__/x.pyc": b"\xa7\r\r\n\0\0" * 99,
    }.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    documents = {document.key: document.text for document in read_documents(text_spec(tmp_path))}
    assert documents == {"a/deep/x.md": "grüße", "a/latin1.txt": "caf\ufffd", "b.txt": "bee"}
    assert list(documents) == sorted(documents)


def test_json_lines_give_a_document_a_row(tmp_path: Path) -> None:
    """The text is the column that data.text_field names; blank lines are passed over."""
    (tmp_path / "rows.jsonl").write_text('{"body": "one"}\n\n{"body": "two", "text": "not this"}\n')
    found = list(read_documents(text_spec(tmp_path, text_field="body")))
    assert found == [Document("rows.jsonl:1", "one"), Document("rows.jsonl:3", "two")]


def test_one_long_file_is_cut_by_position_into_both_parts(tmp_path: Path) -> None:
    """Own text in a single file trains and validates; the pieces are the whole text, and break at line ends."""
    text = "".join(f"line {number} of a long story\n" for number in range(4000))
    (tmp_path / "story.txt").write_text(text)
    split = load_split(text_spec(tmp_path / "story.txt", holdout=0.1))
    pieces = sorted([*split.training, *split.validation], key=lambda piece: int(piece.key.split("#")[1]))
    assert "".join(piece.text for piece in pieces) == text
    assert all(piece.text.endswith("\n") for piece in pieces)
    held = sum(len(piece.text) for piece in split.validation) / len(text)
    assert 0.02 < held < 0.3


def test_a_text_without_line_ends_is_cut_as_well(tmp_path: Path) -> None:
    """No newline to break at is no reason to lose text."""
    (tmp_path / "one.txt").write_text("abcdefghij" * 5000)
    split = load_split(text_spec(tmp_path / "one.txt"))
    assert sum(len(piece.text) for piece in [*split.training, *split.validation]) == 50_000
    assert len(split.training) > 10


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("nowhere", None, r"data\.path is '.*nowhere', which does not exist"),
        ("", None, r"data\.path '.*' holds no text"),
        ("blank.txt", " \n\n", r"data\.path '.*blank\.txt' holds no text"),
        ("short.txt", "too short to split", r"single short document"),
        ("rows.jsonl", '{"text": "fine"}\n{"text": \n', r"line 2 of 'rows\.jsonl' is not JSON"),
        ("rows.jsonl", '{"text": "fine"}\n' + "[" * 200_000, r"line 2 of 'rows\.jsonl' is not JSON"),
        ("rows.jsonl", "{broken", r"line 1 of 'rows\.jsonl' is not JSON"),
    ],
    ids=["missing", "empty folder", "blank", "short", "broken row", "endless brackets", "broken from the start"],
)
def test_unusable_text_is_a_users_error(name: str, content: str | None, words: str, tmp_path: Path) -> None:
    """Each names the setting or the place, and what to do."""
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=words) as caught:
        load_split(text_spec(tmp_path / name))
    assert caught.value.exit_code is ExitCode.DATA
    assert caught.value.remedy
