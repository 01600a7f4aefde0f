"""Links as volunteers have them, on one machine: each node has one uplink, which all of its connections share.

A proxy stands before every node. Who dials through it is found by the process that holds the other end, so what a node
sends is counted against its own uplink on whichever side it dialled.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import psutil

PIECE_BYTES = 16 * 1024
MOST_QUEUED = 64


@dataclass
class Uplink:
    """What one node sends with, whoever it is for."""

    bytes_per_second: float
    delay: float
    """Seconds one way."""
    sent: int = 0
    free_at: float = 0.0

    def take(self, size: int, now: float) -> float:
        """When a piece that is ready now has left: pieces of several connections leave in their order."""
        self.free_at = max(self.free_at, now) + size / self.bytes_per_second
        self.sent += size
        return self.free_at


class Door:
    """Listens before one node and carries both ways, each over the uplink of who sends."""

    def __init__(self, target: int, own: Uplink, caller: Callable[[int], Uplink]) -> None:
        self._target, self._own, self._caller = target, own, caller
        self.port = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """On a free port of this machine."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Break all connections."""
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        far_writer: asyncio.StreamWriter | None = None
        try:
            theirs = self._caller(writer.get_extra_info("peername")[1])
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
            async with asyncio.TaskGroup() as group:
                group.create_task(_carry(reader, far_writer, theirs))
                group.create_task(_carry(far_reader, writer, self._own))
        except* (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()
            if far_writer is not None:
                far_writer.transport.abort()
            self._tasks.discard(task)


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, uplink: Uplink) -> None:
    loop = asyncio.get_running_loop()
    pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MOST_QUEUED)

    async def deliver() -> None:
        while True:
            due, data = await pieces.get()
            await asyncio.sleep(max(0.0, due - loop.time()))
            if not data:
                raise ConnectionResetError
            writer.write(data)
            await writer.drain()

    async def take() -> None:
        while True:
            data = await reader.read(PIECE_BYTES)
            left = uplink.take(len(data), loop.time())
            await pieces.put((left + uplink.delay, data))
            if not data:
                return
            await asyncio.sleep(max(0.0, left - loop.time()))

    async with asyncio.TaskGroup() as group:
        group.create_task(deliver())
        group.create_task(take())


def owner_of(port: int, daemons: dict[int, Uplink], otherwise: Uplink) -> Uplink:
    """The uplink of the daemon whose p2pd has this local port; `otherwise` for anybody else."""
    for connection in psutil.net_connections("tcp"):
        if connection.laddr and connection.laddr.port == port and connection.pid is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                process: psutil.Process | None = psutil.Process(connection.pid)
                while process is not None:
                    if process.pid in daemons:
                        return daemons[process.pid]
                    process = process.parent()
    return otherwise


@contextlib.asynccontextmanager
async def doors(
    targets: list[int], uplinks: list[Uplink], caller: Callable[[int], Uplink]
) -> AsyncIterator[list[Door]]:
    """One before each target, closed with the block."""
    made = [Door(target, uplink, caller) for target, uplink in zip(targets, uplinks, strict=True)]
    for door in made:
        await door.start()
    try:
        yield made
    finally:
        for door in made:
            await door.close()
