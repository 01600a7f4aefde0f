"""One question to the pages of a node, by another process; it also tells whether a silent node is there at all."""

from __future__ import annotations

import http.client
import ipaddress

HANGS = (
    "something listens there and does not answer: a node that hangs, or whose process is stopped (kill -STOP, Ctrl-Z, "
    "a paused container)"
)


class Hangs(Exception):
    """What listens there has taken the question, or the system for it, and gives no answer."""

    def __init__(self) -> None:
        super().__init__(HANGS)


def ask_page(host: str, port: int, path: str, *, seconds: float, most_bytes: int) -> tuple[int, bytes]:
    """Status and body of a page, as far as `most_bytes`; `seconds` for each step of it. Raises Hangs; OSError,
    HTTPException or ValueError where nothing is there, or no such server."""
    connection, connected = http.client.HTTPConnection(host, port, timeout=seconds), False
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
