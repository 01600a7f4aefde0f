"""How a node that nobody can dial stays reachable.

It asks relays for places again and again, and makes direct connections wherever it can dial itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import NoReturn

from noloco_node.ambient import LOOK_SECONDS
from noloco_node.errors import ExitCode, UserError
from noloco_node.identity.addresses import CIRCUIT, REACH_SECONDS, PeerAddress, dialable, parse_address
from noloco_node.identity.peer_id import PeerId
from noloco_node.libp2p.daemon import PrivateP2P
from noloco_node.libp2p.relay_messages import (
    HOP,
    PLACE_SECONDS,
    Status,
    hop_status,
    is_limited,
    read_fields,
    reserve_request,
    write_message,
)
from noloco_node.libp2p.tls_probe import NoAnswer, who_answers
from noloco_node.tallies import NO_REST, Doubling, Rest
from noloco_node.transport.errors import PeerUnreachable
from noloco_node.transport.pool import StreamHost

logger = logging.getLogger(__name__)

RENEW_SECONDS = PLACE_SECONDS / 6.0
"""Seconds between two requests for a place: some may be lost. A relay that came back waits as long."""
MOST_RELAYS = 3
NOT_A_RELAY = "it relays for nobody"
DIRECT_AGAIN = Doubling(4.0, 300.0)
"""Seconds between attempts at a direct connection to one peer; it may only just have told others its address."""


async def ask_for_place(host: StreamHost, relay: PeerId) -> str | None:
    """Reserve a place with a relay, or keep it; None, or why there is none."""
    try:
        async with asyncio.timeout(REACH_SECONDS):
            reader, writer = await host.open_stream(relay, HOP)
            try:
                await write_message(writer, reserve_request())
                answer = await read_fields(reader)
            finally:
                writer.transport.abort()
    except TimeoutError:
        return f"no answer within {REACH_SECONDS:g} s"
    except PeerUnreachable as error:
        return NOT_A_RELAY if "protocols not supported" in str(error) else str(error)[:200]
    except (OSError, ValueError, asyncio.IncompleteReadError) as error:
        return f"it broke off ({error!r})"
    status = hop_status(answer)
    if status == Status.PERMISSION_DENIED:
        return NOT_A_RELAY
    if status != Status.OK:
        return f"it refused with status {status}"
    return "it ends connections after little time or few bytes" if is_limited(answer) else None


async def willing_relays(host: StreamHost, peers: Sequence[PeerAddress]) -> tuple[PeerAddress, ...]:
    """The peers that relay for this node, at most `MOST_RELAYS`. Raises UserError (PEERS_UNREACHABLE) if none does."""
    direct = [peer for peer in peers if peer.relay is None]
    reasons = await asyncio.gather(*(ask_for_place(host, peer.peer) for peer in direct))
    willing = [peer for peer, reason in zip(direct, reasons, strict=True) if reason is None]
    if willing:
        return tuple(willing[:MOST_RELAYS])
    told = "".join(f"\n  {peer.text}: {reason}" for peer, reason in zip(direct, reasons, strict=True))
    raise UserError(
        ExitCode.PEERS_UNREACHABLE,
        f"node.relay: none of {len(direct)} initial peers that answered relays for others{told}",
        "name a seed or node that its owner started with --relay-for-others, or forward a port and leave out --relay",
    )


def circuit_address(relay: PeerAddress) -> str:
    """Where a node that has a place with this relay is reached; its own peer id comes behind it."""
    return f"{relay.text.rstrip('/')}{CIRCUIT}"


async def keep_places(host: PrivateP2P) -> NoReturn:
    """Ask for the places again before they run out, whatever happens to the relays or to p2pd meanwhile. The relays may
    change, and there may be none."""
    tried: dict[PeerId, Rest] = {}
    while True:
        try:
            relays = host.relays
            await _ask_all(host, relays, host.lost_relays)
            renew_at = asyncio.get_running_loop().time() + RENEW_SECONDS
            while asyncio.get_running_loop().time() < renew_at and host.relays is relays:
                if relays:
                    await _go_direct(host, tried)
                await asyncio.sleep(LOOK_SECONDS)
        except Exception:
            # Nobody awaits this before the node ends, and without its places the node is out of reach.
            logger.exception("a request for places with relays, or a direct connection, failed; tried again")
            await asyncio.sleep(LOOK_SECONDS)


async def _ask_all(host: PrivateP2P, relays: Sequence[PeerAddress], lost: set[PeerId]) -> None:
    """Ask each relay for the place, and say which of them begins or ceases to be among the `lost`."""
    reasons = await asyncio.gather(*(_ask_again(host, relay) for relay in relays))
    if any(reasons) and not await host.answers(REACH_SECONDS):  # the silence is of this node's own p2pd
        return
    for relay, reason in zip(relays, reasons, strict=True):
        if reason is not None and relay.peer not in lost:
            logger.warning("the relay at %s does not relay for this node: %s", relay.text, reason)
            lost.add(relay.peer)
        elif reason is None and relay.peer in lost:
            logger.warning("the relay at %s relays for this node again", relay.text)
            lost.discard(relay.peer)


async def _ask_again(host: PrivateP2P, relay: PeerAddress) -> str | None:
    """`ask_for_place` of a relay that p2pd may have lost, or never known if it is a new one."""
    try:
        async with asyncio.timeout(REACH_SECONDS):
            failure = await host.connect(relay.peer, [relay.text])
    except TimeoutError:
        return f"no connection within {REACH_SECONDS:g} s"
    return failure[:200] if failure else await ask_for_place(host, relay.peer)


async def _go_direct(host: PrivateP2P, tried: dict[PeerId, Rest]) -> None:
    """Replace relayed connections to peers that this node can dial itself: they may have dialled first."""
    now = asyncio.get_running_loop().time()
    try:
        connected = await host.connections()
    except (OSError, TimeoutError, EOFError):
        return
    for gone in tried.keys() - connected.keys():
        del tried[gone]
    before = {peer: tried.get(peer, NO_REST) for peer, ends in connected.items() if only_relayed(ends)}
    relayed = [peer for peer, attempt in before.items() if not attempt.holds(now)]
    dialled = await asyncio.gather(*(_dial_directly(host, peer) for peer in relayed), return_exceptions=True)
    for peer, done in zip(relayed, dialled, strict=True):
        if isinstance(done, BaseException):
            logger.error("a direct connection to %s failed", peer, exc_info=done)
        if done is not False:
            tried[peer] = before[peer].again(DIRECT_AGAIN, now)


async def _dial_directly(host: PrivateP2P, peer: PeerId) -> bool:
    """Whether it has an address that could be tried: p2pd hears of one a moment after the peer has dialled."""
    known = [parse_address(text) for text in dialable(await host.addresses_of(peer))]
    direct = [address for address in known if address.relay is None]
    for address in direct:
        if await _answers(address):
            failure = await host.connect_anew(peer, [address.text])
            logger.debug("connected to %s without a relay: %s", peer, failure or "done")
            break
    return bool(direct)


async def _answers(address: PeerAddress) -> bool:
    try:
        seconds = 3.0  # a round trip round the world and three losses
        return await who_answers(address.host, address.port, seconds) == address.peer
    except NoAnswer:
        return False


def only_relayed(ends: Sequence[str]) -> bool:
    """Whether all connections to a peer, by their other ends, go through a relay."""
    return bool(ends) and all(CIRCUIT in end for end in ends)


async def connected_by_relay(host: PrivateP2P, peer: PeerId) -> bool:
    """Whether all connections to a peer go through a relay; where p2pd does not say, none does."""
    try:
        return only_relayed((await host.connections()).get(peer, ()))
    except (OSError, TimeoutError, EOFError):
        return False
