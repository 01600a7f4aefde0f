"""Files of a run folder, read as what they must be: ordinary ones, no links, no devices, no longer than they may be."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def is_plain(path: Path) -> bool:
    """Whether an ordinary file lies there, and no link to one."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def check_plain(path: Path) -> None:
    """Raise OSError where something else than an ordinary file lies there, or nothing. Through a link a folder from
    somewhere else would have this node read, or write, what lies outside of it."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise OSError(errno.EINVAL, "it is a link or no ordinary file", str(path))


def read_small(path: Path, most: int = 1 << 20) -> bytes:
    """An ordinary file's content. OSError where it is none, or longer than `most` bytes."""
    check_plain(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it is longer than {most:,} bytes", str(path))
    return content
