"""The web server for the observers of a node, over real sockets: what it answers, and what slow clients cost."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from noloco_node.errors import ExitCode, UserError
from noloco_node.telemetry.web import MAX_CONNECTIONS, MAX_HEAD_BYTES, Page, WebServer

PAGES = {"/metrics": lambda _: Page(b"up 1\n")}


@contextlib.contextmanager
def served(server: WebServer) -> Iterator[tuple[str, int]]:
    """A running server's address."""
    host, _, port = server.start("127.0.0.1", 0).rpartition(":")
    try:
        yield host, int(port)
    finally:
        server.stop()


def ask(address: tuple[str, int], path: str, method: str = "GET") -> tuple[int, bytes]:
    """Status and body."""
    connection = http.client.HTTPConnection(*address, timeout=10)
    with contextlib.closing(connection):
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read()


def open_descriptors() -> int:
    """The number of open descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def test_a_page_is_answered_and_nothing_else() -> None:
    """Other paths are 404, other methods 405, and what is no HTTP 400."""
    with served(WebServer(PAGES)) as address:
        assert ask(address, "/metrics") == (200, b"up 1\n")
        assert ask(address, "/metrics?x=1") == (200, b"up 1\n")
        assert ask(address, "/metrics", "HEAD") == (200, b"")
        assert [ask(address, path)[0] for path in ("/", "/metrics/", "/../metrics", "/favicon.ico")] == [404] * 4
        assert ask(address, "/metrics", "POST")[0] == 405
        with socket.create_connection(address, timeout=10) as raw:
            raw.sendall(b"\x16\x03\x01\r\n\r\n")
            assert raw.recv(64).startswith(b"HTTP/1.1 400 ")


def test_a_page_that_cannot_be_made_costs_its_answer_only() -> None:
    """500, and the next question is answered."""

    def broken(_: object) -> Page:
        raise RuntimeError("no page today")

    with served(WebServer({**PAGES, "/broken": broken})) as address:
        assert ask(address, "/broken")[0] == 500
        assert ask(address, "/metrics")[0] == 200


def test_slow_clients_take_no_descriptors_and_keep_nobody_out() -> None:
    """Three hundred that say half a line and wait: a bounded few are held, and a question is answered at once."""
    with served(WebServer(PAGES, asking_seconds=0.01)) as address, contextlib.ExitStack() as slow:
        before = open_descriptors()
        for _ in range(300):
            client = slow.enter_context(socket.create_connection(address, timeout=10))
            client.sendall(b"GET /met")
        began = time.monotonic()
        assert ask(address, "/metrics")[0] == 200
        assert time.monotonic() - began < 8.0
        assert open_descriptors() - before - 300 <= 2 * MAX_CONNECTIONS


def test_a_connection_has_a_deadline_and_a_request_a_size() -> None:
    """That holds also for one that sends a byte now and then, and for one that does not read its answer."""
    large = {"/large": lambda _: Page(b"x" * (16 << 20))}
    with served(WebServer(large, request_seconds=0.2)) as address:
        with socket.create_connection(address, timeout=10) as dripping:
            began = time.monotonic()
            with contextlib.suppress(OSError):
                while time.monotonic() - began < 8.0:
                    dripping.sendall(b"G")
                    time.sleep(0.02)
            assert time.monotonic() - began < 5.0
        with socket.create_connection(address, timeout=10) as deaf:
            deaf.sendall(b"GET /large HTTP/1.1\r\n\r\n")
            received = 0
            time.sleep(0.5)
            with contextlib.suppress(OSError):
                while part := deaf.recv(1 << 20):
                    received += len(part)
            assert received < 16 << 20
        with socket.create_connection(address, timeout=10) as wordy:
            with contextlib.suppress(OSError):
                wordy.sendall(b"GET / HTTP/1.1\r\nx: " + b"y" * 4 * MAX_HEAD_BYTES)
            with contextlib.suppress(ConnectionResetError):
                assert wordy.recv(64) == b""


def test_no_thread_and_no_port_is_left() -> None:
    """That holds also if a client is connected when it stops."""
    before = set(threading.enumerate())
    server = WebServer(PAGES)
    with served(server) as address, socket.create_connection(address, timeout=10):
        assert ask(address, "/metrics")[0] == 200
        server.stop()
        assert set(threading.enumerate()) == before
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(address)


def test_a_taken_port_is_named_with_its_own_exit_code() -> None:
    """The error names the setting and the port."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port}") as caught:
            WebServer(PAGES).start("127.0.0.1", port)
    assert caught.value.exit_code is ExitCode.PORT_IN_USE


@pytest.mark.parametrize(
    "host", ["192.0.2.1", "no-such-host.invalid", "", "a b", "x" * 300, "ü" * 70, "a\0b"], ids=repr
)
def test_what_is_no_address_of_this_machine_cannot_be_served(host: str) -> None:
    """A documentation address (RFC 5737) is not ours; others are none."""
    with pytest.raises(UserError, match=r"node\.metrics_host") as caught:
        WebServer(PAGES).start(host, 0)
    assert caught.value.exit_code is ExitCode.CONFIG
