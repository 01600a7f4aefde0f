"""A text larger than memory: what reading it takes of memory, and how long the device waits for it.

    python -m benchmarks.streamed --out benchmarks/results/streamed.json

First one process reads a text in shards of C4's form (gzipped JSON lines) as stage 0 does, a hundred times as far as
at its first note of memory: resident memory then and at the end, the seconds from opening it to the first microbatch,
tokens a second. Then a swarm of two stages trains on the same shards with a tokenizer learnt from them, while so many
processes beside it keep the machine busy: what its first stage waited for text, of the time that it trained.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gzip
import json
import multiprocessing
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.command import command, positive, results_file, whole
from noloco_node.config.load import Config, load_config
from noloco_node.data.reading import Reader, open_samples
from noloco_node.data.turns import TurnPosition
from noloco_node.launch.local_swarm import LocalSwarm, Observer, SwarmNode
from noloco_node.telemetry.events import Account, AnyEvent

SHARDS = 100
PIECES = 150
"""Documents in each shard."""
CHARACTERS = 4000
WINDOWS, TOKENS = 4, 1024
EARLY, LATE = 2_000_000, 200_000_000
"""Tokens drawn when memory is noted."""
BYTES, VOCABULARY = 256, 8192
"""Sizes of the vocabularies."""
STAGE = (128, 344, 4)
"""Hidden size, width of the feed-forward part, layers of the swarm's model."""


def write_shards(folder: Path) -> int:
    """Pieces of Python's standard library, of which each shard takes its own; bytes of text."""
    folder.mkdir()
    sources = [
        path.read_text("utf-8", "replace") for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    ]
    pieces = [text[at : at + CHARACTERS] for text in sources for at in range(0, len(text), CHARACTERS)]
    total = 0
    for shard in range(SHARDS):
        name = folder / f"c4-train.{shard:05d}-of-{SHARDS:05d}.json.gz"
        with gzip.open(name, "wt", compresslevel=1, encoding="utf-8") as file:
            for piece in pieces[shard::SHARDS][:PIECES]:
                total += len(piece)
                file.write(json.dumps({"text": piece, "url": "https://example.org"}) + "\n")
    return total


def config_of(base: Path, shards: Path, *changes: str) -> Config:
    """The base file, streaming that text."""
    hidden, inner, layers = STAGE
    model = (hidden, inner, layers, TOKENS)
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings")
    return load_config(
        base,
        [
            *(f"run.model.config.{name}={value}" for name, value in zip(names, model, strict=True)),
            "run.data.source=text",
            f"run.data.path={shards}/c4-train.*.json.gz",
            "run.data.streaming=true",
            f"run.data.sequence_length={TOKENS}",
            f"run.inner.microbatch_windows={WINDOWS}",
            *changes,
        ],
    )


def resident() -> float:
    """MiB of this process, once the allocator has given back what was freed. Linux."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


async def read(config: Config, late: int) -> dict[str, float]:
    """Draw so many tokens as stage 0 does, in this process."""
    run = config.run
    began = time.monotonic()
    reader = Reader("reader", WINDOWS, run.evaluation.windows, config.node.prefetch_bytes)
    samples = await asyncio.to_thread(open_samples, run.data, BYTES, reader, TurnPosition())
    await samples.draw()
    figures = {"first_microbatch_seconds": time.monotonic() - began}
    drawn, early = WINDOWS * TOKENS, 0.0
    while drawn < late:
        await samples.draw()
        drawn += WINDOWS * TOKENS
        if not early and drawn >= late // (LATE // EARLY):
            early = resident()
    figures |= {"tokens": drawn, "early_mib": early, "late_mib": resident()}
    figures["tokens_a_second"] = drawn / (time.monotonic() - began)
    samples.close()
    return figures


class Waits(Observer):
    """The first stage's accounts."""

    def __init__(self) -> None:
        self.accounts: list[Account] = []

    def on_event(self, node: SwarmNode, event: AnyEvent) -> None:
        """Keep it."""
        if isinstance(event, Account) and node.name.startswith("s0"):
            self.accounts.append(event)


def _turn() -> None:
    while True:
        sum(range(100_000))


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """So many processes that do nothing but keep a core busy."""
    others = [multiprocessing.Process(target=_turn, daemon=True) for _ in range(processes)]
    for other in others:
        other.start()
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.join()


async def trained(config: Config, seconds: float, beside: int) -> dict[str, float]:
    """One whole swarm: what its first stage waited for text, of so many seconds."""
    waits = Waits()
    with tempfile.TemporaryDirectory() as folder, busy(beside):
        swarm = LocalSwarm(config, Path(folder) / "run", observer=waits)
        try:
            await swarm.start()
            async with asyncio.timeout(seconds + 600):
                while not waits.accounts or waits.accounts[-1].time - waits.accounts[0].time < seconds:
                    swarm.read_events()
                    await asyncio.sleep(0.5)
        finally:
            await swarm.stop()
    last = waits.accounts[-1]
    took = last.time - waits.accounts[0].time
    return {
        "busy_processes": beside,
        "seconds": took,
        "waited_seconds": last.data_wait_seconds,
        "share": last.data_wait_seconds / took,
    }


def learnt(config: Path, folder: Path) -> Path:
    """A tokenizer of these shards, by the command."""
    command = [sys.executable, "-m", "noloco_node", "tokenizer", "train", str(config)]
    subprocess.run([*command, "--vocab-size", str(VOCABULARY), "--out", str(folder)], check=True)
    return folder


def main() -> None:
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, nargs="?", default=Path("configs/tiny.yaml"))
    parser.add_argument("--tokens", type=whole, default=LATE, help="to read; memory is noted after a hundredth too")
    parser.add_argument("--seconds", type=positive, default=40.0, help="for which the swarm trains")
    parser.add_argument("--busy", type=int, default=2, help="processes beside the swarm")
    parser.add_argument("--out", type=results_file)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        size = write_shards(folder / "text")
        config = config_of(options.config, folder / "text")
        reading = asyncio.run(read(config, options.tokens))
        print(json.dumps({"shards": SHARDS, "text_bytes": size, **reading}), flush=True)
        spec = folder / "spec.yaml"
        spec.write_text(json.dumps({"run": config.run.model_dump(mode="json", exclude_unset=True)}), encoding="utf-8")
        tokenizer = learnt(spec, folder / "tokenizer")
        changes = [f"run.data.tokenizer={tokenizer}", f"run.model.config.vocab_size={VOCABULARY}"]
        changes += ["local_swarm.replicas=1", "run.inner.target_tokens=1_000_000_000"]
        swarm = asyncio.run(
            trained(config_of(options.config, folder / "text", *changes), options.seconds, options.busy)
        )
        print(json.dumps(swarm), flush=True)
    if options.out:
        result = {"shards": SHARDS, "text_bytes": size, "reading": reading, "swarm": swarm}
        options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    command(main)
