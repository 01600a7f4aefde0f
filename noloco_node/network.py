"""A node's place in the network: identity, p2pd and its supervisor, transport, the run that it agrees on, directory."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from noloco_node import start_checks
from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import RunSpec
from noloco_node.storage.run_folder import RunFolder
from noloco_node.swarm.access import Introduction, own_access
from noloco_node.swarm.circuit_relay import CircuitRelay
from noloco_node.swarm.dht_directory import DhtDirectory, join_directory
from noloco_node.swarm.dial_back import PEER_SECONDS, serve_dial_back
from noloco_node.swarm.directory import Directory
from noloco_node.swarm.identity import Identity, IdentityLock, load_or_create_identity
from noloco_node.swarm.known_peers import Held, KnownPeers, holders_in, live_peers, peers_met
from noloco_node.swarm.libp2p_transport import Libp2pTransport
from noloco_node.swarm.p2p_daemon import Doors, PrivateP2P, running_p2p
from noloco_node.swarm.p2pd_supervisor import Supervisor
from noloco_node.swarm.peer_addresses import Reach, parse_address, reach_of
from noloco_node.swarm.relay_places import connected_by_relay
from noloco_node.swarm.screened_directory import ScreenedDirectory
from noloco_node.swarm.transport import PeerId, Transport

logger = logging.getLogger(__name__)

T = TypeVar("T")

REACH_QUESTIONS = 4
"""Peers asked at a node's start whether they can dial it, until one answers."""


@dataclass(frozen=True, slots=True)
class Network:
    """All parts, running."""

    spec: RunSpec
    settings: NodeSettings
    """The node's own, with the peers that it joined as `initial_peers`."""
    daemon: PrivateP2P
    transport: Transport
    """Shows this node's invitation where peers ask for it."""
    directory: Directory
    """Without outsiders."""
    known: KnownPeers
    supervisor: Supervisor

    async def beside(self, work: Awaitable[T], *companions: Coroutine[Any, Any, None]) -> T:
        """The result of `work`; meanwhile p2pd is started again where it dies, the peers met are written down, and
        `companions` run, which are cancelled at its end."""
        keeping = self.known.keep(self.daemon, self.spec.run_id, self.live_peers, self._holders)
        return await self.supervisor.beside(work, keeping, *companions)

    async def say_whether_reached(self) -> None:
        """Ask the peers that it joined, one after another, to dial this node, and say what the first answer is. A node
        that listens on its own machine only, or relies on relays, has been told already."""
        ports = start_checks.own_ports(self.daemon.visible_addresses())
        joined = self.daemon.joined_peers
        if not ports or not joined or self.settings.relay or out_of_reach(self.settings, joined):
            return
        for address in itertools.islice(itertools.cycle(joined), REACH_QUESTIONS):
            asked = parse_address(address).peer
            answer = await start_checks.dialled_back(self.transport, asked, ports)
            if answer is not None and answer.seen_at:
                start_checks.say(start_checks.check_reached({asked: answer}, ports, local_only=False))
                return
            await asyncio.sleep(PEER_SECONDS)  # who was busy with another's question takes the next one after that

    async def relayed(self, peer: PeerId) -> bool:
        """Whether this node is connected to a peer through relays only."""
        return await connected_by_relay(self.daemon, peer)

    def _holders(self) -> dict[PeerId, Held]:
        return holders_in(self.directory.view, self.directory.now(), self.transport.acquaintances.works)

    def live_peers(self) -> list[PeerId]:
        """Who lives, as this node's last look at the directory says."""
        return live_peers(self.directory.view, self.directory.now(), self.daemon.own_id)


@dataclass(frozen=True, slots=True)
class Entrance:
    """A node that is connected to peers, before it is known what they do together."""

    identity: Identity
    daemon: PrivateP2P
    transport: Libp2pTransport
    known: KnownPeers


Agree = Callable[[Entrance], Awaitable[RunSpec]]
"""How a node and the peers at the addresses that it joined come to the same RunSpec."""


