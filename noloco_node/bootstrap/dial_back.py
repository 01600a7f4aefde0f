"""`Can others reach me?`: a peer dials back to the one that asks, at the host that it sees it at and nowhere else.

Nobody can therefore have a third party dialled. The asker names ports only, at most a few, not often. The peer that
answers there must be the asker itself, by the key behind its peer id.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from noloco_node import ambient
from noloco_node.bootstrap.hello import Plain
from noloco_node.identity.peer_id import PeerId
from noloco_node.libp2p.tls_probe import NoAnswer, who_answers
from noloco_node.tallies import PeerTimes
from noloco_node.transport.calls import Method, call, on
from noloco_node.transport.errors import Refusal, Refused
from noloco_node.transport.interface import Transport
from noloco_node.transport.messages import WireModel

logger = logging.getLogger(__name__)

MAX_PORTS = 2
MAX_HOSTS = MAX_PORTS
"""One peer is seen at, and dialled at, at most so many hosts."""
PEER_SECONDS = 20.0
"""Two questions of one peer are at least so many seconds apart."""
AT_ONCE = 2
"""A node dials back to so many peers at the same time."""

_HOST = re.compile(r"/ip[46]/([^/]+)/tcp/\d+")

Connections = Callable[[], Awaitable[Mapping[PeerId, Sequence[str]]]]
"""A function that gives the peers that a node is connected to, and the other ends of these connections."""


class Reached(StrEnum):
    """How a dial ended."""

    YES = "reached"
    NO = "not reached"
    ANOTHER = "somebody else answers there"


class DialBack(WireModel):
    """The question: am I reached at these TCP ports?"""

    ports: Annotated[tuple[Annotated[int, Field(gt=0, lt=65536)], ...], Field(min_length=1, max_length=MAX_PORTS)]


class Dialled(WireModel):
    """The answer: where the asker is seen, and how each dial ended, by `HOST PORT`."""

    seen_at: Annotated[tuple[Plain, ...], Field(max_length=MAX_HOSTS)]
    results: Annotated[dict[Plain, Reached], Field(max_length=MAX_HOSTS * MAX_PORTS)]


DIAL_BACK = Method("hello.dial_back", DialBack, Dialled)


class DialBackTurns:
    """The turns to ask: each peer once in a while, few at the same time."""

    def __init__(self) -> None:
        self._rest = PeerTimes[PeerId]()
        self._running = 0

    def begin(self, peer: PeerId, now: float) -> bool:
        """Whether a question of this peer is taken at this time; `end` must follow where it is."""
        if self._rest.holds(peer, now) or self._running >= AT_ONCE:
            return False
        self._rest[peer] = now + PEER_SECONDS
        self._running += 1
        return True

    def end(self) -> None:
        """A question is answered."""
        self._running -= 1


def hosts_of(ends: Sequence[str]) -> tuple[str, ...]:
    """The IP addresses behind the ends of direct connections; a relay's is not the peer's."""
    hosts: list[str] = []
    for end in ends:
        match = None if "/p2p-circuit" in end else _HOST.match(end)
        if match is not None and _is_address(match[1]):
            hosts.append(match[1])
    return tuple(dict.fromkeys(hosts))[:MAX_HOSTS]


def serve_dial_back(transport: Transport, connections: Connections) -> None:
    """Answer `hello.dial_back` from now on."""
    turns = DialBackTurns()

    async def handle(peer: PeerId, asked: DialBack) -> Dialled:
        if not turns.begin(peer, ambient.monotonic()):
            raise Refused(Refusal.BUSY, f"ask again in {PEER_SECONDS:g} s")
        try:
            hosts = hosts_of((await connections()).get(peer, ()))
            places = [(host, port) for host in hosts for port in asked.ports]
            results = await asyncio.gather(*(_dial(peer, host, port) for host, port in places))
        except (OSError, TimeoutError):
            raise Refused(Refusal.BUSY, "p2pd does not answer") from None
        finally:
            turns.end()
        named = {f"{host} {port}": result for (host, port), result in zip(places, results, strict=True)}
        return Dialled(seen_at=hosts, results=named)

    on(transport, DIAL_BACK, handle)


async def ask_dial_back(transport: Transport, peer: PeerId, ports: Sequence[int]) -> Dialled:
    """What a peer says of this node's ports. Raises Refused or TransportError."""
    return await call(transport, peer, DIAL_BACK, DialBack(ports=tuple(ports)), seconds=20.0)


async def _dial(peer: PeerId, host: str, port: int) -> Reached:
    try:
        found = await who_answers(host, port, 4.0)
    except NoAnswer as error:
        logger.debug("dialled back to %s at %s port %d: %s", peer, host, port, error)
        return Reached.NO
    return Reached.YES if found == peer else Reached.ANOTHER


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
