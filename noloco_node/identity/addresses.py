"""Addresses of initial peers: what they say, and which of them answer."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import base58

from noloco_node.errors import ExitCode, UserError
from noloco_node.identity.peer_id import PeerId

logger = logging.getLogger(__name__)

CIRCUIT = "/p2p-circuit"
"""Behind this part of an address comes a peer that is reached through the one before it."""
_ADDRESS = re.compile(
    r"/(?P<kind>ip4|ip6|dns|dns4|dns6)/(?P<host>[^/]+)/tcp/(?P<port>\d{1,5})"
    rf"(?:/p2p/(?P<relay>[^/]+){CIRCUIT})?/p2p/(?P<peer>[^/]+)/?"
)
CONNECT_SECONDS = 3.0
"""A port opens, or this node's own p2pd answers, within so many seconds."""
REACH_SECONDS = 10.0
"""A router, a relay, or a peer that must be found or dialled first answers within so many seconds."""
MOST_ADDRESSES = 4
"""The most addresses that are kept of one peer."""
LONGEST_ADDRESS = 256
"""An address with more letters is not kept: any peer may tell of one, and the file of those seen before is bounded."""
ALL_OFF = (
    "; if all nodes of the run are off, start its seed first, or one node by its noloco-node run CONFIG without "
    "--initial-peers, and the others once that is up (docs/operations.md, When everything was off)"
)


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """One address of one peer."""

    text: str
    host: str
    port: int
    peer: PeerId
    relay: PeerId | None = None
    """The peer that listens at host and port, if the named peer is reached through it."""

    @property
    def dialled(self) -> PeerId:
        """The peer that listens at host and port."""
        return self.relay or self.peer


class Reach(IntEnum):
    """From where a host can be dialled, the widest first."""

    PUBLIC = 0
    PRIVATE = 1
    LOOPBACK = 2
    NOWHERE = 3


