"""A lock is refused because somebody holds it, and for no other reason."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import tempfile
import threading
from pathlib import Path

import pytest

from noloco_node.storage.held import FileLock, LockHeld, PrivateFolder, lock_holder


def test_a_private_folder_has_room_for_sockets_whatever_letters_lead_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A letter may take several bytes of a path, and p2pd did not start."""
    with tempfile.TemporaryDirectory(prefix="д" * 40, dir="/tmp") as long, socket.socket(socket.AF_UNIX) as one:
        monkeypatch.setattr("tempfile.tempdir", long)
        folder = PrivateFolder()
        one.bind(str(folder.path / "p2pclient-0123456789ab.sock"))
        folder.remove()


def descriptors() -> int:
    """Open files of this process."""
    return len(os.listdir("/proc/self/fd"))


def test_who_looks_for_an_instant_fails_no_start(tmp_path: Path) -> None:
    """A `status` that asks for the holder of the file holds it, shared, while a node starts."""
    path = tmp_path / "lock"
    path.touch()
    look = os.open(path, os.O_RDONLY)
    fcntl.flock(look, fcntl.LOCK_SH)
    timer = threading.Timer(0.05, os.close, (look,))
    timer.start()
    with FileLock(path):
        assert lock_holder(path) == f"the process with pid {os.getpid()} on this machine"
    timer.join()
    assert lock_holder(path) is None


def test_who_holds_it_keeps_it_and_is_named(tmp_path: Path) -> None:
    """The second is told, and leaves no open file."""
    path = tmp_path / "lock"
    with FileLock(path):
        before = descriptors()
        with pytest.raises(LockHeld, match=f"pid {os.getpid()}"), FileLock(path):
            pass
        assert descriptors() == before


def test_a_file_system_without_locks_is_no_other_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As NFS without its lock daemon: the system's own reason is told."""

    def refuse(_file: int, _how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    before = descriptors()
    with pytest.raises(OSError, match="No locks available"), FileLock(tmp_path / "lock"):
        pass
    assert descriptors() == before


def test_a_disk_that_takes_no_pid_leaves_no_open_file() -> None:
    """The lock would be held until the process ends, and by nobody."""
    before = descriptors()
    with pytest.raises(OSError, match="Invalid argument"), FileLock(Path("/dev/full")):
        pass
    assert descriptors() == before


def test_a_pipe_in_place_of_a_lock_holds_nobody_up(tmp_path: Path) -> None:
    """`status` and `report` waited for ever at a folder from somewhere else."""
    os.mkfifo(tmp_path / "lock")
    assert lock_holder(tmp_path / "lock") is None
