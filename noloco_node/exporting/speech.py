"""What is asked of a model that continues a text, and what comes, shown as it comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

HALF_A_CHARACTER = "\ufffd"
"""A tokenizer shows this for bytes that make no character yet."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What is asked of a model."""

    prompt: str
    tokens: int
    """So many at most."""
    temperature: float
    """0: always the likeliest."""
    seed: int


@dataclass(frozen=True, slots=True)
class Spoken:
    """What came of it."""

    tokens: int
    full: bool
    """It ends since the model sees no longer text."""
    seconds: float
    """From the first question to the last answer."""
    replaced: int = 0
    """Peers that were asked for their part and did not give it."""


class Decoder(Protocol):
    """What is needed of a tokenizer, be it of this package or of transformers."""

    def decode(self, ids: Sequence[int], /) -> str:
        """The text of the ids."""
        ...


class Shown:
    """Text that grows by tokens, given on in whole characters."""

    def __init__(self, tokenizer: Decoder, ids: Sequence[int], write: Callable[[str], None]) -> None:
        self._tokenizer = tokenizer
        self._write = write
        self.ids = list(ids)
        self._came = len(tokenizer.decode(self.ids))

    def add(self, token: int) -> None:
        """One more token."""
        self.ids.append(token)
        text = self._tokenizer.decode(self.ids)
        if not text.endswith(HALF_A_CHARACTER):
            self._give(text)

    def end(self) -> None:
        """Nothing more comes: also what is no whole character."""
        self._give(self._tokenizer.decode(self.ids))

    def _give(self, text: str) -> None:
        if len(text) > self._came:
            self._write(text[self._came :])
            self._came = len(text)
