"""Three worlds that must behave alike: transports in memory, on real p2pd processes, and without one on one machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from noloco_node import ambient
from noloco_node.config.node_settings import NodeSettings
from noloco_node.identity.keys import Identity, identity_of_seed, load_or_create_identity
from noloco_node.identity.peer_id import PeerId
from noloco_node.libp2p.daemon import PrivateP2P
from noloco_node.libp2p.start import running_p2p
from noloco_node.peers.scorecard import PeerStats
from noloco_node.transport.errors import PeerUnreachable
from noloco_node.transport.interface import TransportLimits
from noloco_node.transport.libp2p import Libp2pTransport
from noloco_node.transport.memory import MemoryNetwork, MemoryTransport
from noloco_node.transport.messages import Message
from noloco_node.transport.pacing import UNBOUNDED, Line
from noloco_node.transport.pool import Ends, StreamHandler
from noloco_node.transport.same_machine import SameMachine

LIMITS = TransportLimits(max_body_bytes=96 << 20, progress_seconds=2.0, idle_seconds=4.0)


class AllAnswer(PeerStats):
    """A swarm in which every introduced peer answers, and confirms its record."""

    def answers(self, peer: PeerId, within: float = 0.0) -> bool:
        """See `PeerStats.answers`."""
        del peer, within
        return True

    def serves(self, peer: PeerId, stage: int) -> bool:
        """See `PeerStats.serves`."""
        del peer, stage
        return True

    def takes_part(self, peer: PeerId) -> bool:
        """See `PeerStats.takes_part`."""
        del peer
        return True


class Mortal(SameMachine):
    """May die as a process does: all its streams end, and nobody finds it any more."""

    def __init__(self, identity: Identity) -> None:
        super().__init__(identity)
        self._taken_here: list[asyncio.StreamWriter] = []

    async def serve(self, handler: StreamHandler, within: float) -> None:
        """See `SameMachine.serve`."""

        async def noted(peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._taken_here.append(writer)
            await handler(peer, reader, writer)

        await super().serve(noted, within)

    def die(self) -> None:
        """Now."""
        self.close()
        for writer in self._taken_here:
            writer.transport.abort()


@dataclass
class World:
    """Two nodes: `caller` calls, `server` serves; `kill_server` is a sudden death."""

    caller: MemoryTransport | Libp2pTransport
    server: MemoryTransport | Libp2pTransport
    kill_server: Callable[[], Awaitable[None]]
    real: bool
    daemons: tuple[PrivateP2P, ...] = ()
    near: Mortal | None = None
    """By what the server is found on this machine, if it is."""

    async def call(self, method: str, *tensors: torch.Tensor, **options: Any) -> Message:
        """A call with generous deadlines; `header`, `asks_first` and any deadline may be given."""
        request = Message(options.pop("header", {}), tensors, asks_first=options.pop("asks_first", False))
        settings: dict[str, Any] = {"timeout": 30.0, "progress": 10.0, "max_answer_bytes": 256 << 20}
        return await self.caller.call(self.server.peer_id, method, request, **(settings | options))


@contextlib.asynccontextmanager
async def memory_world() -> AsyncIterator[World]:
    """Both transports on one `MemoryNetwork`."""
    network = MemoryNetwork()
    caller = MemoryTransport(network, PeerId("caller-in-memory"), LIMITS)
    server = MemoryTransport(network, PeerId("server-in-memory"), LIMITS)

    async def kill() -> None:
        network.kill(server.peer_id)

    try:
        yield World(caller, server, kill, real=False)
    finally:
        await caller.close()
        await server.close()


@dataclass
class Daemons:
    """Two p2pds that know each other, and the identities behind their peer ids: the server's and the caller's."""

    keys: tuple[Identity, Identity]
    hosts: tuple[PrivateP2P, PrivateP2P]


@contextlib.asynccontextmanager
async def two_daemons(folder: Path) -> AsyncIterator[Daemons]:
    """A p2pd for each of two transports."""
    one, two = (load_or_create_identity(folder / name) for name in ("server.key", "caller.key"))
    async with (
        running_p2p(NodeSettings(), one) as first,
        running_p2p(NodeSettings(initial_peers=tuple(first.visible_addresses())), two) as second,
    ):
        yield Daemons((one, two), (first, second))


@contextlib.asynccontextmanager
async def world_on(daemons: Daemons, *, nearby: bool = False) -> AsyncIterator[World]:
    """Each transport on one of these p2pds, which stay; `nearby`: found on this machine besides."""
    (one, two), keys = daemons.hosts, daemons.keys
    near, callers = (Mortal(keys[0]), SameMachine(keys[1])) if nearby else (None, None)
    server, caller = Libp2pTransport(one, LIMITS, nearby=near), Libp2pTransport(two, LIMITS, nearby=callers)
    await asyncio.gather(server.start(), caller.start())

    async def kill() -> None:
        os.kill(one.pid, signal.SIGKILL)
        await one.wait_until_dead()

    try:
        yield World(caller, server, kill, real=True, daemons=daemons.hosts, near=near)
    finally:
        await caller.close()
        await server.close()


@contextlib.asynccontextmanager
async def real_world(folder: Path, *, nearby: bool = False) -> AsyncIterator[World]:
    """Each transport on a p2pd of its own; `nearby`: found on this machine besides."""
    async with two_daemons(folder) as daemons, world_on(daemons, nearby=nearby) as made:
        yield made


class NoHost:
    """A `StreamHost` that reaches nobody."""

    def __init__(self, own_id: PeerId) -> None:
        self.own_id = own_id

    async def open_stream(self, peer: PeerId, protocol: str) -> Ends:
        """See `StreamHost.open_stream`."""
        raise PeerUnreachable(f"{peer}: no p2pd for {protocol}")

    async def serve_streams(self, protocol: str, handler: StreamHandler) -> None:
        """See `StreamHost.serve_streams`."""

    async def stop_serving(self, protocol: str) -> None:
        """See `StreamHost.stop_serving`."""


@contextlib.asynccontextmanager
async def nearby_world(line: Line = UNBOUNDED) -> AsyncIterator[World]:
    """Both transports on one machine, without any p2pd; `line` is the caller's."""
    one, two = (identity_of_seed(ambient.token(16).encode()) for _ in range(2))
    served = Mortal(one)
    server = Libp2pTransport(NoHost(one.peer_id), LIMITS, one, nearby=served)
    caller = Libp2pTransport(NoHost(two.peer_id), LIMITS, two, line, nearby=SameMachine(two))
    await server.start()
    await caller.start()

    async def kill() -> None:
        served.die()

    try:
        yield World(caller, server, kill, real=True)
    finally:
        await caller.close()
        await server.close()
