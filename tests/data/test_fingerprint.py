"""The fingerprint of a text: the same wherever it is kept, another for another text."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from noloco_node.config.data_spec import DataSpec
from noloco_node.config.load import load_config
from noloco_node.data.documents import Document, Fingerprint
from noloco_node.data.sources import fingerprint_of_documents, read_documents
from noloco_node.errors import ExitCode, UserError
from tests.data.made_files import write_table, write_texts
from tests.data.splits import load_split
from tests.data.test_sources import text_spec

MICRO = Path(__file__).parent.parent / "configs" / "micro.yaml"
TEXTS = ["one", "two", "", "three " * 90]


def test_it_does_not_depend_on_where_the_text_is_kept_nor_on_how_it_is_named(tmp_path: Path) -> None:
    """A copy of a folder; a single file under another name; the same rows compressed."""
    for folder in ("here", "there"):
        (tmp_path / folder / "deep").mkdir(parents=True)
        for name in ("a.txt", "deep/b.txt"):
            (tmp_path / folder / name).write_text(f"tale {name}")
    here, there = (fingerprint_of_documents(text_spec(tmp_path / folder)) for folder in ("here", "there"))
    assert here == there
    for name in ("rows.jsonl", "rows.jsonl.zst", "rows.json.gz"):
        write_texts(tmp_path / name, TEXTS)
    assert len({fingerprint_of_documents(text_spec(path)) for path in tmp_path.glob("rows.*")}) == 1
    shutil.copy(tmp_path / "here" / "a.txt", tmp_path / "my copy.txt")
    (one, other) = (fingerprint_of_documents(text_spec(tmp_path / name)) for name in ("my copy.txt", "here/a.txt"))
    assert one == other != here


def test_it_changes_with_every_change_of_the_text(tmp_path: Path) -> None:
    """A letter, an order, a name that decides what is held out, ids in place of text, the mask."""
    base = [Document("a", "one"), Document("b", "two")]
    others = [
        [Document("a", "one"), Document("b", "twO")],
        [Document("b", "two"), Document("a", "one")],
        [Document("a", "one"), Document("c", "two")],
        [Document("a", "one")],
        [Document("ao", "ne"), Document("b", "two")],
        [Document("a", "onebtwo")],
    ]

    def of(documents: list[Document]) -> str:
        found = Fingerprint()
        for document in documents:
            found.add(document)
        return found.text

    found = [of(documents) for documents in (base, *others)]
    assert len(set(found)) == len(found)
    for number, mask in enumerate(([1, 1], [1, 0])):
        write_table(tmp_path / f"{number}.parquet", {"input_ids": [[7, 8]], "attention_mask": pa.array([mask])})
    made = [
        fingerprint_of_documents(text_spec(path, text_field="input_ids")) for path in sorted(tmp_path.glob("*.parquet"))
    ]
    assert len(set(made)) == 2


def test_who_holds_another_text_is_told_before_it_trains(tmp_path: Path) -> None:
    """What is read as the node starts is held against the run's."""
    (tmp_path / "a.txt").write_text("tale " * 400)
    found = fingerprint_of_documents(text_spec(tmp_path))
    named = text_spec(tmp_path, fingerprint=found)
    assert load_split(named) == load_split(text_spec(tmp_path))
    (tmp_path / "a.txt").write_text("talE " * 400)
    for read in (load_split, fingerprint_of_documents):
        with pytest.raises(UserError, match=f"is not the run's: its fingerprint is text-.*{found}") as caught:
            read(named)
        assert caught.value.exit_code is ExitCode.DATA


def test_the_run_id_holds_the_fingerprint_and_not_the_place() -> None:
    """Wherever each volunteer keeps it."""
    settings = ["run.data.source=text", "run.data.fingerprint=text-" + "0" * 32]
    here, there = (load_config(MICRO, [*settings, f"run.data.path={path}"]).run for path in ("/a", "/b"))
    other = load_config(MICRO, ["run.data.source=text", "run.data.path=/a"]).run
    assert here.run_id == there.run_id != other.run_id


def test_the_standard_library_has_one_too() -> None:
    """Two versions of Python do not have the same; blank documents do not count."""
    found = Fingerprint()
    for document in read_documents(DataSpec()):
        if document.text.strip():
            found.add(document)
    assert fingerprint_of_documents(DataSpec()) == found.text
