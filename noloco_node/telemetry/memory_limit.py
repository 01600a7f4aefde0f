"""What this process may have of the machine's memory, and how near it is to what the system kills it for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from noloco_node.telemetry.events import Warned

CGROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
SHORT = 0.9
"""A node warns from this share of the limit on."""
AMPLE = 2 * SHORT - 1.0
"""Below this share of the limit a new warning may come: twice as much is free then."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes. `used` is without file cache that the system takes back when it needs memory."""

    limit: int
    used: int
    of: str
    """The owner of the limit, in words."""

    @property
    def ratio(self) -> float:
        """The used share of the limit, 0 to 1 and a little beyond. A version 1 group without a limit says one that no
        machine has, of which next to nothing is used."""
        return self.used / self.limit

    @property
    def left(self) -> int:
        """Bytes that can be had still."""
        return max(0, self.limit - self.used)


def memory_use(groups: Path = CGROUPS, own: Path = OWN_GROUPS) -> MemoryUse:
    """The limit that is nearest, by the share of it that is used."""
    return max(memory_uses(groups, own), key=lambda use: use.ratio)


def memory_uses(groups: Path = CGROUPS, own: Path = OWN_GROUPS) -> Iterator[MemoryUse]:
    """The machine's memory, and the limits of this process's control groups (version 2 or 1)."""
    machine = psutil.virtual_memory()
    yield MemoryUse(int(machine.total), int(machine.total - machine.available), "the machine's memory")
    yield from _of_groups(groups, own)


def _of_groups(groups: Path, own: Path) -> Iterator[MemoryUse]:
    seen: set[Path] = set()
    for row in _read(own).splitlines():
        number, _, rest = row.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            top, files = groups, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top, files = groups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folder = top / path.lstrip("/")
        # In a container the path is often that of the host, and the group's files lie at the top.
        for each in (folder, *folder.parents):
            if each.is_relative_to(top) and each not in seen:
                seen.add(each)
                yield from _of_group(each, *files)


def _of_group(group: Path, limit_file: str, used_file: str, cache_row: str) -> Iterator[MemoryUse]:
    limit, used = _read(group / limit_file).strip(), _read(group / used_file).strip()
    if not (limit.isdigit() and used.isdigit()) or not int(limit):
        return
    rows = (row.split() for row in _read(group / "memory.stat").splitlines())
    cache = next((int(row[1]) for row in rows if len(row) == 2 and row[0] == cache_row), 0)
    yield MemoryUse(int(limit), max(0, int(used) - cache), "the limit of its container or service")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


class MemoryWatch:
    """Warns once whenever memory gets short, before the system kills somebody for it."""

    def __init__(self, emit: Callable[[Warned], None], use: Callable[[], MemoryUse] = memory_use) -> None:
        self._emit = emit
        self._use = use
        self._short = False

    def look(self) -> None:
        """A few file reads; to be called every few seconds."""
        now = self._use()
        if now.ratio >= SHORT and not self._short:
            self._short = True
            share, limit = 100.0 * now.ratio, now.limit / (1 << 30)
            detail = (
                f"memory is short: {share:.0f} % of {now.of} ({limit:.1f} GiB) is in use; beyond it the system kills a "
                "process. End other programs, raise the limit, or serve a smaller stage"
            )
            self._emit(Warned(what="memory_short", detail=detail))
        elif now.ratio < AMPLE:
            self._short = False
