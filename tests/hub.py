"""A model hub on this machine that gives nobody anything, and remembers what was asked with which token."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "hf_" + "t0psecret" * 4


@dataclass
class Hub:
    """What was asked of it."""

    url: str
    status: int = 401
    """What it answers."""
    asked: list[str] = field(default_factory=list)
    shown: list[str | None] = field(default_factory=list)
    """The token of each request."""


@contextlib.contextmanager
def running_hub() -> Iterator[Hub]:
    """One that listens on loopback as long as the block lasts."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _do(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            hub.asked.append(f"{self.command} {self.path}")
            hub.shown.append(self.headers.get("Authorization"))
            content = b'{"error": "no"}'
            self.send_response(hub.status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_HEAD = do_POST = do_PUT = _do

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        hub = Hub(f"http://127.0.0.1:{server.server_address[1]}")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
