"""The directory in hivemind's DHT: one key a stage, one subkey a peer, signed records with a short life."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from hivemind.dht.node import DHTNode  # pyright: ignore[reportMissingTypeStubs]
from hivemind.dht.protocol import ValidationError  # pyright: ignore[reportMissingTypeStubs]
from hivemind.dht.routing import DHTID  # pyright: ignore[reportMissingTypeStubs]
from hivemind.p2p import PeerID  # pyright: ignore[reportMissingTypeStubs]
from hivemind.utils.timed_storage import get_dht_time  # pyright: ignore[reportMissingTypeStubs]

from noloco_node.aio import cancel_and_wait
from noloco_node.errors import ExitCode, UserError
from noloco_node.swarm.directory import DirectoryView, LiveRecord, PeerRecord, SignedRecord
from noloco_node.swarm.identity import Identity
from noloco_node.swarm.lost_peers import LostPeers
from noloco_node.swarm.p2p_daemon import PrivateP2P
from noloco_node.swarm.peer_addresses import peers_unreachable
from noloco_node.swarm.record_validator import RecordValidator, sign_record, stage_key
from noloco_node.swarm.transport import PeerId

logger = logging.getLogger(__name__)

LOOK_UP_SECONDS = 5.0
STORE_SECONDS = 5.0
JOIN_SECONDS = 20.0
RPC_SECONDS = 3.0
MAX_LIFE_SECONDS = 3600.0
"""A record that claims to live longer than this from now is not believed: its owner could never leave."""
SMALLEST_EXTENSION = 1e-3
MOST_KEYS = 4096
"""Stages of other people's runs that a seed holds the records of."""


class DhtDirectory:
    """Implements `Directory` on the DHT. Made by `join_directory`."""

    def __init__(self, node: DHTNode, validator: RecordValidator, identity: Identity, keys: tuple[str, ...]) -> None:
        self._node: Any = node
        self._validator = validator
        self._identity = identity
        self._keys = keys
        self._last_expiry: dict[int, float] = {}
        self._own: dict[int, SignedRecord] = {}
        self._rng = random.Random()
        self._view = DirectoryView(tuple({} for _ in keys))
        self._lost = LostPeers(identity.peer_id, random.Random())
        self._seeking: asyncio.Task[None] | None = None

    @property
    def view(self) -> DirectoryView:
        """The last view read; empty before the first `refresh`."""
        return self._view

    def now(self) -> float:
        """DHT time, seconds."""
        return float(get_dht_time())

    async def publish(self, record: PeerRecord, life: float) -> bool:
        """Sign and store this node's record for `life` seconds, or a little longer where its last one would outlive it
        (the DHT keeps whatever expires later: so a withdrawal always wins over what it withdraws)."""
        assert record.peer_id == self._identity.peer_id, "a node can only publish its own record"
        expires = max(self.now() + life, self._last_expiry.get(record.stage, 0.0) + SMALLEST_EXTENSION)
        self._last_expiry[record.stage] = expires
        key = self._keys[record.stage]
        value = sign_record(self._identity, key, record, expires)
        self._own[record.stage] = SignedRecord(record.stage, self._identity.peer_id, expires, value)
        try:
            async with asyncio.timeout(STORE_SECONDS):
                return bool(await self._node.store(key, value, expires, subkey=record.peer_id))
        except TimeoutError:
            logger.debug("publishing at %s took more than %g s", key, STORE_SECONDS)
            return False

    async def refresh(self) -> DirectoryView:
        """Read all stages anew. A row stays until a newer one is found or its life ends, so a look-up that fails, or
        sees only some of the records, loses nobody."""
        found = await asyncio.gather(*(self._look_up(key) for key in self._keys))
        now = self.now()
        view = DirectoryView(tuple(_merge(old, new, now) for old, new in zip(self._view.stages, found, strict=True)))
        self._lost.seen(self._view, view, now)
        self._view = view
        if self._seeking is None or self._seeking.done():
            self._seeking = asyncio.create_task(self._seek_a_lost_peer(), name="seek a lost peer")
        return self._view

    def to_tell(self, most: int) -> tuple[SignedRecord, ...]:
        """See `Directory.to_tell`."""
        now = self.now()
        own = sorted((row for row in self._own.values() if row.expires > now), key=lambda row: -row.expires)[:most]
        others = [
            SignedRecord(stage, peer, row.expires, row.signed)
            for stage, rows in enumerate(self._view.stages)
            for peer, row in rows.items()
            if row.expires > now and peer != self._identity.peer_id
        ]
        return (*own, *self._rng.sample(others, min(most - len(own), len(others))))

    def told(self, teller: PeerId, records: Sequence[SignedRecord]) -> int:
        """See `Directory.told`."""
        logger.debug("%s told %d records", teller, len(records))
        return sum(self._take(row) for row in records)

    def _take(self, row: SignedRecord) -> bool:
        if row.stage >= len(self._keys):
            return False
        key = self._keys[row.stage]
        believed = row.expires <= self.now() + MAX_LIFE_SECONDS
        if not believed or self._validator.read_found(key, row.peer, row.signed, row.expires) is None:
            return False
        key_id: Any = DHTID.generate(source=key)
        packed = self._node.protocol.serializer.dumps(row.signed)
        return bool(self._node.protocol.storage.store_subkey(key_id, row.peer, packed, row.expires))

    def neighbours(self) -> list[PeerId]:
        """Peers in the routing table of the DHT."""
        return [PeerId(str(peer)) for peer in self._node.protocol.routing_table.peer_id_to_uid]

    async def rejoin(self, peers: Iterable[PeerId]) -> int:
        """Find back into the DHT after p2pd was started anew; how many of `peers` answered.

        While it was away every look-up failed, and took the peers that it asked out of the routing table.
        """
        self._node.blacklist.clear()
        pings = (self._node.protocol.call_ping(PeerID.from_base58(peer)) for peer in peers)
        return sum(answer is not None for answer in await asyncio.gather(*pings))

    async def close(self) -> None:
        """Stop serving the DHT. The p2pd it runs on stays."""
        if self._seeking is not None:
            await cancel_and_wait((self._seeking,))
        try:
            async with asyncio.timeout(STORE_SECONDS):
                await self._node.shutdown()
        except (TimeoutError, OSError):
            logger.debug("the DHT did not shut down in order")

    async def _seek_a_lost_peer(self) -> None:
        """Ask for one that vanished: hivemind drops from its routes whoever fails to answer, and never asks again."""
        peer = self._lost.due(self.now())
        if peer is None:
            return
        peer_id: Any = PeerID.from_base58(peer)
        if await self._node.protocol.call_ping(peer_id) is not None:
            self._node.blacklist.register_success(peer_id)
            logger.info("%s, which had vanished, answers again", peer)

    async def _look_up(self, key: str) -> dict[PeerId, LiveRecord]:
        try:
            async with asyncio.timeout(LOOK_UP_SECONDS):
                found: Any = await self._node.get(key, latest=True)
        except TimeoutError:
            logger.debug("the look-up of %s took more than %g s", key, LOOK_UP_SECONDS)
            return {}
        entries: object = None if found is None else found.value
        if not isinstance(entries, dict):
            return {}
        rows: dict[PeerId, LiveRecord] = {}
        for subkey, (value, expires) in cast("dict[object, tuple[object, float]]", entries).items():
            record = self._validator.read_found(key, subkey, value, expires)
            if record is not None and expires <= self.now() + MAX_LIFE_SECONDS:
                rows[PeerId(record.peer_id)] = LiveRecord(record, expires, cast("bytes", value))
        return rows


