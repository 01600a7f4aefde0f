"""The directory: invented node ids, ghosts (signed records with no node behind them), replays, lying answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import P2PContext, PeerID, ServicerBase
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer

from noloco_node import PROTOCOL_VERSION, __version__
from noloco_node.directory import validator as record_validator
from noloco_node.directory.records import PeerRecord, PeerState
from noloco_node.identity.keys import Identity
from tests.chaos.attacks.life import DHT_SERVICE, Life, Victim, digest_of, throw_away_key

IDS_A_KEY = 20
"""As many as hivemind asks for the nearest of a key."""
BELIEVED_SECONDS = 250.0
"""A life that a reader still believes, allowing for honest clocks."""
BATCH = 50
"""Records in one request to store."""
CROWD = 400
ROUND_SECONDS = 10.0


@dataclass(frozen=True)
class Stored:
    """A record as it travels to the directory."""

    key: bytes
    subkey: bytes
    value: bytes
    expires: float


def ghost(life: Life, stage: int, expires: float, **claims: Any) -> Stored:
    """A validly signed record of a key that no node has."""
    identity = throw_away_key()
    known = {"state": PeerState.TRAINING, "clock": life.clock, "tokens_per_second": 100.0, "capacity": 100.0} | claims
    record = PeerRecord(peer_id=identity.peer_id, stage=stage, protocol=PROTOCOL_VERSION, version=__version__, **known)
    return signed(identity, life.key(stage), record.model_dump_json().encode(), expires)


def own_record(life: Life, stage: int) -> Stored:
    """A plausible record of this life's own key."""
    record = PeerRecord(
        peer_id=life.identity.peer_id,
        stage=stage,
        state=PeerState.TRAINING,
        clock=life.clock,
        tokens_per_second=100.0,
        capacity=1000.0,
        standby_of=(stage + 1) % life.spec.stages,
        protocol=PROTOCOL_VERSION,
        version=__version__,
        sequence=int(time.time() * 1000),
    )
    until = time.time() + life.spec.limits.record_seconds
    return signed(life.identity, life.key(stage), record.model_dump_json().encode(), until)


def signed(identity: Identity, key: str, payload: bytes, expires: float) -> Stored:
    """Any payload, signed for this place as a node would: what `sign_record` does, without its good manners."""
    internals: Any = record_validator
    digest = digest_of(key)
    signature = identity.sign(internals._place(digest, identity.peer_id, expires) + payload)
    lengths = internals._LENGTHS.pack(internals._FORMAT, len(identity.public_key), len(signature))
    value = lengths + identity.public_key + signature + payload
    return Stored(digest, _pack(identity.peer_id), _pack(value), expires)


async def store(life: Life, attack: str, victim: Victim, records: Sequence[Stored]) -> None:
    """Ask a victim to keep these; count what it says of each."""
    for start in range(0, len(records), BATCH):
        part = records[start : start + BATCH]
        request = dht_pb2.StoreRequest(
            keys=[record.key for record in part],
            subkeys=[record.subkey for record in part],
            values=[record.value for record in part],
            expiration_time=[record.expires for record in part],
            in_cache=[False] * len(part),
        )
        answer = await life.rpc(attack, victim.peer, "rpc_store", request, dht_pb2.StoreResponse)
        if answer is not None:
            kept = sum(answer.store_ok)
            life.tally.count(attack, "stored", kept)
            life.tally.count(attack, "refused: not stored", len(part) - kept)


async def _haunt(life: Life, attack: str, make: Any) -> None:
    """Store what `make()` gives, with everybody, again and again."""
    while True:
        records = make()
        for victim in life.victims:
            await store(life, attack, victim, records)
        await asyncio.sleep(ROUND_SECONDS)


async def crowd(life: Life) -> None:
    """400 ghosts a stage."""
    expires = time.time() + BELIEVED_SECONDS
    records = [ghost(life, stage, expires) for stage in range(life.spec.stages) for _ in range(CROWD)]
    await _haunt(life, "crowd of ghosts", lambda: records)


