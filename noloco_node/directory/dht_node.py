"""A node of the DHT: hivemind's messages and routing table, and rules of our own for what strangers say.

A node's place follows from its key: its node id is the hash of its peer id, so each peer has one. A peer that wants a
place near a stage's key must search for a key. Records go through the intake one by one; answers are bounded.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

from google.protobuf.message import DecodeError
from hivemind.dht.routing import DHTID, RoutingTable  # pyright: ignore[reportMissingTypeStubs]
from hivemind.p2p import P2P, PeerID  # pyright: ignore[reportMissingTypeStubs]
from hivemind.p2p.p2p_daemon_bindings.control import (  # pyright: ignore[reportMissingTypeStubs]
    P2PDaemonError,
    P2PHandlerError,
)
from hivemind.proto import dht_pb2  # pyright: ignore[reportMissingTypeStubs]
from hivemind.utils.timed_storage import (  # pyright: ignore[reportMissingTypeStubs]
    MAX_DHT_TIME_DISCREPANCY_SECONDS,
)

from noloco_node import ambient
from noloco_node.aio import cancel_and_wait
from noloco_node.directory.asked_key import MOST_ASKED, AskedKey, pack_asked, unpack_asked
from noloco_node.directory.store import Esteem, HeldRecord, RecordStore
from noloco_node.directory.validator import (
    Intake,
    pack_dictionary,
    pack_one,
    unpack_dictionary,
    unpack_one,
    unpacked_bytes,
)
from noloco_node.identity.keys import PEER_ID_BYTES
from noloco_node.identity.peer_id import PeerId
from noloco_node.tallies import FEW_PEERS, Budget, PeerBudgets
from noloco_node.transport.calls import QUESTION_SECONDS

logger = logging.getLogger(__name__)

_pb: Any = dht_pb2

PING, STORE, FIND = "DHTProtocol.rpc_ping", "DHTProtocol.rpc_store", "DHTProtocol.rpc_find"
BUCKET_SIZE, DEPTH_MODULO = 20, 5
REPLICAS = 5
"""Records are stored at so many nodes nearest to their key."""
ANSWER_BYTES = 1 << 20
"""Records take at most so many bytes in a message: p2pd carries 4 MiB, and hivemind's handler breaks on more."""
ASKED_BYTES, ASKED_BYTES_A_SECOND = float(16 << 20), float(4 << 20)
"""One peer is given so many bytes of records in answers at once, and so many a second."""
ASKED_TOGETHER: dict[bool, tuple[float, float]] = {
    False: (float(32 << 20), float(8 << 20)),
    True: (float(64 << 20), float(16 << 20)),
}
"""All peers together are given so many bytes of records at once, and so many a second. The first entry is for peers
that have not answered this node, the second for those that have. A megabyte takes some seven milliseconds of its loop.
Peers at work here have only their own budgets."""
ASKED_KEY_COST = float(16 << 10)
"""A look-up of a key for a peer costs so many bytes besides the records: it takes as long as packing so many."""

Nearest = list[tuple[Any, Any]]
"""Node ids and peer ids as hivemind has them, the nearest first."""


class Stored(NamedTuple):
    """A record as it is stored at a peer."""

    key: bytes
    signer: str
    signed: bytes
    expires: float


def node_id_of(peer: Any) -> Any:
    """The one DHT id of a peer: the hash of its peer id."""
    return _node_id(peer.to_bytes())


@lru_cache(maxsize=4096)
def _node_id(peer: bytes) -> Any:
    return DHTID.generate(source=peer)


@lru_cache(maxsize=4096)
def _peer_of(raw: bytes) -> Any:
    return PeerID(raw)


def peer_name(peer: Any) -> PeerId:
    """hivemind's peer id as ours."""
    return PeerId(str(peer))


class BoundedTable(RoutingTable):
    """hivemind's routing table, bounded: it remembers nothing of nodes that are gone.

    Its lists of replacements do not grow with invented keys.
    """

    def add_or_update_node(self, node_id: Any, peer_id: Any) -> Any:
        """See hivemind: a node to ask whether it is still there, where there is no place."""
        to_ask: Any = super().add_or_update_node(node_id, peer_id)
        untyped: Any = self
        replacements: dict[Any, Any] = untyped.buckets[untyped.get_bucket_index(node_id)].replacement_nodes
        while len(replacements) > BUCKET_SIZE:
            oldest = next(iter(replacements))
            peer = replacements.pop(oldest)
            untyped.uid_to_peer_id.pop(oldest, None)
            untyped.peer_id_to_uid.pop(peer, None)
        return to_ask

    def __delitem__(self, node_id: Any) -> None:
        untyped: Any = self
        untyped.buckets[untyped.get_bucket_index(node_id)].nodes_requested_for_ping.discard(node_id)
        super().__delitem__(node_id)

    def get_nearest_neighbors(self, query_id: Any, k: int, exclude: Any = None) -> list[tuple[Any, Any]]:
        """See hivemind. Its own way from bucket to bucket takes several times as long, and the buckets hold some
        hundred nodes."""
        untyped, key = cast("Any", self), int(query_id)
        every = (
            (key ^ node, node, peer) for bucket in untyped.buckets for node, peer in bucket.nodes_to_peer_id.items()
        )
        nearest = heapq.nsmallest(k + (exclude is not None), every)
        return [(node, peer) for _, node, peer in nearest if node != exclude][:k]


