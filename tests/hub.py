"""A model hub on this machine: as much of the Hugging Face hub's HTTP interface as an upload needs."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

TOKEN = "hf_" + "t0psecret" * 4


class Hub:
    """Its repositories by name, each a folder of files; users may be `refused`, in the way that it says."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.visibility: dict[str, str] = {}
        self.stored: dict[str, bytes] = {}
        """Large files by their SHA-256."""
        self.asked: list[str] = []
        self.shown: list[str | None] = []
        """The token of each request."""
        self.refused: dict[str, int] = {}
        """HTTP status by a part of the path."""

    def answer(self, method: str, path: str, authorization: str | None, body: bytes) -> tuple[int, Any]:
        """Status and JSON."""
        self.asked.append(f"{method} {path}")
        self.shown.append(authorization)
        if method == "PUT":
            self.stored[hashlib.sha256(body).hexdigest()] = body
            return 200, {}
        for part, status in self.refused.items():
            if part in path:
                return status, {"error": "no"}
        if authorization != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid user token."}
        return self._answer(path, body)

    def _answer(self, path: str, body: bytes) -> tuple[int, Any]:
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path.endswith("/info/lfs/objects/batch"):
            wanted = json.loads(body)["objects"]
            upload = {"href": f"{self.url}/store", "header": {}}
            return 200, {"transfer": "basic", "objects": [{**each, "actions": {"upload": upload}} for each in wanted]}
        _, _, _, owner, name, what, *_ = path.split("/")
        files = self.repositories[f"{owner}/{name}"]
        if what == "tree":
            return 200, [{"type": "file", "path": each, "size": 1, "oid": "0" * 40} for each in files]
        if what == "preupload":
            modes = {True: "lfs", False: "regular"}
            wanted = [each["path"] for each in json.loads(body)["files"]]
            told = [{"path": p, "uploadMode": modes[p.endswith(".safetensors")], "shouldIgnore": False} for p in wanted]
            return 200, {"files": told}
        assert what == "commit", path
        self._commit(files, body)
        return 200, {"commitUrl": f"{self.url}/{owner}/{name}/commit/1", "commitOid": "1" * 40}

    def _create(self, wanted: dict[str, Any]) -> tuple[int, Any]:
        name = f"{wanted['organization']}/{wanted['name']}"
        told = {"url": f"{self.url}/{name}"}
        if name in self.repositories:
            return 409, {**told, "error": "You already created this model repo"}
        self.repositories[name] = {}
        self.visibility[name] = wanted["visibility"]
        return 200, told

    def _commit(self, files: dict[str, bytes], body: bytes) -> None:
        for line in body.splitlines():
            each = json.loads(line)
            value = each["value"]
            if each["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif each["key"] == "lfsFile":
                files[value["path"]] = self.stored[value["oid"]]
            elif each["key"] == "deletedFile":
                del files[value["path"]]


@contextlib.contextmanager
def running_hub() -> Iterator[Hub]:
    """One that listens on loopback as long as the block lasts."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _do(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path, allowed = urlsplit(self.path).path, self.headers.get("Authorization")
            status, told = hub.answer(self.command, path, allowed, body)
            content = json.dumps(told).encode()
            self.send_response(status)
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
