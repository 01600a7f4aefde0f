"""One hop: an activation there and its gradient back, over everything that could carry it on this machine.

    python -m benchmarks.hop --out benchmarks/results/hop.json

Two processes, a p2pd each. The same bytes go there and as many come back: over an asyncio TCP connection, over a bare
stream of p2pd (which is what p2pd bears), over this project's transport on the same p2pd, over hivemind's unary call,
over gRPC's, and over the transport as nodes of one machine use it. With --round-trip and --mbit all but the last goes
through a shaping proxy, a process of its own.

    python -m benchmarks.hop --matrix --out benchmarks/results/hop-matrix.json

does so for links of 20, 100 and 200 ms and of 20, 100 and 1000 Mbit/s, over TCP, p2pd and the transport.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio  # pyright: ignore[reportMissingTypeStubs]
import psutil
import torch
import uvloop
from hivemind.p2p import PeerID  # pyright: ignore[reportMissingTypeStubs]
from hivemind.proto import runtime_pb2  # pyright: ignore[reportMissingTypeStubs]

from benchmarks.command import command, not_negative, parser_of, save, whole
from benchmarks.other_process import other_process
from noloco_node.config.node_settings import NodeSettings
from noloco_node.identity.addresses import parse_address
from noloco_node.identity.keys import load_or_create_identity
from noloco_node.identity.peer_id import PeerId
from noloco_node.libp2p.daemon import PrivateP2P
from noloco_node.libp2p.start import running_p2p
from noloco_node.transport.libp2p import Libp2pTransport
from noloco_node.transport.messages import Message
from noloco_node.transport.same_machine import SameMachine
from tests.chaos.proxy import Shape, ShapingProxy

SIZES = (4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
Tensor: Any = runtime_pb2.Tensor  # pyright: ignore
LENGTH = 8
BARE = "bench/1"
UNARY = "bench.unary"
MOST_UNARY = (4 << 20) - 1024
"""hivemind refuses unary messages above 4 MiB."""
MOST_GRPC = 1 << 30
BULK_BYTES = 64 << 20
CARRIERS = ("tcp", "bare p2pd", "noloco", "hivemind unary", "grpc unary", "nearby")
MATRIX = tuple(itertools.product((20.0, 100.0, 1000.0), (20.0, 100.0, 200.0)))
"""Mbit/s and milliseconds there and back."""
MATRIX_SIZES = (64 << 10, 1 << 20, 4 << 20)
MATRIX_SIZES_QUICK = (*MATRIX_SIZES, 16 << 20)
QUICK_MBIT = 100.0
MOST_SHAPED = 4
"""Calls in a row over a link that takes its time."""
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


async def _echo_unary(request: Any, _context: object) -> Any:
    return Tensor(buffer=request.buffer)


class _Grpc(grpc.GenericRpcHandler):
    def service(self, handler_call_details: Any) -> Any:
        del handler_call_details

        async def answer(request: bytes, _context: object) -> bytes:
            return request

        return grpc.unary_unary_rpc_method_handler(answer)


def _no_admission(*_request: object) -> None:
    return None


async def serve(folder: Path) -> None:
    """Answer on every carrier until standard input ends; print where."""
    tcp = await asyncio.start_server(_answer_bytes, "127.0.0.1", 0, limit=1 << 20)
    server = grpc.aio.server(options=_grpc_options())
    server.add_generic_rpc_handlers((_Grpc(),))
    grpc_port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    identity = load_or_create_identity(folder / "server.key")
    async with running_p2p(NodeSettings(), identity) as daemon:
        transport = Libp2pTransport(daemon, identity=identity, nearby=SameMachine(identity))
        transport.serve("bench.echo", _no_admission, _echo, max_concurrent_per_peer=64)
        await transport.start()

        async def bare(_peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await _answer_bytes(reader, writer)

        await daemon.serve_streams(BARE, bare)
        await daemon.hivemind_p2p.add_protobuf_handler(UNARY, _echo_unary, Tensor)
        where = {
            "tcp": tcp.sockets[0].getsockname()[1],
            "grpc": grpc_port,
            "p2p": daemon.visible_addresses()[0],
            "p2pd": daemon.pid,
        }
        print(json.dumps(where), flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        await transport.close()
    await server.stop(None)
    tcp.close()


async def carry(port: int, delay: float, mbit: float) -> None:
    """A link before that port until standard input ends; print where it is."""
    shape = Shape(delay=delay, bits_per_second=mbit * 1e6)
    proxy = ShapingProxy(port, random.Random(port), shape.pieces_under_way)
    proxy.shape = shape
    await proxy.start()
    print(json.dumps({"port": proxy.port}), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await proxy.close()


def _grpc_options() -> list[tuple[str, int]]:
    return [("grpc.max_receive_message_length", MOST_GRPC), ("grpc.max_send_message_length", MOST_GRPC)]


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
async def _shaped(port: int, shape: Shape | None) -> AsyncIterator[int]:
    if shape is None:
        yield port
        return
    link = ("--link", str(port), str(shape.delay), str(shape.bits_per_second / 1e6))
    async with other_process("benchmarks.hop", *link, seconds=START_SECONDS) as (where, _):
        yield where["port"]


@contextlib.asynccontextmanager
async def carriers(
    where: dict[str, Any], folder: Path, shape: Shape | None
) -> AsyncIterator[tuple[dict[str, Exchange], PrivateP2P]]:
    """The ways to the server, and the p2pd on this side."""
    async with contextlib.AsyncExitStack() as stack:
        tcp_port = await stack.enter_async_context(_shaped(where["tcp"], shape))
        grpc_port = await stack.enter_async_context(_shaped(where["grpc"], shape))
        address = parse_address(where["p2p"])
        p2p_port = await stack.enter_async_context(_shaped(address.port, shape))
        entrance = f"/ip4/127.0.0.1/tcp/{p2p_port}/p2p/{address.peer}"
        identity = load_or_create_identity(folder / "client.key")
        daemon = await stack.enter_async_context(running_p2p(NodeSettings(initial_peers=(entrance,)), identity))
        transport = Libp2pTransport(daemon, identity=identity)
        near = Libp2pTransport(daemon, identity=identity, nearby=SameMachine(identity))
        for each in (transport, near):
            stack.push_async_callback(each.close)
        reader, writer = await asyncio.open_connection("127.0.0.1", tcp_port, limit=1 << 20)
        stack.callback(writer.close)
        bare_reader, bare_writer = await daemon.open_stream(address.peer, BARE)
        stack.callback(bare_writer.close)
        channel = await stack.enter_async_context(
            grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}", options=_grpc_options())
        )
        stub = channel.unary_unary("/bench/echo")

        async def by(way: Libp2pTransport, size: int) -> None:
            answer = await way.call(
                address.peer,
                "bench.echo",
                Message({}, (torch.zeros(size // 4),)),
                timeout=CALL_SECONDS,
                progress=CALL_SECONDS,
                max_answer_bytes=size,
            )
            assert answer.tensors[0].nbytes == size

        async def by_unary(size: int) -> None:
            peer, sent = PeerID.from_base58(address.peer), Tensor(buffer=bytes(size))
            answer: Any = await daemon.hivemind_p2p.call_protobuf_handler(peer, UNARY, sent, Tensor)
            assert len(answer.buffer) == size

        async def by_grpc(size: int) -> None:
            assert len(await stub(bytes(size))) == size

        bare = (_by_bytes(reader, writer), _by_bytes(bare_reader, bare_writer))
        ways = (*bare, partial(by, transport), by_unary, by_grpc, *(() if shape else (partial(by, near),)))
        yield dict(zip(CARRIERS, ways, strict=False)), daemon


async def measure(ways: dict[str, Exchange], cpu: Processes, size: int, rounds: int, most: int = 32) -> list[Measured]:
    """Every carrier in turn, again and again, at `most` so many calls at a time: whatever disturbs the machine disturbs
    all."""
    able = [carrier for carrier in ways if carrier != "hivemind unary" or size <= MOST_UNARY]
    taken: dict[str, list[float]] = {carrier: [] for carrier in able}
    worked: dict[str, float] = dict.fromkeys(able, 0.0)
    times = max(1, min(most, (4 << 20) // size))
    for turn in range(rounds + 1):
        for carrier in able:
            before, began = cpu.seconds(), time.perf_counter()
            for _ in range(times):
                await ways[carrier](size)
            if turn:  # the first opens streams and fills buffers
                taken[carrier].append((time.perf_counter() - began) / times)
                worked[carrier] += cpu.seconds() - before
    return [
        Measured(
            carrier,
            size,
            statistics.median(taken[carrier]),
            min(taken[carrier]),
            max(taken[carrier]),
            worked[carrier] / rounds / times,
        )
        for carrier in able
    ]


@dataclass(frozen=True)
class Bulk:
    """Many streams at once, `BULK_BYTES` in all there and back. MB/s each way, medians."""

    streams: int
    bare: float
    noloco: float
    bare_cores: float
    """CPU seconds a second of both processes and both p2pd."""
    noloco_cores: float


async def measure_bulk(
    ways: dict[str, Exchange], daemon: PrivateP2P, peer: PeerId, cpu: Processes, streams: int, rounds: int
) -> Bulk:
    """What p2pd carries at the most, and what the transport gets out of it."""
    pairs = [await daemon.open_stream(peer, BARE) for _ in range(streams)]
    bare = [_by_bytes(reader, writer) for reader, writer in pairs]
    rates: dict[str, list[float]] = {"bare": [], "noloco": []}
    cores: dict[str, list[float]] = {"bare": [], "noloco": []}
    for turn in range(rounds + 1):
        for name, each in (("bare", bare), ("noloco", [ways["noloco"]] * streams)):
            before, began = cpu.seconds(), time.perf_counter()
            await asyncio.gather(*(way(BULK_BYTES // streams) for way in each))
            took = time.perf_counter() - began
            if turn:
                rates[name].append(BULK_BYTES / took / 1e6)
                cores[name].append((cpu.seconds() - before) / took)
    for _, writer in pairs:
        writer.close()
    middle = statistics.median
    return Bulk(streams, middle(rates["bare"]), middle(rates["noloco"]), middle(cores["bare"]), middle(cores["noloco"]))


def bulk_table(bulks: Sequence[Bulk]) -> str:
    """A row for each number of streams."""
    lines = ["| streams | bare p2pd | its cores | noloco | its cores | noloco / bare |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {each.streams} | {each.bare:.0f} MB/s | {each.bare_cores:.2f} | {each.noloco:.0f} MB/s "
        f"| {each.noloco_cores:.2f} | {each.noloco / each.bare:.2f} |"
        for each in bulks
    ]
    return "\n".join(lines)


def table(measured: Sequence[Measured]) -> str:
    """A row for each size: times as long as the bare stream of p2pd takes."""
    lines = [
        "| each way | " + " | ".join(CARRIERS) + " | noloco / bare p2pd | CPU |",
        "|---" * (len(CARRIERS) + 3) + "|",
    ]
    for size in sorted({each.bytes for each in measured}):
        row = {each.carrier: each for each in measured if each.bytes == size}
        cells = [f"{1e3 * row[name].seconds:.2f} ms" if name in row else "–" for name in CARRIERS]
        ours, bare = row["noloco"], row["bare p2pd"]
        cells.append(f"{ours.seconds / bare.seconds:.2f}")
        cells.append(f"{ours.cpu_seconds / bare.cpu_seconds:.2f}" if bare.cpu_seconds else "–")
        lines.append(f"| {_size(size)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def shape_of(round_trip: float, mbit: float) -> Shape | None:
    """Of milliseconds there and back and Mbit/s each way, 0 for as fast as it goes; None where both are."""
    if not round_trip and not mbit:
        return None
    return Shape(delay=round_trip / 2e3, bits_per_second=mbit * 1e6 if mbit else Shape().bits_per_second)


async def run_matrix(rounds: int) -> list[dict[str, Any]]:
    """Every link in turn, between the same two processes."""
    cells: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        server = other_process("benchmarks.hop", "--serve", name, seconds=START_SECONDS)
        async with server as (where, pid):
            for mbit, round_trip in MATRIX:
                shape = shape_of(round_trip, mbit)
                async with carriers(where, Path(name), shape) as (ways, daemon):
                    cpu = Processes((psutil.Process().pid, pid, where["p2pd"], daemon.pid))
                    for size in MATRIX_SIZES_QUICK if mbit >= QUICK_MBIT else MATRIX_SIZES:
                        found = await measure(ways, cpu, size, rounds, MOST_SHAPED)
                        cell = {"mbit": mbit, "round_trip_ms": round_trip, "load": os.getloadavg()[0]}
                        cells += [cell | asdict(each) for each in found]
                        print(f"{mbit:g} Mbit/s, {round_trip:g} ms: {table(found).splitlines()[-1]}", flush=True)
    return cells


def matrix_table(cells: Sequence[dict[str, Any]]) -> str:
    """A row for each link, a cell for each size: the transport's time, and over that of each other carrier, those of
    `CARRIERS` in their order."""
    sizes = sorted({cell["bytes"] for cell in cells})
    lines = ["| Mbit/s, ms | " + " | ".join(_size(size) for size in sizes) + " |", "|---" * (1 + len(sizes)) + "|"]
    for mbit, round_trip in MATRIX:
        shown = [f"{mbit:g}, {round_trip:g}"]
        for size in sizes:
            here = (mbit, round_trip, size)
            took = {
                cell["carrier"]: cell["seconds"]
                for cell in cells
                if (cell["mbit"], cell["round_trip_ms"], cell["bytes"]) == here
            }
            if not took:
                shown.append("–")
                continue
            ours = took["noloco"]
            others = (f"{ours / took[name]:.2f}" if name in took else "–" for name in CARRIERS if name != "noloco")
            shown.append("; ".join((f"{1e3 * ours:,.0f} ms", *others)))
        lines.append("| " + " | ".join(shown) + " |")
    return "\n".join(lines)


def _size(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


async def run(options: argparse.Namespace) -> tuple[list[Measured], list[Bulk]]:
    """Start the server, measure every size, then many streams at once."""
    shape = shape_of(options.round_trip, options.mbit)
    with tempfile.TemporaryDirectory() as name:
        server = other_process("benchmarks.hop", "--serve", name, seconds=START_SECONDS)
        async with server as (where, pid), carriers(where, Path(name), shape) as (ways, daemon):
            cpu = Processes((psutil.Process().pid, pid, where["p2pd"], daemon.pid))
            found: list[Measured] = []
            for size in options.sizes:
                found += await measure(ways, cpu, size, options.rounds)
            peer = parse_address(where["p2p"]).peer
            bulks = [
                await measure_bulk(ways, daemon, peer, cpu, streams, options.rounds) for streams in options.streams
            ]
            return found, bulks


def main() -> None:
    """Measure, print the table, write the figures."""
    parser = parser_of(__doc__)
    parser.add_argument("--serve", type=Path, metavar="DIR", help=argparse.SUPPRESS)
    parser.add_argument("--link", nargs=3, metavar=("PORT", "DELAY", "MBIT"), help=argparse.SUPPRESS)
    parser.add_argument("--sizes", type=whole, nargs="+", default=list(SIZES), metavar="BYTES")
    parser.add_argument("--streams", type=whole, nargs="*", default=[1, 4, 16], help="of a bulk of 64 MiB")
    parser.add_argument("--rounds", type=whole, default=7)
    parser.add_argument("--round-trip", type=not_negative, default=0.0, metavar="MS")
    parser.add_argument("--mbit", type=not_negative, default=0.0, help="Mbit/s each way; 0: as fast as it goes")
    parser.add_argument("--matrix", action="store_true", help="every link of the matrix, with sizes of its own")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.serve:
        uvloop.run(serve(options.serve))
        return
    if options.link:
        port, delay, mbit = options.link
        uvloop.run(carry(int(port), float(delay), float(mbit)))
        return
    if options.matrix:
        cells = uvloop.run(run_matrix(options.rounds))
        print(matrix_table(cells))
        save(options.out, {"rounds": options.rounds, "measured": cells})
        return
    found, bulks = uvloop.run(run(options))
    print(table(found))
    if bulks:
        print("\n" + bulk_table(bulks))
    settings = {"round_trip_ms": options.round_trip, "mbit": options.mbit, "rounds": options.rounds}
    figures = [asdict(each) for each in found]
    many = [asdict(each) for each in bulks]
    save(options.out, settings | {"measured": figures, "bulk": many})


if __name__ == "__main__":
    command(main)
