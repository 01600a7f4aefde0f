"""A document, the error of a text that cannot be used, and one short name for a text, wherever it is kept.

A node with another text is told so before it trains.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from noloco_node.config.data_spec import TEXT
from noloco_node.data.tokenizers import Tokens
from noloco_node.errors import ExitCode, UserError


@dataclass(frozen=True, slots=True)
class Document:
    """A text and its path-like key, which is the same on every machine that has the same text."""

    key: str
    text: str
    ids: Tokens | None = None
    """Tokens that others made, in place of the text."""

    @property
    def is_blank(self) -> bool:
        """Whether there is nothing to train on in it."""
        return not self.text.strip() if self.ids is None else len(self.ids) == 0

    def __len__(self) -> int:
        """Characters, or tokens where others made them."""
        return len(self.text) if self.ids is None else len(self.ids)


def data_error(message: str, remedy: str) -> UserError:
    """A text that cannot be trained on."""
    return UserError(ExitCode.DATA, message, remedy)


def unreadable(path: object, error: OSError) -> UserError:
    """A file that this machine does not give."""
    return data_error(f"run.data.path: '{path}' cannot be read: {error.strerror or error}", "make it readable")


def damaged(path: object, error: BaseException) -> UserError:
    """A file that ends too early, or holds what its format does not allow."""
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    if "too much memory for decoding" in reason:  # as the library of zstd says it
        return data_error(
            f"run.data.path: '{path}' was compressed with a window above 128 MiB (`zstd --long`), which is not read",
            "unpack it with `zstd -d --long=31`, and compress it again without --long",
        )
    return data_error(
        f"run.data.path: '{path}' is cut off or damaged: {reason}",
        "copy or download it again; `gzip -t`, `zstd -t` or another reader of its format say the same",
    )


_BYTES = 16


class Fingerprint:
    """A hash of documents, their keys and their order, taken one by one; blank documents do not count."""

    def __init__(self) -> None:
        self._digest = bytes(_BYTES)

    def add(self, document: Document) -> None:
        """Take one more document."""
        key = document.key.encode("utf-8", errors="surrogatepass")
        if document.ids is None:
            content, kind = document.text.encode("utf-8", errors="surrogatepass"), b"t"
        else:
            content, kind = document.ids.astype("<i8").tobytes(), b"i"
        head = self._digest + kind + len(key).to_bytes(8, "little") + key
        self._digest = hashlib.blake2b(head + content, digest_size=_BYTES).digest()

    @property
    def text(self) -> str:
        """The fingerprint as `run.data.fingerprint` has it: `text-` and 32 hex digits."""
        return TEXT + self._digest.hex()