class ClocksDiffer(Exception):
    """A peer's clock is too far from this node's for records to have the same life on both."""


class CannotBeReached(Exception):
    """A peer cannot call this node back."""


class DhtNode:
    """One node's side of the DHT. Made by `open`; `close` ends it. Peers, node ids and messages are hivemind's. One
    that `only_asks` names no node id: it gets no place in anybody's routing table, and nobody gives it anything.
    """

    def __init__(self, p2p: P2P, intake: Intake, records: RecordStore, *, only_asks: bool = False) -> None:
        self._p2p: Any = p2p
        self._intake, self._records = intake, records
        self.node_id: Any = node_id_of(self._p2p.peer_id)
        self.table: Any = BoundedTable(self.node_id, BUCKET_SIZE, DEPTH_MODULO)
        self._info: Any = _pb.NodeInfo(node_id=b"" if only_asks else self.node_id.to_bytes())
        self._calls = asyncio.Semaphore(FEW_PEERS)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._calling_back: set[Any] = set()
        self._pings = 0
        self._rested = 0
        self._answers = PeerBudgets[PeerId](ASKED_BYTES, ASKED_BYTES_A_SECOND, ambient.monotonic)
        self._answers_together = {known: Budget(*pool, ambient.monotonic) for known, pool in ASKED_TOGETHER.items()}

    @classmethod
    async def open(cls, p2p: P2P, intake: Intake, records: RecordStore, *, only_asks: bool = False) -> DhtNode:
        """Answer other nodes on `p2p` from now on."""
        self = cls(p2p, intake, records, only_asks=only_asks)
        await self._p2p.add_protobuf_handler(PING, self.handle_ping, _pb.PingRequest)
        await self._p2p.add_protobuf_handler(STORE, self.handle_store, _pb.StoreRequest)
        await self._p2p.add_protobuf_handler(FIND, self.handle_find, _pb.FindRequest)
        return self

    async def close(self) -> None:
        """Answer nobody any more. OSError or P2PDaemonError where p2pd is gone."""
        await cancel_and_wait(self._tasks)
        for name in (PING, STORE, FIND):
            await self._p2p.remove_protobuf_handler(name)

    def nearest(self, key: Any, most: int = BUCKET_SIZE, exclude: Any = None) -> Nearest:
        """Nodes of the routing table that are nearest to a key, without this one."""
        return list(self.table.get_nearest_neighbors(key, most, exclude=exclude))

    async def ping(self, peer: Any, *, introduce: bool = False) -> bool:
        """Whether the peer answers and takes part in the DHT; it is in the routing table then.

        With `introduce` the peer is asked to call back: raises CannotBeReached where it cannot, and ClocksDiffer.
        """
        asked = ambient.wall()
        request = _pb.PingRequest(peer=self._info, validate=introduce)
        response = await self._request(peer, PING, request, _pb.PingResponse)
        if response is None or not self._met(peer, response.peer.node_id):
            return False
        if introduce:
            _check(peer, response, asked)
        return True

    async def find(
        self, peer: Any, keys: Sequence[Any], neighbours: int = BUCKET_SIZE, *, records: bool = True
    ) -> dict[Any, Nearest] | None:
        """Ask a peer for records that this node lacks, unless it wants none; they go through the intake.

        Returns so many of the nodes that the peer knows nearest to each key; None if it does not answer.
        """
        asked = [self._asking_for(key.to_bytes(), neighbours, records) for key in keys]
        request = _pb.FindRequest(keys=asked, peer=self._info)
        response = await self._request(peer, FIND, request, _pb.FindResponse)
        if response is None or not self._met(peer, response.peer.node_id):
            return None
        found: dict[Any, Nearest] = {}
        for key, result in zip(keys, response.results, strict=False):
            if result.type == _pb.FOUND_DICTIONARY:
                await asyncio.sleep(0)
                for signer, signed, expires in _rows_of(result.value):
                    self._intake.take(peer_name(peer), key.to_bytes(), signer, signed, expires)
                    await self._breathe()
            found[key] = self._true_neighbours(result)
        return found

    def _asking_for(self, key: bytes, neighbours: int, records: bool) -> bytes:
        salt = bytes.fromhex(ambient.token(8))
        if not records:
            return pack_asked(key, (), salt, neighbours, only_marked=True)
        held = [(signer, row.expires) for signer, row in self._records.live(key, self._intake.now()).items()]
        return pack_asked(key, held, salt, neighbours)

    async def store(self, peer: Any, rows: Sequence[Stored]) -> list[bool] | None:
        """Ask a peer to hold records; which of them it took, None where it does not answer."""
        request = _pb.StoreRequest(
            keys=[row.key for row in rows],
            subkeys=[pack_one(row.signer) for row in rows],
            values=[pack_one(row.signed) for row in rows],
            expiration_time=[row.expires for row in rows],
            in_cache=[False] * len(rows),
            peer=self._info,
        )
        response = await self._request(peer, STORE, request, _pb.StoreResponse)
        if response is None or not self._met(peer, response.peer.node_id):
            return None
        return list(response.store_ok)

    async def handle_ping(self, request: Any, context: Any) -> Any:
        """A node asks to be in the routing table, and with `validate` whether it can be reached."""
        response = _pb.PingResponse(peer=self._info, dht_time=ambient.wall(), available=False)
        if request.validate:
            itself = self._is_itself(context.remote_id, request.peer.node_id)
            response.available = itself and await self._call_back(context.remote_id)
        else:
            self._met(context.remote_id, request.peer.node_id)
        return response

    async def handle_store(self, request: Any, context: Any) -> Any:
        """A node asks to hold records: each is judged by itself."""
        self._met(context.remote_id, request.peer.node_id)
        response = _pb.StoreResponse(store_ok=[], peer=self._info)
        storer, left = peer_name(context.remote_id), MOST_ASKED
        fields = (request.keys, request.subkeys, request.values, request.expiration_time, request.in_cache)
        for key, subkey, value, expires, in_cache in itertools.islice(zip(*fields, strict=False), MOST_ASKED):
            offered = [] if in_cache or left <= 0 else _offered(subkey, value, expires)[:left]
            left -= len(offered)
            taken = 0
            for signer, signed, until in offered:
                taken += self._intake.take(storer, key, signer, signed, until)
                await self._breathe()
            response.store_ok.append(0 < taken == len(offered))
        return response

    async def handle_find(self, request: Any, context: Any) -> Any:
        """Answer a node that asks for records with those that it lacks.

        A record is told if its signer brought it here or answers this node. As many go as fit, those first of which
        most is known. This node's own record always goes, since it is only now that its signer brings it.
        """
        self._met(context.remote_id, request.peer.node_id)
        response = _pb.FindResponse(results=[], peer=self._info)
        allowances = self._allowances(peer_name(context.remote_id))
        left = ANSWER_BYTES
        for raw in request.keys[:MOST_ASKED]:
            result = _pb.FindResult(type=_pb.NOT_FOUND)
            if any(allowance.left <= 0.0 for allowance in allowances):
                response.results.append(result)
                continue
            asked = unpack_asked(raw)
            records = self._records.live(asked.key, self._intake.now())
            for allowance in allowances:  # each record costs its bytes, whether it is in the answer or not
                allowance.spend(ASKED_KEY_COST + sum(len(held.signed) for held in records.values()))
            await asyncio.sleep(0)
            rows = self._fitting(asked, records, left)
            if rows:
                result.type, result.value = _pb.FOUND_DICTIONARY, pack_dictionary(rows)
                result.expiration_time = max(expires for _, _, expires in rows)
                left -= len(result.value)
            if len(asked.key) == DHTID.HASH_NBYTES and asked.neighbours:
                key, asker = DHTID.from_bytes(asked.key), node_id_of(context.remote_id)
                for node_id, peer in self.nearest(key, min(asked.neighbours, BUCKET_SIZE), exclude=asker):
                    result.nearest_node_ids.append(node_id.to_bytes())
                    result.nearest_peer_ids.append(peer.to_bytes())
            response.results.append(result)
        return response

    def _allowances(self, peer: PeerId) -> list[Budget]:
        """What a peer that asks may still be given: by itself, and together with its like."""
        standing, own = self._records.standing(peer), self._answers.of(peer)
        return [own] if standing >= Esteem.WORKS else [own, self._answers_together[standing >= Esteem.KNOWN]]

    def _fitting(
        self, asked: AskedKey, records: Mapping[PeerId, HeldRecord], most_bytes: int
    ) -> list[tuple[str, bytes, float]]:
        now, own = self._intake.now(), peer_name(self._p2p.peer_id)

        def lacked(signer: str, held: HeldRecord) -> bool:
            return signer == own or asked.wants(signer, held.expires)

        lacking = [row for row in records.items() if lacked(*row)]
        rows: list[tuple[str, bytes, float]] = []
        for signer, held in self._records.best_first(lacking, now):
            most_bytes -= len(held.signed) + len(signer)
            if most_bytes < 0:
                break
            rows.append((signer, held.signed, held.expires))
        return rows

    async def _request(self, peer: Any, name: str, request: Any, answer: Any) -> Any:
        """See `_asked`; waits while too many own requests are under way."""
        async with self._calls:
            return await self._asked(peer, name, request, answer)

    async def _asked(self, peer: Any, name: str, request: Any, answer: Any) -> Any:
        """The answer; None, and the peer is no longer in the routing table, where there is none."""
        try:
            async with asyncio.timeout(QUESTION_SECONDS):
                return await self._p2p.call_protobuf_handler(peer, name, request, answer)
        except (P2PDaemonError, P2PHandlerError, DecodeError, OSError, TimeoutError) as error:
            logger.debug("%s of %s came to nothing: %r", name, peer, error)
        if (node_id := node_id_of(peer)) in self.table:
            del self.table[node_id]
        return None

    def _is_itself(self, peer: Any, claimed: bytes) -> bool:
        """Whether the node id that a peer claims is its own; it claims none where it only asks."""
        itself = claimed == node_id_of(peer).to_bytes()
        if claimed and not itself:
            logger.debug("%s claims a node id that is not its own", peer)
        return itself

    def _met(self, peer: Any, claimed: bytes) -> bool:
        """Keep a peer that asked or answered in the routing table.

        Returns whether it takes part in the DHT under its own id.
        """
        node_id = node_id_of(peer)
        if node_id == self.node_id or not self._is_itself(peer, claimed):
            return False
        to_ask: Any = self.table.add_or_update_node(node_id, peer)
        if to_ask is not None:
            self._spawn(self._ask_whether_there(to_ask[1]))
        return True

    async def _ask_whether_there(self, peer: Any) -> None:
        """Ask as many at once as a bucket has places: a crowd that lets such calls hang holds up no other request."""
        if self._pings < BUCKET_SIZE:
            self._pings += 1
            try:
                await self.ping(peer)
            finally:
                self._pings -= 1

    async def _call_back(self, peer: Any) -> bool:
        """Tell whether a peer that asks for it can be reached, as far as is known.

        Each is called back one time, and at most `FEW_PEERS` at once. Beyond that nothing speaks against it: peers that
        let these calls hang would otherwise turn every newcomer away.
        """
        if peer in self._calling_back:
            return False
        if len(self._calling_back) >= FEW_PEERS:
            return True
        self._calling_back.add(peer)
        try:
            request = _pb.PingRequest(peer=self._info)
            response = await self._asked(peer, PING, request, _pb.PingResponse)
            return response is not None and self._met(peer, response.peer.node_id)
        finally:
            self._calling_back.discard(peer)

    def _true_neighbours(self, result: Any) -> Nearest:
        """The nodes of an answer with the ids of their peers, at most as many as a bucket holds."""
        true: Nearest = []
        for claimed, raw in zip(result.nearest_node_ids, result.nearest_peer_ids, strict=False):
            if len(true) >= BUCKET_SIZE:
                break
            if len(raw) <= PEER_ID_BYTES and claimed == _node_id(raw).to_bytes():
                true.append((_node_id(raw), _peer_of(raw)))
        return [(node_id, peer) for node_id, peer in true if node_id != self.node_id]

    async def _breathe(self) -> None:
        if self._intake.checked > self._rested:  # a checked signature takes a tenth of a millisecond
            self._rested = self._intake.checked
            await asyncio.sleep(0)

    def _spawn(self, work: Any) -> None:
        task: asyncio.Task[Any] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _rows_of(value: bytes) -> list[tuple[object, object, object]]:
    return unpack_dictionary(value) if len(value) <= 2 * ANSWER_BYTES else []


def _offered(subkey: bytes, value: bytes, expires: float) -> list[tuple[object, object, object]]:
    """What a store request offers in one place: a dictionary of records, or one record under its signer's name."""
    if subkey == b"":
        return _rows_of(value)
    try:
        return [(unpack_one(subkey), unpacked_bytes(value), expires)]
    except ValueError:
        return []


def _check(peer: Any, response: Any, asked: float) -> None:
    """Raise where a peer's answer to an introduction shows that the two cannot work together."""
    if not response.available:
        raise CannotBeReached(f"{peer} cannot reach this node")
    slack = MAX_DHT_TIME_DISCREPANCY_SECONDS
    if response.dht_time and not asked - slack <= response.dht_time <= ambient.wall() + slack:
        raise ClocksDiffer(
            f"local time must be within {slack} seconds of others (local: {asked:.3f}, peer: {response.dht_time:.3f})"
        )
