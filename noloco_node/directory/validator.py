"""Signed directory records: how they are written, the total predicate on them, and what a node takes in of them.

A value is stored under (key of the stage, subkey = the peer's id, expiry). Its signature, by the key behind the peer
id, covers all of these. Nobody can therefore move a record to another place or lengthen its life. The predicate reads
no clock: a skewed one would empty the directory. It never raises: one value that passed and did not parse would hang
the look-ups of every reader.

A record comes by a store, in an answer to a look-up, or told over an own link. `Intake` judges all three alike, one by
one and at a bounded cost. One bad record never takes others with it: between two honest clocks or versions that would
be a weapon.

How records lie in hivemind's messages: MessagePack, a dictionary as an extension type. Anything else is nothing.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgpack  # pyright: ignore[reportMissingTypeStubs]
from hivemind.dht.routing import DHTID  # pyright: ignore[reportMissingTypeStubs]
from pydantic_core import from_json

from noloco_node import ambient
from noloco_node.directory.asked_key import KEY_BYTES
from noloco_node.directory.buckets import MOST_LEVEL, Place, bucket_of, prefix_of
from noloco_node.directory.records import PeerRecord, SignedRecord
from noloco_node.directory.store import MOST_RECORDS, Esteem, HeldRecord, NoRoom, RecordStore
from noloco_node.identity.keys import PUBLIC_KEY_BYTES, Identity, peer_id_of, verify
from noloco_node.identity.peer_id import PeerId
from noloco_node.tallies import Budget, PeerBudgets, PeerTable

DICTIONARY_CODE = 0x50

_msgpack: Any = msgpack

_Row = tuple[str, bytes, float]
"""A row is a signer, what it signed, and the expiry in DHT time."""


def pack_one(value: object) -> bytes:
    """A subkey or a value."""
    return bytes(_msgpack.packb(value, use_bin_type=True))


def unpack_one(data: bytes) -> object:
    """One MessagePack value without extension types; ValueError for anything else."""
    return _msgpack.unpackb(data, raw=False, strict_map_key=True, ext_hook=_no_extension)


def pack_dictionary(rows: Sequence[_Row]) -> bytes:
    """Pack rows as hivemind packs a value with subkeys."""
    items = [[signer, pack_one(signed), expires] for signer, signed, expires in rows]
    latest = max((expires for _, _, expires in rows), default=0.0)
    return pack_one(_msgpack.ExtType(DICTIONARY_CODE, pack_one([float("inf"), latest, items])))


def unpack_dictionary(data: bytes) -> list[tuple[object, object, object]]:
    """Rows of any types: what is no row is passed over, and what is no dictionary has none. Never raises."""
    try:
        packed = _msgpack.unpackb(data, ext_hook=_content_of_dictionary)
        if not isinstance(packed, bytes):
            return []
        parts = _msgpack.unpackb(packed, raw=False, strict_map_key=True, ext_hook=_passed_over)
    except ValueError:
        return []
    if not isinstance(parts, list) or len(cast("list[object]", parts)) != 3:
        return []
    items = cast("list[object]", parts)[2]
    rows: list[tuple[object, object, object]] = []
    for item in cast("list[object]", items)[:MOST_RECORDS] if isinstance(items, list) else []:
        if isinstance(item, list) and len(cast("list[object]", item)) == 3:
            signer, value, expires = cast("list[object]", item)
            rows.append((signer, unpacked_bytes(value), expires))
    return rows


def unpacked_bytes(value: object) -> bytes | None:
    """The bytes that a packed value holds; None where it holds no bytes, or is packed otherwise than all others."""
    if not isinstance(value, bytes):
        return None
    try:
        inner = unpack_one(value)
    except ValueError:
        return None
    return inner if isinstance(inner, bytes) else None


def _no_extension(code: int, data: bytes) -> object:
    raise ValueError(f"extension type {code} of {len(data)} bytes")


def _content_of_dictionary(code: int, data: bytes) -> object:
    return data if code == DICTIONARY_CODE else None


def _passed_over(_code: int, _data: bytes) -> object:
    return None


MAX_RECORD_BYTES = 1664
"""The most bytes of what is signed. An honest record has some 190 bytes, an invitation 460 more. A node needs 800 more
if it reads blocks of as many sources as a mixture may have, and holds as many of each as it may."""
MAX_SIGNED_BYTES = MAX_RECORD_BYTES + PUBLIC_KEY_BYTES + 520
"""The most bytes of a signed record, with the longest key and signature around it; their sizes are fixed."""
MAX_EXPIRY = float(1 << 40)
"""No honest record reaches so many seconds since 1970. The bound keeps arithmetic with expiries harmless."""

_DOMAIN = b"noloco directory record 1\0"
_LENGTHS = struct.Struct(">BHH")
_FORMAT = 1


def stage_key(run_id: str, stage: int) -> str:
    """The DHT key under which the peers of a stage are found."""
    return f"{run_id}.stage.{stage}"


def bucket_key(run_id: str, place: Place) -> str:
    """The DHT key of a bucket; at level 0 that of the stage."""
    key = stage_key(run_id, place.stage)
    return f"{key}.{place.level}.{place.bucket}" if place.level else key


def sign_record(identity: Identity, key: str, record: PeerRecord, expires: float) -> bytes:
    """The bytes to store under (key, own peer id) until DHT time `expires`."""
    payload = record.model_dump_json(exclude={"peer_id"}, exclude_defaults=True).encode()
    place = _place(_digest(key), identity.peer_id, expires)
    signature = identity.sign(place + payload)
    lengths = _LENGTHS.pack(_FORMAT, len(identity.public_key), len(signature))
    return lengths + identity.public_key + signature + payload


class RecordValidator:
    """Accepts signed records at the stage keys of one run and in the buckets that their peers belong to, and nothing
    else at any key.

    Where `run_id` is None it accepts signed records at any key: what lies behind a key's hash cannot be told.
    """

    def __init__(self, run_id: str | None, stages: int) -> None:
        self._any_key = run_id is None
        self._run_id = "" if run_id is None else run_id
        self._stages = stages
        self._verdicts = PeerTable[bytes, PeerRecord | None]()

    def read(self, key: bytes, signer: str, signed: bytes, expires: float) -> PeerRecord | None:
        """The record, if it is exactly what its owner signed for this place; None otherwise. Never raises."""
        if len(key) != KEY_BYTES or len(signed) > MAX_SIGNED_BYTES or not 0 < expires <= MAX_EXPIRY:
            return None
        lengths = struct.pack(">dI", expires, len(signed))
        digest = hashlib.sha256(lengths + key + signed + signer.encode(errors="replace")).digest()
        if digest in self._verdicts:
            return self._verdicts[digest]
        try:
            verdict = self._parse(key, signer, signed, expires)
        except (ValueError, struct.error, RecursionError):
            verdict = None
        self._verdicts[digest] = verdict
        return verdict

    def _parse(self, key: bytes, signer: str, signed: bytes, expires: float) -> PeerRecord | None:
        version, public_length, signature_length = cast("tuple[int, int, int]", _LENGTHS.unpack_from(signed))
        public_end = _LENGTHS.size + public_length
        payload_start = public_end + signature_length
        if version != _FORMAT or public_length != PUBLIC_KEY_BYTES or payload_start >= len(signed):
            return None
        if len(signed) - payload_start > MAX_RECORD_BYTES:
            return None
        public_key, signature = signed[_LENGTHS.size : public_end], signed[public_end:payload_start]
        payload = signed[payload_start:]
        if peer_id_of(public_key) != signer:
            return None
        record = _record_of(payload, signer)
        if record.peer_id != signer or not self._belongs(key, record):
            return None
        return record if verify(public_key, signature, _place(key, signer, expires) + payload) else None

    def _belongs(self, key: bytes, record: PeerRecord) -> bool:
        """Whether a record may lie under a key: that of its stage, or of one of its own peer's buckets there. A key is
        a hash, so each level is tried."""
        if self._any_key:
            return True
        prefix, stage = prefix_of(PeerId(record.peer_id)), record.stage
        places = (Place(stage, level, bucket_of(prefix, level)) for level in range(MOST_LEVEL + 1))
        return stage < self._stages and any(_digest(bucket_key(self._run_id, place)) == key for place in places)


def _record_of(payload: bytes, peer: str) -> PeerRecord:
    """The record in a signed payload. Raises ValueError (ValidationError included) if there is none.

    The place says whose it is, and older versions say it a second time.
    """
    parsed: object = from_json(payload, allow_inf_nan=False)
    if not isinstance(parsed, dict):
        raise ValueError("it is no JSON object")
    return PeerRecord.model_validate({"peer_id": peer} | cast("dict[str, object]", parsed))


def _place(key: bytes, subkey: str, expires: float) -> bytes:
    name = subkey.encode()
    return _DOMAIN + struct.pack(">dHH", expires, len(key), len(name)) + key + name


def _digest(key: str) -> bytes:
    identifier: Any = DHTID.generate(source=key)
    return bytes(identifier.to_bytes())


SKEW_SECONDS = 300.0
"""The clock of an honest node may be so many seconds ahead of this node's: only ghosts live longer by it."""
CHECKS_AT_ONCE, CHECKS_A_SECOND = 256.0, 32.0
"""One peer can make this node check so many new signatures at once, and so many a second, at a tenth of a millisecond
each. Honest peers bring whole keys when they meet a node, and then what has been renewed since."""
POOLS: dict[Esteem, tuple[float, float]] = {
    Esteem.HEARSAY: (512.0, 128.0),
    Esteem.DIRECT: (256.0, 64.0),
    Esteem.KNOWN: (2048.0, 512.0),
}
"""New signatures that are checked at once, and a second, for all peers of a kind together. The kinds are peers that
bring records of others, that bring their own, and that have answered this node. Each has its own pool, so that a flood
of one kind shuts nobody of another out."""


