"""The web server of a node and of a seed: fixed pages, few connections, a deadline for each.

It also makes the page itself, asks another process for its page, and writes where nodes of a machine show metrics. A
page's policy has a browser run exactly its own script and load nothing.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import hashlib
import http.client
import ipaddress
import logging
import re
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from importlib.resources import files
from typing import TYPE_CHECKING

from noloco_node import ambient
from noloco_node.aio import Pulse
from noloco_node.errors import ExitCode, UserError

if TYPE_CHECKING:  # `noloco-node health` loads no library
    from noloco_node.telemetry.events import NodeStarted

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 32
"""The most connections that may be open. For one more an answered one is closed, or the oldest once it has had its
time."""
MAX_HEAD_BYTES = 8192
"""The most bytes of request line and headers; a longer request is closed without an answer."""

TEXT = "text/plain; charset=utf-8"
JSON = "application/json"
NOTHING_LOADED = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
"""The policy under which a browser loads nothing for a page."""
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})


@dataclass(frozen=True, slots=True)
class Page:
    """An answer."""

    body: bytes
    content_type: str = TEXT
    status: HTTPStatus = HTTPStatus.OK
    policy: str = NOTHING_LOADED
    """Its Content-Security-Policy."""


PageMaker = Callable[[Mapping[str, str]], Page]
"""A function that makes a page from the headers of a request, by lower-case name. It runs on the server's thread: it
must be quick."""


class _Connection:
    """One client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.opened = ambient.monotonic()
        self.answered = False
        """The system has all of its answer."""

    def close(self) -> None:
        """At once."""
        self.writer.transport.abort()