@contextlib.asynccontextmanager
async def entrance(
    settings: NodeSettings, folder: RunFolder, *, run: str | None, may_found: bool
) -> AsyncGenerator[Entrance]:
    """Identity, p2pd and transport; all gone at the end of the block, whatever ends it.

    `run` is the wanted run's id where it is known already. Raises UserError as its parts do.
    """
    start_checks.report(start_checks.before_the_network())
    path: Path = settings.identity or folder.identity
    known = KnownPeers(folder.peers)
    doors = Doors(seen_before(known, run, settings.initial_peers), may_found)
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(IdentityLock(path))
        identity = load_or_create_identity(path)
        daemon = await stack.enter_async_context(running_p2p(settings, identity, doors))
        if out_of_reach(settings, daemon.joined_peers):
            logger.warning(
                "host is %s: other machines cannot reach this node; --host 0.0.0.0 --port N lets them", settings.host
            )
        transport = Libp2pTransport(daemon, identity=identity)
        await transport.start()
        stack.push_async_callback(transport.close)
        serve_dial_back(transport, daemon.connections)
        relay = CircuitRelay(daemon, carry=settings.relay_for_others)
        await relay.start()
        stack.push_async_callback(relay.close)
        for circuit in daemon.relays:
            logger.info("others reach this node through the relay at %s only", circuit.text)
        yield Entrance(identity, daemon, transport, known)


@contextlib.asynccontextmanager
async def network(
    agree: Agree, settings: NodeSettings, folder: RunFolder, *, run: str | None
) -> AsyncGenerator[Network]:
    """Join the network of a run; all is gone at the end of the block, whatever ends it.

    `run` is the run's id where it is known already: then the node may also start a swarm of its own.
    Raises UserError as its parts do.
    """
    async with entrance(settings, folder, run=run, may_found=run is not None) as door:
        daemon, known = door.daemon, door.known
        spec = await agree(door)
        start_checks.report(await start_checks.among_peers(door.transport, daemon.joined_peers))
        for text in daemon.joined_peers:
            known.learn(parse_address(text).peer, [text])
        access = own_access(spec, settings.invitation, door.identity.peer_id)
        access.serve(door.transport)
        if access.proof is not None:
            door.transport.introduce_with(Introduction(door.transport, access.proof).show)
        directory = await join_directory(
            daemon,
            door.identity,
            spec.run_id,
            spec.stages,
            acquaintances=door.transport.acquaintances,
            record_seconds=spec.limits.record_seconds,
        )
        try:
            yield Network(
                spec,
                settings.model_copy(update={"initial_peers": daemon.joined_peers}),
                daemon,
                door.transport,
                ScreenedDirectory(directory, access, access.proof),
                known,
                supervisor(daemon, directory, known, settings),
            )
            await known.last_look(daemon, spec.run_id, peers_met(directory.view, daemon.own_id))
        finally:
            await directory.close()


def seen_before(known: KnownPeers, run: str | None, named: Sequence[str]) -> tuple[str, ...]:
    """Addresses of peers met before that belong to the wanted run: the one with this id, or where that is not known
    yet, the one in which a named peer was met. Where nobody is named any run will do."""
    if run is not None:
        return known.texts(run)
    met = any(text.endswith(f"/p2p/{peer}") for text in named for peer in known.addresses)
    return known.texts() if met or not named else ()


def out_of_reach(settings: NodeSettings, joined: Sequence[str]) -> bool:
    """Whether this node joined others elsewhere and listens where only its own machine reaches it."""
    elsewhere = any(reach_of(parse_address(address).host) is not Reach.LOOPBACK for address in joined)
    return elsewhere and not (settings.announce or settings.relay) and reach_of(settings.host) is Reach.LOOPBACK


def supervisor(daemon: PrivateP2P, directory: DhtDirectory, known: KnownPeers, settings: NodeSettings) -> Supervisor:
    """Restarts that lead back to the peers of the directory, and to those that the node entered by."""

    def peers() -> dict[PeerId, tuple[str, ...]]:
        found: dict[PeerId, tuple[str, ...]] = {parse_address(text).peer: (text,) for text in daemon.joined_peers}
        for peer in {*live_peers(directory.view, directory.now(), daemon.own_id), *directory.neighbours()}:
            found[peer] = known.addresses.get(peer) or found.get(peer, ())
        return found

    async def rejoin() -> None:
        await directory.rejoin(peers())

    return Supervisor(daemon, settings.p2pd_start_seconds, peers, rejoin)
