"""Tokens per second of a local swarm over those of one process training the same model on the same cores.

    python -m benchmarks.pipeline configs/tiny.yaml --out benchmarks/results/pipeline.json

The single process takes its best of several microbatch and thread settings; then single and swarm are measured in
turn, so that both see the same machine. The swarm's rate is taken between the moment when every first-stage replica has
taken some inner steps and the moment when the first of them stops training: start-up and the end are left out on both
sides. Several numbers of microbatches in flight are measured: their validation losses are at equal tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, cast

import psutil
import torch

from noloco_node import __version__
from noloco_node.config.load import Config, load_config
from noloco_node.launch.local_swarm import LocalSwarm, Observer, SwarmNode
from noloco_node.telemetry.events import AnyEvent, Evaluation, InnerStep

SWEEP_SECONDS = 8
SINGLE_SECONDS = 25
THREADS = (1, 2)
WINDOWS = (4, 8, 16, 32)
STEPS_BEFORE_WINDOW = 5


@dataclass
class CpuShare:
    """CPU seconds of all daemons by where they were spent."""

    compute_thread: float = 0.0
    event_loop: float = 0.0
    other_threads: float = 0.0
    p2pd: float = 0.0

    @property
    def total(self) -> float:
        """All of them."""
        return self.compute_thread + self.event_loop + self.other_threads + self.p2pd


def cpu_of(pids: list[int]) -> dict[str, float]:
    """CPU seconds of each thread of the daemons and of each of their p2pd, by a key that stays."""
    seconds: dict[str, float] = {}
    for pid in pids:
        process = psutil.Process(pid)
        for thread in process.threads():
            kind = "event_loop" if thread.id == pid else "thread"
            seconds[f"{pid}/{kind}/{thread.id}"] = thread.user_time + thread.system_time
        for child in process.children():
            times = child.cpu_times()
            seconds[f"{pid}/p2pd/{child.pid}"] = times.user + times.system
    return seconds


def shares(before: dict[str, float], after: dict[str, float]) -> CpuShare:
    """Where the CPU time between two looks went; a daemon's busiest thread beside its loop is its compute thread."""
    spent: dict[str, dict[str, list[float]]] = {}
    for key, seconds in after.items():
        pid, kind, _ = key.split("/")
        spent.setdefault(pid, {}).setdefault(kind, []).append(seconds - before.get(key, 0.0))
    share = CpuShare()
    for kinds in spent.values():
        threads = sorted(kinds.get("thread", [0.0]))
        share.compute_thread += threads[-1]
        share.other_threads += sum(threads[:-1])
        share.event_loop += sum(kinds.get("event_loop", []))
        share.p2pd += sum(kinds.get("p2pd", []))
    return share


class Activity(Observer):
    """Takes the CPU times at the start and at the end of the window in which the swarm's rate is measured."""

    def __init__(self, heads: int) -> None:
        self._heads = heads
        self._steps: dict[str, list[InnerStep]] = {}
        self._finals: dict[str, float] = {}
        self._pids: dict[str, int] = {}
        self._cpu: list[dict[str, float]] = []
        self._span: list[float] = []

    def on_event(self, node: SwarmNode, event: AnyEvent) -> None:
        """Open the window once all heads are under way, close it when one has ended its training."""
        self._pids[node.name] = node.pid
        if node.stage > 0:
            return
        if isinstance(event, InnerStep):
            self._steps.setdefault(node.name, []).append(event)
        if isinstance(event, Evaluation) and event.final:
            self._finals[node.name] = event.loss
        ready = len(self._steps) == self._heads and min(map(len, self._steps.values())) >= STEPS_BEFORE_WINDOW
        if (not self._cpu and ready) or (len(self._cpu) == 1 and self._finals):
            self._cpu.append(cpu_of(list(self._pids.values())))
            self._span.append(event.time)

    def result(self) -> dict[str, object]:
        """Rate, CPU shares and final loss."""
        start, end = self._span
        tokens = sum(e.tokens for steps in self._steps.values() for e in steps if start < e.time <= end)
        share = shares(*self._cpu)
        return {
            "tokens_per_second": tokens / (end - start),
            "window_seconds": end - start,
            "cpu_seconds_per_million_tokens": share.total / tokens * 1e6,
            "cpu_share": {name: value / share.total for name, value in asdict(share).items()},
            "validation_loss": statistics.mean(self._finals.values()),
        }


async def run_swarm(config: Config) -> dict[str, object]:
    """One whole run of a local swarm, measured."""
    watch = Activity(config.local_swarm.replicas)
    with tempfile.TemporaryDirectory() as folder:
        swarm = LocalSwarm(config, Path(folder) / "run", observer=watch)
        try:
            await swarm.start()
            await swarm.wait()
        finally:
            await swarm.stop()
    return watch.result()


def run_single(config: Path, threads: int, windows: int, seconds: float) -> dict[str, float]:
    """One process, in a process of its own so that the thread setting holds."""
    command = [sys.executable, "-m", "benchmarks.single", str(config)]
    command += ["--threads", str(threads), "--windows", str(windows), "--seconds", str(seconds)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--tokens", type=int, default=400_000, help="target of each swarm run")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 2, 4], help="microbatches a replica, in turn")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    sweep = [run_single(options.config, t, w, SWEEP_SECONDS) for t, w in product(THREADS, WINDOWS)]
    best = max(sweep, key=lambda row: row["tokens_per_second"])
    rows: list[dict[str, object]] = []
    for in_flight in options.in_flight * options.repeats:
        quiet = [f"run.inner.target_tokens={options.tokens}", f"run.evaluation.every_tokens={10 * options.tokens}"]
        config = load_config(options.config, [*quiet, *options.set, f"node.in_flight={in_flight}"])
        single = run_single(options.config, int(best["threads"]), int(best["windows"]), SINGLE_SECONDS)
        swarm = asyncio.run(run_swarm(config))
        ratio = float(str(swarm["tokens_per_second"])) / single["tokens_per_second"]
        rows.append({"in_flight": in_flight, "ratio": ratio, "single": single, "swarm": swarm})
        print(json.dumps(rows[-1]), flush=True)
    result = {
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__},
        "version": __version__,
        "layout": f"{config.run.stages} stages × {config.local_swarm.replicas} replicas",
        "tokens": options.tokens,
        "single_sweep": sweep,
        "runs": rows,
        "by_in_flight": {str(count): summary(rows, count) for count in sorted(set(options.in_flight))},
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n")


def summary(rows: list[dict[str, object]], in_flight: int) -> dict[str, float]:
    """Medians over the runs with that many microbatches in flight."""
    mine = [row for row in rows if row["in_flight"] == in_flight]
    swarms = [cast(dict[str, Any], row["swarm"]) for row in mine]
    return {
        "ratio": statistics.median(cast(float, row["ratio"]) for row in mine),
        "tokens_per_second": statistics.median(s["tokens_per_second"] for s in swarms),
        "cpu_seconds_per_million_tokens": statistics.median(s["cpu_seconds_per_million_tokens"] for s in swarms),
        "validation_loss": statistics.median(s["validation_loss"] for s in swarms),
    }


if __name__ == "__main__":
    main()
