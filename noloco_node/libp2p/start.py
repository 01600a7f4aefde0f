"""A node's p2pd, started and connected: its doors into the swarm, the check of its identity, and its relays."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from noloco_node.aio import cancel_and_wait
from noloco_node.config.node_settings import NodeSettings
from noloco_node.identity.addresses import (
    CONNECT_SECONDS,
    REACH_SECONDS,
    PeerAddress,
    log_passed_over,
    no_address,
    peers_unreachable,
    try_peers,
)
from noloco_node.identity.keys import Identity, identity_taken
from noloco_node.identity.peer_id import PeerId
from noloco_node.libp2p.arguments import ALWAYS, NOT_THIS_PEER, check_port_free, node_arguments
from noloco_node.libp2p.daemon import PrivateP2P
from noloco_node.libp2p.relay_places import circuit_address, keep_places, willing_relays
from noloco_node.libp2p.tls_probe import NoAnswer, who_answers
from noloco_node.storage.held import PrivateFolder, sweep_dead_folders
from noloco_node.transport.calls import ATTEMPTS

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Doors:
    """Addresses by which a node may enter a swarm, beside the initial peers of its settings."""

    seen_before: tuple[str, ...] = ()
    """Tried where no initial peer is named, or none of them proves to be that peer."""
    may_found: bool = True
    """If no address is named and none of those seen before answers, the node starts a swarm of its own."""
    comes_back: bool = False
    """The node has been in a run before."""


async def start_p2p(settings: NodeSettings, identity: Identity, doors: Doors | None = None) -> PrivateP2P:
    """Start p2pd as the settings say and connect it to the initial peers that answer.

    Raises UserError: PORT_IN_USE, PEERS_UNREACHABLE (also if none relays that should), or IDENTITY_TAKEN (another live
    node has this peer id). Others are P2P_DAEMON and CONFIG (a host or announced address that is none). Leaves nothing
    behind when it raises or is cancelled.
    """
    node_arguments(settings, identity.path)
    check_port_free(settings.host, settings.port)
    sweep_dead_folders()
    peers = await _open_doors(settings.initial_peers, doors or Doors())
    if peers:
        await _check_identity_free(settings, identity, peers)
    relays = await _find_relays(settings, peers) if settings.relay == "always" else ()
    arguments = node_arguments(settings, identity.path, [circuit_address(relay) for relay in relays])
    daemon = await _launch(arguments, peers, settings.p2pd_start_seconds)
    daemon.relays = relays
    try:
        await _connect_to_some(daemon, peers)
    except BaseException:
        await daemon.close()
        raise
    return daemon


@contextlib.asynccontextmanager
async def running_p2p(
    settings: NodeSettings, identity: Identity, doors: Doors | None = None
) -> AsyncGenerator[PrivateP2P]:
    """`start_p2p`, closed at the end of the block."""
    daemon = await start_p2p(settings, identity, doors)
    keeping = [asyncio.create_task(keep_places(daemon))]
    try:
        try:
            yield daemon
        finally:
            await cancel_and_wait(keeping)
    finally:
        await daemon.close()


async def _open_doors(named: Sequence[str], doors: Doors) -> list[PeerAddress]:
    """The addresses that answer: of the named ones, and of peers seen before unless one of those proves to be the named
    peer. UserError (PEERS_UNREACHABLE)."""
    live, reasons = await try_peers(named, REACH_SECONDS)
    others = [text for text in doors.seen_before if text not in named]
    if live or others:
        log_passed_over(reasons)
    if others and not any(await asyncio.gather(*map(_proves_itself, live))):
        logger.info("trying %d addresses of peers seen before", len(others))
        more, silent = await try_peers(others, 0.0)
        live += more  # those named come first: they may only be busy
        reasons |= silent
    if live or (doors.may_found and not named):
        return live
    raise peers_unreachable(reasons, comes_back=doors.comes_back) if reasons else no_address()


async def _proves_itself(address: PeerAddress) -> bool:
    """Whether the peer of an address has the port that opens there; a new key, or another service, may have it."""
    try:
        return await who_answers(address.host, address.port, CONNECT_SECONDS) == address.dialled
    except NoAnswer:
        return False


async def _launch(arguments: Sequence[str], peers: Sequence[PeerAddress], within: float) -> PrivateP2P:
    daemon = PrivateP2P(PrivateFolder(), arguments, peers)
    try:
        await daemon.start(within)
    except BaseException:
        await daemon.close()
        raise
    return daemon


@contextlib.asynccontextmanager
async def _nameless(settings: NodeSettings, peers: Sequence[PeerAddress]) -> AsyncGenerator[PrivateP2P]:
    """A short-lived p2pd of no identity of ours, which nobody can dial."""
    probe = await _launch([*ALWAYS, "-dhtClient=1", "-noListenAddrs=1"], peers, settings.p2pd_start_seconds)
    try:
        yield probe
    finally:
        await probe.close()


async def _check_identity_free(settings: NodeSettings, identity: Identity, peers: Sequence[PeerAddress]) -> None:
    """Ask the swarm, through a short-lived nameless p2pd, whether a live node answers under our peer id.

    Our own p2pd cannot ask: to it the id is its own. A key made just now needs no question. A node that crashed does
    not answer, so it comes straight back under its old id.
    """
    if identity.created:
        return
    own = [peer for peer in peers if peer.peer == identity.peer_id]
    if own:
        raise identity_taken(identity.path, f"the initial peer {own[0].text}")
    async with _nameless(settings, peers) as probe:
        answered = await is_found(probe, identity.peer_id)
    if answered:
        raise identity_taken(identity.path, f"a live node of the swarm (peer id {identity.peer_id})")


async def is_found(probe: PrivateP2P, peer: PeerId) -> bool:
    """Whether a peer answers to a probe that may have met the swarm a moment ago: it is looked for more than once."""
    try:
        async with asyncio.timeout(REACH_SECONDS):
            for look in range(ATTEMPTS):
                await asyncio.sleep(0.5 if look else 0.0)
                why = await probe.connect(peer)
                if why is None:
                    return True
                logger.debug("no node answers as %s (look %d of %d): %s", peer, look + 1, ATTEMPTS, why)
    except TimeoutError:
        logger.debug("no node answers as %s within %g s", peer, REACH_SECONDS)
    return False


async def _find_relays(settings: NodeSettings, peers: Sequence[PeerAddress]) -> tuple[PeerAddress, ...]:
    """Initial peers that relay for this node, asked through a short-lived nameless p2pd: what a p2pd announces must be
    known when it starts."""
    async with _nameless(settings, peers) as probe:
        return await willing_relays(probe, peers)


async def reached_by_a_stranger(settings: NodeSettings, node: PrivateP2P) -> str | None:
    """None where another p2pd, which knows nothing else, reaches a node by the addresses that it tells; or why not."""
    async with _nameless(settings, ()) as stranger:
        try:
            async with asyncio.timeout(REACH_SECONDS):
                return await stranger.connect(node.own_id, node.visible_addresses())
        except TimeoutError:
            return f"no connection within {REACH_SECONDS:g} s"


async def _connect_to_some(daemon: PrivateP2P, peers: Sequence[PeerAddress]) -> None:
    """A port that answers may belong to anything: go on only with peers that have the identity in their address."""
    failures = await asyncio.gather(*(daemon.connect(peer.peer, [peer.text]) for peer in peers))
    daemon.joined_peers = tuple(peer.text for peer, failure in zip(peers, failures, strict=True) if failure is None)
    failed = zip(peers, failures, strict=True)
    reasons = {peer.text: f"{NOT_THIS_PEER} ({why[:200]})" for peer, why in failed if why is not None}
    if peers and not daemon.joined_peers:
        raise peers_unreachable(reasons)
    log_passed_over(reasons)
