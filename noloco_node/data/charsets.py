"""How the bytes of a text become characters: what its beginning says, what is lost, and which encoding would fit."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable
from unicodedata import category

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
"""So many lost characters end no run, however short the file: somebody's name in a comment."""
_OFTEN_SIMPLE = frozenset(
    "的一是不了在人有我他这个们中来上大为和国地到以说时要就出会可也你对生能而子那得于着下自之年过发后作里"
)
_OFTEN_COMPLEX = frozenset(
    "的一是不了在人有我他這個們中來上大為和國地到以說時要就出會可也你對生能而子那得於著下自之年過發後作裡"
)
_OFTEN_LATIN = frozenset("éèàçäöüßñáíóúâêîôûãõåøæÄÖÜÉ’‘“”–—«»°£€")


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


def undecodable(path: object, lost: int, characters: int, encoding: str, beginning: bytes) -> UserError:
    """A text in another encoding than it is read as."""
    fitting = fitting_encoding(beginning)
    remedy = (
        f"it can be read as {fitting}: set run.data.encoding to {fitting}, or convert it with iconv -f {fitting} "
        "-t UTF-8"
        if fitting not in (None, encoding)
        else "set run.data.encoding to what it is, convert it to UTF-8 with iconv, or take it away"
    )
    return data_error(
        f"run.data.path: '{path}' is not {encoding}: {lost:,} of {characters:,} characters cannot be read", remedy
    )


def fitting_encoding(content: bytes) -> str | None:
    """The encoding that gives the likeliest text, as Python and iconv name it; None where none does. A guess, for a
    person to judge."""
    if b"\0" in content:
        return _wide(content)
    scores = {name: _score(content, name, of_text) for name, of_text in _SCORES.items()}
    best = max(scores, key=scores.__getitem__)
    return best if scores[best] >= 0.4 else None


def _wide(content: bytes) -> str | None:
    """The encoding of two or four bytes a character: the places of the zeros tell which byte comes first."""
    zeros = [content[at::4].count(0) for at in range(4)]
    quarter, odd, even = len(content) // 4, zeros[1] + zeros[3], zeros[0] + zeros[2]
    if min(zeros[2:]) > 0.9 * quarter:
        name = "utf-32-le"
    elif min(zeros[:2]) > 0.9 * quarter:
        name = "utf-32-be"
    elif max(odd, even) > 3 * min(odd, even):
        name = "utf-16-le" if odd > even else "utf-16-be"
    else:
        return None
    text = codecs.getincrementaldecoder(name)("replace").decode(content)
    strange = sum(category(each) in ("Cc", "Cn", "Co", "Cs") and each not in "\t\r\n\f" for each in text)
    return name if text and 100 * (strange + text.count(LOST)) < len(text) else None


def _score(content: bytes, name: str, of_text: Callable[[list[str], float], float]) -> float:
    lost, characters = losses([content], name)
    if lost * 1000 > characters:
        return 0.0
    text = codecs.getincrementaldecoder(name)("ignore").decode(content)
    foreign = [each for each in text if each > "\x7f"]
    return of_text(foreign, len(foreign) / len(text)) if foreign else 0.0


def _share(characters: list[str], wanted: Callable[[str], bool]) -> float:
    return sum(map(wanted, characters)) / len(characters)


def _is_kana(character: str) -> bool:
    return "\u3041" <= character <= "\u30fa"


def _chinese(often: frozenset[str], name: str, first: int, last: int) -> Callable[[list[str], float], float]:
    """By the characters that are used most, and by where a table has its common ones."""

    def common(character: str) -> bool:
        return first <= character.encode(name, "replace")[0] <= last and len(character.encode(name, "replace")) == 2

    def score(characters: list[str], _share_of_all: float) -> float:
        if _share(characters, _is_kana) > 0.1:
            return 0.0
        return 0.5 * _share(characters, common) + 0.5 * min(1.0, 4 * _share(characters, often.__contains__))

    return score


def _japanese(characters: list[str], _share_of_all: float) -> float:
    return min(1.0, 2 * _share(characters, _is_kana))


def _korean(characters: list[str], _share_of_all: float) -> float:
    return 0.9 if _share(characters, lambda each: "\uac00" <= each <= "\ud7a3") > 0.97 else 0.0


def _cyrillic(characters: list[str], share_of_all: float) -> float:
    small = _share(characters, lambda each: "а" <= each <= "я" or each == "ё")
    return 0.95 * small if small > 0.6 and share_of_all > 0.3 else 0.0


def _latin(characters: list[str], share_of_all: float) -> float:
    return 0.5 if share_of_all < 0.3 and _share(characters, _OFTEN_LATIN.__contains__) > 0.6 else 0.0


_SCORES: dict[str, Callable[[list[str], float], float]] = {
    "gb18030": _chinese(_OFTEN_SIMPLE, "gb18030", 0xA1, 0xD7),
    "big5": _chinese(_OFTEN_COMPLEX, "big5", 0xA1, 0xC6),
    "shift_jis": _japanese,
    "euc_jp": _japanese,
    "euc_kr": _korean,
    "cp1251": _cyrillic,
    "koi8-r": _cyrillic,
    "cp866": _cyrillic,
    "cp1252": _latin,
}
