"""Tokens on a disk: written once from beginning to end, then read a window at a time.

Memory does not grow with the text.
"""

from __future__ import annotations

import errno
import os
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from noloco_node.data.documents import data_error
from noloco_node.data.loaders import PIECE_LENGTH
from noloco_node.data.tokenizers import Tokens
from noloco_node.document_marks import BEGINS
from noloco_node.errors import UserError


class TokenFile:
    """A file of token ids of one width, little-endian; it is closed when nobody holds it any more.

    In a `marked` one the first id of each document is larger by the size of the vocabulary.
    """

    def __init__(self, fd: int, vocab_size: int, where: str, *, marked: bool = False) -> None:
        self._fd, self._where = fd, where
        self._vocab_size, self._marked = vocab_size, marked
        self._dtype = token_type(vocab_size, marked=marked)
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self.count = os.fstat(fd).st_size // self._dtype.itemsize
        """Tokens in it, those that wait to be written included."""
        weakref.finalize(self, os.close, fd)

    @classmethod
    def nameless(cls, vocab_size: int, *, marked: bool = False) -> TokenFile:
        """A file that is gone when it is closed, however the process ends. Raises UserError (DATA) where no folder for
        such files can be written."""
        folder = temporary_folder()
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                return cls(os.dup(file.fileno()), vocab_size, folder, marked=marked)
        except OSError as error:
            raise no_room(folder, error) from None

    @classmethod
    def at(cls, path: Path, vocab_size: int, *, write: bool = False, marked: bool = False) -> TokenFile:
        """The file of that name, made where it is to be written and is not there. Raises OSError."""
        flags = os.O_RDWR | os.O_CREAT if write else os.O_RDONLY
        return cls(os.open(path, flags | os.O_CLOEXEC, 0o644), vocab_size, str(path.parent), marked=marked)

    def append(self, ids: Tokens) -> None:
        """Add the tokens of a document at the end. Raises UserError (DATA) where the disk is full, ValueError for an id
        outside the vocabulary, which would become another one or a mark."""
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self._vocab_size:
            raise ValueError(f"ids from {ids.min()} to {ids.max()}, outside a vocabulary of {self._vocab_size}")
        written = ids.astype(self._dtype)
        if self._marked and len(written):
            written[0] += self._vocab_size
        data = written.tobytes()
        self._waiting.append(data)
        self._waiting_bytes += len(data)
        self.count += len(ids)
        if self._waiting_bytes >= PIECE_LENGTH:
            self.flush()

    def flush(self) -> None:
        """Write what waits. Raises UserError (DATA) where the disk is full."""
        data = memoryview(b"".join(self._waiting))
        at = self.count * self._dtype.itemsize - len(data)
        try:
            while data:
                written = os.pwrite(self._fd, data, at)
                data, at = data[written:], at + written
        except OSError as error:
            raise no_room(self._where, error) from None
        self._waiting, self._waiting_bytes = [], 0

    def cut_to(self, count: int) -> None:
        """Keep the first `count` of the written tokens. Raises OSError if there are fewer."""
        if count > self.count:
            raise OSError(errno.EIO, f"{self._where} holds {self.count} tokens, not {count}")
        os.ftruncate(self._fd, count * self._dtype.itemsize)
        self.count = count

    def sync(self) -> None:
        """Return when what was written is on the disk."""
        os.fsync(self._fd)

    def _read(self, octets: int, begin: int) -> bytes:
        """A prepared text lies where others may write: it may be cut, or its disk be gone, while a node reads it."""
        try:
            data = os.pread(self._fd, octets, begin)
        except OSError as error:
            raise self._gone(error.strerror or str(error)) from None
        if len(data) < octets:
            raise self._gone(f"a file of tokens has become shorter than the {self.count:,} tokens that it held")
        return data

    def _gone(self, why: str) -> UserError:
        return data_error(
            f"the tokens of the text in '{self._where}' can no longer be read: {why}",
            "leave a prepared text as it is while nodes read it; copy or prepare it again, and start this node again",
        )

    def windows(self, indices: Sequence[int], length: int) -> NDArray[np.int64]:
        """Windows of `length` tokens, int64 [len(indices), length]: window i begins at token i · length. Where the file
        is marked, so is the first id of each document in them (`document_marks.BEGINS`). Raises UserError
        (DATA) where they are not there any more."""
        size = length * self._dtype.itemsize
        data = b"".join(self._read(size, index * size) for index in indices)
        rows = np.frombuffer(data, dtype=self._dtype).astype(np.int64).reshape(len(indices), length)
        if self._marked:
            begins = rows >= self._vocab_size
            rows += begins * (BEGINS - self._vocab_size)
        return rows


def token_type(vocab_size: int, *, marked: bool = False) -> np.dtype[Any]:
    """The narrowest type that holds every id of a vocabulary, marked ones included where they are."""
    return np.min_scalar_type((2 * vocab_size if marked else vocab_size) - 1).newbyteorder("<")


def temporary_folder() -> str:
    """TMPDIR where that is set; else /var/tmp, since /tmp is memory on many machines; else what the system has."""
    wanted = os.environ.get("TMPDIR") or "/var/tmp"
    return wanted if os.access(wanted, os.W_OK) else tempfile.gettempdir()


def no_room(folder: str, error: OSError) -> UserError:
    """Tokens cannot be written there."""
    return data_error(
        f"the tokens of the text cannot be written to '{folder}': {error.strerror or error}",
        "make room there, or name a folder with more by `data prepare --to`, or by TMPDIR for a text that is not "
        "prepared: a token takes 1 byte with a vocabulary of 256, 2 up to 65,536, else 4",
    )
