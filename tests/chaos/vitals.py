"""What a process costs, from /proc and its metrics endpoint: memory, descriptors, threads, tasks."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from tests.chaos.swarm import Node

TASKS = "noloco_tasks"
ENDPOINT_SECONDS = 5.0


@dataclass(frozen=True)
class Vitals:
    """One look at one node. Memory in MB."""

    time: float
    memory: float
    descriptors: float
    threads: float
    tasks: float
    p2pd_memory: float
    p2pd_descriptors: float


@dataclass(frozen=True)
class Growth:
    """A quantity early and late in a node's life (medians)."""

    name: str
    early: float
    late: float
    allowed: float
    """How much `late` may exceed `early`."""

    @property
    def flat(self) -> bool:
        """Whether it has stayed within what is allowed."""
        return self.late <= self.early + self.allowed

    def __str__(self) -> str:
        return f"{self.name} {self.early:.1f} → {self.late:.1f}"


ALLOWED = {
    "memory": (0.08, 12.0),
    "descriptors": (0.15, 8.0),
    "threads": (0.0, 2.0),
    "tasks": (0.2, 12.0),
    "p2pd_memory": (0.25, 25.0),
    "p2pd_descriptors": (0.2, 10.0),
}
"""By quantity: the share of its early value, and the absolute amount, by which it may grow; the larger counts. p2pd
remembers peers that it has met, and its collector gives memory back late."""


async def look(node: Node) -> Vitals | None:
    """Its vitals now; None where it has just ended, or does not answer."""
    assert node.started is not None
    try:
        process, p2pd = psutil.Process(node.pid), node.p2pd()
        tasks = await asyncio.to_thread(_metric, node.started.metrics_address or "", TASKS)
        return Vitals(
            time.time(),
            process.memory_info().rss / 1e6,
            process.num_fds(),
            process.num_threads(),
            tasks,
            p2pd.memory_info().rss / 1e6,
            p2pd.num_fds(),
        )
    except (psutil.Error, LookupError, OSError):
        return None


def growths(samples: Sequence[Vitals]) -> list[Growth]:
    """Medians of the second fifth of the samples against the last fifth: the first is warming up."""
    fifth = max(1, len(samples) // 5)
    early, late = samples[fifth : 2 * fifth], samples[-fifth:]
    found: list[Growth] = []
    for name, (share, amount) in ALLOWED.items():
        before = statistics.median(getattr(sample, name) for sample in early)
        after = statistics.median(getattr(sample, name) for sample in late)
        found.append(Growth(name, before, after, max(share * before, amount)))
    return found


def _metric(address: str, name: str) -> float:
    with contextlib.closing(urllib.request.urlopen(f"http://{address}/metrics", timeout=ENDPOINT_SECONDS)) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith(f"{name} "):
                return float(line.split()[1])
    raise LookupError(name)
