"""A file or a private folder that one process holds. The system lets go of it when that process dies, however it does.

What a killed process leaves behind, the next one clears away.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

import psutil

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
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe from somewhere else has no writer
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


PREFIX = "noloco-"
SHARED_PREFIX = "noloco-swarm-"
"""The name of a folder for the temporary files of all daemons of one launcher begins so."""


class PrivateFolder:
    """A folder of mode 0700, held by a lock for as long as this process lives or until `remove`."""

    def __init__(self) -> None:
        base = _base()
        draft = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=base))
        self._lock = os.open(draft / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # Only now does it get the name that `sweep_dead_folders` looks for.
        self.path = draft.rename(base / draft.name.removeprefix("."))

    def note_child(self, pid: int) -> None:
        """Write down which process serves this folder's sockets, for a later process that finds it without this one."""
        (self.path / "pid").write_text(str(pid), encoding="ascii")

    def remove(self) -> None:
        """Delete the folder and all that is in it. May be repeated."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def leave_shared_folder() -> None:
    """Delete the temporary folder that a launcher made for its daemons, if this one was the last in it. A launcher that
    was killed cannot do it."""
    base = Path(tempfile.gettempdir())
    if base.name.startswith(SHARED_PREFIX):
        with contextlib.suppress(OSError):
            base.rmdir()


def sweep_dead_folders() -> int:
    """Delete this user's folders whose processes were killed, and so could not do it; returns how many there were. A
    child that outlived its node is killed, if it is still the process that was started for that folder."""
    swept = 0
    for folder in _base().glob(f"{PREFIX}*"):
        try:
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if folder.stat().st_uid == os.getuid():
                _reap_child(folder)
                shutil.rmtree(folder, ignore_errors=True)
                swept += 1
        except OSError:
            continue
        finally:
            os.close(lock)
    return swept


def _reap_child(folder: Path) -> None:
    """The system kills a node's child with it on Linux only. A process id may have been used anew since: only a process
    that names this very folder on its command line is ours."""
    with contextlib.suppress(OSError, ValueError, psutil.Error):
        process = psutil.Process(int((folder / "pid").read_text(encoding="ascii")))
        if any(f"/unix{folder}/" in argument for argument in process.cmdline()):
            process.kill()


def _base() -> Path:
    base = tempfile.gettempdir()
    # A Unix socket's path must fit into about 100 bytes.
    return Path(base if len(os.fsencode(base)) <= 60 else "/tmp")
