"""Tokens per second of a local swarm over those of one process training the same model on the same cores.

    python -m benchmarks.pipeline configs/tiny.yaml --out pipeline.json
    python -m benchmarks.pipeline configs/tiny.yaml --layouts 2x1 2x2 4x2 1x4 --activations fp16 int8 --repeats 3
    python -m benchmarks.pipeline benchmarks/hidden-512.yaml --layouts 2x2 2x4

The single process takes its best of several microbatch and thread settings (or what `--single` names); then single and
swarm are measured in turn, so that both see the same machine, every variant once before any is measured again. The
swarm's rate is taken between the moment when every first-stage replica has taken some inner steps and the moment when
the first of them has trained 95 % of the tokens: start-up, the last evaluation and the end are left out on both sides.
Validation losses are at equal tokens. A variant is a layout, a number of microbatches in flight and a codec of
activations.
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
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.command import command, parser_of, positive, save, whole
from noloco_node import __version__
from noloco_node.config.load import Config, load_config
from noloco_node.errors import ExitCode, UserError
from noloco_node.launch.local_swarm import LocalSwarm, Observer, SwarmNode
from noloco_node.simulator.report import table_of
from noloco_node.telemetry.events import AnyEvent, Evaluation, InnerStep

SWEEP_SECONDS = 8
SINGLE_SECONDS = 25
THREADS = (1, 2)
WINDOWS = (4, 8, 16, 32)
STEPS_BEFORE_WINDOW = 5
WINDOW_ENDS = 0.95
"""Share of the tokens: what comes after is the end, and each head's evaluation of the whole of its held-out text."""


PLACES = {
    "compute_thread": "compute threads",
    "event_loop": "event loops",
    "other_threads": "other threads",
    "p2pd": "p2pd",
}
"""Where CPU time goes, as `CpuShare` and the table name it."""


@dataclass(frozen=True)
class Variant:
    """What one row of the table is measured with."""

    stages: int
    replicas: int
    in_flight: int
    activations: str

    @property
    def name(self) -> str:
        """As the table shows it."""
        return f"{self.stages} × {self.replicas}, {self.in_flight} in flight, {self.activations}"

    @property
    def settings(self) -> list[str]:
        """As `--set` takes them."""
        return [
            f"run.model.stages={self.stages}",
            f"local_swarm.replicas={self.replicas}",
            f"node.in_flight={self.in_flight}",
            f"run.pipeline.activations={self.activations}",
        ]


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

    def __init__(self, heads: int, tokens: int) -> None:
        self._heads = heads
        self._last_clock = WINDOW_ENDS * tokens
        self._steps: dict[str, list[InnerStep]] = {}
        self._finals: dict[str, float] = {}
        self._clock = 0.0
        self._pids: dict[str, int] = {}
        self._cpu: list[dict[str, float]] = []
        self._span: list[float] = []

    def on_event(self, node: SwarmNode, event: AnyEvent) -> None:
        """Open the window once all heads are under way, close it when one is nearly at the end."""
        self._pids[node.name] = node.pid
        if node.stage > 0:
            return
        if isinstance(event, InnerStep):
            self._steps.setdefault(node.name, []).append(event)
            self._clock = max(self._clock, event.clock)
        if isinstance(event, Evaluation) and event.final:
            self._finals[node.name] = event.loss
        ready = len(self._steps) == self._heads and min(map(len, self._steps.values())) >= STEPS_BEFORE_WINDOW
        if (not self._cpu and ready) or (len(self._cpu) == 1 and self._clock >= self._last_clock):
            self._cpu.append(cpu_of(list(self._pids.values())))
            self._span.append(event.time)

    def result(self) -> dict[str, Any]:
        """Rate, CPU shares and final loss."""
        if len(self._span) < 2:
            raise UserError(
                ExitCode.USAGE,
                f"the swarm reached its {self._last_clock / WINDOW_ENDS:,.0f} tokens before anything could be measured",
                f"train longer: {STEPS_BEFORE_WINDOW} inner steps of each replica and some more",
            )
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


async def run_swarm(config: Config) -> dict[str, Any]:
    """One whole run of a local swarm, measured."""
    watch = Activity(config.local_swarm.replicas, config.run.inner.target_tokens)
    with tempfile.TemporaryDirectory() as folder:
        swarm = LocalSwarm(config, Path(folder) / "run", observer=watch)
        try:
            await swarm.start()
            await swarm.wait()
        finally:
            await swarm.stop()
    return watch.result()


