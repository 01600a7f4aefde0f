"""Links as volunteers have them, on one machine: each node has one uplink, which all of its connections share.

A proxy stands before every node. Who dials through it is found by the process that holds the other end, so what a node
sends is counted against its own uplink on whichever side it dialled.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial

import psutil

from tests.chaos.proxy import GRAIN_SECONDS, PIECE_BYTES, Carry, Proxy

MOST_QUEUED, LARGEST_QUEUE = 64, 4096


@dataclass
class Uplink:
    """What one node sends with, whoever it is for."""

    bytes_per_second: float
    delay: float
    """Seconds one way."""
    piece_bytes: int = PIECE_BYTES
    """So much of a connection goes before the next connection has its turn."""
    held_bytes: int | None = None
    """See `Proxy`."""
    sent: int = 0
    free_at: float = 0.0

    @property
    def pieces_under_way(self) -> int:
        """Pieces of each connection: as many as such a line holds, and half as many again, so that only its rate and
        its delay bound it."""
        return int(min(LARGEST_QUEUE, max(MOST_QUEUED, 1.5 * self.delay * self.bytes_per_second / PIECE_BYTES)))

    def take(self, size: int, now: float) -> float:
        """When a piece that is ready now has left: pieces of several connections leave in their order. Who waits for
        that is woken up to `GRAIN_SECONDS` late, which the line does not stand idle for."""
        self.free_at = max(self.free_at, now - GRAIN_SECONDS) + size / self.bytes_per_second
        self.sent += size
        return self.free_at


class Door(Proxy):
    """Listens before one node and carries both ways, each over the uplink of who sends."""

    def __init__(self, target: int, own: Uplink, caller: Callable[[int], Uplink]) -> None:
        super().__init__(target, own.held_bytes)
        self._own, self._caller = own, caller

    def _carriers(self, caller: int) -> tuple[Carry, Carry]:
        return partial(_carry, uplink=self._caller(caller)), partial(_carry, uplink=self._own)


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, uplink: Uplink) -> None:
    loop = asyncio.get_running_loop()
    pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(uplink.pieces_under_way)

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
            data = await reader.read(uplink.piece_bytes)
            left = uplink.take(len(data), loop.time())
            await pieces.put((left + uplink.delay, data))
            if not data:
                return
            if left > loop.time() + GRAIN_SECONDS:
                await asyncio.sleep(left - loop.time())

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