GHOSTS: Mapping[str, tuple[bool, Sequence[Mapping[str, Any]]]] = {
    "ghosts with huge capacity": (True, [{"capacity": 1e12, "tokens_per_second": 1e12}]),
    "training ghosts at stage 0": (False, [{}] * 4),
    "finished and finishing ghosts": (
        False,
        [
            {"state": state, "finished": True, "outer_steps_taken": 1}
            for state in (PeerState.FINISHING, PeerState.GONE, PeerState.DRAINING)
        ],
    ),
    "ghosts with extreme clocks": (True, [{"clock": clock} for clock in (0.0, 1e17, 1e18)]),
    "joining ghosts": (True, [{"state": PeerState.JOINING}] * 4),
    # A node that follows the eldest birth there can be leaves the swarm.
    "another birth of the run": (False, [{"birth": "0" * 24}]),
}
"""Attacks by ghosts: whether they are in every stage, or at stage 0 alone; and what each of them claims."""


async def ghosts(attack: str, life: Life) -> None:
    """Those of this attack, anew each round."""

    def make() -> list[Stored]:
        everywhere, claims = GHOSTS[attack]
        until, stages = time.time() + BELIEVED_SECONDS, range(life.spec.stages if everywhere else 1)
        return [ghost(life, stage, until, **each) for stage in stages for each in claims]

    await _haunt(life, attack, make)


async def told_once(life: Life, attack: str, **claims: Any) -> Stored:
    """Store the record of a ghost of stage 0 that claims this with all victims."""
    record = ghost(life, 0, time.time() + BELIEVED_SECONDS, **claims)
    for victim in life.victims:
        await store(life, attack, victim, [record])
    return record


async def endless_records(life: Life) -> None:
    """Records that are to live for thousands of years, padded to 4 KiB."""
    expires = [float(1 << 40), time.time() + 10 * 365 * 86400.0, time.time() + 7200.0]

    def make() -> list[Stored]:
        return [padded(life, stage, until) for stage in range(life.spec.stages) for until in expires for _ in range(8)]

    await _haunt(life, "endless records", make)


def padded(life: Life, stage: int, expires: float) -> Stored:
    """A ghost with an unknown field that fills it up to about 4,000 bytes."""
    identity = throw_away_key()
    record = PeerRecord(
        peer_id=identity.peer_id, stage=stage, state=PeerState.JOINING, protocol=PROTOCOL_VERSION, version=__version__
    )
    text = record.model_dump_json()
    filler = "x" * max(0, 4000 - len(text) - 250)
    payload = f'{text[:-1]},"filler":"{filler}"}}'
    return signed(identity, life.key(stage), payload.encode(), expires)


async def many_subkeys(life: Life) -> None:
    """New keys without end, each with a record of a short life."""
    attack = "subkeys by the thousand"
    while True:
        for stage in range(life.spec.stages):
            until = time.time() + 600.0
            records = [ghost(life, stage, until, state=PeerState.GONE) for _ in range(BATCH)]
            for victim in life.victims:
                await store(life, attack, victim, records)
            await asyncio.sleep(0.2)


async def replayed(life: Life) -> None:
    """Honest nodes' own older records, given back to the nodes that hold newer ones."""
    attack, kept = "replayed records", dict[tuple[bytes, Any, float], Stored]()
    while True:
        for stage in range(life.spec.stages):
            for victim in life.victims:
                for record in await _found(life, attack, victim, stage):
                    kept.setdefault((record.key, record.subkey, record.expires), record)
        now = time.time()
        kept = {place: record for place, record in kept.items() if record.expires > now}
        honest = {_pack(victim.peer) for victim in life.victims}
        old = [record for record in kept.values() if record.subkey in honest and _is_old(record, kept)]
        for victim in life.victims:
            await store(life, attack, victim, old)
        await asyncio.sleep(1.0)


def _is_old(record: Stored, kept: dict[tuple[bytes, Any, float], Stored]) -> bool:
    place = (record.key, record.subkey)
    return any((other.key, other.subkey) == place and other.expires > record.expires for other in kept.values())


