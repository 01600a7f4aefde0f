"""A small web server for whoever watches a node: fixed pages, few connections, a deadline for each."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus

from noloco_node.errors import ExitCode, UserError

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 16
"""Open at once. For one more the oldest is closed: an honest question takes milliseconds, so that is a slow one."""
WAITING_CONNECTIONS = 128
"""Not accepted yet; the system keeps them."""
REQUEST_SECONDS = 5.0
"""From the opening of a connection to the last byte of the answer."""
MAX_HEAD_BYTES = 8192
"""Request line and headers; a longer request is closed without an answer."""

TEXT = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Page:
    """An answer."""

    body: bytes
    content_type: str = TEXT
    status: HTTPStatus = HTTPStatus.OK


Answer = Callable[[Mapping[str, str]], Page]
"""Makes a page from the headers of a request, by lower-case name. Called on the server's thread: it must be quick."""


class WebServer:
    """Answers GET and HEAD for `pages`, by path, from a thread with a loop of its own: a node that hangs can still be
    looked at. Every other path is 404. One request a connection."""

    def __init__(self, pages: Mapping[str, Answer], *, request_seconds: float = REQUEST_SECONDS) -> None:
        self._pages = dict(pages)
        self._seconds = request_seconds
        self._open: dict[asyncio.StreamWriter, None] = {}
        self._running: tuple[threading.Thread, asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def start(self, host: str, port: int) -> str:
        """Listen, and return `host:port` with the port chosen.

        Raises UserError: PORT_IN_USE where the port is taken, CONFIG where the address cannot be listened on.
        """
        listener = _listener(host, port)
        loop, stop = asyncio.new_event_loop(), asyncio.Event()
        thread = threading.Thread(target=self._run, args=(loop, listener, stop), name="web server", daemon=True)
        self._running = thread, loop, stop
        thread.start()
        return f"{host}:{listener.getsockname()[1]}"

    def stop(self) -> None:
        """Close the port and all connections, and end the thread; nothing where it was not started."""
        if self._running is None:
            return
        thread, loop, stop = self._running
        self._running = None
        loop.call_soon_threadsafe(stop.set)
        thread.join()

    def _run(self, loop: asyncio.AbstractEventLoop, listener: socket.socket, stop: asyncio.Event) -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(self._serve(listener, stop))

    async def _serve(self, listener: socket.socket, stop: asyncio.Event) -> None:
        # To asyncio the backlog is how many connections it accepts before it looks at any of them; the system's queue
        # of those not accepted yet costs no descriptor, and is longer.
        server = await asyncio.start_server(
            self._connected, sock=listener, limit=MAX_HEAD_BYTES, backlog=MAX_CONNECTIONS
        )
        listener.listen(WAITING_CONNECTIONS)
        await stop.wait()
        server.close()
        for writer in list(self._open):
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= MAX_CONNECTIONS:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.transport.abort()
        self._open[writer] = None
        try:
            async with asyncio.timeout(self._seconds):
                await self._converse(reader, writer)
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # a client's own affair
        finally:
            self._open.pop(writer, None)
            writer.transport.abort()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        page = self._answer(head)
        lines = (
            f"HTTP/1.1 {page.status.value} {page.status.phrase}",
            f"Content-Type: {page.content_type}",
            f"Content-Length: {len(page.body)}",
            "Cache-Control: no-store",
            "X-Content-Type-Options: nosniff",
            "Connection: close",
        )
        writer.write("\r\n".join((*lines, "", "")).encode("latin-1"))
        if not head[0].startswith("HEAD "):
            writer.write(page.body)
        # Not before the client has ended its side is everything read: what is unread turns a close into a reset.
        writer.write_eof()
        await writer.drain()
        while await reader.read(MAX_HEAD_BYTES):
            pass

    def _answer(self, head: list[str]) -> Page:
        words = head[0].split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return _error(HTTPStatus.BAD_REQUEST)
        if words[0] not in ("GET", "HEAD"):
            return _error(HTTPStatus.METHOD_NOT_ALLOWED)
        answer = self._pages.get(words[1].partition("?")[0])
        if answer is None:
            return _error(HTTPStatus.NOT_FOUND)
        headers = {name.strip().lower(): value.strip() for name, _, value in (row.partition(":") for row in head[1:])}
        try:
            return answer(headers)
        except Exception:  # whoever makes a page may fail in any way: it costs that answer only
            logger.exception("the page %s could not be made", words[1])
            return _error(HTTPStatus.INTERNAL_SERVER_ERROR)


def _error(status: HTTPStatus) -> Page:
    return Page(f"{status.value} {status.phrase}\n".encode(), status=status)


def _listener(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server((str(address[0]), port), family=family, backlog=WAITING_CONNECTIONS)
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise UserError(
                ExitCode.PORT_IN_USE,
                f"node.metrics_port: port {port} on {host} is taken",
                "choose another with --metrics-port, or 0 for any free one",
            ) from None
        raise UserError(
            ExitCode.CONFIG,
            f"node.metrics_host: cannot listen on {host} port {port}: {getattr(error, 'strerror', None) or error}",
            "use an address of this machine (127.0.0.1 or 0.0.0.0) and a port above 1023",
        ) from None