class Intake:
    """Checks records and puts them into the store. `now` gives DHT time, `known` whether a peer has answered here."""

    def __init__(
        self,
        own: PeerId,
        validator: RecordValidator,
        store: RecordStore,
        known: Callable[[PeerId], bool],
        now: Callable[[], float],
        longest_life: float,
        clock: Callable[[], float] = ambient.monotonic,
    ) -> None:
        self._own = own
        self._validator = validator
        self._store = store
        self._known = known
        self.now = now
        self._longest_life = longest_life
        self._of_peers = PeerBudgets[PeerId](CHECKS_AT_ONCE, CHECKS_A_SECOND, clock)
        self._pools = {esteem: Budget(*pool, clock) for esteem, pool in POOLS.items()}
        self.checked = 0
        """Signatures so far."""

    @property
    def latest_expiry(self) -> float:
        """DHT time beyond which no record is believed to live."""
        return self.now() + self._longest_life + SKEW_SECONDS

    def take(self, storer: PeerId, key: bytes, signer: object, signed: object, expires: object) -> bool:
        """Take in one record as `storer` brought it, of any types; whether it is held now. Never raises."""
        if not isinstance(signer, str) or not isinstance(signed, bytes) or not isinstance(expires, float):
            return False
        now, peer = self.now(), PeerId(signer)
        if not now < expires <= self.latest_expiry:
            return False
        held = self._store.held(key, peer)
        if held is not None and held.expires >= expires:
            same = held.signed == signed and held.expires == expires
            if same:
                self._store.touch(held, peer, storer, now)
            return same
        if not self._may_check(storer, peer):
            return False
        self.checked += 1
        record = self._validator.read(key, signer, signed, expires)
        return record is not None and self._store.put(key, peer, HeldRecord(record, signed, expires, storer), now)

    def read(self, key: bytes, row: SignedRecord) -> PeerRecord | None:
        """The record as its owner signed it for `key`; None where it did not. Nothing is taken in."""
        return self._validator.read(key, row.peer, row.signed, row.expires)

    def _may_check(self, storer: PeerId, signer: PeerId) -> bool:
        if storer == self._own:
            return True
        if self._known(storer):
            kind = Esteem.KNOWN
        elif storer == signer:
            kind = Esteem.DIRECT
        else:
            kind = Esteem.HEARSAY
        own, pool = self._of_peers.of(storer), self._pools[kind]
        if own.left < 1.0 or pool.left < 1.0:
            self._store.no_room[NoRoom.CHECKS] += 1
            return False
        own.spend()
        pool.spend()
        return True
