"""The directory of a simulation is the daemon's own, with its keys, signatures, messages and look-ups.

Only p2pd below it is a model: its calls go over the links of the simulation.

Records are judged once for all nodes: a signature that holds for one holds for all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from hivemind.p2p import PeerID  # pyright: ignore[reportMissingTypeStubs]
from hivemind.p2p.p2p_daemon_bindings.control import P2PDaemonError  # pyright: ignore[reportMissingTypeStubs]

from noloco_node import ambient
from noloco_node.ambient import LOOK_SECONDS
from noloco_node.directory.dht import DhtDirectory, join_directory
from noloco_node.directory.dht_node import FIND, PING, STORE, peer_name
from noloco_node.directory.validator import RecordValidator
from noloco_node.errors import UserError
from noloco_node.identity.keys import Identity
from noloco_node.identity.peer_id import PeerId
from noloco_node.peers.scorecard import PeerStats
from noloco_node.simulator.links import Links
from noloco_node.transport.memory import Parcel

COUNTED_AS = {FIND: "dht.find", STORE: "dht.store", PING: "dht.ping"}
"""The bytes of the DHT are counted under these names."""

_Handler = Callable[[Any, Any], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class _Caller:
    """What a handler is told of its caller."""

    remote_id: Any


class SimulatedP2P:
    """Stands for hivemind's `P2P`. All that share one `network` find each other in it, as long as they live.

    A call to one that is gone is refused a way there and back later, as by a machine on which nothing listens any more.
    A call to a machine that is itself gone never ends, as long as the links say so.
    """

    def __init__(self, network: dict[PeerId, SimulatedP2P], links: Links, own: PeerId) -> None:
        self.peer_id = PeerID.from_base58(own)
        self._own = own
        self._network = network
        self._links = links
        self._handlers: dict[str, _Handler] = {}
        self._answering: dict[asyncio.Task[Any], None] = {}
        self._dead = False
        self._context = copy_context()
        """The context in which it was made: its handlers run there, whichever task asks."""
        network[own] = self

    def die(self) -> None:
        """It is gone: what it was answering comes to nothing."""
        self._dead = True
        if self._network.get(self._own) is self:  # else a twin has taken its place
            del self._network[self._own]
        for task in self._answering:
            task.cancel()

    async def add_protobuf_handler(self, name: str, handler: _Handler, kind: Any) -> None:
        """See hivemind."""
        del kind
        self._handlers[name] = handler

    async def remove_protobuf_handler(self, name: str) -> None:
        """See hivemind."""
        del self._handlers[name]

    async def call_protobuf_handler(self, peer: Any, name: str, request: Any, answer: Any) -> Any:
        """See hivemind. P2PDaemonError where there is nobody, or it goes away meanwhile."""
        del answer
        target, parcel = _name_of(peer), Parcel(COUNTED_AS[name], request.ByteSize())
        await self._links.open(self._own, target)
        await self._links.carry(self._own, target, parcel)
        other = self._network.get(target)
        if other is None or self._dead:
            await asyncio.sleep(self._links.way.round_trip(self._own, target) / 2.0)
            raise P2PDaemonError(f"nobody answers as {target}")
        task = other.answer(self._own, name, request)
        try:
            await asyncio.wait((task,))
        finally:
            task.cancel()
        if task.cancelled():
            raise P2PDaemonError(f"{target} went away")
        return task.result()

    def answer(self, caller: PeerId, name: str, request: Any) -> asyncio.Task[Any]:
        """Called by the caller's side: do what it asks, on this one's machine, and send what comes of it."""
        task = asyncio.create_task(self._answer(caller, name, request), context=self._context.copy())
        self._answering[task] = None
        task.add_done_callback(self._answered)
        return task

    async def _answer(self, caller: PeerId, name: str, request: Any) -> Any:
        handler = self._handlers.get(name)
        if handler is None:
            raise P2PDaemonError(f"{self._own} takes no part in the DHT")
        response = await handler(request, _Caller(_id_of(caller)))
        await self._links.carry(self._own, caller, Parcel(COUNTED_AS[name], response.ByteSize()))
        return response

    def _answered(self, task: asyncio.Task[Any]) -> None:
        self._answering.pop(task, None)
        if not task.cancelled():
            task.exception()


@dataclass(frozen=True, slots=True)
class JoinedP2P:
    """Implements `Joined`."""

    hivemind_p2p: Any
    joined_peers: Sequence[str]


@lru_cache(maxsize=8192)
def _id_of(peer: PeerId) -> Any:
    return PeerID.from_base58(peer)


@lru_cache(maxsize=8192)
def _name_of(peer: Any) -> PeerId:
    return peer_name(peer)


def address_of(peer: PeerId) -> str:
    """What a joiner names; nobody dials it."""
    return f"/ip4/127.0.0.1/tcp/7000/p2p/{peer}"


class SimulatedDht:
    """What all members of a simulated DHT share: the run, the links, and the members."""

    def __init__(self, stages: int, links: Links, run: str, record_seconds: float) -> None:
        self.stages = stages
        self.links = links
        self.run = run
        self.record_seconds = record_seconds
        self.members: dict[PeerId, SimulatedP2P] = {}
        self.validator = RecordValidator(run, stages)

    def daemon(self, peer: PeerId) -> SimulatedP2P:
        """Start a p2pd."""
        return SimulatedP2P(self.members, self.links, peer)

    async def join(
        self, p2p: SimulatedP2P, identity: Identity, met: PeerStats, entrances: Sequence[PeerId]
    ) -> DhtDirectory:
        """Join as a daemon does through these peers, through others that live if none of them lets it in; a new DHT if
        none is named. Raises UserError (PEERS_UNREACHABLE) if no other node lives any more: a node that has named peers
        begins no swarm of its own."""
        rng = ambient.chance()
        while True:
            joined = JoinedP2P(p2p, tuple(address_of(peer) for peer in entrances))
            try:
                return await join_directory(
                    joined,
                    identity,
                    self.run,
                    self.stages,
                    peer_stats=met,
                    record_seconds=self.record_seconds,
                    validator=self.validator,
                )
            except UserError:
                await asyncio.sleep(LOOK_SECONDS)  # it is started again, and names others
                others = [peer for peer in self.members if peer != identity.peer_id and not self.links.lost(peer)]
                if not others:
                    raise
                entrances = rng.sample(others, min(3, len(others)))
