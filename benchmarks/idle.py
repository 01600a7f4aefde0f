"""What a node costs before it has anything to do: its start, its memory, and its processor while it waits.

    python -m benchmarks.idle configs/tiny.yaml --out idle.json

One daemon serves the last stage of a run of which nobody serves the first: it is up, and waits. So does one with a
model of almost no size: what it takes is what a daemon takes beside its model. This package is compiled
before, as an installation has it.
"""

from __future__ import annotations

import compileall
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

import noloco_node
from benchmarks.command import command, parser_of, positive, save
from noloco_node.config.load import load_config
from noloco_node.telemetry.events import EventReader, NodeStarted

START_SECONDS = 300.0
LOOK_SECONDS = 0.05
SETTLING_SECONDS = 10.0
ROUNDS = 3
"""Of starts and of imports."""
DAEMON = "noloco_node.node.daemon"
OPTIMIZER = "torch._dynamo"
"""torch loads it at the first call of any of its optimizers, with sympy and `torch.distributed.tensor`."""
LIBRARIES = ("torch", OPTIMIZER, "hivemind", "transformers.modeling_utils", "transformers.models.llama.modeling_llama")
MEMORY_AFTER_IMPORT = """
import gc, importlib, json, psutil, time
gc.disable()
own = psutil.Process()
def taken():
    memory = own.memory_full_info()
    return memory.rss, memory.uss, time.process_time()
last = taken()
found = {"python": (*last[:2], 0.0)}
for name in NAMES:
    importlib.import_module(name)
    now = taken()
    found[name], last = [after - before for after, before in zip(now, last)], now
print(json.dumps(found))
"""
NEXT_TO_NONE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
"""A model whose weights take less than a megabyte."""


@dataclass(frozen=True)
class Idle:
    """One daemon's life so far."""

    help_seconds: float
    """`noloco-node --help`, wall clock."""
    start_seconds: float
    """From its command until it is about to advertise itself, wall clock."""
    start_cpu_seconds: float
    memory_bytes: int
    """Resident, daemon."""
    private_bytes: int
    """Of these, what no other process shares."""
    p2pd_bytes: int
    daemon_share: float
    """Of one core while it waits."""
    p2pd_share: float


def seconds_of_help() -> float:
    """Median of five."""
    taken: list[float] = []
    for _ in range(5):
        began = time.monotonic()
        subprocess.run([sys.executable, "-m", "noloco_node", "--help"], check=True, stdout=subprocess.DEVNULL)
        taken.append(time.monotonic() - began)
    return statistics.median(taken)


def imports() -> dict[str, tuple[int, int, float]]:
    """Bytes, those that no other process shares, and seconds of the processor that each library adds to a fresh
    process, in this order."""
    program = f"NAMES = {(*LIBRARIES, DAEMON)!r}\n{MEMORY_AFTER_IMPORT}"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    return {name: (size, own, seconds) for name, (size, own, seconds) in json.loads(done.stdout).items()}


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


@contextlib.contextmanager
def running(config: Path, settings: Sequence[str] = ()) -> Iterator[tuple[subprocess.Popen[str], Path, float]]:
    """A daemon of the last stage, where its events are, and when it began; ended with the block."""
    last = load_config(config).run.stages - 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "node"
        command = [sys.executable, "-m", "noloco_node", "run", str(config), "--stage", str(last)]
        command += ["--run-folder", str(folder), "--metrics-port", "0"]
        command += [part for setting in settings for part in ("--set", setting)]
        began = time.monotonic()
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as child:
            try:
                yield child, folder / "events.jsonl", began
            finally:
                child.terminate()
                child.communicate()


def idle(config: Path, seconds: float) -> Idle:
    """Start a daemon, wait until it is up, look at it for so long, end it."""
    with running(config) as (child, events, began):
        daemon = psutil.Process(child.pid)
        _wait_until_up(child, events, began)
        start, start_cpu = time.monotonic() - began, _cpu(daemon)
        time.sleep(seconds / 4)  # what a start leaves behind is over
        p2pd = next(each for each in daemon.children() if "p2pd" in each.name())
        before, before_p2pd, at = _cpu(daemon), _cpu(p2pd), time.monotonic()
        time.sleep(seconds)
        passed = time.monotonic() - at
        memory = daemon.memory_full_info()
        return Idle(
            help_seconds=seconds_of_help(),
            start_seconds=start,
            start_cpu_seconds=start_cpu,
            memory_bytes=memory.rss,
            private_bytes=memory.uss,
            p2pd_bytes=p2pd.memory_info().rss,
            daemon_share=(_cpu(daemon) - before) / passed,
            p2pd_share=(_cpu(p2pd) - before_p2pd) / passed,
        )


def started(config: Path) -> float:
    """Seconds from a daemon's command until it is up; it is ended then."""
    with running(config) as (child, events, began):
        _wait_until_up(child, events, began)
        return time.monotonic() - began


def beside_the_model(config: Path) -> tuple[int, int]:
    """Bytes of a daemon that waits with a model of almost no size: resident, and those that no other process shares."""
    settings = [f"run.model.config.{name}={value}" for name, value in NEXT_TO_NONE.items()]
    with running(config, settings) as (child, events, began):
        _wait_until_up(child, events, began)
        time.sleep(SETTLING_SECONDS)
        memory = psutil.Process(child.pid).memory_full_info()
        return memory.rss, memory.uss


def _wait_until_up(child: subprocess.Popen[str], events: Path, began: float) -> None:
    while time.monotonic() - began < START_SECONDS:
        if child.poll() is not None:
            raise SystemExit(f"benchmarks.idle: the daemon ended with {child.returncode}: {child.communicate()[1]}")
        if events.is_file() and any(isinstance(each, NodeStarted) for each in EventReader(events).new_events()):
            return
        time.sleep(LOOK_SECONDS)
    raise SystemExit(f"benchmarks.idle: the daemon was not up within {START_SECONDS:.0f} s")


def main() -> None:
    """Measure, print, write the figures."""
    parser = parser_of(__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--seconds", type=positive, default=60.0, help="to look at the daemon for")
    options = parser.parse_args()
    compileall.compile_dir(Path(noloco_node.__file__).parent, quiet=1)
    found, taken = idle(options.config, options.seconds), [imports() for _ in range(ROUNDS)]
    beside, own = beside_the_model(options.config)
    starts = [found.start_seconds, *(started(options.config) for _ in range(ROUNDS - 1))]
    start = statistics.median(starts)
    print(f"--help                 {found.help_seconds:.2f} s")
    print(
        f"up after               {start:.1f} s ({min(starts):.1f} to {max(starts):.1f}), "
        f"{found.start_cpu_seconds:.1f} s of CPU"
    )
    print(f"memory                 {found.memory_bytes / 1e6:.0f} MB, {found.private_bytes / 1e6:.0f} of it its own")
    print(f"memory beside a model  {beside / 1e6:.0f} MB, {own / 1e6:.0f} of it its own")
    for name in taken[0]:
        size, private, seconds = (statistics.median(each[name][place] for each in taken) for place in (0, 1, 2))
        print(f"  import {name:<42} {size / 1e6:.0f} MB, {private / 1e6:.0f} its own, {seconds:.2f} s of CPU")
    print(f"memory of p2pd         {found.p2pd_bytes / 1e6:.0f} MB")
    print(f"waiting                {found.daemon_share:.2%} of a core, p2pd {found.p2pd_share:.2%}")
    more = {"starts": starts, "imports": taken, "beside_model_bytes": beside, "beside_model_private_bytes": own}
    save(options.out, asdict(found) | more)


if __name__ == "__main__":
    command(main)
