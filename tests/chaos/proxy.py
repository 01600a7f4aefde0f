"""A shaping TCP proxy in front of one node: delay, bandwidth and loss for each connection that comes in through it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass

PACKET_BYTES = 1448
PIECE_BYTES = 16 * 1024
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

    def __init__(self, target: int) -> None:
        self.port = 0
        self._target = target
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen on a free port from now on."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Break all connections and stop listening."""
        assert self._server is not None
        self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

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
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
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
