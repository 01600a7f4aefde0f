"""Documents: which files count as text, which are held out, and what a person reads when there are none."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path

import datasets
import pytest

from noloco_node.config.run_spec import DataSpec
from noloco_node.data.sources import Document, load_split, read_documents, split_documents
from noloco_node.errors import ExitCode, UserError


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


def save_arrow(folder: Path, table: datasets.Dataset) -> Path:
    """`save_to_disk` of one split."""
    table.save_to_disk(str(folder / "arrow"))
    return folder / "arrow"


def save_splits(folder: Path, table: datasets.Dataset) -> Path:
    """`save_to_disk` of a dictionary of splits."""
    datasets.DatasetDict({"train": table, "test": table.select([0])}).save_to_disk(str(folder / "splits"))
    return folder / "splits"


def save_parquet(folder: Path, table: datasets.Dataset) -> Path:
    """A parquet file."""
    table.to_parquet(str(folder / "rows.parquet"))
    return folder / "rows.parquet"


def save_folder_of_json_lines(folder: Path, table: datasets.Dataset) -> Path:
    """A folder of data files, as people upload them."""
    (folder / "files").mkdir()
    (folder / "files" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))
    return folder / "files"


@pytest.mark.parametrize("save", [save_arrow, save_splits, save_parquet, save_folder_of_json_lines])
def test_datasets_on_disk_give_their_rows_in_order(
    save: Callable[[Path, datasets.Dataset], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every local form of a dataset that its library writes or reads."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    table = datasets.Dataset.from_dict({"body": ["one", "two", None], "other": [1, 2, 3]})
    path = save(tmp_path, table)
    spec = DataSpec(source="huggingface", path=str(path), text_field="body")
    assert list(read_documents(spec)) == [Document("0", "one"), Document("1", "two"), Document("2", "")]
    with pytest.raises(UserError, match=r"data\.text_field is 'absent'.*body, other"):
        list(read_documents(spec.model_copy(update={"text_field": "absent"})))


def save_rows(folder: Path, name: str) -> Path:
    """Rows of text as JSON, packed where the name says so."""
    rows = "".join(json.dumps({"text": f"row {number}"}) + "\n" for number in range(100)).encode()
    (folder / name).write_bytes(gzip.compress(rows) if name.endswith(".gz") else rows)
    return folder / name


@pytest.mark.parametrize("name", ["rows.json.gz", "rows.jsonl.gz", "rows.JSON.GZ", "rows.arrow", "rows"])
def test_a_dataset_file_of_unknown_kind_is_refused_and_not_read_as_raw_text(name: str, tmp_path: Path) -> None:
    """The datasets library would take every line of it for a document, braces and all."""
    path = save_rows(tmp_path, name)
    with pytest.raises(UserError, match=rf"data\.path is '.*{re.escape(name)}'") as caught:
        list(read_documents(DataSpec(source="huggingface", path=str(path))))
    assert caught.value.exit_code is ExitCode.DATA
    assert ".jsonl" in caught.value.remedy


@pytest.mark.parametrize("name", ["rows.json", "rows.JSON", "rows.csv", "rows.jsonl.gz"])
@pytest.mark.parametrize("whole_folder", [False, True])
def test_rows_and_columns_are_not_trained_on_as_plain_text(name: str, whole_folder: bool, tmp_path: Path) -> None:
    """Neither one such file nor a folder of them."""
    path = save_rows(tmp_path, name)
    (tmp_path / "about.txt").write_text("what is here")
    with pytest.raises(UserError, match=r"data\.path is '.*'text' would train on it") as caught:
        list(read_documents(text_spec(tmp_path if whole_folder else path)))
    assert caught.value.exit_code is ExitCode.DATA
    assert "huggingface" in caught.value.remedy


def test_a_folder_of_text_may_hold_a_table_or_two(tmp_path: Path) -> None:
    """A source tree has its package.json."""
    (tmp_path / "package.json").write_text("{}")
    (tmp_path / "code.py").write_text("pass\n" * 10)
    assert keys(text_spec(tmp_path)) == ["code.py", "package.json"]


@pytest.mark.parametrize("column", [[[1, 2], [3]], [1, 2], [1.5, None]])
def test_a_column_of_tokens_or_numbers_is_named(
    column: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It used to end as a defect."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    path = save_parquet(tmp_path, datasets.Dataset.from_dict({"input_ids": column}))
    spec = DataSpec(source="huggingface", path=str(path), text_field="input_ids")
    with pytest.raises(UserError, match=r"data\.text_field is 'input_ids', but that column .* not text") as caught:
        load_split(spec)
    assert caught.value.exit_code is ExitCode.DATA


def bad_spec(case: str, folder: Path) -> DataSpec:
    """A source that cannot be used."""
    if case == "missing":
        return text_spec(folder / "nowhere")
    if case == "empty folder":
        return text_spec(folder)
    if case == "blank file":
        (folder / "blank.txt").write_text(" \n\n")
        return text_spec(folder / "blank.txt")
    if case == "short file":
        (folder / "short.txt").write_text("too short to split")
        return text_spec(folder / "short.txt")
    if case == "broken json lines":
        (folder / "rows.jsonl").write_text('{"text": "fine"}\n{"text": \n')
        return text_spec(folder)
    if case == "endless brackets":
        (folder / "rows.jsonl").write_text('{"text": "fine"}\n' + "[" * 200_000)
        return text_spec(folder)
    if case == "no such column":
        (folder / "rows.jsonl").write_text('{"body": "fine"}\n[1]\n')
        return text_spec(folder)
    (folder / "train.jsonl").write_text("{broken")
    return DataSpec(source="huggingface", path=str(folder))


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("missing", r"data\.path is '.*nowhere', which does not exist"),
        ("empty folder", r"data\.path '.*' holds no text"),
        ("blank file", r"data\.path '.*blank\.txt' holds no text"),
        ("short file", r"single short document"),
        ("broken json lines", r"line 2 of 'rows\.jsonl' is not JSON"),
        ("endless brackets", r"line 2 of 'rows\.jsonl' is not JSON"),
        ("no such column", r"data\.text_field is 'text', but line 1 of 'rows\.jsonl'"),
        ("broken dataset", r"datasets library cannot load"),
    ],
)
def test_unusable_text_is_a_users_error(case: str, words: str, tmp_path: Path) -> None:
    """Each names the setting or the place, and what to do."""
    with pytest.raises(UserError, match=words) as caught:
        load_split(bad_spec(case, tmp_path))
    assert caught.value.exit_code is ExitCode.DATA
    assert caught.value.remedy
