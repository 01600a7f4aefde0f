"""Memory on the disk holds what is written to it, and its file is gone with it."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
import torch

from noloco_node.state_transfer.fetch import DiskMemory


def test_what_left_memory_is_there_when_it_is_looked_at_again(tmp_path: Path) -> None:
    """At places that are no page's, and without a name in the folder."""
    memory = DiskMemory(3 * 4096 + 8, tmp_path)
    assert not any(memory.bytes)
    numbers = memory.tensor(torch.int32)
    numbers.copy_(torch.arange(len(numbers)))
    memory.leave_memory(100, 5000)
    memory.leave_memory()
    assert torch.equal(numbers, torch.arange(len(numbers), dtype=torch.int32))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("system", ["Linux", "macOS"])
def test_a_disk_without_room_says_so_before_anything_is_written(
    system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write to a mapped file that finds no block ends the process. macOS has no call that takes blocks."""
    if system == "macOS":
        monkeypatch.delattr(os, "posix_fallocate")
    assert len(DiskMemory(3 << 19, tmp_path).bytes) == 3 << 19
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(OSError, match="large"):
            DiskMemory(2 << 20, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_is_too_small_is_not_filled_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that waits for room asks every few seconds."""

    def writes(*_: object) -> int:
        raise AssertionError("it fills the disk")

    monkeypatch.delattr(os, "posix_fallocate")
    monkeypatch.setattr(os, "write", writes)
    with pytest.raises(OSError, match="No space left"):
        DiskMemory(1 << 60, tmp_path)


def test_a_folder_that_is_not_there_is_no_failure(tmp_path: Path) -> None:
    """It is the disk of temporary files then."""
    DiskMemory(10, tmp_path / "missing").bytes[:2] = b"ab"
