"""A file that one process holds. The system lets go of it when that process dies, whatever the reason."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path

from noloco_node import ambient

NODE_LOCK = "node.lock"
"""This file in a node's run folder is held by its process."""


class LockHeld(Exception):
    """Another process holds the file; the message names it, in words."""


class FileLock:
    """Holds `path`, which is made where missing, for this process. A context manager.

    Raises LockHeld, and OSError as the file system says.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None

    def __enter__(self) -> FileLock:
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _take(file)
            os.ftruncate(file, 0)
            os.write(file, str(os.getpid()).encode())
        except BaseException:
            os.close(file)
            raise
        self._file = file
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def lock_holder(path: Path) -> str | None:
    """The process on this machine that holds the file now, in words; None if there is none. Raises OSError if it cannot
    be told. It takes the lock for an instant, shared, and never makes the file."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _holder_in(file)
    finally:
        os.close(file)
    return None


def holder_pid(path: Path) -> int | None:
    """The id of the process on this machine that holds the file now; None if there is none, or if it cannot be told."""
    with contextlib.suppress(OSError, ValueError):
        if lock_holder(path) is not None:
            return int(path.read_text("ascii"))
    return None


def _take(file: int) -> None:
    """Lock an open file. Raises LockHeld, and OSError where the file system has no locks."""
    # A process that asks for the holder of the file holds it for an instant: that must not fail a start.
    until = ambient.monotonic() + 0.2
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if ambient.monotonic() >= until:
                raise LockHeld(_holder_in(file)) from None
        time.sleep(0.01)


def _holder_in(file: int) -> str:
    pid = os.read(file, 32).decode("ascii", "replace").strip() or "unknown"
    return f"the process with pid {pid} on this machine"
