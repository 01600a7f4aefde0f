"""A node's place in the network: identity, p2pd and its supervisor, transport, the run that it agrees on, directory.

A look at a run from outside is connected to its nodes, with their RunSpec and directory, and is no node of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from noloco_node import ambient
from noloco_node.bootstrap.reach_watch import Policy, ReachWatch
from noloco_node.bootstrap.reachability import serve_dial_back
from noloco_node.bootstrap.spec_fetch import fetch_run_spec
from noloco_node.config.load import OwnData
from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import RunSpec
from noloco_node.directory.dht import DhtDirectory, join_directory
from noloco_node.directory.known_peers import HeldState, KnownPeers, holders_in, live_peers
from noloco_node.directory.records import Directory
from noloco_node.directory.store import esteem_by
from noloco_node.errors import UserError
from noloco_node.identity.addresses import PeerAddress, Reach, parse_address, reach_of
from noloco_node.identity.keys import Identity, IdentityLock, load_or_create_identity
from noloco_node.identity.peer_id import PeerId
from noloco_node.libp2p.arguments import one_family
from noloco_node.libp2p.daemon import PrivateP2P
from noloco_node.libp2p.relay_places import connected_by_relay
from noloco_node.libp2p.relay_server import CircuitRelay
from noloco_node.libp2p.start import Doors, running_p2p
from noloco_node.libp2p.supervisor import Supervisor
from noloco_node.node import start_checks
from noloco_node.storage.run_folder import RunFolder
from noloco_node.transport.interface import Transport
from noloco_node.transport.libp2p import Libp2pTransport
from noloco_node.transport.pacing import line_of
from noloco_node.transport.same_machine import SameMachine
from noloco_node.trust.admission import Introduction, OwnInvitation, own_access
from noloco_node.trust.lives import LifeWatch, OwnLife, agree_birth
from noloco_node.trust.screened_directory import ScreenedDirectory

logger = logging.getLogger(__name__)

T = TypeVar("T")


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
    """Without outsiders, and without nodes of other lives of the run."""
    known: KnownPeers
    supervisor: Supervisor
    reach: ReachWatch
    invitation: OwnInvitation
    life: OwnLife
    lives: LifeWatch

    async def beside(self, work: Awaitable[T], *companions: Coroutine[Any, Any, None]) -> T:
        """The result of `work`, with the network kept up meanwhile. p2pd is started again if it dies, the node is kept
        in reach, and the peers met are written down. `companions` run, and are cancelled at its end."""
        esteem = esteem_by(self.transport.peer_stats)
        keeping = self.known.keep(self.daemon, self.spec.run_id, self.live_peers, self._holders, esteem)
        return await self.supervisor.beside(work, keeping, self.reach.keep(), self.lives.keep(), *companions)

    async def relayed(self, peer: PeerId) -> bool:
        """Whether this node is connected to a peer through relays only."""
        return await connected_by_relay(self.daemon, peer)

    def _holders(self) -> dict[PeerId, HeldState]:
        return holders_in(self.directory.view, self.directory.now(), self.transport.peer_stats.works)

    def live_peers(self) -> list[PeerId]:
        """The peers that live, as this node's last look at the directory says."""
        return live_peers(self.directory.view, self.directory.now(), self.daemon.own_id)


@dataclass(frozen=True, slots=True)
class Entrance:
    """A node that is connected to peers, before it is known what they do together."""

    identity: Identity
    daemon: PrivateP2P
    transport: Libp2pTransport
    known: KnownPeers


