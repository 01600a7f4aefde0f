"""Much at once over a long line: a state transfer and an exchange between two replicas behind a shaping proxy.

    python -m benchmarks.bulk --round-trip 200 --mbit 1000 --out benchmarks/results/bulk.json

Two processes with a p2pd each (`benchmarks.pair`). In turn: bytes over so many bare streams of p2pd, there and back;
the other side's state as a joiner fetches it, at the donor's own rate and at any; an exchange in fp32.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import uvloop

from benchmarks.command import command, not_negative, positive, results_file, whole
from benchmarks.hop import Processes
from benchmarks.pair import WIDTHS, Pair, pair
from noloco_node.state_transfer.fetch import fetch_state, new_download
from noloco_node.transport.pieces import Width, side_by_side

ANY_RATE = 4e9


@dataclass(frozen=True)
class Row:
    """One thing: MB/s one way, median with the least and the most."""

    what: str
    megabytes: float
    """One way."""
    rate: float
    slowest: float
    fastest: float
    cores: float
    """CPU seconds a second of both processes and both p2pd."""


async def state(two: Pair, rate: float | None) -> int:
    """The other side's state, whole and verified; its bytes."""
    own = two.own
    if rate is not None:
        await two.lift_rate(rate)
    download = await asyncio.to_thread(new_download, own.spec, own.worker)
    await fetch_state(
        own.spec, 0, two.transport, own.worker, two.other, download, streams=own.streams, on_progress=lambda _: None
    )
    return download.size


async def exchange(two: Pair) -> int:
    """An outer step of two; bytes each way."""
    return (await two.own.average_with(two.other)).bytes_sent


async def pieces(two: Pair, size: int, most: int) -> int:
    """So many requests under way, a piece there and one back in each."""
    chunk = two.own.spec.limits.chunk_bytes
    piece = torch.zeros(chunk // 4)

    async def swap(_: int) -> None:
        await two.swap(piece)

    await side_by_side(range(-(-size // chunk)), Width(most, 600.0), swap)
    return -(-size // chunk) * chunk


async def measure(options: argparse.Namespace) -> list[Row]:
    """Everything in turn, again and again. The first round opens streams."""
    with tempfile.TemporaryDirectory() as name:
        async with pair(options.round_trip / 1e3, options.mbit, folder=Path(name)) as two:
            cpu = Processes((*two.pids, *two.p2pds))
            size = 4 * await two.hold(options.millions, "fp32")
            works: dict[str, Callable[[], Coroutine[Any, Any, int]]] = {}
            for most in options.streams:
                works[f"{most} requests under way, both ways"] = lambda most=most: pieces(two, size, most)
            works["exchange, both ways"] = lambda: exchange(two)
            works["state at the donor's own rate"] = lambda: state(two, None)
            works["state at any rate"] = lambda: state(two, ANY_RATE)
            taken: dict[str, list[tuple[int, float, float]]] = {what: [] for what in works}
            for turn in range(options.rounds + 1):
                for what, work in works.items():
                    if options.only and not any(words in what for words in options.only):
                        continue
                    await two.hold(options.millions, "fp32")
                    before, began = cpu.seconds(), time.perf_counter()
                    moved = await work()
                    took = time.perf_counter() - began
                    print(f"{turn}: {what}: {moved / took / 1e6:.1f} MB/s", flush=True)
                    if turn:
                        taken[what].append((moved, took, (cpu.seconds() - before) / took))
    return [row_of(what, ones) for what, ones in taken.items() if ones]


def row_of(what: str, ones: list[tuple[int, float, float]]) -> Row:
    """What some of one kind come to."""
    rates = [moved / took / 1e6 for moved, took, _ in ones]
    cores = statistics.median(each for _, _, each in ones)
    return Row(what, ones[0][0] / 1e6, statistics.median(rates), min(rates), max(rates), cores)


def table(rows: list[Row]) -> str:
    """A row for each."""
    lines = ["| what | MB one way | MB/s one way (range) | cores |", "|---|---|---|---|"]
    lines += [
        f"| {row.what} | {row.megabytes:.0f} | {row.rate:.1f} ({row.slowest:.1f} to {row.fastest:.1f}) "
        f"| {row.cores:.2f} |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure, print the table, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--round-trip", type=not_negative, default=200.0, metavar="MS")
    parser.add_argument("--mbit", type=positive, default=1000.0, help="Mbit/s each way")
    parser.add_argument("--millions", type=int, default=10, choices=list(WIDTHS), help="parameters of the stage")
    parser.add_argument(
        "--streams", type=int, nargs="*", default=[4, 16, 32], help="requests under way, for comparison"
    )
    parser.add_argument("--rounds", type=whole, default=3)
    parser.add_argument("--only", nargs="*", default=[], metavar="WORDS", help="what has one of these in its name")
    parser.add_argument("--out", type=results_file)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = uvloop.run(measure(options))
    print(table(rows))
    if options.out:
        settings = {"round_trip_ms": options.round_trip, "mbit": options.mbit, "rounds": options.rounds}
        found = {"cores": os.cpu_count(), "load": os.getloadavg()[0], "measured": [asdict(row) for row in rows]}
        options.out.write_text(json.dumps(settings | found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    command(main)
