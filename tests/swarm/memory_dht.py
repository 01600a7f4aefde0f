"""A whole DHT in one process: real directories and real signatures, without p2pd. Messages pass through their bytes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError

from noloco_node.directory.dht import DhtDirectory, join_directory
from noloco_node.identity.keys import Identity
from noloco_node.peers.scorecard import PeerStats
from tests.swarm.hostile_dht import throw_away_key


class MemoryP2P:
    """What is needed of hivemind's `P2P`. All that share one `network` reach each other."""

    def __init__(self, network: dict[str, MemoryP2P], peer: str) -> None:
        self.network = network
        self.peer_id = PeerID.from_base58(peer)
        self.handlers: dict[str, tuple[Any, Any]] = {}
        self.calls: list[tuple[str, str]] = []
        """The called peers, and what each was called for."""
        network[peer] = self

    async def add_protobuf_handler(self, name: str, handler: Any, kind: Any) -> None:
        """See hivemind."""
        self.handlers[name] = (handler, kind)

    async def remove_protobuf_handler(self, name: str) -> None:
        """See hivemind."""
        del self.handlers[name]

    async def call_protobuf_handler(self, peer: Any, name: str, request: Any, answer: Any) -> Any:
        """See hivemind. P2PDaemonError where there is nobody."""
        self.calls.append((str(peer), name))
        other = self.network.get(str(peer))
        if other is None or name not in other.handlers:
            raise P2PDaemonError("nobody there")
        handler, kind = other.handlers[name]
        context = SimpleNamespace(remote_id=self.peer_id)
        response = await handler(kind.FromString(request.SerializeToString()), context)
        return answer.FromString(response.SerializeToString())


class Member:
    """A node of the memory DHT."""

    def __init__(self, network: dict[str, MemoryP2P], identity: Identity | None = None) -> None:
        self.identity = identity or throw_away_key()
        self.peer = self.identity.peer_id
        self.p2p = MemoryP2P(network, self.peer)
        self.met = PeerStats()
        self.directory: DhtDirectory

    async def join(self, run: str | None, stages: int, *through: str, only_asks: bool = False) -> Member:
        """Enter through these peers, or only ask them."""
        joined = tuple(f"/ip4/127.0.0.1/tcp/1/p2p/{peer}" for peer in through)
        daemon: Any = SimpleNamespace(hivemind_p2p=self.p2p, joined_peers=joined)
        self.directory = await join_directory(
            daemon, self.identity, run, stages, peer_stats=self.met, only_asks=only_asks
        )
        return self
