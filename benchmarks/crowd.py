"""Many whole daemons on one machine: whether they stay together, and what one of them costs as they become more.

    python -m benchmarks.crowd --counts 8 16 32 --out benchmarks/results/crowd.json

Two stages with a tiny model on paced devices (each forward and backward takes a set time and no processor), one
microbatch an inner step whatever the number of replicas. Bytes of the directory are those of the DHT's messages.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import psutil

from benchmarks.command import command, positive, results_file, whole
from benchmarks.directory import CountedP2P
from noloco_node.directory.dht_node import DhtNode
from noloco_node.telemetry.events import Account, InnerStep, OuterStep
from tests.chaos import paced_node
from tests.chaos.swarm import Place, Swarm

COUNTED = "CROWD_COUNTED_BYTES"
"""Names the file that a daemon writes its bytes of the DHT to."""
MICROBATCH = 128
SETTINGS = (
    "run.inner.target_tokens=1_000_000_000",
    "run.pipeline.budget_seconds=60",
    "run.pipeline.progress_seconds=20",
    "run.limits.record_seconds=20",
    "run.limits.exchange_progress_seconds=20",
)


@dataclass(frozen=True)
class Point:
    """So many daemons, followed for a while. Figures of a node are medians."""

    daemons: int
    operation: float
    """Seconds of a forward, and of a backward."""
    outer_steps: int
    alone: float
    """Share of them that were taken alone."""
    aborted: int
    refused: int
    """Of these because the partner was busy, or another refusal's word."""
    fellows_least: int
    fellows_median: float
    """Replicas of the own stage that an inner step was shared by, the own one included."""
    received: float
    """Bytes of the directory a second."""
    sent: float
    python_ms: float
    """CPU milliseconds a second of the daemon, and of its p2pd."""
    p2pd_ms: float
    tokens_a_second: float
    load: float


class WritingP2P(CountedP2P):
    """Writes what it counts to a file, every two seconds at most."""

    def __init__(self, p2p: Any, path: Path) -> None:
        super().__init__(p2p)
        self._path, self._written = path, 0.0

    async def call_protobuf_handler(self, peer: Any, name: str, request: Any, answer: Any) -> Any:
        """See hivemind."""
        try:
            return await super().call_protobuf_handler(peer, name, request, answer)
        finally:
            if time.monotonic() - self._written >= 2.0:
                self._written = time.monotonic()
                self._path.write_text(f"{self.received} {self.sent} {time.monotonic()}", encoding="ascii")


def node() -> None:
    """A paced daemon that counts its bytes of the DHT."""
    path, opened = Path(os.environ[COUNTED]), DhtNode.__init__

    def counting(self: DhtNode, p2p: Any, *args: Any, **options: Any) -> None:
        opened(self, cast("Any", WritingP2P(p2p, path)), *args, **options)

    DhtNode.__init__ = counting  # type: ignore[method-assign]
    paced_node.main()


async def measured(daemons: int, operation: float, seconds: float) -> Point:
    """Start so many, and follow them once all train."""
    batch = f"run.inner.global_batch_tokens={MICROBATCH * daemons // 2}"
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        swarm = Swarm(folder, [*SETTINGS, batch], operation)
        command = (sys.executable, "-m", "benchmarks.crowd", "node")

        def place(number: int) -> Place:
            return Place(command=command, environment={COUNTED: str(folder / f"{number}.bytes")})

        try:
            await swarm.start([number % 2 for number in range(daemons)], place)
            await swarm.until_training(steps=2)
            await swarm.rest(30.0, 60.0)
            began, wall, before = time.monotonic(), time.time(), [_taken(swarm, folder, n) for n in range(daemons)]
            await swarm.rest(seconds, 60.0)
            after = [_taken(swarm, folder, n) for n in range(daemons)]
            took, load = time.monotonic() - began, os.getloadavg()[0]
        finally:
            await swarm.stop()
        events = [event for each in swarm.nodes for event in each.events if wall <= event.time <= wall + took]
    outer = [event for event in events if isinstance(event, OuterStep)]
    steps = [event for event in events if isinstance(event, InnerStep)]
    kinds = Counter(event.kind for event in outer)
    reasons = Counter(event.reason.partition(":")[0] for event in outer if event.kind == "aborted")
    print(dict(kinds), dict(reasons), flush=True)
    views = [event.nodes_per_stage for event in events if isinstance(event, Account)]
    print("nodes seen, least and median:", min(map(sum, views)), statistics.median(map(sum, views)), flush=True)
    done = kinds["paired"] + kinds["alone"]
    received, sent, python, p2pd = (
        statistics.median((late[at] - early[at]) / took for early, late in zip(before, after, strict=True))
        for at in range(4)
    )
    return Point(
        daemons=daemons,
        operation=operation,
        outer_steps=done,
        alone=kinds["alone"] / max(1, done),
        aborted=kinds["aborted"],
        refused=reasons["busy"],
        fellows_least=min(event.live_replicas for event in steps),
        fellows_median=statistics.median(event.live_replicas for event in steps),
        received=received,
        sent=sent,
        python_ms=1e3 * python,
        p2pd_ms=1e3 * p2pd,
        tokens_a_second=sum(event.tokens for event in steps) / took / 2,
        load=load,
    )


def _taken(swarm: Swarm, folder: Path, number: int) -> tuple[float, float, float, float]:
    """Bytes received and sent, CPU seconds of the daemon and of p2pd."""
    each = swarm.nodes[number]
    received, sent, _ = (folder / f"{number}.bytes").read_text(encoding="ascii").split()
    return float(received), float(sent), _cpu(psutil.Process(each.pid)), _cpu(each.p2pd())


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def main() -> None:
    """Measure, print, write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", type=whole, nargs="+", default=[8, 16, 32])
    parser.add_argument("--operation", type=positive, default=1.0)
    parser.add_argument("--seconds", type=positive, default=90.0)
    parser.add_argument("--out", type=results_file)
    options = parser.parse_args()
    points: list[Point] = []
    for count in options.counts:
        points.append(asyncio.run(measured(count, options.operation, options.seconds)))
        print(points[-1], flush=True)
        if options.out:
            content = {"date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count(), "points": [*map(asdict, points)]}
            options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["node"]:
        del sys.argv[1]
        node()
    else:
        command(main)
