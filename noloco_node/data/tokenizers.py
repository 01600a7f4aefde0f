"""Text to token ids and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from noloco_node.config.data_spec import NO_TOKENIZER
from noloco_node.errors import ExitCode, UserError

BYTES = "bytes"
"""The name of the built-in tokenizer: a token is a byte of the UTF-8 text."""

Tokens = NDArray[np.integer[Any]]
"""A one-dimensional array of token ids."""


class Tokenizer(Protocol):
    """What the data room needs of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """All ids are below this."""
        ...

    @property
    def separator(self) -> Tokens:
        """The tokens put after each document; may be empty."""
        ...

    def encode(self, text: str) -> Tokens:
        """Token ids of the text, without special tokens around it."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids; what is no valid text shows as the replacement character."""
        ...


class ByteTokenizer:
    """Ids are the bytes of the UTF-8 text, 0 to 255. Documents are separated by a newline."""

    vocab_size = 256

    @property
    def separator(self) -> Tokens:
        """A newline."""
        return self.encode("\n")

    def encode(self, text: str) -> Tokens:
        """The UTF-8 bytes; a lone surrogate, which UTF-8 cannot hold, becomes a question mark."""
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the bytes; an id that is none, as a model of a larger vocabulary may draw, shows as the
        replacement character."""
        return bytes(min(each, 255) for each in ids).decode("utf-8", errors="replace")  # no text has a byte 255


class NoTokenizer:
    """Stands for a tokenizer where the text is token ids: all below a bound, and nothing put between documents."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    @property
    def separator(self) -> Tokens:
        """None is known."""
        return np.zeros(0, dtype=np.int64)

    def encode(self, text: str) -> Tokens:
        """UserError (DATA) for any text."""
        raise no_tokenizer(f"there is no tokenizer for text such as {text[:20]!r}")

    def decode(self, ids: Sequence[int]) -> str:
        """The ids as numbers: nobody here knows what they stand for."""
        return " ".join(map(str, ids))


class PretrainedTokenizer:
    """A tokenizer of transformers, from the hub or a folder."""

    def __init__(self, name: str) -> None:
        self.backend = _load_backend(name)

    @property
    def vocab_size(self) -> int:
        """Ids, added tokens included."""
        return len(self.backend)

    @property
    def separator(self) -> Tokens:
        """The end-of-text token, or a newline where there is none."""
        end: int | None = self.backend.eos_token_id
        return self.encode("\n") if end is None else np.array([end], dtype=np.int64)

    def encode(self, text: str) -> Tokens:
        """Ids without special tokens around them; a lone surrogate becomes a question mark."""
        ids: list[int] = self.backend.encode(encodable(text), add_special_tokens=False, verbose=False)
        return np.asarray(ids, dtype=np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids, special tokens included."""
        return cast(str, self.backend.decode(list(ids)))


def encodable(text: str) -> str:
    """The text with question marks in place of lone surrogates, which UTF-8 cannot hold and JSON can."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", errors="replace").decode()
    return text


def load_tokenizer(name: str) -> Tokenizer:
    """`bytes`, or what `AutoTokenizer.from_pretrained` takes. Raises UserError (DATA) when there is none such, and for
    `none`."""
    if name == NO_TOKENIZER:
        raise no_tokenizer("there is nothing that turns text into tokens, or back")
    return ByteTokenizer() if name == BYTES else PretrainedTokenizer(name)


def no_tokenizer(what: str) -> UserError:
    """Text meets a run whose text is token ids."""
    return UserError(
        ExitCode.DATA,
        f"run.data.tokenizer is 'none', and {what}",
        "name a column of token ids with run.data.text_field, or the tokenizer of the text",
    )


def _load_backend(name: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return cast(Any, AutoTokenizer.from_pretrained(name, trust_remote_code=False))  # pyright: ignore
    except (OSError, ValueError, ImportError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            ExitCode.DATA,
            f"run.data.tokenizer is '{name}', which transformers cannot load: {reason}",
            "set it to 'bytes', to a local tokenizer folder, or to a tokenizer of the Hugging Face hub",
        ) from error
