"""Tokens that others made: padding dropped, ids within the vocabulary, documents joined as those of text are."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from noloco_node.config.data_spec import DataSpec
from noloco_node.data.encoding import check_made_tokens
from noloco_node.data.sources import check_source, read_documents
from noloco_node.data.tokenizers import ByteTokenizer
from noloco_node.data.windows import Windows, load_windows
from noloco_node.errors import ExitCode, UserError
from tests.data.made_files import write_table
from tests.data.splits import held_out_count
from tests.data.test_sources import text_spec
from tests.data.test_windows import save_word_tokenizer

STORIES = [f"tale {number}: " + "and so on, " * (5 + number % 7) for number in range(60)]


def tokens_spec(path: Path, **changes: object) -> DataSpec:
    """A spec that reads token ids."""
    return text_spec(path, text_field="input_ids", holdout=0.2, **changes)


def padded(rows: list[list[int]], width: int) -> dict[str, object]:
    """Columns as the published code's: every second row padded on the left, the others on the right."""
    ids, masks = [], []
    for number, row in enumerate(rows):
        padding, ones = [0] * (width - len(row)), [1] * len(row)
        ids.append(padding + row if number % 2 else row + padding)
        masks.append(padding + ones if number % 2 else ones + padding)
    return {"input_ids": pa.array(ids, pa.list_(pa.int64())), "attention_mask": pa.array(masks, pa.list_(pa.int8()))}


def laid_out(windows: Windows) -> tuple[list[int], list[int]]:
    """All tokens to train on, and all that are held out."""
    parts: list[list[int]] = []
    for count, get in ((windows.train_count, windows.train), (held_out_count(windows), windows.validation)):
        inputs, labels = get(range(count))
        parts.append(torch.cat([inputs, labels[:, -1:]], dim=1).flatten().tolist())
    return parts[0], parts[1]


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow", "stream.arrow", "rows.jsonl"])
def test_token_ids_give_the_windows_that_their_text_gives(name: str, tmp_path: Path) -> None:
    """The same documents lie there as text and as padded bytes of that text: not one token differs."""
    rows = [list(story.encode()) for story in STORIES]
    columns = padded(rows, max(map(len, rows)) + 3)
    if name.endswith(".jsonl"):
        listed = (
            dict(zip(columns, row, strict=True)) for row in zip(*(c.to_pylist() for c in columns.values()), strict=True)
        )
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in listed))
        (tmp_path / "text").mkdir()
        (tmp_path / "text" / name).write_text("".join(json.dumps({"text": story}) + "\n" for story in STORIES))
    else:
        write_table(tmp_path / name, columns)
        (tmp_path / "text").mkdir()
        write_table(tmp_path / "text" / name, {"text": STORIES})
    spec = tokens_spec(tmp_path / name)
    check_source(spec)
    made = load_windows(spec, 256)
    of_text = load_windows(text_spec(tmp_path / "text" / name, holdout=0.2), 256)
    assert laid_out(made) == laid_out(of_text)


def test_documents_are_parted_by_the_tokenizers_end_and_not_twice(tmp_path: Path) -> None:
    """Ids that end with it already keep the one they have."""
    tokenizer = save_word_tokenizer(tmp_path / "words", "</s>")
    rows = [[2, 3, 4] + ([1] if number % 2 else []) for number in range(200)]
    write_table(tmp_path / "rows.parquet", {"input_ids": pa.array(rows, pa.list_(pa.int32()))})
    training, held = laid_out(load_windows(tokens_spec(tmp_path / "rows.parquet", tokenizer=tokenizer), 8))
    for part in (training, held):
        assert part == ([2, 3, 4, 1] * len(part))[: len(part)]


def test_few_long_rows_are_cut_so_that_some_are_held_out(tmp_path: Path) -> None:
    """As one long text is; no token is lost."""
    ids = np.arange(5000) % 251
    pq.write_table(pa.table({"input_ids": [ids[:4000].tolist(), ids[4000:].tolist()]}), tmp_path / "rows.parquet")
    windows = load_windows(tokens_spec(tmp_path / "rows.parquet"), 256)
    assert windows.train_count > 100
    assert held_out_count(windows) > 20
    assert (windows.train_count + held_out_count(windows) + 2) * 17 > 5000


@pytest.mark.parametrize("with_statistics", [True, False])
def test_ids_beyond_the_vocabulary_are_refused_naming_id_and_tokenizer(with_statistics: bool, tmp_path: Path) -> None:
    """Before anything starts where the file says its largest id, else as it is read."""
    rows = [[1, 2, 3]] * 50 + [[4, 700]] * 20
    place = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"input_ids": rows}), place, write_statistics=with_statistics)
    words = r"token id 700 in '.*rows\.parquet.*', outside the 256 tokens of run\.data\.tokenizer 'bytes'"
    if with_statistics:
        with pytest.raises(UserError, match=words) as caught:
            check_made_tokens(tokens_spec(place), ByteTokenizer())
        assert caught.value.exit_code is ExitCode.DATA
    with pytest.raises(UserError, match=words) as caught:
        load_windows(tokens_spec(place), 1000)
    assert "the tokenizer that made them" in caught.value.remedy


BAD_COLUMNS = [
    ({"input_ids": [1, 2]}, "holds whole numbers, not text or token ids"),
    ({"input_ids": [1.5, None]}, "holds numbers, not text or token ids"),
    ({"input_ids": [[1.5], [2.0]]}, r"holds lists such as \[1\.5\]"),
    ({"input_ids": [[1, None]]}, r"holds lists such as \[1, None\]"),
    ({"input_ids": [["a"]]}, "holds lists such as"),
    ({"input_ids": [[1, 2]], "attention_mask": [[1]]}, "'input_ids' has 2 tokens, and 'attention_mask' is no mask"),
    ({"input_ids": [[1, 2]], "attention_mask": ["11"]}, "is no mask of as many"),
]


@pytest.mark.parametrize(("columns", "words"), BAD_COLUMNS)
@pytest.mark.parametrize("name", ["rows.parquet", "stream.arrow"])
def test_columns_that_are_neither_text_nor_tokens_are_refused_before_anything_starts(
    name: str, columns: dict[str, object], words: str, tmp_path: Path
) -> None:
    """With what they hold."""
    write_table(tmp_path / name, columns)
    with pytest.raises(UserError, match=words) as caught:
        check_source(tokens_spec(tmp_path / name))
    assert caught.value.exit_code is ExitCode.DATA


def test_a_row_without_tokens_is_no_document(tmp_path: Path) -> None:
    """Empty, absent, or all padding."""
    columns = {"input_ids": [[1, 2], None, [], [3]], "attention_mask": [[0, 0], None, [], [1]]}
    write_table(tmp_path / "rows.parquet", columns)
    found = list(read_documents(tokens_spec(tmp_path / "rows.parquet")))
    assert [document.is_blank for document in found] == [True, True, True, False]
