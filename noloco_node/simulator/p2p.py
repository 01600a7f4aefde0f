"""A node's p2pd, as far as the DHT needs it: its calls over the links of a simulation. Everything above it, from the
messages on, is the daemon's own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from hivemind.p2p import PeerID  # pyright: ignore[reportMissingTypeStubs]
from hivemind.p2p.p2p_daemon_bindings.control import P2PDaemonError  # pyright: ignore[reportMissingTypeStubs]

from noloco_node.directory.dht_node import FIND, PING, STORE, peer_name
from noloco_node.identity.peer_id import PeerId
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