class WebServer:
    """Answers GET and HEAD for `pages`, by path; every other path is 404. One request a connection.

    It runs on a thread with a loop of its own: a node that hangs can still be looked at. On a loopback address only
    requests to this machine's own names are answered. Otherwise a website whose name was made to lead here would read,
    through a visitor's browser, what is meant for this machine's users.
    """

    def __init__(
        self, pages: Mapping[str, PageMaker], *, request_seconds: float = 5.0, asking_seconds: float = 0.25
    ) -> None:
        self._pages = dict(pages)
        self._seconds = request_seconds
        self._asking_seconds = asking_seconds
        self._open: dict[_Connection, None] = {}
        self._fewer = Pulse()
        self._loopback = False
        self.address: str | None = None
        """`host:port` while it listens."""
        self._running: tuple[threading.Thread, asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def start(self, host: str, port: int) -> str:
        """Listen, and return `host:port` with the port chosen.

        Raises UserError: PORT_IN_USE where the port is taken, CONFIG where the address cannot be listened on.
        """
        listener = _listener(host, port)
        self._loopback = ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback
        loop, stop = asyncio.new_event_loop(), asyncio.Event()
        thread = threading.Thread(target=self._run, args=(loop, listener, stop), name="web server", daemon=True)
        self._running = thread, loop, stop
        thread.start()
        self.address = f"{host}:{listener.getsockname()[1]}"
        return self.address

    def show(self, pages: Mapping[str, PageMaker]) -> None:
        """Answer with these pages from now on."""
        self._pages = dict(pages)

    def stop(self) -> None:
        """Close the port and all connections, and end the thread; nothing where it was not started."""
        if self._running is None:
            return
        thread, loop, stop = self._running
        self._running = self.address = None
        loop.call_soon_threadsafe(stop.set)
        thread.join()

    def _run(self, loop: asyncio.AbstractEventLoop, listener: socket.socket, stop: asyncio.Event) -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(self._serve(listener, stop))

    async def _serve(self, listener: socket.socket, stop: asyncio.Event) -> None:
        listener.setblocking(False)
        with listener:
            async with asyncio.TaskGroup() as group:
                connected: set[asyncio.Task[None]] = set()
                accepting = group.create_task(self._accept(listener, group, connected))
                await stop.wait()
                for task in (accepting, *connected):
                    task.cancel()

    async def _accept(
        self, listener: socket.socket, group: asyncio.TaskGroup, connected: set[asyncio.Task[None]]
    ) -> None:
        """One connection after another, each when there is room for it: the system keeps those that wait."""
        loop = asyncio.get_running_loop()
        while True:
            await self._make_room()
            try:
                client, _ = await loop.sock_accept(listener)
                reader, writer = await asyncio.open_connection(sock=client, limit=MAX_HEAD_BYTES)
            except OSError:
                # The system had no descriptor for one more.
                await asyncio.sleep(1.0)
                continue
            connection = _Connection(reader, writer)
            self._open[connection] = None
            task = group.create_task(self._attend(connection))
            connected.add(task)
            task.add_done_callback(connected.discard)

    async def _make_room(self) -> None:
        while len(self._open) >= MAX_CONNECTIONS:
            oldest = next(iter(self._open))
            served = next((one for one in self._open if one.answered), oldest)
            left = 0.0 if served.answered else served.opened + self._asking_seconds - ambient.monotonic()
            if left <= 0.0:
                del self._open[served]
                served.close()
            else:
                await self._fewer.wait(left)

    async def _attend(self, connection: _Connection) -> None:
        try:
            async with asyncio.timeout(self._seconds):
                await self._converse(connection)
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # a client's own affair
        finally:
            self._open.pop(connection, None)
            self._fewer.fire()
            connection.close()

    async def _converse(self, connection: _Connection) -> None:
        reader, writer = connection.reader, connection.writer
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        page = self._answer(head)
        lines = (
            f"HTTP/1.1 {page.status.value} {page.status.phrase}",
            f"Content-Type: {page.content_type}",
            f"Content-Length: {len(page.body)}",
            "Cache-Control: no-store",
            "X-Content-Type-Options: nosniff",
            f"Content-Security-Policy: {page.policy}",
            "Referrer-Policy: no-referrer",
            "Cross-Origin-Resource-Policy: same-origin",
            "Connection: close",
            *(("Allow: GET, HEAD",) if page.status is HTTPStatus.METHOD_NOT_ALLOWED else ()),
        )
        writer.write("\r\n".join((*lines, "", "")).encode("latin-1"))
        if not head[0].startswith("HEAD "):
            writer.write(page.body)
        # Not before the client has ended its side is everything read: what is unread turns a close into a reset.
        writer.write_eof()
        await writer.drain()
        connection.answered = not writer.transport.get_write_buffer_size()
        self._fewer.fire()
        while await reader.read(MAX_HEAD_BYTES):
            pass

    def _answer(self, head: list[str]) -> Page:
        words = head[0].split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return _error(HTTPStatus.BAD_REQUEST)
        if words[0] not in ("GET", "HEAD"):
            return _error(HTTPStatus.METHOD_NOT_ALLOWED)
        headers = {name.strip().lower(): value.strip() for name, _, value in (row.partition(":") for row in head[1:])}
        if self._loopback and _name_of(headers.get("host", "localhost")) not in LOOPBACK_NAMES:
            return _error(HTTPStatus.MISDIRECTED_REQUEST)
        answer = self._pages.get(words[1].partition("?")[0])
        if answer is None:
            return _error(HTTPStatus.NOT_FOUND)
        try:
            return answer(headers)
        except Exception:  # a page may fail in any way: it costs that answer only
            logger.exception("the page %s could not be made", words[1])
            return _error(HTTPStatus.INTERNAL_SERVER_ERROR)


def _name_of(host: str) -> str:
    """The value of a `host` header without its port."""
    name, colon, port = host.lower().rpartition(":")
    return (name if colon and port.isdecimal() else host.lower()).rstrip(".")


def _error(status: HTTPStatus) -> Page:
    return Page(f"{status.value} {status.phrase}\n".encode(), status=status)


def _listener(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server((str(address[0]), port), family=family, backlog=128)
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise UserError(
                ExitCode.PORT_IN_USE,
                f"node.metrics_port: port {port} on {host} is taken",
                "choose another with --metrics-port, or 0 for any free one",
            ) from None
        raise UserError(
            ExitCode.CONFIG,
            f"node.metrics_host: cannot listen on '{host}' port {port}: {getattr(error, 'strerror', None) or error}",
            "name an address of this machine with --metrics-host (127.0.0.1 or 0.0.0.0), and with --metrics-port a "
            "port above 1023, or 0 for any free one",
        ) from None


HTML = "text/html; charset=utf-8"


def state_page() -> Page:
    """What a browser shows of a node, or of a swarm that a seed sees; it asks for the state (`/api/state`)."""
    html = text_of("page.html")
    for shared in ("page.css", "page.js"):
        html = html.replace(f"/*{{{shared}}}*/\n", text_of(shared))
    return Page(html.encode(), HTML, policy=policy_of(html))


def text_of(name: str) -> str:
    """One of the files that pages are made of."""
    return files("noloco_node.telemetry").joinpath(name).read_text(encoding="utf-8")


def policy_of(html: str) -> str:
    """The Content-Security-Policy of a page with scripts and styles of its own, by their hashes."""
    kinds = {kind: " ".join(map(_hashed, re.findall(f"<{kind}>(.*?)</{kind}>", html, re.DOTALL))) for kind in _OWN}
    return (
        f"default-src 'none'; script-src {kinds['script']}; style-src {kinds['style']}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


_OWN = ("script", "style")


def _hashed(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


HANGS = (
    "something listens there and does not answer: a node that hangs, or whose process is stopped (kill -STOP, Ctrl-Z, "
    "a paused container)"
)


ANSWER_SECONDS = 4.0
"""A page has so many seconds to come; the image's health check gives up after 5."""


class Hangs(Exception):
    """What listens there has taken the question, or the system for it, and gives no answer."""

    def __init__(self) -> None:
        super().__init__(HANGS)


def ask_page(host: str, port: int, path: str, *, most_bytes: int) -> tuple[int, bytes]:
    """Status and body of a page, as far as `most_bytes`; each step of it has `ANSWER_SECONDS`. Raises Hangs; OSError,
    HTTPException or ValueError where nothing is there, or no such server."""
    connection, connected = http.client.HTTPConnection(host, port, timeout=ANSWER_SECONDS), False
    try:
        connection.connect()
        connected = True
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read(most_bytes)
    except TimeoutError:
        # The system takes questions for a stopped process until its queue is full, and drops them then. If nobody
        # listens on this machine, it says so at once.
        if connected or _is_this_machine(host):
            raise Hangs from None
        raise
    finally:
        connection.close()


def _is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


TARGETS = "targets.json"
"""The name of this file in the run folder of a local swarm, or of a machine's devices."""
_OF_THIS_MACHINE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def scrape_targets(started: Mapping[str, NodeStarted]) -> list[dict[str, object]]:
    """The targets of the nodes that are up, by name; those that show none are left out. Which stage a node serves is
    no label of its address: it may move."""
    up = [(name, event.metrics_address, event.run_name) for name, event in started.items()]
    return [
        {"targets": [_reached(address)], "labels": {"node": name, "run": run}}
        for name, address, run in up
        if address is not None
    ]


def _reached(address: str) -> str:
    """A server that listens on every address is found on this machine's own."""
    host, _, port = address.rpartition(":")
    bare = host.strip("[]")
    own = _OF_THIS_MACHINE.get(bare)
    return address if own is None else f"[{own}]:{port}" if ":" in own else f"{own}:{port}"
