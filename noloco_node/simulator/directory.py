"""The directory of a simulation, as the DHT is: records lie at the nodes nearest to a stage's key and at those that
have read them, look-ups take round trips and ask many, and who died takes what it held along.

Who is told, and how many, are the daemon's own figures. A look asks everybody near a key, which the daemon does only
now and then: between, it asks two of them for what it lacks. Not modelled: signatures, rations, hand-overs to nodes
that come near a key, and that bytes of look-ups take up links; they are counted.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from noloco_node import ambient
from noloco_node.directory.dht import ALSO_ASKED, ALSO_TOLD
from noloco_node.directory.dht_node import BUCKET_SIZE, REPLICAS, ROW_BYTES, RPC_SECONDS
from noloco_node.directory.dht_walk import STRANGERS_SECONDS
from noloco_node.directory.memory import UnsignedDirectory
from noloco_node.directory.records import DirectoryView, LiveRecord, PeerRecord
from noloco_node.identity.peer_id import PeerId
from noloco_node.simulator.links import Links
from noloco_node.transport.acquaintance import Acquaintances

SIGNED_OCTETS = 391
"""Of a record with its signature (measured: `docs/decisions.md`, 216 and before)."""
SIGNER_OCTETS = 52
NEIGHBOUR_OCTETS = 58
"""Of a node's id and its peer's in an answer."""
ASKING_OCTETS = 200
"""Of a request, its keys apart."""
KEY_OCTETS = 22
FORGOTTEN_SECONDS = 30.0
"""How long routing tables still name who died."""
FIND, STORE = "dht.find", "dht.store"


@dataclass(eq=False)
class _Member:
    """A node's part in the DHT: what it holds of each stage, and who brought it there."""

    peer: PeerId
    place: int
    answers: Callable[[PeerId], bool]
    rows: tuple[dict[PeerId, LiveRecord], ...]
    brought: tuple[set[PeerId], ...]
    died: float | None = None
    silent: dict[PeerId, float] = field(default_factory=dict[PeerId, float])
    """Who did not answer, and until when it is not asked."""

    def vouched(self, stage: int, now: float) -> list[LiveRecord]:
        """What it gives others: of those that brought their records here or answer it."""
        own, brought, answers = self.peer, self.brought[stage], self.answers
        return [
            row
            for peer, row in self.rows[stage].items()
            if row.expires > now and (peer in brought or peer == own or answers(peer))
        ]

    def take(self, stage: int, row: LiveRecord) -> None:
        """Hold it, unless a newer one is there."""
        rows, peer = self.rows[stage], PeerId(row.record.peer_id)
        held = rows.get(peer)
        if held is None or held.expires < row.expires:
            rows[peer] = row


class SimulatedDht:
    """What all members of a simulated DHT share: who there is, and where keys lie."""

    def __init__(self, stages: int, links: Links, run: str = "") -> None:
        self.stages = stages
        self.links = links
        self.members: dict[PeerId, _Member] = {}
        self._keys = [_place(f"{run}/{stage}") for stage in range(stages)]
        self._near: tuple[tuple[PeerId, ...], list[list[_Member]]] = ((), [])

    def join(self, peer: PeerId, answers: Callable[[PeerId], bool]) -> _Member:
        """A new member, which holds nothing yet."""
        stages = range(self.stages)
        member = _Member(peer, _place(peer), answers, tuple({} for _ in stages), tuple(set() for _ in stages))
        self.members[peer] = member
        self._near = ((), [])
        return member

    def die(self, member: _Member) -> None:
        """It answers no more, and what it held is gone; routing tables name it for a while."""
        member.died = asyncio.get_running_loop().time()

    def near(self, stage: int, now: float) -> list[_Member]:
        """Members by their distance from a stage's key, as routing tables have them."""
        gone = [m.peer for m in self.members.values() if m.died is not None and now >= m.died + FORGOTTEN_SECONDS]
        for peer in gone:
            del self.members[peer]
        known = tuple(self.members)
        if self._near[0] != known:
            every = list(self.members.values())
            self._near = known, [sorted(every, key=lambda m, key=key: m.place ^ key) for key in self._keys]
        return self._near[1][stage]


