"""How long a joiner needs, from its command to its first microbatch and to full weight in its stage's averages.

    python -m benchmarks.join configs/tiny.yaml --out benchmarks/results/join.json

Both stages are served by two daemons each that train; then one more joins the last stage by the address of one of them,
and ends when its probation is over. Again and again, each time a new joiner; all on this machine's cores.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from benchmarks.command import command, parser_of, save, whole
from noloco_node.config.load import load_config
from noloco_node.telemetry.events import (
    AnyEvent,
    Event,
    EventReader,
    InnerStep,
    NodeStarted,
    NodeStopped,
    OuterStep,
    ProbationEnded,
    StateDownload,
)

SETTINGS = (
    "run.inner.target_tokens=1_000_000_000",
    "run.evaluation.every_tokens=1_000_000_000",
    "node.torch_threads=1",
    "node.in_flight=1",
)
WAIT_SECONDS = 900.0
LOOK_SECONDS = 0.1
END_SECONDS = 60.0


@dataclass(frozen=True)
class Joined:
    """One joiner. Seconds since its command; those of `probation` since its first inner step."""

    up: float
    """It says that it is up: p2pd, its stage and its state are there."""
    up_processor: float
    """Of the processor that the daemon itself, without p2pd, took until then."""
    state: float
    """It has a stage peer's state."""
    first_step: float
    """Its first inner step, so the end of its first microbatches."""
    full_weight: float
    """Its probation is over; before its first step where the copied state was due for an outer step."""
    probation_steps: int
    ending: str
    bytes: int
    """Of the state."""


class Daemon:
    """A node in a process of its own, by its events."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._command = [sys.executable, "-m", "noloco_node", *arguments, "--run-folder", str(folder)]
        self._reader = EventReader(folder / "events.jsonl")
        self._errors = folder.with_suffix(".err")
        self.events: list[AnyEvent] = []
        self.began = time.time()
        with self._errors.open("wb") as errors:
            self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=errors)

    def wait(self, done: Callable[[list[AnyEvent]], bool], what: str) -> None:
        """Until its events say so. SystemExit with its last words where it ends before, or takes too long."""
        limit = time.monotonic() + WAIT_SECONDS
        while not done(self.events):
            self.events += self._reader.new_events()
            ended = self.process.poll() is not None or any(isinstance(each, NodeStopped) for each in self.events)
            if ended or time.monotonic() > limit:
                words = self._errors.read_text(encoding="utf-8", errors="replace")[-800:]
                raise SystemExit(f"benchmarks.join: a daemon did not come to {what}:\n{words}")
            time.sleep(LOOK_SECONDS)

    def first(self, kind: type[Event]) -> float:
        """Seconds from its command to its first event of that kind."""
        return next(each.time for each in self.events if isinstance(each, kind)) - self.began

    def processor_seconds(self) -> float:
        """That it has taken so far."""
        times = psutil.Process(self.process.pid).cpu_times()
        return times.user + times.system

    def end(self) -> None:
        """As its owner ends it."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_SECONDS)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def has(kind: type[Event], count: int = 1) -> Callable[[list[AnyEvent]], bool]:
    """Whether there are so many events of that kind."""
    return lambda events: sum(isinstance(each, kind) for each in events) >= count


@contextlib.contextmanager
def swarm(config: Path, folder: Path) -> Iterator[str]:
    """Two stages of two replicas that train; the address of one."""
    settings = [part for setting in SETTINGS for part in ("--set", setting)]
    running: list[Daemon] = []
    try:
        address: str | None = None
        for number in range(4):
            peers = () if address is None else ("--initial-peers", address)
            own = ("run", str(config), *settings, "--stage", str(number % 2), *peers)
            running.append(Daemon(folder / f"node{number}", *own))
            if address is None:
                running[0].wait(has(NodeStarted), "its start")
                address = next(each.addresses[0] for each in running[0].events if isinstance(each, NodeStarted))
        for daemon in running:
            daemon.wait(has(OuterStep, 2), "its second outer step")  # before the first a joiner copies nobody
        print("four daemons train", flush=True)
        assert address is not None
        yield address
    finally:
        for daemon in running:
            daemon.end()


def join(address: str, folder: Path, stage: int) -> Joined:
    """One joiner, until its probation is over and it has trained."""
    joiner = Daemon(folder, "join", address, "--stage", str(stage), "--set", "node.torch_threads=1")
    try:
        joiner.wait(has(NodeStarted), "its start")
        processor = joiner.processor_seconds()
        joiner.wait(has(ProbationEnded), "the end of its probation")
        joiner.wait(has(InnerStep), "its first inner step")  # a copy may be due for an outer step before that
    finally:
        joiner.end()
    downloads = [each for each in joiner.events if isinstance(each, StateDownload)]
    ending = next(each for each in joiner.events if isinstance(each, ProbationEnded))
    return Joined(
        up=joiner.first(NodeStarted),
        up_processor=processor,
        state=downloads[-1].time - joiner.began,
        first_step=joiner.first(InnerStep),
        full_weight=ending.time - joiner.began,
        probation_steps=ending.steps,
        ending=ending.reason,
        bytes=downloads[-1].total,
    )


def table(found: Sequence[Joined]) -> Iterator[str]:
    """What the joiners needed, in lines."""
    yield "| seconds until a joiner | median | least | most |\n|---|---|---|---|"
    rows = {
        "is up": "up",
        "is up, of its processor": "up_processor",
        "has a stage peer's state": "state",
        "has taken its first inner step": "first_step",
        "counts in full": "full_weight",
    }
    for words, field in rows.items():
        taken = [float(getattr(each, field)) for each in found]
        yield f"| {words} | {statistics.median(taken):.1f} | {min(taken):.1f} | {max(taken):.1f} |"
    yield f"\nprobation: {', '.join(f'{each.probation_steps} inner steps ({each.ending})' for each in found)}"


def main() -> None:
    """Measure, print the table, write the figures."""
    parser = parser_of(__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--rounds", type=whole, default=3)
    options = parser.parse_args()
    last = load_config(options.config).run.stages - 1
    with tempfile.TemporaryDirectory() as name, swarm(options.config, Path(name)) as address:
        found: list[Joined] = []
        for number in range(options.rounds):
            found.append(join(address, Path(name) / f"joiner{number}", last))
            print(found[-1], flush=True)
    print("\n".join(table(found)))
    machine = {"cores": os.cpu_count(), "load": os.getloadavg()[0]}
    figures = {"joiners": [asdict(each) for each in found]}
    save(options.out, machine | figures)


if __name__ == "__main__":
    command(main)
