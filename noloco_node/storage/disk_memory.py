"""Memory that lies on the disk: a state that travels is several times a stage's weights, and is seldom looked at.

A file without a name is mapped. The machine keeps of it in memory what it has room for, and the file is gone with the
last use of it, also where the process is killed.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

ZEROS = bytes(1 << 20)


def take_room(descriptor: int, size: int) -> None:
    """Make a new file `size` bytes long, all of them on the disk. A map of a file for which the disk has no room ends
    the process that writes to it. Raises OSError where there is none."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
        return
    while size > 0:  # macOS
        size -= os.write(descriptor, ZEROS[:size])


class DiskMemory:
    """Zeroed bytes on the disk of a folder."""

    def __init__(self, size: int, folder: Path | None = None) -> None:
        """`folder` says which disk; where it is missing, that of temporary files. Raises OSError where the disk has no
        room for `size` bytes: all are taken at once, since a write to a mapped file that finds none ends the
        process."""
        there = folder if folder is not None and folder.is_dir() else None
        with tempfile.TemporaryFile(dir=there) as file:
            take_room(file.fileno(), max(1, size))
            self._map = mmap.mmap(file.fileno(), max(1, size))
        self.size = size
        self.bytes = memoryview(self._map)[:size]
        """All of it, to be read and written."""

    def tensor(self, dtype: torch.dtype) -> Tensor:
        """All of it as numbers, flat."""
        return torch.frombuffer(self.bytes, dtype=dtype)

    def leave_memory(self, start: int = 0, end: int | None = None) -> None:
        """This process looks at bytes [start, end) no more for now: the machine may have their memory."""
        end = self.size if end is None else min(end, self.size)
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        if end > first:
            self._map.madvise(mmap.MADV_DONTNEED, first, end - first)
