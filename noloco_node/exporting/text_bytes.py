"""How many bytes of text tokens stand for, exactly, wherever a window cuts a character in two."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any, cast

from torch import Tensor

from noloco_node.config.data_spec import DataSpec
from noloco_node.data.tokenizers import PretrainedTokenizer, load_tokenizer

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
"""Tokenizers of SentencePiece's kind name a token for a single byte so."""
_SPACE = "▁"


def text_bytes(spec: DataSpec, batches: Iterable[Tensor]) -> int:
    """Bytes of UTF-8 that these ids (int64, any shape) stand for, of the run's tokenizer. What stands for no text, as
    the end of a document, is none. Raises UserError (DATA) as `load_tokenizer` does."""
    counts: Counter[int] = Counter()
    for batch in batches:
        counts.update(cast("list[int]", batch.flatten().tolist()))  # pyright: ignore[reportUnknownMemberType]
    tokenizer = load_tokenizer(spec)
    if not isinstance(tokenizer, PretrainedTokenizer):
        return counts.total()
    backend: Any = tokenizer.backend
    special, byte_level = set[int](backend.all_special_ids), _is_byte_level(backend)
    tokens = [token for token in counts if token not in special]
    names: list[str] = backend.convert_ids_to_tokens(tokens)
    return sum(counts[token] * _bytes_of(name, byte_level) for token, name in zip(tokens, names, strict=True))


def _is_byte_level(backend: Any) -> bool:
    """Whether each character in a token's name stands for one byte."""
    inner = getattr(backend, "backend_tokenizer", None)
    return inner is not None and "ByteLevel(" in repr(inner.decoder)


def _bytes_of(name: str, byte_level: bool) -> int:
    if byte_level:
        return len(name)
    return 1 if _BYTE.fullmatch(name) else len(name.replace(_SPACE, " ").encode())