Agree = Callable[[Entrance], Awaitable[RunSpec]]
"""A function by which a node and the peers at the addresses that it joined come to the same RunSpec."""


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
    comes_back = folder.claimed and not folder.ended
    doors = Doors(seen_before(known, run, settings.initial_peers), may_found, comes_back)
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(IdentityLock(path))
        identity = load_or_create_identity(path)
        daemon = await stack.enter_async_context(running_p2p(settings, identity, doors))
        line = line_of(settings.uplink_mbit, settings.downlink_mbit)
        transport = Libp2pTransport(daemon, identity=identity, line=line, nearby=SameMachine(identity))
        daemon.on_messages = transport.count_directory
        await transport.start()
        stack.push_async_callback(transport.close)
        serve_dial_back(transport, daemon.connections)
        relay = CircuitRelay(daemon, carry=settings.relay_for_others, count=transport.carry)
        await relay.start()
        stack.push_async_callback(relay.close)
        for circuit in daemon.relays if settings.relay == "always" else ():
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
        warn_of_host(settings, daemon.joined_peers)
        spec = await agree(door)
        life = await _own_life(door, spec, folder)
        start_checks.report(await start_checks.among_peers(door.transport, daemon.joined_peers))
        reach = _reach_watch(daemon, door.transport, settings)
        await reach.first_look()
        for text in daemon.joined_peers:
            known.learn(parse_address(text).peer, [text])
        access = own_access(spec, settings.invitation, door.identity.peer_id)
        access.serve(door.transport)
        door.transport.guard(lambda peer: access.admits(peer) and life.admits(peer))
        if access.proof is not None:
            door.transport.introduce_with(Introduction(door.transport, access.proof).show)
        async with directory_of(door, spec) as directory:
            watch = supervisor(daemon, directory, known, settings)
            reach.readdress = partial(_renew, daemon, watch)
            yield Network(
                spec,
                settings.model_copy(update={"initial_peers": daemon.joined_peers}),
                daemon,
                door.transport,
                ScreenedDirectory(directory, access, access.proof, life),
                known,
                watch,
                reach,
                OwnInvitation(access, door.transport.peer_id, spec.name),
                life,
                LifeWatch(life, door.transport, ScreenedDirectory(directory, access), spec),
            )


@contextlib.asynccontextmanager
async def directory_of(
    door: Entrance, spec: RunSpec | None, *, only_asks: bool = False
) -> AsyncGenerator[DhtDirectory]:
    """The directory of a run, or of whatever runs come by, for as long as the block lasts."""
    run, stages, seconds = (None, 0, math.inf)
    if spec is not None:
        run, stages, seconds = spec.run_id, spec.stages, spec.limits.record_seconds
    directory = await join_directory(
        door.daemon,
        door.identity,
        run,
        stages,
        peer_stats=door.transport.peer_stats,
        record_seconds=seconds,
        only_asks=only_asks,
    )
    try:
        yield directory
    finally:
        await directory.close()


async def _own_life(door: Entrance, spec: RunSpec, folder: RunFolder) -> OwnLife:
    from noloco_node.node.claiming import kept_birth  # a seed without a run never reads weights

    kept = await ambient.elsewhere(kept_birth, folder, spec.run_id, spec.name)
    life = await agree_birth(door.transport, spec, door.daemon.joined_peers, kept)
    keep_life(life, folder, spec)
    return life


def keep_life(life: OwnLife, folder: RunFolder, spec: RunSpec) -> None:
    """From now on write the birth that settles into the folder. A disk that refuses that ends nobody: it is tried again
    at the next start."""

    def changed(birth: str) -> None:
        try:
            folder.keep_birth(spec.run_id, spec.name, birth)
        except UserError as error:
            logger.warning("it is not written down in which life of the run this node takes part: %s", error.message)

    life.changed = changed


def seen_before(known: KnownPeers, run: str | None, named: Sequence[str]) -> tuple[str, ...]:
    """Addresses of peers met before that belong to the wanted run. That is the one with this id, or if that is not
    known yet, the one in which a named peer was met. If no peer is named any run will do."""
    if run is not None:
        return known.texts(run)
    met = any(text.endswith(f"/p2p/{peer}") for text in named for peer in known.addresses)
    return known.texts() if met or not named else ()


def warn_of_host(settings: NodeSettings, joined: Sequence[str]) -> None:
    """Say where others cannot reach a node that they are to call: an onlooker is called by nobody."""
    if out_of_reach(settings, joined):
        logger.warning(
            "host is %s: other machines cannot reach this node; --host 0.0.0.0 --port N lets them", settings.host
        )
    if (family := one_family(settings.host)) is not None:
        logger.warning("%s", family)


