"""One short name for a text, the same wherever it is kept: a node with another text is told so before it trains."""

from __future__ import annotations

import hashlib

from noloco_node.config.data_spec import TEXT
from noloco_node.data.documents import Document

_BYTES = 16


class Fingerprint:
    """A hash of documents, their keys and their order, taken one by one; blank documents do not count.

    It can be gone on with from what `text` said after any document.
    """

    def __init__(self, text: str | None = None) -> None:
        self._digest = bytes(_BYTES) if text is None else bytes.fromhex(text.removeprefix(TEXT))

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
