"""Whether others reach this node, and what follows: pure judgements of what those peers found that dialled back."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from typing import NamedTuple

from noloco_node.identity.addresses import Reach, reach_of
from noloco_node.identity.peer_id import PeerId
from noloco_node.tallies import Doubling

NETWORKS_AGREED = 2
"""Peers of so many networks must have reached an address that only they know to be this node's, before it is
announced."""
MISSES = 2
"""The number of probes in a row that must find a node out of reach before it asks for a relay."""
CHANGES = Doubling(60.0, 960.0)
"""Seconds between changes of what others are told: each costs all connections for a moment."""
CHANGES_COUNT_SECONDS = 3600.0


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
        if place in own or len(yes) >= NETWORKS_AGREED or (len(networks) == 1 and vouched):
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
    return Step.LOOK_AGAIN if finding is None or misses < MISSES else Step.SEEK_RELAY


def may_change(changes: Sequence[float], now: float) -> bool:
    """Tell whether what others are told may be changed, after changes at these times. The more of them within the hour,
    the longer the next one waits."""
    recent = [at for at in changes if now - at < CHANGES_COUNT_SECONDS]
    if not recent:
        return True
    return now - recent[-1] >= CHANGES.after(len(recent) - 1)


def is_elsewhere(host: str) -> bool:
    """Whether a peer at this host is on another machine."""
    return reach_of(host) in (Reach.PUBLIC, Reach.PRIVATE)
