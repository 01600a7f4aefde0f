"""Texts as editors save them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from noloco_node.config.data_spec import DataSpec
from noloco_node.data.sources import check_source, read_documents
from noloco_node.errors import UserError
from tests.data.test_formats import refused
from tests.data.test_sources import text_spec


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8", "utf-32"])
def test_a_text_that_an_editor_saved_as_unicode_is_read(encoding: str, tmp_path: Path) -> None:
    """UTF-16 is no binary file: what it begins with says so."""
    texts = ("book", "book.txt", "Grüße, 世界\n" * 40), ("rows", "rows.jsonl", '{"text": "eins\u2028zwei"}\n' * 9)
    for folder, name, text in texts:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text(text, encoding=encoding)
    assert [document.text for document in read_documents(text_spec(tmp_path / "book"))] == ["Grüße, 世界\n" * 40]
    assert [document.text for document in read_documents(text_spec(tmp_path / "rows"))] == ["eins\u2028zwei"] * 9


WRITTEN = {
    "gb18030": "他说这个国家的人在上海来了就不要出去，我们大家都会到那里去看一看。\n",
    "big5": "他說這個國家的人在上海來了就不要出去，我們大家都會到那裡去看一看。\n",
    "shift_jis": "吾輩は猫である。名前はまだ無い。どこで生れたか見当がつかぬ。\n",
    "euc_jp": "吾輩は猫である。名前はまだ無い。どこで生れたか見当がつかぬ。\n",
    "euc_kr": "나라의 말이 중국과 달라 문자와 서로 통하지 아니하므로\n",
    "cp1251": "Все счастливые семьи похожи друг на друга, каждая несчастлива по-своему.\n",
    "koi8-r": "Все счастливые семьи похожи друг на друга, каждая несчастлива по-своему.\n",
    "cp1252": "Die schönen Bäume grüßen über die Straße und wärmen sich.\n",
    "utf-16-le": "Grüße, 世界\n",
    "utf-16-be": "plain words alone\n",
    "utf-32-le": "Grüße, 世界\n",
}


@pytest.mark.parametrize("encoding", WRITTEN)
@pytest.mark.parametrize("name", ["book.txt", "rows.jsonl", "rows.csv.gz"])
def test_another_encoding_is_refused_with_the_setting_and_then_read(encoding: str, name: str, tmp_path: Path) -> None:
    """It was trained on as U+FFFD without a word."""
    lines = [WRITTEN[encoding].strip()] * 60
    text = "".join(f"{line}\n" for line in lines)
    if name == "rows.jsonl":
        text = "".join(json.dumps({"text": line}, ensure_ascii=False) + "\n" for line in lines)
    elif name == "rows.csv.gz":
        text = "number,text\n" + "".join(f'1,"{line}"\n' for line in lines)
    content = text.encode(encoding)
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    for path in (tmp_path / name, tmp_path):
        error = refused(text_spec(path))
        assert "run.data.encoding" in error.message + error.remedy
    spec = text_spec(tmp_path / name, encoding=encoding.upper())
    check_source(spec)
    assert [document.text for document in read_documents(spec)] == ([text] if name == "book.txt" else lines)


def test_a_mark_before_a_quoted_name_is_no_part_of_it(tmp_path: Path) -> None:
    """Databases and pandas write such tables."""
    (tmp_path / "rows.csv").write_text('"text"\n"words"\n', encoding="utf-8-sig")
    assert [document.text for document in read_documents(text_spec(tmp_path / "rows.csv"))] == ["words"]


@pytest.mark.parametrize("name", ["book.txt", "rows.jsonl", "rows.csv"])
def test_what_cannot_be_read_far_inside_is_found(name: str, tmp_path: Path) -> None:
    """Behind what is looked at before anything starts."""
    row = {"book.txt": "%s\n", "rows.jsonl": '{"text": "%s"}\n', "rows.csv": '"%s"\n'}[name].encode()
    begin = b"text\n" if name == "rows.csv" else b""
    for count, bad in ((9000, False), (9000, True)):
        words = b"words and so on" if not bad else "schöne Bäume".encode("latin-1")
        (tmp_path / name).write_bytes(begin + (row % b"words and so on") * 9000 + (row % words) * (count // 9))
        spec = text_spec(tmp_path / name)
        check_source(spec)
        if not bad:
            list(read_documents(spec))
            continue
        with pytest.raises(UserError, match=r"is not utf-8: 2,000 of [\d,]+ characters cannot be read"):
            list(read_documents(spec))


def test_a_thousandth_and_what_is_written_so_is_allowed(tmp_path: Path) -> None:
    """One name of a person in Latin-1 in a folder of programs; a text about the replacement character."""
    (tmp_path / "name.py").write_bytes(b"# by J\xf6rg\n")
    (tmp_path / "long.py").write_bytes(b"words and so on\n" * 2000 + b"\xf6" * 5)
    (tmp_path / "about.md").write_text("\ufffd" * 90, encoding="utf-8")
    check_source(text_spec(tmp_path))
    assert sum(document.text.count("\ufffd") for document in read_documents(text_spec(tmp_path))) == 96


def test_the_encoding_is_part_of_the_run_and_of_files_here() -> None:
    """However it is spelt; what is no encoding of files is refused."""
    assert text_spec("a", encoding="GB18030") == text_spec("a", encoding="gb18030")
    assert DataSpec(mixture=({"source": "text", "path": "a", "encoding": "big5"},)).parts[0].encoding == "big5"  # type: ignore[arg-type]
    for wrong in ("klingon", "rot13", "unicode_escape", "base64"):
        with pytest.raises(ValueError, match="no encoding of texts"):
            text_spec("a", encoding=wrong)
    with pytest.raises(ValueError, match="only files of this machine"):
        DataSpec(encoding="big5")
