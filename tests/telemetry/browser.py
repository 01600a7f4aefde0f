"""A real browser, headless, where the machine has one: Debian's chromium, driven through its chromedriver."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support import free_port

MISSING = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
"""What this machine lacks for it."""
ANSWER_SECONDS = 60.0
ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)


class Browser:
    """One session: pages at any size, what they hold, and what the browser complained of."""

    def __init__(self, port: int, folder: Path) -> None:
        self._root = f"http://127.0.0.1:{port}"
        options = {"args": [*ARGUMENTS, f"--user-data-dir={folder}"], "binary": shutil.which("chromium")}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        made = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{made['sessionId']}"

    def _call(self, method: str, path: str, body: object = None) -> Any:
        data = None if method != "POST" else json.dumps(body or {}).encode()
        request = urllib.request.Request(self._root + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            return json.load(answer)["value"]

    def tell(self, command: str, **params: object) -> Any:
        """A command of the DevTools protocol."""
        return self._call("POST", f"{self._session}/goog/cdp/execute", {"cmd": command, "params": params})

    def open(self, url: str, width: int, *, dark: bool = False) -> None:
        """Load a page into a window of that width, as a phone has it where it is narrow."""
        phone = width < 600
        shape = {"width": width, "height": 844 if phone else 900, "deviceScaleFactor": 1, "mobile": phone}
        self.tell("Emulation.setDeviceMetricsOverride", **shape)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.tell("Emulation.setEmulatedMedia", features=[scheme])
        self._call("POST", f"{self._session}/url", {"url": url})

    def ask(self, expression: str) -> Any:
        """The value of an expression in the page."""
        return self._call("POST", f"{self._session}/execute/sync", {"script": f"return {expression}", "args": []})

    def wait_for(self, expression: str) -> None:
        """Until it is true in the page."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while not self.ask(expression):
            assert time.monotonic() < deadline, expression
            time.sleep(0.05)

    def complaints(self) -> list[str]:
        """What was written to the console since the last time, among it what the page's policy forbids."""
        return [row["message"] for row in self._call("POST", f"{self._session}/se/log", {"type": "browser"})]

    def picture(self, path: Path) -> None:
        """The whole page as PNG."""
        shot = self.tell("Page.captureScreenshot", captureBeyondViewport=True, fromSurface=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        """End the session and its browser."""
        self._call("DELETE", self._session)


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser with an empty profile in `folder`, ended with the block."""
    port = free_port()
    driver = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + ANSWER_SECONDS
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            assert time.monotonic() < deadline, "chromedriver does not listen"
            time.sleep(0.02)
        made = Browser(port, folder)
        try:
            yield made
        finally:
            made.close()
    finally:
        driver.terminate()
        driver.wait(10)
