"""A stranger in the DHT: one p2pd, as many keys and node ids as it likes, and answers of its own."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer

from noloco_node.directory.dht_node import node_id_of
from noloco_node.directory.records import PeerRecord, PeerState
from noloco_node.directory.validator import sign_record, stage_key
from noloco_node.identity.keys import Identity, ed25519_peer_id

PING, STORE, FIND = "DHTProtocol.rpc_ping", "DHTProtocol.rpc_store", "DHTProtocol.rpc_find"


def throw_away_key() -> Identity:
    """An identity without a file."""
    private = Ed25519PrivateKey.generate()
    peer = ed25519_peer_id(private)
    raw = private.public_key().public_bytes_raw()
    return Identity(Path(), peer, b"\x08\x01\x12\x20" + raw, True, private)


def ghost(
    run: str, stage: int, expires: float, padding: int = 0, identity: Identity | None = None, **fields: Any
) -> tuple[str, bytes]:
    """Signer and signed bytes of a valid record with nobody behind it."""
    identity = identity or throw_away_key()
    record = PeerRecord(
        peer_id=identity.peer_id, stage=stage, state=PeerState.TRAINING, protocol=3, version="0.1.0", **fields
    )
    if padding:
        padded: Any = Padded(record, padding)
        return identity.peer_id, sign_record(identity, stage_key(run, stage), padded, expires)
    return identity.peer_id, sign_record(identity, stage_key(run, stage), record, expires)


class Padded:
    """A record with a field that nobody knows."""

    def __init__(self, record: PeerRecord, padding: int) -> None:
        self._record, self._padding = record, padding

    def model_dump_json(self, *, exclude: set[str], exclude_defaults: bool) -> str:
        text = self._record.model_dump_json(exclude=exclude, exclude_defaults=exclude_defaults)
        return f'{text[:-1]},"padding":"{base64.b64encode(bytes(self._padding)).decode()[: self._padding]}"}}'


class Stranger:
    """Speaks to the DHT by hivemind's messages over `p2p`, and answers them as a black hole."""

    def __init__(self, p2p: Any, kind: list[Any]) -> None:
        self._p2p = p2p
        self.kind = kind
        """The peers that it names as neighbours."""
        self.own = node_id_of(p2p.peer_id)
        self.stored = 0

    async def answer(self) -> None:
        """Take part from now on: every record is "stored", and none is found."""
        await self._p2p.add_protobuf_handler(PING, self._ping, dht_pb2.PingRequest)
        await self._p2p.add_protobuf_handler(STORE, self._store, dht_pb2.StoreRequest)
        await self._p2p.add_protobuf_handler(FIND, self._find, dht_pb2.FindRequest)

    async def store(self, peer: str, key: Any, rows: Sequence[tuple[str, bytes]], expires: float) -> list[bool]:
        """Store records one beside the other."""
        request = dht_pb2.StoreRequest(
            keys=[key.to_bytes()] * len(rows),
            subkeys=[MSGPackSerializer.dumps(signer) for signer, _ in rows],
            values=[MSGPackSerializer.dumps(signed) for _, signed in rows],
            expiration_time=[expires] * len(rows),
            in_cache=[False] * len(rows),
        )
        return list((await self._call(peer, STORE, request, dht_pb2.StoreResponse)).store_ok)

    async def store_whole(self, peer: str, key: Any, rows: Sequence[tuple[str, bytes]], expires: float) -> list[bool]:
        """Store records as one dictionary, as a node hands over a key."""
        with DictionaryDHTValue().freeze() as whole:
            for signer, signed in rows:
                whole.store(signer, MSGPackSerializer.dumps(signed), expires)
            packed = MSGPackSerializer.dumps(whole)
        request = dht_pb2.StoreRequest(
            keys=[key.to_bytes()], subkeys=[b""], values=[packed], expiration_time=[expires], in_cache=[False]
        )
        return list((await self._call(peer, STORE, request, dht_pb2.StoreResponse)).store_ok)

    async def find(self, peer: str, keys: Sequence[Any]) -> Any:
        """Ask for records."""
        request = dht_pb2.FindRequest(keys=[key.to_bytes() for key in keys])
        return await self._call(peer, FIND, request, dht_pb2.FindResponse)

    async def _call(self, peer: str, name: str, request: Any, answer: Any) -> Any:
        return await self._p2p.call_protobuf_handler(PeerID.from_base58(peer), name, request, answer)

    def info(self) -> Any:
        """What it says of itself."""
        return dht_pb2.NodeInfo(node_id=self.own.to_bytes())

    async def _ping(self, _request: Any, _context: Any) -> Any:
        return dht_pb2.PingResponse(peer=self.info(), dht_time=0.0, available=True)

    async def _store(self, request: Any, _context: Any) -> Any:
        self.stored += len(request.keys)
        return dht_pb2.StoreResponse(store_ok=[True] * len(request.keys), peer=self.info())

    async def _find(self, request: Any, _context: Any) -> Any:
        result = dht_pb2.FindResult(type=dht_pb2.NOT_FOUND)
        for peer in self.kind:
            result.nearest_node_ids.append(node_id_of(peer).to_bytes())
            result.nearest_peer_ids.append(peer.to_bytes())
        return dht_pb2.FindResponse(results=[result] * len(request.keys), peer=self.info())


def key_ids(run: str, stages: int) -> list[Any]:
    """The DHT's keys of a run's stages."""
    return [DHTID.generate(source=stage_key(run, stage)) for stage in range(stages)]
