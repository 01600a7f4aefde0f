"""Addresses of initial peers: what they say, and which of them answer."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import base58

from noloco_node.errors import ExitCode, UserError
from noloco_node.swarm.transport import PeerId

logger = logging.getLogger(__name__)

_ADDRESS = re.compile(r"/(?P<kind>ip4|ip6|dns|dns4|dns6)/(?P<host>[^/]+)/tcp/(?P<port>\d{1,5})/p2p/(?P<peer>[^/]+)/?")
RETRY_SECONDS = 0.25
CONNECT_SECONDS = 3.0
MAX_SHOWN = 300


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """One address of one peer."""

    text: str
    host: str
    port: int
    peer: PeerId


def parse_address(text: str) -> PeerAddress:
    """Parse `/ip4/HOST/tcp/PORT/p2p/PEER_ID` (or ip6, dns, dns4, dns6). ValueError saying what is wrong."""
    match = _ADDRESS.fullmatch(text)
    if match is None:
        raise ValueError("malformed: it must look like /ip4/203.0.113.7/tcp/31337/p2p/12D3Koo...")
    port = int(match["port"])
    if not 0 < port < 65536:
        raise ValueError(f"malformed: {port} is no TCP port")
    try:
        known = base58.b58decode(match["peer"])[:2]
    except ValueError:
        known = b""
    if known not in (b"\x00\x24", b"\x12\x20"):
        raise ValueError(f"malformed: {match['peer'][:60]} is no peer id")
    return PeerAddress(text, match["host"], port, PeerId(match["peer"]))


async def answering_peers(texts: Sequence[str], within: float) -> list[PeerAddress]:
    """Those addresses where a TCP connection opens, in order; retries all for up to `within` seconds until one does.

    The others are logged with the reason. UserError (PEERS_UNREACHABLE) that says for each address why it does not
    count, if none does.
    """
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
        failures = await asyncio.gather(*(_why_silent(address) for address in candidates))
        live = [address for address, failure in zip(candidates, failures, strict=True) if failure is None]
        silent = {address.text: why for address, why in zip(candidates, failures, strict=True) if why is not None}
        if live:
            log_passed_over(reasons | silent)
            return live
        if loop.time() >= deadline:
            reasons |= silent
            break
        # A peer that is just starting gives no sign that could be awaited: asking again is the only way.
        await asyncio.sleep(RETRY_SECONDS)
    raise peers_unreachable(reasons)


def log_passed_over(reasons: Mapping[str, str]) -> None:
    """One line for each address that is not used, with the reason."""
    for text, why in reasons.items():
        logger.warning("passed over %s: %s", shown(text), shown(why))


def shown(text: str) -> str:
    """A stranger's or the system's words for a terminal: one line, bounded, without control characters."""
    line = " ".join(text.split())
    return "".join(letter if letter.isprintable() else "?" for letter in line)[:MAX_SHOWN]


def peers_unreachable(reasons: Mapping[str, str]) -> UserError:
    """The error that says for each initial peer why it cannot be joined."""
    lines = "".join(f"\n  {text}: {why}" for text, why in reasons.items())
    return UserError(
        ExitCode.PEERS_UNREACHABLE,
        f"initial_peers: none of {len(reasons)} answered{lines}",
        "check the addresses (a running node prints its own at start), that the peer still runs, and firewalls between",
    )


async def _why_silent(address: PeerAddress) -> str | None:
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(address.host, address.port)
    except TimeoutError:
        return f"timed out after {CONNECT_SECONDS:g} s"
    except ConnectionRefusedError:
        return "refused: nothing listens on that port"
    except OSError as error:
        return f"unreachable: {error.strerror or error}"
    writer.transport.abort()
    return None
