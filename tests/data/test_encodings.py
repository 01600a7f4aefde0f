"""Texts as editors save them."""

from __future__ import annotations

from pathlib import Path

import pytest

from noloco_node.data.sources import read_documents
from tests.data.test_sources import text_spec


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8"])
def test_a_text_that_an_editor_saved_as_unicode_is_read(encoding: str, tmp_path: Path) -> None:
    """UTF-16 is no binary file: what it begins with says so."""
    for name, text in (("book.txt", "Grüße, 世界\n" * 40), ("rows.jsonl", '{"text": "eins\u2028zwei"}\n' * 9)):
        (tmp_path / name).write_text(text, encoding=encoding)
    found = list(read_documents(text_spec(tmp_path)))
    assert found[0].text == "Grüße, 世界\n" * 40
    assert [document.text for document in found[1:]] == ["eins\u2028zwei"] * 9
