"""What is free on this machine."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

from noloco_node.address_space import address_space_left
from noloco_node.sizing.memory import Memory
from noloco_node.training.compute_device import memory_of_device, resolve_device


def free_memory(device: str) -> Memory:
    """Free bytes of `node.device` and of this machine, within what its container may take."""
    own = memory_of_device(torch.device(resolve_device(device)))
    return Memory(own.get("free", 0), _free_on_host())


def _free_on_host() -> int:
    """What can be had without swapping, and without exceeding what a container or this process is allowed."""
    free = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    limit, used = _lines(group / "memory.max"), _lines(group / "memory.current")
    if limit and used and limit[0].isdigit():
        free = min(free, max(0, int(limit[0]) - int(used[0]) + _reclaimable(group)))
    left = address_space_left()
    return free if left is None else min(free, left)


def _reclaimable(group: Path) -> int:
    """File cache that a container gives back when it needs memory."""
    rows = (line.split() for line in _lines(group / "memory.stat"))
    return sum(int(row[1]) for row in rows if row[0] == "inactive_file")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").splitlines()
    except OSError:
        return []