async def join_directory(p2p: PrivateP2P, identity: Identity, run_id: str | None, stages: int) -> DhtDirectory:
    """Join the DHT through the initial peers that `p2p` is connected to, or start a new one if there are none.

    Where `run_id` is None this node only holds the records of whatever runs come by, and looks up none (`stages` is 0).
    Raises UserError: PEERS_UNREACHABLE where none of them answers in the DHT, CONFIG where clocks differ too much.
    """
    validator = RecordValidator(run_id, stages)
    peers = p2p.joined_peers
    try:
        async with asyncio.timeout(JOIN_SECONDS):
            node = await cast("Any", DHTNode).create(
                p2p=p2p.hivemind_p2p,
                initial_peers=list(peers),
                record_validator=validator,
                wait_timeout=RPC_SECONDS,
                cache_locally=False,
                cache_nearest=0,
                cache_on_store=False,
                cache_refresh_before_expiry=0,
                reuse_get_requests=False,
            )
    except ValidationError as error:
        raise UserError(
            ExitCode.CONFIG,
            f"initial_peers: a peer does not accept this node ({error})",
            "set this machine's clock (NTP), and see that others can reach the announced address",
        ) from None
    except (RuntimeError, TimeoutError):
        raise peers_unreachable(dict.fromkeys(peers, "connected, but it does not answer in the directory")) from None
    keys = () if run_id is None else tuple(stage_key(run_id, stage) for stage in range(stages))
    if run_id is None:
        node.protocol.storage.maxsize = MOST_KEYS
    return DhtDirectory(node, validator, identity, keys)


def _merge(old: Mapping[PeerId, LiveRecord], new: Mapping[PeerId, LiveRecord], now: float) -> dict[PeerId, LiveRecord]:
    merged = dict(old)
    for peer, row in new.items():
        if peer not in merged or row.expires >= merged[peer].expires:
            merged[peer] = row
    return {peer: row for peer, row in merged.items() if row.expires > now}