async def _found(life: Life, attack: str, victim: Victim, stage: int) -> list[Stored]:
    key = digest_of(life.key(stage))
    answer = await life.rpc(attack, victim.peer, "rpc_find", dht_pb2.FindRequest(keys=[key]), dht_pb2.FindResponse)
    if answer is None or not answer.results or answer.results[0].type != dht_pb2.FOUND_DICTIONARY:
        return []
    entries: Any = MSGPackSerializer.loads(answer.results[0].value)
    with entries.freeze():
        return [Stored(key, _pack(subkey), value, until) for subkey, (value, until) in entries.items()]


def beside(key: bytes, count: int, rng: Any) -> list[bytes]:
    """Node ids nearer to a key than any that chance gives."""
    whole = int.from_bytes(key, "big")
    return [(whole ^ rng.getrandbits(24)).to_bytes(len(key), "big") for _ in range(count)]


async def invented_node_ids(life: Life) -> None:
    """Twenty node ids beside every stage's key, all of this one peer; a newcomer is told that all is stored."""
    attack = "invented node ids"
    await _serve_directory(life)
    ids = [
        node for stage in range(life.spec.stages) for node in beside(digest_of(life.key(stage)), IDS_A_KEY, life.rng)
    ]
    while True:
        for node in ids:
            request = dht_pb2.PingRequest(peer=dht_pb2.NodeInfo(node_id=node), validate=False)
            for victim in life.victims:
                answer = await life.rpc(attack, victim.peer, "rpc_ping", request, dht_pb2.PingResponse)
                if answer is not None:
                    life.tally.count(attack, "pings answered")
        await asyncio.sleep(5.0)


async def lying_finds(life: Life) -> None:
    """Answers to look-ups: values without end, and this peer as the nearest under many names. Only answers."""
    await _serve_directory(life)
    await asyncio.Event().wait()


async def _serve_directory(life: Life) -> None:
    if "directory" not in life.served:
        life.served.add("directory")
        servicer: Any = _directory_of(life)
        await servicer.add_p2p_handlers(life.daemon.hivemind_p2p)


def _directory_of(life: Life) -> object:
    """A directory node that keeps nothing and lies, under hivemind's own name for the service."""

    class Liar(ServicerBase):
        async def rpc_ping(self, request: dht_pb2.PingRequest, context: P2PContext) -> dht_pb2.PingResponse:
            stage = life.rng.randrange(life.spec.stages)
            [node] = beside(digest_of(life.key(stage)), 1, life.rng)
            life.tally.count("invented node ids", "pings taken")
            return dht_pb2.PingResponse(peer=dht_pb2.NodeInfo(node_id=node), dht_time=time.time(), available=True)

        async def rpc_store(self, request: dht_pb2.StoreRequest, context: P2PContext) -> dht_pb2.StoreResponse:
            life.tally.count("invented node ids", "stores swallowed")
            return dht_pb2.StoreResponse(store_ok=[True] * len(request.keys))

        async def rpc_find(self, request: dht_pb2.FindRequest, context: P2PContext) -> dht_pb2.FindResponse:
            life.tally.count("lying finds", "finds answered")
            return dht_pb2.FindResponse(results=[_lie(life, bytes(key)) for key in request.keys])

    Liar.__name__ = DHT_SERVICE
    return Liar()


def _lie(life: Life, key: bytes) -> dht_pb2.FindResult:
    nearest = beside(key, IDS_A_KEY, life.rng)
    own = PeerID.from_base58(life.identity.peer_id).to_bytes()
    result = dht_pb2.FindResult(type=dht_pb2.NOT_FOUND, nearest_node_ids=nearest, nearest_peer_ids=[own] * len(nearest))
    stages = [stage for stage in range(life.spec.stages) if digest_of(life.key(stage)) == key]
    if stages and life.rng.random() < 0.5:
        record = ghost(life, stages[0], time.time() + 60.0)
        entries: Any = DictionaryDHTValue()
        entries.store(msgpack.unpackb(record.subkey), record.value, record.expires)
        entries.latest_expiration_time = float("inf")
        result.type = dht_pb2.FOUND_DICTIONARY
        result.value = MSGPackSerializer.dumps(entries)
        result.expiration_time = float("inf")
    return result


def _pack(value: object) -> bytes:
    return bytes(msgpack.packb(value, use_bin_type=True))
