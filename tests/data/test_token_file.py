"""Tokens on a disk: what was appended comes back, memory does not grow with the text, a full disk is said."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from noloco_node.config.data_spec import DataSpec
from noloco_node.data import token_file
from noloco_node.data.sources import divided, read_documents
from noloco_node.data.token_file import TokenFile
from noloco_node.data.windows import load_windows
from noloco_node.errors import ExitCode, UserError
from tests.data.splits import split_documents
from tests.data.test_sources import text_spec


@pytest.mark.parametrize("vocab_size", [256, 257, 65_536, 65_537])
@pytest.mark.parametrize("buffered", [1, 100, 1 << 20])
def test_what_is_appended_comes_back_window_by_window(
    vocab_size: int, buffered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the narrowest type that holds every id, whenever it is written."""
    monkeypatch.setattr(token_file, "PIECE_LENGTH", buffered)
    rng = np.random.default_rng(0)
    parts = [rng.integers(0, vocab_size, size) for size in (0, 1, 30, 7, 100)]
    parts[1][:] = vocab_size - 1
    tokens = TokenFile.nameless(vocab_size)
    for part in parts:
        tokens.append(part)
    tokens.flush()
    whole = np.concatenate(parts)
    assert tokens.count == len(whole)
    rows = tokens.windows([3, 0, 3, 12], 10)
    assert rows.dtype == np.int64
    assert np.array_equal(rows, whole[:130].reshape(13, 10)[[3, 0, 3, 12]])


def test_a_text_that_is_cut_while_it_is_read_is_said_with_its_folder(tmp_path: Path) -> None:
    """A user that writes to a prepared text under a running node finds out what it was."""
    written = TokenFile.at(tmp_path / "training.tokens", 256, write=True)
    written.append(np.arange(100) % 256)
    written.flush()
    read = TokenFile.at(tmp_path / "training.tokens", 256)
    os.truncate(tmp_path / "training.tokens", 55)
    assert read.windows([4], 10)[0][-1] == 49
    for reading in (lambda: read.windows([4, 5], 10), lambda: read.windows([9], 10)):
        with pytest.raises(UserError, match="become shorter than the 100 tokens") as refused:
            reading()
        assert refused.value.exit_code is ExitCode.DATA
        assert str(tmp_path) in refused.value.message


def test_the_file_has_no_name_and_is_closed_when_nobody_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However a process ends, it leaves nothing."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    tokens = TokenFile.nameless(256)
    fd = tokens._fd
    assert list(tmp_path.iterdir()) == []
    assert os.fstat(fd)
    del tokens
    with pytest.raises(OSError):
        os.fstat(fd)


def test_a_full_disk_is_said_with_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's own word for it."""
    tokens = TokenFile.nameless(256)
    full = os.open("/dev/full", os.O_RDWR)
    os.dup2(full, tokens._fd)
    os.close(full)
    tokens.append(np.zeros(9, dtype=np.int64))
    with pytest.raises(UserError, match=r"cannot be written to '.*': No space left on device") as caught:
        tokens.flush()
    assert caught.value.exit_code is ExitCode.DATA
    assert "TMPDIR" in caught.value.remedy


@pytest.mark.parametrize("spec", [DataSpec(), DataSpec(holdout=0.02), DataSpec(holdout=0.49)])
def test_a_text_that_is_divided_as_it_is_read_is_divided_as_if_it_were_in_memory(spec: DataSpec) -> None:
    """What is held out looks at keys, and not at how much has been read."""
    documents = [document for document in read_documents(spec) if not document.is_blank]
    expected = split_documents(documents, spec.holdout)
    found = list(divided(spec))
    assert [document for document, held_out in found if held_out] == list(expected.validation)
    assert [document for document, held_out in found if not held_out] == list(expected.training)


def test_memory_is_flat_over_a_hundred_times_as_much_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """6 MB of rows after 60 kB: what is allocated at most while they are packed and read does not grow."""
    monkeypatch.setattr(token_file, "PIECE_LENGTH", 1 << 14)
    row = json.dumps({"text": "words and so on, " * 350}) + "\n"
    peaks: list[int] = []
    for rows in (10, 1000):
        (tmp_path / "rows.jsonl").write_text(row * rows)
        tracemalloc.start()
        windows = load_windows(text_spec(tmp_path / "rows.jsonl", holdout=0.25), 256)
        for first in range(0, windows.train_count, 4096):
            windows.train(range(first, min(first + 4096, windows.train_count)))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert windows.train_count * 17 > 4_000_000
    assert peaks[1] < peaks[0] + 2_000_000
