"""What a process may have of the memory: control groups of both versions as files, and the warning before the kill."""

from __future__ import annotations

from pathlib import Path

import pytest

from noloco_node.telemetry.events import Warned
from noloco_node.telemetry.memory_limit import MemoryUse, MemoryWatch, memory_use

MIB = 1 << 20


def write(folder: Path, files: dict[str, str]) -> None:
    """A group's files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def version_2(limit: str, used: int, cache: int = 0) -> dict[str, str]:
    """What such a group says."""
    return {"memory.max": limit, "memory.current": str(used), "memory.stat": f"anon 5\ninactive_file {cache}\n"}


def test_a_service_is_held_to_the_tightest_of_its_groups(tmp_path: Path) -> None:
    """Version 2: its own and those above it; file cache that can go is not in use."""
    own = tmp_path / "own"
    own.write_text("0::/system.slice/noloco.service\n")
    write(tmp_path / "fs/system.slice/noloco.service", version_2("max\n", 100 * MIB))
    write(tmp_path / "fs/system.slice", version_2(f"{200 * MIB}\n", 250 * MIB, cache=55 * MIB))
    use = memory_use(tmp_path / "fs", own)
    assert (use.limit, use.used) == (200 * MIB, 195 * MIB)


def test_a_container_finds_its_group_at_the_top(tmp_path: Path) -> None:
    """Its path is that of the host, which is not there."""
    own = tmp_path / "own"
    own.write_text("0::/../../docker/abc\n")
    write(tmp_path / "fs", version_2(str(64 * MIB), 63 * MIB))
    assert memory_use(tmp_path / "fs", own).limit == 64 * MIB


def test_version_1_has_other_files(tmp_path: Path) -> None:
    """They hold a very large number if there is no limit."""
    own = tmp_path / "own"
    own.write_text("5:cpu,cpuacct:/x\n4:memory:/docker/abc\n1:name=systemd:/x\n")
    group = {"memory.limit_in_bytes": str(64 * MIB), "memory.usage_in_bytes": str(63 * MIB)}
    write(tmp_path / "fs/memory/docker/abc", group | {"memory.stat": f"cache 1\ntotal_inactive_file {MIB}\n"})
    write(tmp_path / "fs/memory", {"memory.limit_in_bytes": "9223372036854771712", "memory.usage_in_bytes": "1"})
    use = memory_use(tmp_path / "fs", own)
    assert (use.limit, use.used) == (64 * MIB, 62 * MIB)


@pytest.mark.parametrize("text", ["", "0::/gone\n", "nonsense\n0:\n::\n", "0::/\n"])
def test_without_a_group_it_is_the_machines_memory(tmp_path: Path, text: str) -> None:
    """It is so too with files that make no sense."""
    own = tmp_path / "own"
    own.write_text(text)
    write(tmp_path / "fs", version_2("0", 0) | {"memory.stat": "inactive_file\n"})
    use = memory_use(tmp_path / "fs", own)
    assert "machine" in use.of
    assert 0 < use.used < use.limit
    assert memory_use().limit > MIB


def test_short_memory_is_said_once_until_there_is_ample_again() -> None:
    """With share, limit and what can be done."""
    said: list[Warned] = []
    now = [0.5]
    watch = MemoryWatch(said.append, lambda: MemoryUse(2 << 30, int(now[0] * (2 << 30)), "its limit"))
    for now[0] in (0.5, 0.89, 0.91, 0.99, 0.85, 0.92, 0.7, 0.95):
        watch.look()
    assert [event.what for event in said] == ["memory_short"] * 2
    assert "memory is short: 91 % of its limit (2.0 GiB)" in said[0].detail
