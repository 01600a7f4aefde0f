"""Text to token ids and back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from noloco_node.config.data_spec import BYTES, NO_TOKENIZER, REVISION, DataSpec
from noloco_node.config.tokenizer_files import check_tokenizer
from noloco_node.errors import ExitCode, UserError

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
    """A tokenizer of transformers, from the hub, where a `revision` of it may be meant, or a folder."""

    def __init__(self, name: str, revision: str | None = None) -> None:
        self.backend = _load_backend(name, revision)

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


def load_tokenizer(spec: DataSpec) -> Tokenizer:
    """The run's. Raises UserError (DATA) where there is none such, where it is not the one that the run means, and for
    `none`."""
    if spec.tokenizer == NO_TOKENIZER:
        raise no_tokenizer("there is nothing that turns text into tokens, or back")
    if spec.tokenizer == BYTES:
        return ByteTokenizer()
    check_tokenizer(spec)
    return PretrainedTokenizer(spec.tokenizer, spec.tokenizer_revision)


def tokenizer_words(spec: DataSpec) -> str | None:
    """What names the run's tokenizer, for a person; None for one that this package has itself, or none. Of one of the
    hub without a revision it is that which the hub's cache on this machine holds."""
    if spec.tokenizer in (BYTES, NO_TOKENIZER):
        return None
    if spec.own_tokenizer:
        return f"{spec.tokenizer_fingerprint} (in the run's id; where its folder lies is not)"
    if spec.tokenizer_revision is not None:
        return f"{spec.tokenizer}, {spec.tokenizer_fingerprint} (as the run has it)"
    found = _revision_here(spec.tokenizer)
    if found is None:
        return f"{spec.tokenizer}, in whatever revision the hub has"
    return f"{spec.tokenizer}, {found} (set run.data.tokenizer_fingerprint to it, and every node loads that)"


def _revision_here(name: str) -> str | None:
    from huggingface_hub import try_to_load_from_cache  # pyright: ignore[reportUnknownVariableType]

    for file in ("tokenizer_config.json", "tokenizer.json", "config.json"):
        found = try_to_load_from_cache(name, file)
        if isinstance(found, str):
            return REVISION + Path(found).parent.name
    return None


def no_tokenizer(what: str) -> UserError:
    """Text meets a run whose text is token ids."""
    return UserError(
        ExitCode.DATA,
        f"run.data.tokenizer is 'none', and {what}",
        "name a column of token ids with run.data.text_field, or the tokenizer of the text",
    )


def _as_what(name: str) -> str:
    return "" if Path(name).expanduser().exists() else " from the hub (there is no such folder here)"


def _load_backend(name: str, revision: str | None) -> Any:
    from transformers import AutoTokenizer

    place, which = str(Path(name).expanduser()), revision or "main"
    try:
        return cast(Any, AutoTokenizer.from_pretrained(place, revision=which, trust_remote_code=False))  # pyright: ignore
    except (OSError, ValueError, ImportError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            ExitCode.DATA,
            f"run.data.tokenizer is '{name}', which transformers cannot load{_as_what(name)}: {reason}",
            "set it to 'bytes', to a local tokenizer folder, or to a tokenizer of the Hugging Face hub",
        ) from error