class SimulatedDirectory(UnsignedDirectory):
    """Implements `Directory` over a `SimulatedDht`, for one node."""

    def __init__(self, dht: SimulatedDht, peer: PeerId, met: Acquaintances) -> None:
        self._dht = dht
        self._own = peer
        self._member = dht.join(peer, met.answers)
        self._rng = ambient.chance()
        self._view = DirectoryView(tuple({} for _ in range(dht.stages)))
        self._last_expiry: dict[int, float] = {}
        self.change: Callable[[PeerRecord], PeerRecord] = lambda record: record
        """What becomes of this node's record as it says it."""

    @property
    def view(self) -> DirectoryView:
        """See `Directory.view`."""
        return self._view

    def now(self) -> float:
        """See `Directory.now`: this node's wall clock."""
        return ambient.wall()

    def die(self) -> None:
        """The node is gone from one moment to the next."""
        self._dht.die(self._member)

    def close(self) -> None:
        """The node leaves in order: others forget it at once."""
        if self._dht.members.get(self._own) is self._member:
            del self._dht.members[self._own]

    async def publish(self, record: PeerRecord, life: float) -> bool:
        """See `Directory.publish`: stored at the nodes nearest to the stage's key and at some others, one way later."""
        stage = record.stage
        expires = max(self.now() + life, self._last_expiry.get(stage, 0.0) + 1e-3)
        self._last_expiry[stage] = expires
        row = LiveRecord(self.change(record), expires)
        self._member.take(stage, row)
        asked = [*self._candidates(stage)[:REPLICAS], *self._some(ALSO_TOLD)]
        there = await self._ask(asked)
        for holder in there:
            self._dht.links.count(self._own, holder.peer, STORE, ASKING_OCTETS + SIGNED_OCTETS + SIGNER_OCTETS)
            holder.take(stage, row)
            holder.brought[stage].add(self._own)
        return bool(there) or not asked

    async def refresh(self) -> DirectoryView:
        """See `Directory.refresh`."""
        stages = range(self._dht.stages)
        asked: dict[PeerId, tuple[_Member, list[int]]] = {}
        for stage in stages:
            for member in self._candidates(stage)[:BUCKET_SIZE]:
                asked.setdefault(member.peer, (member, []))[1].append(stage)
        for member in self._some(ALSO_ASKED):
            asked[member.peer] = member, list(stages)
        there = await self._ask([member for member, _ in asked.values()])
        now, links = self.now(), self._dht.links
        for member in there:
            wanted = asked[member.peer][1]
            octets = 0
            for stage in wanted:
                rows = member.vouched(stage, now)
                for row in rows:
                    self._member.take(stage, row)
                neighbours = min(BUCKET_SIZE, len(self._dht.members))
                octets += len(rows) * (SIGNED_OCTETS + SIGNER_OCTETS + ROW_BYTES) + neighbours * NEIGHBOUR_OCTETS
            links.count(self._own, member.peer, FIND, ASKING_OCTETS + KEY_OCTETS * len(wanted))
            links.count(member.peer, self._own, FIND, octets)
        for rows in self._member.rows:
            for peer in [peer for peer, row in rows.items() if row.expires <= now]:
                del rows[peer]
        self._view = DirectoryView(tuple(dict(sorted(rows.items())) for rows in self._member.rows))
        return self._view

    def _candidates(self, stage: int) -> list[_Member]:
        """Whom to ask, the nearest first: not those that have just not answered."""
        now, silent = asyncio.get_running_loop().time(), self._member.silent
        near = self._dht.near(stage, now)
        return [each for each in near if each is not self._member and silent.get(each.peer, 0.0) <= now]

    def _some(self, most: int) -> list[_Member]:
        """Some peers of the view that answer this node, wherever they lie."""
        members = self._dht.members
        known = [p for rows in self._view.stages for p in rows if p != self._own and self._member.answers(p)]
        return [members[peer] for peer in self._rng.sample(known, min(most, len(known))) if peer in members]

    async def _ask(self, asked: Sequence[_Member]) -> list[_Member]:
        """Those of them that answer, once all have or the time for it is over."""
        distinct = list({member.peer: member for member in asked}.values())
        there = [each for each in distinct if self._reaches(each)]
        links = self._dht.links
        trips = [links.way.round_trip(self._own, each.peer) for each in there]
        await asyncio.sleep(max([*trips, 0.0 if len(there) == len(distinct) else STRANGERS_SECONDS]))
        until = asyncio.get_running_loop().time() + RPC_SECONDS + FORGOTTEN_SECONDS
        for member in distinct:
            if not self._reaches(member):
                self._member.silent[member.peer] = until
        return [each for each in there if self._reaches(each)]

    def _reaches(self, member: _Member) -> bool:
        return self._member.died is None and member.died is None and not self._dht.links.apart(self._own, member.peer)


def _place(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:20])
