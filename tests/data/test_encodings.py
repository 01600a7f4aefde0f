"""Texts as editors save them."""

from __future__ import annotations

from pathlib import Path

import pytest

from noloco_node.data.sources import read_documents
from tests.data.test_sources import text_spec


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8"])
def test_a_text_that_an_editor_saved_as_unicode_is_read(encoding: str, tmp_path: Path) -> None:
    """UTF-16 is no binary file: what it begins with says so."""
    texts = ("book", "book.txt", "Grüße, 世界\n" * 40), ("rows", "rows.jsonl", '{"text": "eins\u2028zwei"}\n' * 9)
    for folder, name, text in texts:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text(text, encoding=encoding)
    assert [document.text for document in read_documents(text_spec(tmp_path / "book"))] == ["Grüße, 世界\n" * 40]
    assert [document.text for document in read_documents(text_spec(tmp_path / "rows"))] == ["eins\u2028zwei"] * 9
