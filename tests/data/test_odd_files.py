"""Files that are whole and were called damaged, or of which another part was read than meant."""

from __future__ import annotations

import gzip
import json
import logging
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from noloco_node.config.data_spec import DataSpec
from noloco_node.data.formats import open_unpacked
from noloco_node.data.hub import hub_documents, hub_shards
from noloco_node.data.loaders import MASK
from noloco_node.data.sources import read_documents
from noloco_node.data.tokenizer_training import LONGEST_TOKEN, train_tokenizer
from noloco_node.data.tokenizers import PretrainedTokenizer
from noloco_node.errors import UserError
from tests.data.made_files import lines, write_table
from tests.data.test_bad_rows import complaint
from tests.data.test_formats import texts
from tests.data.test_sources import text_spec

TEXTS = [f"tale {number}" for number in range(9)]
SKIPPED = b"\x5a\x2a\x4d\x18\x05\x00\x00\x00abcde"
LONG_WINDOW = bytes.fromhex("28b52ffd04a8") + bytes.fromhex("6400001000000200e9ff3773")
"""As `zstd --long=31` begins."""


@pytest.mark.parametrize("place", ["before", "between", "after"])
def test_an_archive_with_parts_to_be_skipped_is_whole(place: str, tmp_path: Path) -> None:
    """pzstd writes them, and the seekable form of zstd, and what pads gzip on a tape."""
    one, two = (pa.compress(lines(part), codec="zstd", asbytes=True) for part in (TEXTS[:4], TEXTS[4:]))
    parts = {"before": [SKIPPED, one, two], "between": [one, SKIPPED, two], "after": [one, two, SKIPPED]}
    (tmp_path / "rows.jsonl.zst").write_bytes(b"".join(parts[place]))
    assert texts(text_spec(tmp_path / "rows.jsonl.zst")) == TEXTS
    zeros = bytes(3 if place == "before" else 5000)
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(lines(TEXTS[:4])) + gzip.compress(lines(TEXTS[4:])) + zeros)
    assert texts(text_spec(tmp_path / "rows.jsonl.gz")) == TEXTS


@pytest.mark.parametrize("at", [30, -20, -6])
def test_a_damaged_gzip_is_said_to_be(at: int, tmp_path: Path) -> None:
    """Whatever library reads it, and in whatever words."""
    content = bytearray(gzip.compress(lines([f"{number} {number**7}" for number in range(4000)])))
    content[at] ^= 0x5A
    (tmp_path / "rows.jsonl.gz").write_bytes(content)
    assert "is cut off or damaged" in complaint(text_spec(tmp_path / "rows.jsonl.gz"), early=False)


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow", "stream.arrow"])
def test_rotten_strings_of_a_table_are_damage(name: str, tmp_path: Path) -> None:
    """Arrow checks neither UTF-8 nor where a string ends as it reads: a node died of it, some of a segmentation
    fault."""
    for ends in ((0, 4, 8), (0, 8, 4))[
        : 1 if name.endswith(".parquet") else 2
    ]:  # no writer of Parquet takes the second
        table = rotten_table(ends)
        if name.endswith(".parquet"):
            pq.write_table(table, tmp_path / name)
        else:
            write_table(tmp_path / name, table)
        assert "is cut off or damaged" in complaint(text_spec(tmp_path / name), early=False)


def rotten_table(ends: tuple[int, ...]) -> pa.Table:
    """Two strings that end there, the second of them no UTF-8."""
    content = pa.py_buffer(b"tale\xff\xfe\xfd\xfc")
    column = pa.StringArray.from_buffers(2, pa.array(ends, pa.int32()).buffers()[1], content)
    return pa.table({"text": column})


def test_a_dataset_that_rotted_in_the_cache_is_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node said that it had a defect, and not what to take away."""
    monkeypatch.setattr("noloco_node.data.hub.check_not_here", lambda _name: None)
    monkeypatch.setattr("noloco_node.data.hub._loaded", lambda _spec: datasets.Dataset(rotten_table((0, 4, 8))))
    with pytest.raises(UserError, match="in this machine's cache, cannot be read on") as refused:
        list(hub_documents(DataSpec(source="huggingface", path="owner/name")))
    assert "remove it from the cache" in refused.value.remedy


@pytest.mark.parametrize("content", [b"", b"text\nanother tale\n", bytes(500)])
def test_a_file_that_another_replaces_as_it_is_read_is_damage(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list of rows is opened a second time, and the node ended with an error that no reader of shards passes over."""
    place = tmp_path / "rows.json"
    place.write_text(json.dumps([{"text": text} for text in TEXTS]))
    opened = list[Path]()

    def replaced(path: Path, *more: Any) -> BinaryIO:
        opened.append(path)
        if len(opened) == 3:
            place.write_bytes(content)
        return open_unpacked(path, *more)

    monkeypatch.setattr("noloco_node.data.loaders.open_unpacked", replaced)
    with pytest.raises(UserError, match="is not JSON"):
        list(read_documents(text_spec(place)))