def run_single(config: Path, settings: list[str], threads: int, windows: int, seconds: float) -> dict[str, float]:
    """One process, in a process of its own so that the thread setting holds."""
    command = [sys.executable, "-m", "benchmarks.single", str(config)]
    command += ["--threads", str(threads), "--windows", str(windows), "--seconds", str(seconds)]
    for setting in settings:
        command += ["--set", setting]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def layout(text: str) -> tuple[int, int]:
    """Stages and replicas out of "2x4". ArgumentTypeError where it is no such text."""
    parts = text.split("x")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no layout: write stages x replicas, as in 2x4")
    return int(parts[0]), int(parts[1])


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """What the caller wants."""
    parser = parser_of(__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--tokens", type=whole, default=400_000, help="target of each swarm run")
    parser.add_argument("--layouts", type=layout, nargs="+", metavar="PxR", help="the config's own, if none is named")
    parser.add_argument("--in-flight", type=whole, nargs="+", default=[1], help="microbatches a first-stage replica")
    parser.add_argument("--activations", nargs="+", help="codecs, one after the other; the config's own, if none")
    parser.add_argument("--repeats", type=whole, default=1)
    parser.add_argument("--single", type=whole, nargs=2, metavar=("THREADS", "WINDOWS"), help="take these, no sweep")
    parser.add_argument("--single-seconds", type=positive, default=SINGLE_SECONDS)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of swarm and single process")
    return parser.parse_args(arguments)


def settings_of(tokens: int, warmup: int) -> list[str]:
    """Of a swarm that is measured: so many tokens, no more of them warm-up than half, and one evaluation, at its
    end."""
    return [
        f"run.inner.target_tokens={tokens}",
        f"run.inner.warmup_tokens={min(warmup, tokens // 2)}",
        f"run.evaluation.every_tokens={10 * tokens}",
    ]


def variants(options: argparse.Namespace) -> list[Variant]:
    """All that are to be measured."""
    config = load_config(options.config, options.set)
    layouts: list[tuple[int, int]] = options.layouts or [(config.run.model.stages, config.local_swarm.replicas)]
    codecs: list[str] = options.activations or [config.run.pipeline.activations[0]]
    flights: list[int] = options.in_flight
    return [
        Variant(stages, replicas, in_flight, codec)
        for stages, replicas in layouts
        for in_flight in flights
        for codec in codecs
    ]


def main() -> None:
    """Measure, print and write the result."""
    options = parse()
    wanted = variants(options)
    quiet = settings_of(options.tokens, load_config(options.config, options.set).run.inner.warmup_tokens)
    configs = [load_config(options.config, [*quiet, *options.set, *variant.settings]) for variant in wanted]
    rows: list[dict[str, Any]] = []
    sweep: list[dict[str, float]] = []
    if options.single is None:
        sweep = [run_single(options.config, options.set, t, w, SWEEP_SECONDS) for t, w in product(THREADS, WINDOWS)]
        best = max(sweep, key=lambda row: row["tokens_per_second"])
        options.single = [int(best["threads"]), int(best["windows"])]
    for variant, config in list(zip(wanted, configs, strict=True)) * options.repeats:
        threads, windows = options.single
        single = run_single(options.config, options.set, threads, windows, options.single_seconds)
        swarm = asyncio.run(run_swarm(config))
        ratio = swarm["tokens_per_second"] / single["tokens_per_second"]
        cpu = swarm["cpu_seconds_per_million_tokens"] / single["cpu_seconds_per_million_tokens"]
        rows.append({"variant": variant.name, "ratio": ratio, "cpu_ratio": cpu, "single": single, "swarm": swarm})
        print(json.dumps(rows[-1]), flush=True)
    result = {
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__},
        "version": __version__,
        "tokens": options.tokens,
        "single_sweep": sweep,
        "runs": rows,
        "summary": {name: summary(rows, name) for name in dict.fromkeys(row["variant"] for row in rows)},
    }
    print(json.dumps(result["summary"], indent=2))
    print(table(result["summary"]))
    save(options.out, result)


def summary(rows: list[dict[str, Any]], variant: str) -> dict[str, list[float]]:
    """Of each figure median, least and most over the runs of a variant."""
    mine = [row for row in rows if row["variant"] == variant]
    figures = {
        "ratio": [row["ratio"] for row in mine],
        "cpu_ratio": [row["cpu_ratio"] for row in mine],
        "tokens_per_second": [row["swarm"]["tokens_per_second"] for row in mine],
        "cpu_seconds_per_million_tokens": [row["swarm"]["cpu_seconds_per_million_tokens"] for row in mine],
        "single_cpu_seconds_per_million_tokens": [row["single"]["cpu_seconds_per_million_tokens"] for row in mine],
        "validation_loss": [row["swarm"]["validation_loss"] for row in mine],
        **{place: [row["swarm"]["cpu_share"][place] for row in mine] for place in PLACES},
    }
    return {name: [statistics.median(values), min(values), max(values)] for name, values in figures.items()}


def table(summaries: dict[str, dict[str, list[float]]]) -> str:
    """For a page: one row a variant, with the shares of its CPU time by where it went."""
    head = ["variant", "swarm / one process", "CPU of a token, likewise", *PLACES.values(), "loss"]
    rows: list[list[str]] = []
    for name, figures in summaries.items():
        (rate, *ends), cpu = figures["ratio"], figures["cpu_ratio"][0]
        spread = f"{rate:.2f} ({ends[0]:.2f} to {ends[1]:.2f})"
        shares = [f"{figures[place][0]:.1%}" for place in PLACES]
        rows.append([name, spread, f"{cpu:.2f}", *shares, f"{figures['validation_loss'][0]:.3f}"])
    return table_of([head, *rows])


if __name__ == "__main__":
    command(main)