def out_of_reach(settings: NodeSettings, joined: Sequence[str]) -> bool:
    """Whether this node joined others elsewhere and listens where only its own machine reaches it."""
    elsewhere = any(reach_of(parse_address(address).host) is not Reach.LOOPBACK for address in joined)
    told = bool(settings.announce) or settings.relay == "always"
    return elsewhere and not told and reach_of(settings.host) is Reach.LOOPBACK


def _reach_watch(daemon: PrivateP2P, transport: Transport, settings: NodeSettings) -> ReachWatch:
    """How the node is reached, before a supervisor watches its p2pd."""
    policy = Policy(
        may_announce=not settings.announce,
        may_relay=not settings.announce and settings.relay != "never",
        tells_own=settings.relay != "always",
    )

    async def start_again(addresses: Sequence[str], relays: tuple[PeerAddress, ...]) -> None:
        daemon.readdress(addresses, relays)
        await daemon.restart(settings.p2pd_start_seconds)
        entered = [parse_address(text) for text in _entered_by(daemon)]
        await asyncio.gather(*(daemon.connect(address.peer, [address.text]) for address in entered))
        daemon.back()

    return ReachWatch(daemon, transport, policy, start_again, random.Random(daemon.own_id))


async def _renew(
    daemon: PrivateP2P, watch: Supervisor, addresses: Sequence[str], relays: tuple[PeerAddress, ...]
) -> None:
    daemon.readdress(addresses, relays)
    await watch.renew()


def _entered_by(daemon: PrivateP2P) -> list[str]:
    """The peers that the node joined, and its relays."""
    return [*daemon.joined_peers, *(relay.text for relay in daemon.relays)]


def supervisor(daemon: PrivateP2P, directory: DhtDirectory, known: KnownPeers, settings: NodeSettings) -> Supervisor:
    """Restarts that lead back to the peers of the directory, and to those that the node entered by."""

    def peers() -> dict[PeerId, tuple[str, ...]]:
        found: dict[PeerId, tuple[str, ...]] = {parse_address(text).peer: (text,) for text in _entered_by(daemon)}
        for peer in {*live_peers(directory.view, directory.now(), daemon.own_id), *directory.neighbours()}:
            found[peer] = known.addresses.get(peer) or found.get(peer, ())
        return found

    async def rejoin() -> None:
        await directory.rejoin(peers())

    return Supervisor(daemon, settings.p2pd_start_seconds, peers, rejoin)


@dataclass(frozen=True, slots=True)
class Outside:
    """The parts that an onlooker is built from."""

    spec: RunSpec
    door: Entrance
    directory: DhtDirectory
    supervisor: Supervisor


@contextlib.asynccontextmanager
async def looking_on(settings: NodeSettings, *, as_guest: bool = False) -> AsyncGenerator[Outside]:
    """Look at the run that the peers at `settings.initial_peers` serve: publishes nothing, has no place in the
    directory, and leaves nothing behind. The peer id is one made for the purpose, but for a guest's.

    `as_guest`: be let in as the run's access demands it, with `settings.invitation` and `settings.identity`, so that
    its nodes give more than their hello. Raises UserError as a node that joins does, where no peer answers, none gives
    a RunSpec, or the run does not admit a guest.
    """
    with tempfile.TemporaryDirectory(prefix="noloco-look-") as made:
        kept = settings.identity if as_guest else None
        own = settings.model_copy(update={"run_folder": Path(made), "identity": kept})
        async with entrance(own, RunFolder(own.run_folder), run=None, may_found=False) as door:
            joined = door.daemon.joined_peers
            spec = await fetch_run_spec(door.transport, joined, OwnData(), reads_text=False)
            start_checks.report(await start_checks.among_peers(door.transport, joined))
            if as_guest:
                access = own_access(spec, settings.invitation, door.identity.peer_id)
                if access.proof is not None:
                    door.transport.introduce_with(Introduction(door.transport, access.proof).show)
            async with directory_of(door, spec, only_asks=True) as directory:
                yield Outside(spec, door, directory, supervisor(door.daemon, directory, door.known, own))
