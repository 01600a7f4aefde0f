"""Text to token ids and back."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from noloco_node.config.data_spec import BYTES, NO_TOKENIZER, REVISION, DataSpec
from noloco_node.config.environment import hub_remedy, hub_token
from noloco_node.config.files import home_place
from noloco_node.config.tokenizer_files import check_tokenizer
from noloco_node.errors import ExitCode, UserError

Tokens = NDArray[np.integer[Any]]
"""A one-dimensional array of token ids."""


class Tokenizer(Protocol):
    """What the data room needs of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Ids that a run may train on are below this."""
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
    """A tokenizer of transformers, from the hub, at a `revision` if one is meant, or from a folder.

    If it has more ids than `most`, only those below it may be trained on; the trainer checks what `encode` gives.
    """

    def __init__(self, name: str, revision: str | None = None, most: int | None = None) -> None:
        self.name, self.backend = name, _load_backend(name, revision)
        self.bound: int = max(self.backend.get_vocab().values(), default=-1) + 1
        """All ids are below this, added tokens included; there may be fewer tokens, since ids may have gaps."""
        self.vocab_size = self.bound if most is None else min(self.bound, most)
        """See `Tokenizer`."""
        self._marks = _marks_of(self.backend)
        self._mark_ids = np.array(sorted(self._marks), dtype=np.int64)
        written = sorted((mark for mark in self._marks.values() if len(mark) > 1), key=len, reverse=True)
        self._written = re.compile("|".join(map(re.escape, written))) if written else None

    @property
    def separator(self) -> Tokens:
        """The end-of-text token, or a newline where there is none."""
        end: int | None = self.backend.eos_token_id
        return self.encode("\n") if end is None else np.array([end], dtype=np.int64)

    def encode(self, text: str) -> Tokens:
        """Ids without special tokens: neither around the text, nor for marks that are written in it, such as
        `<|endoftext|>`. A lone surrogate becomes a question mark."""
        text = encodable(text)
        ids = self._ids(text)
        if self._written is None or not np.isin(ids, self._mark_ids).any():
            return ids
        cuts = [match.start() + 1 for match in self._written.finditer(text)]  # some models hold marks as ordinary words
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        return np.concatenate([self._ids(piece) for piece in pieces])

    def _ids(self, text: str) -> Tokens:
        ids: list[int] = self.backend.encode(text, add_special_tokens=False, split_special_tokens=True, verbose=False)
        return np.asarray(ids, dtype=np.int64)

    def word(self, token: int) -> str:
        """What stands for the token in the vocabulary."""
        return str(self.backend.convert_ids_to_tokens(token))

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


def _marks_of(backend: Any) -> Mapping[int, str]:
    """The special tokens of a tokenizer of transformers; that for unknown characters is one that texts may have."""
    marks = {token: str(added.content) for token, added in backend.added_tokens_decoder.items() if added.special}
    marks |= dict(zip(backend.all_special_ids, backend.all_special_tokens, strict=True))
    marks.pop(backend.unk_token_id, None)
    return marks


def load_tokenizer(spec: DataSpec, most: int | None = None) -> Tokenizer:
    """The run's; of one that has more ids than `most`, those below it. Raises UserError (DATA) where there is none,
    where it is not the one that the run means, and for `none`."""
    if spec.tokenizer == NO_TOKENIZER:
        raise no_tokenizer("there is nothing that turns text into tokens, or back")
    if spec.tokenizer == BYTES:
        return ByteTokenizer()
    check_tokenizer(spec)
    return PretrainedTokenizer(spec.tokenizer, spec.tokenizer_revision, most)


def tokenizer_words(spec: DataSpec) -> str | None:
    """The name of the run's tokenizer, for a person; None for one that this package has itself, or none. For one of the
    hub without a revision, the revision is that which the hub's cache on this machine holds."""
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
    """The error for text in a run whose text is token ids."""
    return UserError(
        ExitCode.DATA,
        f"run.data.tokenizer is 'none', and {what}",
        "name a column of token ids with run.data.text_field, or the tokenizer of the text",
    )


def _as_what(name: str) -> str:
    return "" if home_place(name).exists() else " from the hub (there is no such folder here)"


def _load_backend(name: str, revision: str | None) -> Any:
    from transformers import AutoTokenizer

    place, which = str(home_place(name)), revision or "main"
    try:
        return AutoTokenizer.from_pretrained(place, revision=which, trust_remote_code=False, token=hub_token())
    except Exception as error:  # the tokenizers library raises no narrower kind for a file of a newer version
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            ExitCode.DATA,
            f"run.data.tokenizer is '{name}', which transformers cannot load{_as_what(name)}: {reason}",
            f"set it to 'bytes', to a local tokenizer folder, or to a tokenizer of the Hugging Face hub{hub_remedy()}",
        ) from error