def test_a_window_that_is_too_large_is_named(tmp_path: Path) -> None:
    """Such an archive is not damaged, and to download it again would not help."""
    (tmp_path / "rows.jsonl.zst").write_bytes(LONG_WINDOW)
    with pytest.raises(UserError, match=r"a window above 128 MiB") as caught:
        list(read_documents(text_spec(tmp_path / "rows.jsonl.zst")))
    assert "zstd -d --long=31" in caught.value.remedy


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow", "stream.arrow", "rows.csv"])
def test_of_two_columns_of_one_name_none_is_taken(name: str, tmp_path: Path) -> None:
    """The last was, or another altogether."""
    for columns in (["text", "text", "other"], ["text", MASK, MASK]):
        if name.endswith(".csv"):
            (tmp_path / name).write_text("text,text,other\na,b,c\n")
        elif name.endswith(".parquet"):
            pq.write_table(pa.table([["a"], ["b"], ["c"]], names=columns), tmp_path / name)
        else:
            write_table(tmp_path / name, pa.table([["a"], ["b"], ["c"]], names=columns))  # type: ignore[arg-type]
        for early in (True, False):
            assert "has two columns '" in complaint(text_spec(tmp_path / name), early=early)


def test_a_row_without_the_column_costs_that_row_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In a streamed shard it cost all that came after; the first rows may be such."""
    rows = [{"text": text} for text in TEXTS]
    rows[0:0] = [{"about": "this file"}] * 2
    rows[5:5] = [{"url": "none"}]
    for name, content in (
        ("lines.jsonl", "".join(json.dumps(row) + "\n" for row in rows)),
        ("list.json", json.dumps(rows)),
    ):
        (tmp_path / name).write_text(content)
        caplog.clear()
        assert texts(text_spec(tmp_path / name)) == TEXTS
        assert f"'{name}': rows without the column 'text' are passed over: 3" in caplog.text
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("noloco_node.data.hub.check_not_here", lambda _name: None)
    streamed = datasets.IterableDataset.from_generator(lambda: iter(rows))
    monkeypatch.setattr("noloco_node.data.hub._loaded", lambda _spec: streamed)
    spec = DataSpec(source="huggingface", path="owner/name", streaming=True)
    (shard,) = hub_shards(spec)
    assert [document.text for document in shard() if not document.is_blank] == TEXTS
    (shard,) = hub_shards(spec.model_copy(update={"text_field": "body"}))
    with pytest.raises(UserError, match=r"text_field is 'body', but shard 0 of 'owner/name' has the columns about"):
        list(shard())


def test_damaged_bytes_of_a_hub_break_off_a_shard_and_not_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries of compression have errors of their own, and theirs ended the node. What is streamed is passed over."""

    def rows() -> Iterator[dict[str, str]]:
        yield {"text": TEXTS[0]}
        zlib.decompress(b"no stream")

    monkeypatch.setattr("noloco_node.data.hub.check_not_here", lambda _name: None)
    monkeypatch.setattr("noloco_node.data.hub._loaded", lambda _spec: SimpleNamespace(num_shards=1, shard=shard))

    def shard(**_: int) -> Iterator[dict[str, str]]:
        return rows()

    (read,) = hub_shards(DataSpec(source="huggingface", path="owner/name", streaming=True))
    with pytest.raises(UserError, match=r"shard 0 of 'owner/name' cannot be read on: Error -3 while decompressing"):
        list(read())


def test_a_column_that_no_row_has_is_refused_before_all_is_read(tmp_path: Path) -> None:
    """A wrong name in the configuration is no row that lacks its text."""
    (tmp_path / "rows.jsonl").write_bytes(lines(TEXTS * 100) + b"{ no json")
    assert "line 1 of 'rows.jsonl' has the columns text" in complaint(
        text_spec(tmp_path / "rows.jsonl", text_field="body"), early=True
    )


def test_a_row_as_long_as_a_library_is_cut_as_a_file_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One could take all memory of a machine. Nothing of it is lost, and lines stay whole where they can."""
    monkeypatch.setattr("noloco_node.data.loaders.LONGEST_TEXT", 1600)
    monkeypatch.setattr("noloco_node.data.loaders.PIECE_LENGTH", 100)
    long = "".join(f"line {number}\n" for number in range(200)) + "x" * 500
    (tmp_path / "rows.jsonl").write_bytes(lines(["short", long]))
    short, *pieces = read_documents(text_spec(tmp_path / "rows.jsonl"))
    assert short.text == "short"
    assert "".join(piece.text for piece in pieces) == long
    assert max(map(len, pieces)) <= 100
    assert all(piece.text.endswith("\n") for piece in pieces if "x" not in piece.text)
    assert len({piece.key for piece in pieces}) == len(pieces)
    streamed = datasets.IterableDataset.from_generator(lambda: iter([{"text": long}]))
    monkeypatch.setattr("noloco_node.data.hub.check_not_here", lambda _name: None)
    monkeypatch.setattr("noloco_node.data.hub._loaded", lambda _spec: streamed)
    (shard,) = hub_shards(DataSpec(source="huggingface", path="owner/name", streaming=True))
    assert [piece.text for piece in shard()] == [piece.text for piece in pieces]


def test_a_text_without_spaces_gives_no_token_as_long_as_itself(tmp_path: Path) -> None:
    """A line that is there often was one token of 30,000 bytes."""
    logging.getLogger("tokenizers").setLevel(logging.ERROR)
    (tmp_path / "rows.jsonl").write_bytes(lines(["".join(chr(97 + at * at % 23) for at in range(2000))] * 60))
    train_tokenizer(text_spec(tmp_path / "rows.jsonl"), tmp_path / "made", 2400, most_bytes=1 << 20)
    words = PretrainedTokenizer(str(tmp_path / "made")).backend.get_vocab()
    assert LONGEST_TOKEN // 2 < max(map(len, words)) <= LONGEST_TOKEN
