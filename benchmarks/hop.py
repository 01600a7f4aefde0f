"""One hop: an activation there and its gradient back, over what could carry it on this machine.

    python -m benchmarks.hop --out hop.json

Two processes, a p2pd each. The same bytes go there and as many come back: over an asyncio TCP connection, over a bare
stream of p2pd (which is what p2pd bears), over this project's transport on the same p2pd, and over the transport as
nodes of one machine use it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import uvloop

from benchmarks.command import command, parser_of, save, whole
from benchmarks.other_process import other_process
from noloco_node.config.node_settings import NodeSettings
from noloco_node.identity.addresses import parse_address
from noloco_node.identity.keys import load_or_create_identity
from noloco_node.identity.peer_id import PeerId
from noloco_node.libp2p.daemon import PrivateP2P
from noloco_node.libp2p.start import running_p2p
from noloco_node.simulator.report import table_of
from noloco_node.transport.libp2p import Libp2pTransport
from noloco_node.transport.messages import Message
from noloco_node.transport.same_machine import SameMachine

SIZES = (4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
LENGTH = 8
BARE = "bench/1"
CARRIERS = ("tcp", "bare p2pd", "noloco", "nearby")
MOST_CALLS = 32
"""So many calls of a size in a row at the most."""
START_SECONDS = 60.0
CALL_SECONDS = 600.0

Exchange = Callable[[int], Awaitable[None]]
"""Sends so many bytes and receives as many."""


async def _answer_bytes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            size = int.from_bytes(await reader.readexactly(LENGTH), "big")
            body = await reader.readexactly(size)
            writer.write(body)
            await writer.drain()
    writer.close()


def _by_bytes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Exchange:
    async def exchange(size: int) -> None:
        async def write() -> None:
            writer.write(size.to_bytes(LENGTH, "big"))
            writer.write(bytes(size))
            await writer.drain()

        writing = asyncio.ensure_future(write())
        await reader.readexactly(size)
        await writing

    return exchange


async def _echo(_peer: PeerId, message: Message) -> Message:
    return Message({}, message.tensors)


def _no_admission(*_request: object) -> None:
    return None


async def serve(folder: Path) -> None:
    """Answer on every carrier until standard input ends; print where."""
    tcp = await asyncio.start_server(_answer_bytes, "127.0.0.1", 0, limit=1 << 20)
    identity = load_or_create_identity(folder / "server.key")
    async with running_p2p(NodeSettings(), identity) as daemon:
        transport = Libp2pTransport(daemon, identity=identity, nearby=SameMachine(identity))
        transport.serve("bench.echo", _no_admission, _echo, max_concurrent_per_peer=64)
        await transport.start()

        async def bare(_peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await _answer_bytes(reader, writer)

        await daemon.serve_streams(BARE, bare)
        where = {"tcp": tcp.sockets[0].getsockname()[1], "p2p": daemon.visible_addresses()[0], "p2pd": daemon.pid}
        print(json.dumps(where), flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        await transport.close()
    tcp.close()


@dataclass(frozen=True)
class Measured:
    """One size over one carrier."""

    carrier: str
    bytes: int
    """Each way."""
    seconds: float
    """There and back, median."""
    fastest: float
    slowest: float
    cpu_seconds: float
    """Of both processes and both p2pd, for one there and back."""


class Processes:
    """CPU time of what takes part."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._processes = [psutil.Process(pid) for pid in pids]

    def seconds(self) -> float:
        """User and system time so far."""
        times = [process.cpu_times() for process in self._processes]
        return sum(each.user + each.system for each in times)


