"""The package's docstrings and comments are plain English: short sentences, each about something that it names.

The bounds are what was reached; they may fall and never rise. Text is found with patterns, which is ten times as fast
as parsing. A quoted text that is no docstring counts as well: a user reads it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "noloco_node"

COMMENT = re.compile(r"(?:^ *# .*\n)+", re.MULTILINE)
DOCSTRING = re.compile(r'"""(.*?)"""', re.DOTALL)
SENTENCE_END = re.compile(r"(?<=[.!?])[\"')]*\s+(?=[A-Z`\"'(])|\n\s*\n")
WORD = re.compile(r"[A-Za-z0-9`_][\w`'./-]*")

UNNAMED = re.compile(r"\b(who|whoever|whom|whomever)\b", re.IGNORECASE)
"""Words of a sentence about somebody whom it does not name."""
LEANS_ON_ITS_NEIGHBOUR = re.compile(r"(Of |The same\b|As above|And |Likewise|Also |Else\b|But |Nor )")
"""How a text begins that nobody understands without the one before it."""
LONGEST = 30
"""Words of a sentence that may pass; 25 are wanted."""

LONG_SENTENCES = 34
UNNAMED_SENTENCES = 17
LEANING_TEXTS = 14


def texts(source: str) -> Iterator[str]:
    """Docstrings, other long strings and blocks of comment lines."""
    for found in DOCSTRING.finditer(source):
        yield found[1]
    for found in COMMENT.finditer(source):
        yield "\n".join(line.strip().removeprefix("#").strip() for line in found[0].splitlines())


def sentences(text: str) -> list[str]:
    """The sentences of a text, each without line breaks."""
    return [" ".join(sentence.split()) for sentence in SENTENCE_END.split(text) if sentence.strip()]


@cache
def package() -> tuple[tuple[str, ...], ...]:
    """All texts of the package, as sentences."""
    files = sorted(PACKAGE.rglob("*.py"))
    return tuple(tuple(sentences(text)) for path in files for text in texts(path.read_text(encoding="utf-8")))


def within(bound: int, found: list[str], remedy: str) -> None:
    """Fail with some of the sentences, where there are more than the bound."""
    assert len(found) <= bound, f"{len(found)}, at most {bound}; {remedy}:\n" + "\n".join(found[:20])


def test_sentences_are_short() -> None:
    """Few sentences are longer than a reader holds at once."""
    found = [s for text in package() for s in text if s.count(" ") >= LONGEST and len(WORD.findall(s)) > LONGEST]
    within(LONG_SENTENCES, found, "make two of a long sentence")


def test_sentences_name_whom_they_are_about() -> None:
    """Few sentences speak of somebody whom the reader has to guess."""
    found = [s for text in package() for s in text if UNNAMED.search(s)]
    within(UNNAMED_SENTENCES, found, "name the peer, replica, node or user")


def test_each_text_stands_alone() -> None:
    """Few texts begin with words that point to the text before."""
    found = [text[0] for text in package() if text and LEANS_ON_ITS_NEIGHBOUR.match(text[0])]
    within(LEANING_TEXTS, found, "say in full what it is, and its unit")


def test_the_check_sees_what_it_is_for() -> None:
    """A text with each of the three faults is found out, and a plain one is not."""
    bad = 'X = 1\n"""Of these, for whoever asks."""\n'
    plain = 'X = 1\n"""A node waits so many seconds for its first answer."""\n'
    assert [bool(UNNAMED.search(t)) and bool(LEANS_ON_ITS_NEIGHBOUR.match(t)) for t in texts(bad + plain)] == [
        True,
        False,
    ]
    assert sentences("It waits. Then\nit asks.\n\nAnd ends.") == ["It waits.", "Then it asks.", "And ends."]
