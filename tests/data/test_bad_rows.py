"""Damaged files: one screen with what is wrong and what to do, as early as it can be seen."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from noloco_node.config.data_spec import DataSpec
from noloco_node.data.sources import check_source
from noloco_node.errors import ExitCode, UserError
from tests.data.made_files import TABLES, lines, write_table, write_texts
from tests.data.splits import load_split
from tests.data.test_sources import text_spec

MANY = [f"{number} {random.Random(number).randbytes(30).hex()}" for number in range(4000)]


def complaint(spec: DataSpec, *, early: bool) -> str:
    """What a person reads."""
    read = check_source if early else load_split
    with pytest.raises(UserError) as caught:
        read(spec)
    assert caught.value.exit_code is ExitCode.DATA
    assert caught.value.remedy
    assert len(caught.value.message) < 600
    return caught.value.message


@pytest.mark.parametrize("name", TABLES)
def test_a_file_without_the_column_is_refused_with_the_columns_it_has(name: str, tmp_path: Path) -> None:
    """Whatever its format, before anything starts; as one shard of several, too."""
    write_texts(tmp_path / name, ["a", "b"])
    for early in (True, False):
        message = complaint(text_spec(tmp_path, text_field="body"), early=early)
        assert "run.data.text_field is 'body'" in message
        assert name in message
        assert "text" in message.split("columns", 1)[1]


@pytest.mark.parametrize("name", ["rows.json.gz", "rows.jsonl.zst", "rows.parquet", "rows.arrow", "stream.arrow"])
@pytest.mark.parametrize("share", [0.5, 0.98])
def test_a_file_that_breaks_off_is_said_to(name: str, share: float, tmp_path: Path) -> None:
    """However much of it is there; a file with a table of contents at its end, before anything starts."""
    write_texts(tmp_path / name, MANY)
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[: int(share * len(whole))])
    spec = text_spec(tmp_path / name)
    message = complaint(spec, early=name in ("rows.parquet", "rows.arrow"))
    assert "is cut off or damaged" in message
    assert name in message


def test_a_short_file_that_breaks_off_is_found_before_anything_starts(tmp_path: Path) -> None:
    """It ends within what is looked at to tell its format."""
    (tmp_path / "rows.json.gz").write_bytes(gzip.compress(lines(["some text"] * 9))[:-9])
    assert "is cut off or damaged" in complaint(text_spec(tmp_path / "*.gz"), early=True)


def write_empty(path: Path) -> None:
    """A file of that format without a row."""
    if path.suffix in (".parquet", ".arrow"):
        write_table(path, {"text": pa.array([], pa.string())})
    elif path.name == "rows.csv":
        path.write_text("number,text\n")
    else:
        write_texts(path, [])


@pytest.mark.parametrize("name", TABLES)
def test_an_empty_shard_is_named_before_anything_starts(name: str, tmp_path: Path) -> None:
    """Without rows, and without bytes; the other shards are as they should be."""
    write_texts(tmp_path / f"a-{name}", ["a", "b"])
    empty = tmp_path / f"b-{name}"
    for write in (write_empty, Path.touch):
        empty.unlink(missing_ok=True)
        write(empty)
        message = complaint(text_spec(tmp_path / "*"), early=True)
        assert empty.name in message
        assert "is empty: it has no rows" in message or "but begins with" in message


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("rows.csv", 'text\n"no end\n', "cut off or damaged"),
        ("rows.csv", "number,text\n1,a,b\n", "line 2 has 3 columns, the first 2"),
        ("rows.json", '[{"text": "a"}, {"text": ', "row 2 of 'rows.json' is not JSON"),
        ("rows.json", '[{"text": "a"}', "row 1 of 'rows.json' is not JSON: the list has no end"),
        ("rows.json", '[{"text": "a"}, 7]', "row 2 of 'rows.json' has no columns: it is 7"),
        ("rows.jsonl", '{"text": "a"}\n{"text": 7}\n', "line 2 of 'rows.jsonl' holds whole numbers"),
        ("rows.json", "{\n}\n", "line 1 of 'rows.json' is not JSON"),
    ],
)
def test_rows_that_cannot_be_read_are_named(name: str, content: str, words: str, tmp_path: Path) -> None:
    """By line or row."""
    (tmp_path / name).write_text(content)
    assert words in complaint(text_spec(tmp_path / name), early=False)


def test_a_parquet_file_whose_pages_are_damaged_is_said_to_be(tmp_path: Path) -> None:
    """Its table of contents is whole."""
    place = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"text": MANY}), place, write_page_checksum=False, compression="gzip")
    content = bytearray(place.read_bytes())
    content[200:40_000] = bytes(39_800)
    place.write_bytes(content)
    assert "is cut off or damaged" in complaint(text_spec(place), early=False)


def test_a_row_as_long_as_a_book_is_one_row(tmp_path: Path) -> None:
    """Longer than what is looked at, and than a piece."""
    book = "word " * 400_000
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": book}) + "\n")
    write_texts(tmp_path / "rows.csv", [book])
    for name in ("rows.jsonl", "rows.csv"):
        check_source(text_spec(tmp_path / name))
        split = load_split(text_spec(tmp_path / name))
        assert sum(len(piece.text) for piece in (*split.training, *split.validation)) == len(book)
