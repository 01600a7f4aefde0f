"""A shaping TCP proxy in front of one node: delay, bandwidth and loss for each connection that comes in through it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import socket
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass

PACKET_BYTES = 1448
PIECE_BYTES = 16 * 1024
READ_AHEAD_BYTES = 64 * 1024
MOST_QUEUED = 64
LARGEST_QUEUE = 4096
GRAIN_SECONDS = 0.002
"""An event loop wakes nobody more exactly than to a millisecond: what a line carries in less is not waited for."""
SMALLEST_TIMEOUT = 0.2
"""Seconds for which a lost packet holds a connection up at least (RFC 6298's timer, as systems set it)."""


@dataclass(frozen=True)
class Shape:
    """What one connection is like, each way."""

    delay: float = 0.0
    """Seconds one way."""
    bits_per_second: float = math.inf
    loss: float = 0.0
    """Share of packets that are lost. The stream stands still for a round trip or a timer, whichever is longer. Its
    rate is bounded by 1.22 packets / (round trip · √loss) (Mathis et al., 1997)."""

    @property
    def bytes_per_second(self) -> float:
        """What TCP gets through."""
        bound = math.inf
        if self.loss and self.delay:
            bound = 1.22 * PACKET_BYTES / (2 * self.delay * math.sqrt(self.loss))
        return min(self.bits_per_second / 8, bound)

    @property
    def pieces_under_way(self) -> int:
        """As many as such a line holds, and half as many again, so that only its rate and its delay bound it."""
        held = 1.5 * self.delay * self.bytes_per_second / PIECE_BYTES if self.delay else 0.0
        return int(min(LARGEST_QUEUE, max(MOST_QUEUED, held)))


CLEAR = Shape()


Carry = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[None, None, None]]
"""Takes one direction of a connection to its end."""


class Proxy(ABC):
    """Listens on a port of this machine and connects its callers with `target`."""

    def __init__(self, target: int, held_bytes: int | None = None) -> None:
        """`held_bytes` wait at most in a buffer before this proxy, about; None: as many as the system likes. It likes
        megabytes on a machine's own addresses, which a slow line takes minutes for."""
        self.port = 0
        self._target = target
        self._held_bytes = held_bytes
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen on a free port from now on."""
        listening = self._socket()
        listening.bind(("127.0.0.1", 0))
        self._server = await asyncio.start_server(self._serve, sock=listening, limit=self._limit)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Break all connections and stop listening."""
        assert self._server is not None
        self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    @property
    def _limit(self) -> int:
        return READ_AHEAD_BYTES if self._held_bytes is None else self._held_bytes

    def _socket(self) -> socket.socket:
        made = socket.socket()
        made.setblocking(False)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if self._held_bytes is not None:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._held_bytes)
            # The other side's buffer has room for some packets, and those of a machine's own addresses are large.
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, PACKET_BYTES)
        return made

    @abstractmethod
    def _carriers(self, caller: int) -> tuple[Carry, Carry]:
        """What carries to the target, and back from it, for a connection from the port `caller`."""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        far_writer: asyncio.StreamWriter | None = None
        try:
            there, back = self._carriers(writer.get_extra_info("peername")[1])
            far = self._socket()
            await asyncio.get_running_loop().sock_connect(far, ("127.0.0.1", self._target))
            far_reader, far_writer = await asyncio.open_connection(sock=far, limit=self._limit)
            async with asyncio.TaskGroup() as group:
                group.create_task(there(reader, far_writer))
                group.create_task(back(far_reader, writer))
        except* (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()
            if far_writer is not None:
                far_writer.transport.abort()
            self._connections.discard(task)


class ShapingProxy(Proxy):
    """Passes all it gets on as `shape` says at that moment."""

    def __init__(self, target: int, rng: random.Random, most_queued: int = MOST_QUEUED) -> None:
        """`most_queued` pieces are on their way at once at the most: a long and fast line holds more of them."""
        super().__init__(target)
        self.shape = CLEAR
        self._most_queued = most_queued
        self.bytes_passed = 0
        self.delayed_pieces = 0
        """Pieces that were held back for any reason: proof that shaping takes effect."""
        self.lost = 0
        self._rng = rng

    def _carriers(self, caller: int) -> tuple[Carry, Carry]:
        return self._carry, self._carry

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One direction of one connection. What is on its way is bounded, so that a full link pushes back."""
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(self._most_queued)

        async def deliver() -> None:
            while True:
                due, data = await pieces.get()
                if due > loop.time():
                    self.delayed_pieces += 1
                    await asyncio.sleep(due - loop.time())
                if not data:
                    raise ConnectionResetError
                writer.write(data)
                await writer.drain()
                self.bytes_passed += len(data)

        async def take() -> None:
            sent, arrived = loop.time(), loop.time()
            while True:
                data = await reader.read(PIECE_BYTES)
                shape = self.shape
                sent = max(sent, loop.time() - GRAIN_SECONDS) + len(data) / shape.bytes_per_second
                arrived = max(arrived, sent + shape.delay + self._held_up(shape, len(data)))
                await pieces.put((arrived, data))
                if not data:
                    return
                if sent > loop.time() + GRAIN_SECONDS:
                    await asyncio.sleep(sent - loop.time())

        async with asyncio.TaskGroup() as group:
            group.create_task(deliver())
            group.create_task(take())

    def _held_up(self, shape: Shape, size: int) -> float:
        packets = math.ceil(size / PACKET_BYTES)
        if not shape.loss or self._rng.random() > 1 - (1 - shape.loss) ** packets:
            return 0.0
        self.lost += 1
        return max(SMALLEST_TIMEOUT, 2 * shape.delay)


@contextlib.asynccontextmanager
async def shaping_proxies(targets: list[int], rng: random.Random) -> AsyncIterator[list[ShapingProxy]]:
    """A proxy for each target port; closed with the block."""
    proxies = [ShapingProxy(target, rng) for target in targets]
    for proxy in proxies:
        await proxy.start()
    try:
        yield proxies
    finally:
        for proxy in proxies:
            await proxy.close()
