"""An exchange between two replicas over real p2pd, by codec and by size, beside what others send.

    python -m benchmarks.outer --out outer.json

Two processes with a p2pd each (`benchmarks.pair`). Each round moves the weights of both apart and averages them: with
each codec of the outer step, and as the published code of NoLoCo does it, both tensors in fp32 and nothing else, in
pieces over the same transport.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import torch
import uvloop

from benchmarks.command import command, parser_of, save, whole
from benchmarks.hop import Processes
from benchmarks.pair import WIDTHS, Pair, pair, peak_bytes, reset_peak
from noloco_node.outer import CodecName
from noloco_node.transport.calls import Width, side_by_side

CODECS: tuple[CodecName, ...] = get_args(CodecName)
PAPER = "NoLoCo (paper)"
STREAMS = 4


@dataclass(frozen=True)
class One:
    """One exchange."""

    bytes: int
    """That one side sends."""
    seconds: float
    held_seconds: float
    """For which the thread of the device was held."""
    cpu_seconds: float
    """Of both processes and both p2pd."""
    memory: int
    """Bytes by which this process grew at the most."""


@dataclass(frozen=True)
class Row:
    """One way of one size: medians over the rounds, with the least and the most."""

    way: str
    parameters: int
    bytes: int
    seconds: float
    fastest: float
    slowest: float
    held_seconds: float
    cpu_seconds: float
    memory: int


async def by_codec(two: Pair, cpu: Processes, millions: int, codec: CodecName, seed: int) -> One:
    """An exchange as nodes make it."""
    await two.hold(millions, codec)
    await two.move_apart(seed)
    before, resident = cpu.seconds(), reset_peak(two.pids[0])
    began = time.perf_counter()
    step = await two.own.average_with(two.other)
    took = time.perf_counter() - began
    grown = peak_bytes(two.pids[0]) - resident
    return One(step.bytes_sent, took, step.held_seconds, cpu.seconds() - before, max(0, grown))


async def as_the_paper(two: Pair, cpu: Processes) -> One:
    """Δ and φ in fp32, each averaged as it comes; nothing is checked, and the weights are held while it goes on."""
    size, chunk = two.own.worker.outer.size, two.own.spec.limits.chunk_bytes // 4
    both = torch.randn(2 * size)
    before, resident = cpu.seconds(), reset_peak(two.pids[0])
    began = time.perf_counter()

    async def swap(start: int) -> None:
        part = both[start : start + chunk]
        part.add_(await two.swap(part)).div_(2.0)

    await side_by_side(range(0, 2 * size, chunk), Width(600.0, STREAMS, STREAMS), swap)
    took = time.perf_counter() - began
    grown = peak_bytes(two.pids[0]) - resident + both.nbytes
    return One(both.nbytes, took, took, cpu.seconds() - before, max(0, grown))


async def measure(sizes: Sequence[int], codecs: Sequence[CodecName], rounds: int) -> list[Row]:
    """Every codec in turn, again and again, size by size. The first round opens streams and touches memory."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        async with pair(Path(name)) as two:
            cpu = Processes((*two.pids, *two.p2pds))
            for millions in sizes:
                taken: dict[str, list[One]] = {}
                for turn in range(rounds + 1):
                    for codec in codecs:
                        one = await by_codec(two, cpu, millions, codec, turn)
                        taken.setdefault(codec, []).append(one)
                    taken.setdefault(PAPER, []).append(await as_the_paper(two, cpu))
                size = two.own.worker.outer.size
                rows += [row_of(way, size, ones[1:]) for way, ones in taken.items()]
                print(table(rows[-len(taken) :]), flush=True)
    return rows


def row_of(way: str, parameters: int, ones: Sequence[One]) -> Row:
    """What some exchanges come to."""

    def middle(name: str) -> float:
        return statistics.median(getattr(one, name) for one in ones)

    seconds = [one.seconds for one in ones]
    return Row(
        way,
        parameters,
        ones[0].bytes,
        statistics.median(seconds),
        min(seconds),
        max(seconds),
        middle("held_seconds"),
        middle("cpu_seconds"),
        int(middle("memory")),
    )


def table(rows: Sequence[Row]) -> str:
    """A row for each way of one size; ratios to the paper's."""
    paper = next(row for row in rows if row.way == PAPER)
    lines = [
        f"{paper.parameters / 1e6:.1f} million parameters",
        "| way | MB sent | of NoLoCo (paper) | seconds (range) | the same | device held, ms | CPU s | memory, MB |",
        "|---" * 8 + "|",
    ]
    lines += [
        f"| {row.way} | {row.bytes / 1e6:.1f} | {row.bytes / paper.bytes:.3f} "
        f"| {row.seconds:.2f} ({row.fastest:.2f} to {row.slowest:.2f}) | {row.seconds / paper.seconds:.2f} "
        f"| {1e3 * row.held_seconds:.1f} | {row.cpu_seconds:.2f} | {row.memory / 1e6:.0f} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print the tables, write the figures."""
    parser = parser_of(__doc__)
    parser.add_argument("--millions", type=int, nargs="+", default=[1, 10], choices=list(WIDTHS), metavar="M")
    parser.add_argument("--codecs", nargs="+", default=list(CODECS), choices=CODECS)
    parser.add_argument("--rounds", type=whole, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {"cores": os.cpu_count(), "load": os.getloadavg()[0], "rounds": options.rounds}
    rows = uvloop.run(measure(options.millions, options.codecs, options.rounds))
    found["exchanges"] = [asdict(row) for row in rows]
    save(options.out, found)


if __name__ == "__main__":
    command(main)
