"""The directory of a simulation is the daemon's own, with its keys, signatures, messages and look-ups; only p2pd below
it is a model (`SimulatedP2P`).

Records are judged once for all nodes: a signature that holds for one holds for all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from noloco_node import ambient
from noloco_node.directory.dht import DhtDirectory, join_directory
from noloco_node.directory.records import DirectoryView, PeerRecord, SignedRecord
from noloco_node.directory.validator import RecordValidator
from noloco_node.errors import UserError
from noloco_node.identity.keys import Identity
from noloco_node.identity.peer_id import PeerId
from noloco_node.peers.stats import PeerStats
from noloco_node.simulator.links import Links
from noloco_node.simulator.p2p import JoinedP2P, SimulatedP2P

JOIN_AGAIN_SECONDS = 5.0
"""A node that nobody let in is started again after so many seconds, and names others."""


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
    ) -> SimulatedDirectory:
        """Join as a daemon does through these peers, through others that live if none of them lets it in; a new DHT if
        none is named. Raises UserError (PEERS_UNREACHABLE) if no other node lives any more: a node that has named peers
        begins no swarm of its own."""
        rng = ambient.chance()
        while True:
            joined = JoinedP2P(p2p, tuple(address_of(peer) for peer in entrances))
            try:
                directory = await join_directory(
                    joined,
                    identity,
                    self.run,
                    self.stages,
                    peer_stats=met,
                    record_seconds=self.record_seconds,
                    validator=self.validator,
                )
            except UserError:
                await asyncio.sleep(JOIN_AGAIN_SECONDS)
                others = [peer for peer in self.members if peer != identity.peer_id and not self.links.lost(peer)]
                if not others:
                    raise
                entrances = rng.sample(others, min(3, len(others)))
            else:
                return SimulatedDirectory(directory)


class SimulatedDirectory:
    """Implements `Directory`: the daemon's own, of one node. Made by `SimulatedDht.join`."""

    def __init__(self, directory: DhtDirectory) -> None:
        self._directory = directory
        self.change: Callable[[PeerRecord], PeerRecord] = lambda record: record
        """What becomes of this node's record as it says it."""

    @property
    def view(self) -> DirectoryView:
        """See `Directory.view`."""
        return self._directory.view

    @property
    def no_room(self) -> Mapping[str, int]:
        """See `Directory.no_room`."""
        return self._directory.no_room

    def now(self) -> float:
        """See `Directory.now`: this node's wall clock."""
        return self._directory.now()

    async def publish(self, record: PeerRecord, life: float) -> bool:
        """See `Directory.publish`."""
        return await self._directory.publish(self.change(record), life)

    async def refresh(self) -> DirectoryView:
        """See `Directory.refresh`."""
        return await self._directory.refresh()

    def to_tell(self, most: int) -> tuple[SignedRecord, ...]:
        """See `Directory.to_tell`."""
        return self._directory.to_tell(most)

    def read(self, row: SignedRecord) -> PeerRecord | None:
        """See `Directory.read`."""
        return self._directory.read(row)

    def told(self, teller: PeerId, records: Sequence[SignedRecord]) -> int:
        """See `Directory.told`."""
        return self._directory.told(teller, records)

    async def close(self) -> None:
        """Take part no more."""
        await self._directory.close()