@contextlib.asynccontextmanager
async def carriers(where: dict[str, Any], folder: Path) -> AsyncIterator[tuple[dict[str, Exchange], PrivateP2P]]:
    """The ways to the server, and the p2pd on this side."""
    async with contextlib.AsyncExitStack() as stack:
        peer = parse_address(where["p2p"]).peer
        identity = load_or_create_identity(folder / "client.key")
        settings = NodeSettings(initial_peers=(where["p2p"],))
        daemon = await stack.enter_async_context(running_p2p(settings, identity))
        transport = Libp2pTransport(daemon, identity=identity)
        near = Libp2pTransport(daemon, identity=identity, nearby=SameMachine(identity))
        for each in (transport, near):
            stack.push_async_callback(each.close)
        reader, writer = await asyncio.open_connection("127.0.0.1", where["tcp"], limit=1 << 20)
        stack.callback(writer.close)
        bare_reader, bare_writer = await daemon.open_stream(peer, BARE)
        stack.callback(bare_writer.close)

        async def by(way: Libp2pTransport, size: int) -> None:
            answer = await way.call(
                peer,
                "bench.echo",
                Message({}, (torch.zeros(size // 4),)),
                timeout=CALL_SECONDS,
                progress=CALL_SECONDS,
                max_answer_bytes=size,
            )
            assert answer.tensors[0].nbytes == size

        bare = (_by_bytes(reader, writer), _by_bytes(bare_reader, bare_writer))
        yield dict(zip(CARRIERS, (*bare, partial(by, transport), partial(by, near)), strict=True)), daemon


async def measure(ways: dict[str, Exchange], cpu: Processes, size: int, rounds: int) -> list[Measured]:
    """Every carrier in turn, again and again: whatever disturbs the machine disturbs all."""
    taken: dict[str, list[float]] = {carrier: [] for carrier in ways}
    worked: dict[str, float] = dict.fromkeys(ways, 0.0)
    times = max(1, min(MOST_CALLS, (4 << 20) // size))
    for turn in range(rounds + 1):
        for carrier, way in ways.items():
            before, began = cpu.seconds(), time.perf_counter()
            for _ in range(times):
                await way(size)
            if turn:  # the first opens streams and fills buffers
                taken[carrier].append((time.perf_counter() - began) / times)
                worked[carrier] += cpu.seconds() - before
    return [
        Measured(carrier, size, statistics.median(took), min(took), max(took), worked[carrier] / rounds / times)
        for carrier, took in taken.items()
    ]


def table(measured: Sequence[Measured]) -> str:
    """A row for each size: times as long as the bare stream of p2pd takes."""
    rows = [["each way", *CARRIERS, "noloco / bare p2pd", "the same in CPU"]]
    for size in sorted({each.bytes for each in measured}):
        row = {each.carrier: each for each in measured if each.bytes == size}
        ours, bare = row["noloco"], row["bare p2pd"]
        cpu = f"{ours.cpu_seconds / bare.cpu_seconds:.2f}" if bare.cpu_seconds else "–"
        shown = f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
        cells = [f"{1e3 * row[name].seconds:.2f} ms" for name in CARRIERS]
        rows.append([shown, *cells, f"{ours.seconds / bare.seconds:.2f}", cpu])
    return table_of(rows)


async def run(options: argparse.Namespace) -> list[Measured]:
    """Start the server and measure every size."""
    with tempfile.TemporaryDirectory() as name:
        server = other_process("benchmarks.hop", "--serve", name, seconds=START_SECONDS)
        async with server as (where, pid), carriers(where, Path(name)) as (ways, daemon):
            cpu = Processes((psutil.Process().pid, pid, where["p2pd"], daemon.pid))
            return [each for size in options.sizes for each in await measure(ways, cpu, size, options.rounds)]


def main() -> None:
    """Measure, print the table, write the figures."""
    parser = parser_of(__doc__)
    parser.add_argument("--serve", type=Path, metavar="DIR", help=argparse.SUPPRESS)
    parser.add_argument("--sizes", type=whole, nargs="+", default=list(SIZES), metavar="BYTES")
    parser.add_argument("--rounds", type=whole, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.serve:
        uvloop.run(serve(options.serve))
        return
    found = uvloop.run(run(options))
    print(table(found))
    save(options.out, {"rounds": options.rounds, "measured": [asdict(each) for each in found]})


if __name__ == "__main__":
    command(main)