def reach_of(host: str) -> Reach:
    """From where an IP address can be dialled. A name counts as public: what is behind it is not looked up."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        name = host.lower()
        own = name in ("localhost", "localhost.localdomain") or name.endswith(".localhost")
        return Reach.LOOPBACK if own else Reach.PUBLIC
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if address.is_unspecified or address.is_multicast:
        return Reach.NOWHERE
    if address.is_loopback:
        return Reach.LOOPBACK
    return Reach.PUBLIC if address.is_global else Reach.PRIVATE


def widest_first(texts: Sequence[str]) -> list[str]:
    """Addresses of a node in the order in which to hand them out: a public one is of use to everyone."""
    return sorted(texts, key=lambda text: reach_of(parse_address(text).host))


def to_hand_out(texts: Sequence[str]) -> list[str]:
    """The addresses of a node that a newcomer can use: where it has a public one, those behind its router are left
    out."""
    public = [text for text in texts if reach_of(parse_address(text).host) is Reach.PUBLIC]
    return public or list(texts)


def parse_address(text: str) -> PeerAddress:
    """Parse `/ip4/HOST/tcp/PORT/p2p/PEER_ID` (or ip6, dns, dns4, dns6), or `.../p2p/RELAY/p2p-circuit/p2p/PEER_ID`.
    ValueError saying what is wrong."""
    match = _ADDRESS.fullmatch(text)
    if match is None:
        raise ValueError("malformed: it must look like /ip4/203.0.113.7/tcp/31337/p2p/12D3Koo...")
    port = int(match["port"])
    if not 0 < port < 65536:
        raise ValueError(f"malformed: {port} is no TCP port")
    relay = None if match["relay"] is None else parse_peer(match["relay"])
    return PeerAddress(text, match["host"], port, parse_peer(match["peer"]), relay)


def check_addresses(texts: Sequence[str]) -> None:
    """Raise UserError (CONFIG) where none of the named addresses is one: a typing error, whatever the network does."""
    reasons: dict[str, str] = {}
    for text in texts:
        try:
            parse_address(text)
        except ValueError as error:
            reasons[text] = str(error).removeprefix("malformed: ")
    if reasons and len(reasons) == len(set(texts)):
        lines = "".join(f"\n  {shown(text)}: {why}" for text, why in reasons.items())
        raise UserError(
            ExitCode.CONFIG,
            f"node.initial_peers: {'this is' if len(reasons) == 1 else 'these are'} no address of a peer{lines}",
            "copy the whole address that a running node prints at its start, behind `noloco-node join`",
        )


def parse_peer(text: str) -> PeerId:
    """A whole peer id; ValueError saying what is wrong."""
    try:
        known = base58.b58decode(text)[:2]
    except ValueError:
        known = b""
    if known not in (b"\x00\x24", b"\x12\x20"):
        raise ValueError(f"malformed: {text[:60]} is no peer id")
    return PeerId(text)


async def try_peers(texts: Sequence[str], within: float) -> tuple[list[PeerAddress], dict[str, str]]:
    """The addresses where a TCP connection opens, in order, and for each of the others why it does not count. It
    retries all of them for up to `within` seconds until one answers."""
    reasons: dict[str, str] = {}
    candidates: list[PeerAddress] = []
    for text in texts:
        try:
            candidates.append(parse_address(text))
        except ValueError as error:
            reasons[text] = str(error)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within
    while candidates:
        failures = await asyncio.gather(*(why_silent(address) for address in candidates))
        live = [address for address, failure in zip(candidates, failures, strict=True) if failure is None]
        silent = {address.text: why for address, why in zip(candidates, failures, strict=True) if why is not None}
        if live or loop.time() >= deadline:
            return live, reasons | silent
        # A peer that is just starting gives no sign that could be awaited: asking again is the only way.
        await asyncio.sleep(0.25)
    return [], reasons


def peers_at(addresses: Iterable[str]) -> list[PeerId]:
    """The peers that these addresses name. ValueError as `parse_address`."""
    return [parse_address(text).peer for text in addresses]


def log_passed_over(reasons: Mapping[str, str]) -> None:
    """One line for each address that is not used, with the reason."""
    for text, why in reasons.items():
        logger.warning("passed over %s: %s", shown(text), shown(why))


def shown(text: str) -> str:
    """A stranger's or the system's words for a terminal: one line, bounded, without control characters."""
    line = " ".join(text.split())
    return "".join(letter if letter.isprintable() else "?" for letter in line)[:300]


def peers_unreachable(reasons: Mapping[str, str], *, comes_back: bool = False) -> UserError:
    """The error that says for each initial peer why it cannot be joined. A node that `comes_back` to a run is also told
    how the run begins again after all of its nodes were off."""
    lines = "".join(f"\n  {text}: {why}" for text, why in reasons.items())
    return UserError(
        ExitCode.PEERS_UNREACHABLE,
        f"node.initial_peers: none of {len(reasons)} answered{lines}",
        "check the addresses (a running node prints its own at start), that the peer still runs (when a run is over, "
        "all of its nodes leave), and firewalls between" + (ALL_OFF if comes_back else ""),
    )


def no_address() -> UserError:
    """The error for a node that is to join and knows nobody."""
    return UserError(
        ExitCode.PEERS_UNREACHABLE,
        "no address was given, and no peer was seen before in this run folder",
        "name the address of a node of the run: each one prints its own at its start",
    )


async def why_silent(address: PeerAddress) -> str | None:
    """None where a TCP connection opens at this address, else why it does not."""
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(address.host, address.port)
    except TimeoutError:
        return f"timed out after {CONNECT_SECONDS:g} s"
    except ConnectionRefusedError:
        return "refused: nothing listens on that port"
    except OSError as error:
        return f"unreachable: {error.strerror or error}"
    except ValueError:
        return "its host is no name that can be looked up"
    writer.transport.abort()
    return None


def dialable(texts: Iterable[str]) -> tuple[str, ...]:
    """The addresses that a node may dial by TCP, public ones first. A peer's loopback address counts only if it has no
    other (it is on this machine then)."""
    parsed: list[PeerAddress] = []
    for text in (each for each in texts if len(each) <= LONGEST_ADDRESS):
        try:
            parsed.append(parse_address(text))
        except ValueError:
            continue
    ordered = sorted(((reach_of(address.host), address.text) for address in parsed), key=lambda row: row[0])
    elsewhere = [text for reach, text in ordered if reach in (Reach.PUBLIC, Reach.PRIVATE)]
    here = [text for reach, text in ordered if reach is Reach.LOOPBACK]
    return tuple(dict.fromkeys(elsewhere or here))[:MOST_ADDRESSES]
