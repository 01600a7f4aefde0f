"""How the bytes of a text become characters: what its beginning says, and what is lost."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from noloco_node.data.documents import data_error
from noloco_node.errors import UserError

LOST = "\ufffd"
"""This character stands for what could not be read."""
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),  # begins as the mark of UTF-16 does
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
    (codecs.BOM_UTF8, "utf-8"),
)
_FEW = 3
"""The number of lost characters that end no run, however short the file: a name in a comment has as many."""
USUAL = "gb18030, big5, shift_jis, euc_kr, cp1251, cp1252 or utf-16"
"""Encodings of texts that are not UTF-8, for a person to try."""


def encoding_of(beginning: bytes, named: str | None) -> str:
    """What the mark at the beginning of a text says; else the encoding that is named; else UTF-8."""
    return next((name for mark, name in _MARKS if beginning.startswith(mark)), named or "utf-8")


def losses(chunks: Iterable[bytes], encoding: str) -> tuple[int, int]:
    """How many characters of so many cannot be read: those that are written as U+FFFD are none of them. Bytes at the
    end that are part of a character do not count."""
    shown, kept = (codecs.getincrementaldecoder(encoding)(errors) for errors in ("replace", "ignore"))
    lost = characters = 0
    for chunk in chunks:
        text = shown.decode(chunk)
        characters += len(text)
        if LOST in text or lost:
            lost += text.count(LOST)
        lost -= kept.decode(chunk).count(LOST)
    return lost, characters


def too_many(lost: int, characters: int) -> bool:
    """More than a thousandth."""
    return lost > _FEW and lost * 1000 > characters


def undecodable(path: object, lost: int, characters: int, encoding: str) -> UserError:
    """A text in another encoding than it is read as."""
    return data_error(
        f"run.data.path: '{path}' is not {encoding}: {lost:,} of {characters:,} characters cannot be read",
        f"set run.data.encoding to what it is (often {USUAL}), convert it to UTF-8 with iconv, or take it away",
    )
