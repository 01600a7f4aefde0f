"""A file or folder is whole or absent, whenever the writer fails."""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from noloco_node.storage import atomic


def listing(folder: Path) -> list[str]:
    """Names in the folder, hidden ones included."""
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    """New content under the same name, and nothing else left in the folder."""
    atomic.write_bytes(tmp_path / "a", b"one")
    atomic.write_json(tmp_path / "a", {"two": [1, None]})
    assert json.loads((tmp_path / "a").read_text()) == {"two": [1, None]}
    assert listing(tmp_path) == ["a"]


def test_two_threads_that_write_one_file_do_not_take_it_from_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waits before it renames until the other has written. A node's known peers were written at its start and by
    its first look at once, and one of the two found no file."""
    both, written = threading.Barrier(2, timeout=10.0), os.fsync

    def sync(descriptor: int) -> None:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            both.wait()
        written(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(atomic.write_bytes, tmp_path / "a", text) for text in (b"one", b"two")]:
            done.result()
    assert (tmp_path / "a").read_bytes() in (b"one", b"two")
    assert listing(tmp_path) == ["a"]


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk refuses when the data is synced: the old content stays, no partial file does."""
    atomic.write_bytes(tmp_path / "a", b"old")

    def refuse(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="No space"):
        atomic.write_bytes(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"old"
    assert listing(tmp_path) == ["a"]


def test_json_refuses_what_json_does_not_have(tmp_path: Path) -> None:
    """NaN would make a file that other readers refuse."""
    with pytest.raises(ValueError, match="JSON"):
        atomic.write_json(tmp_path / "a", {"loss": float("nan")})
    assert listing(tmp_path) == []


def test_a_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    """Files of the former folder are gone, and so are the temporary folders."""
    for name in ("one", "two"):
        with atomic.new_folder(tmp_path / "w") as partial:
            (partial / name).write_text(name)
            assert not (tmp_path / "w" / name).exists()
        assert listing(tmp_path / "w") == [name]
    assert listing(tmp_path) == ["w"]


def test_a_failed_folder_keeps_the_old_one(tmp_path: Path) -> None:
    """An error inside the block changes nothing."""
    with atomic.new_folder(tmp_path / "w") as partial:
        (partial / "good").write_text("good")

    def fail_half_way() -> None:
        with atomic.new_folder(tmp_path / "w") as partial:
            (partial / "bad").write_text("half")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError):
        fail_half_way()
    assert listing(tmp_path / "w") == ["good"]
    assert listing(tmp_path) == ["w"]


def test_a_crash_between_the_two_renames_is_mended(tmp_path: Path) -> None:
    """Killed after the former folder was moved aside: the next writer puts it back before it starts."""
    with atomic.new_folder(tmp_path / "w") as partial:
        (partial / "good").write_text("good")
    (tmp_path / "w").rename(tmp_path / ".w.former")
    with atomic.new_folder(tmp_path / "w"):
        assert listing(tmp_path / "w") == ["good"]
    assert listing(tmp_path / "w") == []
    assert listing(tmp_path) == ["w"]


def test_what_a_killed_writer_left_does_not_stop_the_next(tmp_path: Path) -> None:
    """Killed half-way, or after the renames and before the former folder was removed."""
    for name in ("w", ".w.partial", ".w.former"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "left").write_text("left")
    with atomic.new_folder(tmp_path / "w") as partial:
        (partial / "new").write_text("new")
    assert listing(tmp_path / "w") == ["new"]
    assert listing(tmp_path) == ["w"]


def test_files_of_a_new_folder_may_be_read_by_whom_this_process_lets_read(tmp_path: Path) -> None:
    """What writes tensors makes its files for their owner alone; weights are no secret."""
    (tmp_path / "usual").touch()
    with atomic.new_folder(tmp_path / "folder") as partial:
        (partial / "weights").touch(mode=0o600)
    assert (tmp_path / "folder" / "weights").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_a_disk_that_syncs_no_folders_takes_files_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So it is with some that a virtual machine shares with its host: no node could start there."""
    synced = os.fsync

    def sync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        synced(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    atomic.write_bytes(tmp_path / "a", b"one")
    with atomic.new_folder(tmp_path / "w") as partial:
        (partial / "good").write_text("good")
    assert listing(tmp_path) == ["a", "w"]
