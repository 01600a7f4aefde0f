"""A TCP proxy in front of one node, which carries each connection as its user says: `benchmarks/shaped_links.py`."""

from __future__ import annotations

import asyncio
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine

PACKET_BYTES = 1448
PIECE_BYTES = 16 * 1024
READ_AHEAD_BYTES = 64 * 1024
GRAIN_SECONDS = 0.002
"""An event loop wakes nobody more exactly than to a millisecond: what a line carries in less is not waited for."""

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
