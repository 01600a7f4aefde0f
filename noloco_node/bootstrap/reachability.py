"""Whether others reach this node: peers dial back to it, and pure judgements of what they found.

A peer dials back to the one that asks, at the host that it sees it at and nowhere else. Nobody can therefore have a
third party dialled. The asker names ports only, at most a few, not often. The peer that answers there must be the asker
itself, by the key behind its peer id.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from typing import Annotated, NamedTuple

from pydantic import Field

from noloco_node import ambient
from noloco_node.bootstrap.hello import Plain
from noloco_node.identity.addresses import Reach, reach_of
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
MOST_ASKED = 4
"""At most so many peers are asked to dial at once, and a node dials back to as many at the same time."""

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
        if self._rest.holds(peer, now) or self._running >= MOST_ASKED:
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


AGREED = 2
"""Peers of so many networks must have reached an address that only they know to be this node's, before it is announced.
So many looks in a row must find a node out of reach before it asks for a relay."""


class HostPort(NamedTuple):
    """An IP address and a TCP port."""

    host: str
    port: int


class Way(StrEnum):
    """How others reach a node."""

    UNKNOWN = "unknown"
    DIRECT = "direct"
    RELAYED = "relayed"
    UNREACHED = "unreached"


@dataclass(frozen=True, slots=True)
class Seen:
    """What one peer found that dialled this node at the host that it sees it at."""

    observer: PeerId
    network: str
    """The network of the observer, as `network_of` says: peers of one network count as one."""
    place: HostPort
    reached: bool


@dataclass(frozen=True, slots=True)
class ReachFinding:
    """What the peers found together."""

    place: HostPort | None
    """Where this node is reached; None where it is not, or where too few say so."""
    tried: tuple[HostPort, ...]
    """Where it was dialled."""


class Step(Enum):
    """What follows from a look."""

    DIRECT = auto()
    """It is reached where others are told."""
    ANNOUNCE = auto()
    """It is reached elsewhere, or no longer needs a relay: tell others so."""
    RELAYED = auto()
    """Its relays work."""
    SEEK_RELAY = auto()
    LOOK_AGAIN = auto()
    """Too little is known."""


@dataclass(frozen=True, slots=True)
class ReachStanding:
    """How a node is reached now."""

    way: Way = Way.UNKNOWN
    place: HostPort | None = None
    relays: tuple[str, ...] = ()
    """Peer ids."""
    why: str = ""
    """What is in the way, where it is not reached."""

    def words(self) -> str:
        """For a person, in one line."""
        match self.way:
            case Way.DIRECT if self.place is not None:
                return f"reachable directly at {self.place.host} port {self.place.port}"
            case Way.RELAYED:
                return f"reachable by relay {', '.join(self.relays)}"
            case Way.UNREACHED:
                return "not reachable" + (f": {self.why}" if self.why else "")
            case _:
                return "not known whether others reach this node"


def network_of(host: str) -> str:
    """The network of an IP address: its /24, or /48 of IPv6; machines of one may belong to one owner. ValueError."""
    version = ipaddress.ip_address(host).version
    return str(ipaddress.ip_network(f"{host}/{24 if version == 4 else 48}", strict=False))


def judge(seen: Sequence[Seen], own: Collection[HostPort], named: Collection[PeerId]) -> ReachFinding | None:
    """Where this node is reached, by what peers found, each once a place; None if nobody dialled it.

    Only the widest hosts count: that a neighbour reaches it says nothing of the world. An address that this node knows
    for its own needs the word of one network, and no more that say otherwise. An address that it knows only from others
    must be reached from two networks, so that no single peer can have it announce a stranger's. If all peers that can
    be asked are of one network, one of the peers that its owner `named` must be among them.
    """
    if not seen:
        return None
    widest = min(reach_of(each.place.host) for each in seen)
    counted = [each for each in seen if reach_of(each.place.host) is widest]
    networks = {each.network for each in seen}
    tried = tuple(dict.fromkeys(each.place for each in counted))
    found: list[tuple[int, HostPort]] = []
    for place in tried:
        yes = {each.network for each in counted if each.place == place and each.reached}
        no = {each.network for each in counted if each.place == place and not each.reached} - yes
        if not yes or len(no) > len(yes):
            continue
        vouched = any(each.observer in named for each in counted if each.place == place and each.reached)
        if place in own or len(yes) >= AGREED or (len(networks) == 1 and vouched):
            found.append((len(yes), place))
    best = max(found, default=None)
    return ReachFinding(None if best is None else best[1], tried)


def next_step(
    finding: ReachFinding | None, told: Collection[HostPort], *, relayed: bool, relays_work: bool, misses: int
) -> Step:
    """What to do: `told` are the places that others are told now, `relayed` whether they are told relays. `misses`
    counts looks in a row, this one included, that found a node out of reach; one that was reached has two."""
    if finding is not None and finding.place is not None:
        return Step.ANNOUNCE if relayed or finding.place not in told else Step.DIRECT
    if relayed:
        return Step.RELAYED if relays_work else Step.SEEK_RELAY
    return Step.LOOK_AGAIN if finding is None or misses < AGREED else Step.SEEK_RELAY


def is_elsewhere(host: str) -> bool:
    """Whether a peer at this host is on another machine."""
    return reach_of(host) in (Reach.PUBLIC, Reach.PRIVATE)
