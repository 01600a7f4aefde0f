"""The cost of look-ups of records to a node, and the peers that pay for it: whole directories in memory."""

from __future__ import annotations

import asyncio
import random
from itertools import islice
from typing import Any

import pytest
from hivemind.dht.routing import DHTID, RoutingTable
from hivemind.p2p import PeerID

from noloco_node.directory import dht_node as guarded_dht
from noloco_node.directory import dht_walk
from noloco_node.directory.asked_key import KEY_BYTES, MOST_ASKED, AskedKey, pack_asked, unpack_asked
from noloco_node.directory.dht_node import ASKED_BYTES, BUCKET_SIZE, DEPTH_MODULO, BoundedTable, node_id_of
from noloco_node.directory.store import HeldRecord
from noloco_node.identity.keys import Identity
from noloco_node.identity.peer_id import PeerId
from tests.inside import intake_of, node_of, records_of, walker_of
from tests.swarm.hostile_dht import Stranger, key_ids, throw_away_key
from tests.swarm.memory_dht import Member, MemoryP2P
from tests.swarm.test_guarded_dht import KEY, RUN, members
from tests.worlds import record_of


async def test_keys_without_number_that_look_up_a_full_stage_share_one_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """An asker with a new key each time is given no more than so much in all. A peer that has answered this node still
    gets its own, and one that works here gets it whatever others take."""
    pools = {False: (1e6, 0.0), True: (1e6, 0.0)}
    monkeypatch.setattr(guarded_dht, "ASKED_TOGETHER", pools)
    made = await members(3)
    target, acquainted, worker = made
    fill(target, 400)
    target.met.answered(PeerId(acquainted.peer))
    target.met.worked(PeerId(worker.peer))
    network, given = target.p2p.network, 0

    async def ask(p2p: MemoryP2P) -> int:
        answer = await Stranger(p2p, []).find(target.peer, [KEY])
        return sum(len(result.value) for result in answer.results)

    for _ in range(30):
        given += await ask(MemoryP2P(network, throw_away_key().peer_id))
    assert 0 < given < 1.5e6
    for _ in range(30):
        assert await ask(worker.p2p) > 0
    assert await ask(acquainted.p2p) > 0
    assert await ask(MemoryP2P(network, throw_away_key().peer_id)) == 0


async def test_looking_at_a_full_stage_is_paid_for_also_where_the_answer_has_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One request that names the same key again and again."""
    monkeypatch.setattr(guarded_dht, "ASKED_BYTES_A_SECOND", 0.0)
    made = await members(2)
    fill(made[0], 400)
    stranger = Stranger(MemoryP2P(made[0].p2p.network, throw_away_key().peer_id), [])
    looked = 0
    for _ in range(3):
        answer = await stranger.find(made[0].peer, [KEY] * guarded_dht.MOST_ASKED)
        looked += sum(bool(result.nearest_node_ids) for result in answer.results)
    assert looked <= 1 + ASKED_BYTES / (400 * 450)


def fill(member: Member, count: int, octets: int = 450) -> None:
    """Have it hold records that their signers brought, of the usual size if nothing else is said."""
    node = node_of(member.directory)
    now, key = intake_of(node).now(), KEY.to_bytes()
    for number in range(count):
        peer = PeerId(f"a-signer-of-a-record-{number}")
        records_of(node).put(key, peer, HeldRecord(record_of(peer), bytes(octets), now + 50.0, peer), now)


async def test_between_walks_two_holders_are_asked_for_what_is_new() -> None:
    """There are twelve members: a walk asks them all, a look in the half of a record's life after it two for the key.
    These say nothing that the asker has; if one of the two has gone everybody is asked again."""
    made = await members(12)
    reader, writer = made[0], made[1]
    await reader.directory.refresh()
    assert await writer.directory.publish(record_of(writer.peer, sequence=2), 61.0)
    asked, told, take = asked_by(reader), list[str](), intake_of(reader.directory).take

    def taking(storer: PeerId, key: bytes, signer: object, signed: object, expires: object) -> bool:
        told.append(str(signer))
        return take(storer, key, signer, signed, expires)

    intake_of(reader.directory).take = taking  # type: ignore[method-assign]
    view = await reader.directory.refresh()
    assert asked_by(reader) - asked == 2
    assert view.stages[0][writer.peer].record.sequence == 2
    assert len(told) <= 3, "the new record, and each holder's own"
    for peer in walker_of(reader.directory).near(KEY):
        reader.p2p.network.pop(str(peer))
    asked = asked_by(reader)
    view = await reader.directory.refresh()
    assert asked_by(reader) - asked > 4
    assert set(view.stages[0]) == {member.peer for member in made}


async def test_over_a_slow_line_two_holders_are_asked_for_each_key_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """That holds also if the second one for one key still answers for another, of which it was first."""
    monkeypatch.setattr(dht_walk, "REFRESH_SECONDS", 0.05)
    made = [await Member(network := {}).join(RUN, 2)]
    made += [await Member(network).join(RUN, 2, made[0].peer) for _ in range(2)]
    for number, member in enumerate(made):
        await member.directory.publish(record_of(member.peer, stage=number % 2), 60.0)
    for _ in range(2):
        await made[0].directory.refresh()
    call, asked = made[0].p2p.call_protobuf_handler, list[tuple[str, bytes]]()

    async def slowly(peer: PeerID, name: str, request: Any, answer: Any) -> Any:
        asked.extend((str(peer), unpack_asked(key).key) for key in request.keys)
        for _ in range(20):
            await asyncio.sleep(0.0)
        return await call(peer, name, request, answer)

    monkeypatch.setattr(made[0].p2p, "call_protobuf_handler", slowly)
    for _ in range(8):
        asked.clear()
        await made[0].directory.refresh()
        assert sorted(asked) == sorted((m.peer, key.to_bytes()) for m in made[1:] for key in key_ids(RUN, 2))


async def test_half_a_records_life_after_a_walk_everybody_is_asked_again() -> None:
    """That holds also if the clock has gone back meanwhile, and every time for a node that sees nobody but itself."""
    made = await members(12)
    reader, now = made[1], made[1].directory.now()
    await reader.directory.refresh()
    reader.directory._walked_at[KEY] = now
    for later, whole in ((29.0, False), (31.0, True), (40.0, False), (-500.0, True)):
        reader.directory.now = lambda later=later: now + later  # type: ignore[method-assign]
        asked = asked_by(reader)
        await reader.directory.refresh()
        assert (asked_by(reader) - asked >= 11) is whole
    newcomer = await Member(made[0].p2p.network).join("another-run", 1, made[0].peer)
    await newcomer.directory.publish(record_of(newcomer.peer), 60.0)
    for _ in range(2):
        asked = asked_by(newcomer)
        await newcomer.directory.refresh()
        assert asked_by(newcomer) - asked >= 12


async def test_a_key_to_which_others_come_nearer_is_walked_to_before_a_records_life_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They come nearer than all that were near: the key's servers would seem gone."""
    made = [await Member(network := {}).join(RUN, 3)]
    made += [await Member(network).join(RUN, 3, made[0].peer) for _ in range(7)]
    reader, key = made[0], key_ids(RUN, 3)[2]
    for member in made[:2]:
        await member.directory.publish(record_of(member.peer), 60.0)
    await reader.directory.refresh()

    def distance(identity: Identity) -> int:
        return key.xor_distance(node_id_of(PeerID.from_base58(identity.peer_id)))

    least = min(distance(member.identity) for member in made)
    nearer = islice((each for each in iter(throw_away_key, None) if distance(each) < least), 6)
    came = [await Member(network, identity).join(RUN, 3, reader.peer) for identity in nearer]
    server = await Member(network).join(RUN, 3, came[0].peer)
    await server.directory.publish(record_of(server.peer, stage=2), 60.0)
    began = reader.directory.now()
    for later in range(12, 60, 12):
        monkeypatch.setattr(reader.directory, "now", lambda later=later: began + later)
        await reader.directory.refresh()
    assert server.peer in reader.directory.view.stages[2]


def test_what_an_asker_holds_is_left_out_and_nothing_else() -> None:
    """That record and what its signer said before it, never what it said later, if only by a millisecond; nothing under
    another salt; any bytes are read."""
    key, held = bytes(range(KEY_BYTES)), [(f"signer-{number}", 100.0 + number) for number in range(MOST_ASKED)]
    asked = unpack_asked(pack_asked(key, held, b"saltsalt", 8))
    assert (asked.key, asked.neighbours) == (key, 8)
    assert not any(asked.wants(*row) for row in held)
    assert not any(asked.wants(signer, expires - before) for signer, expires in held for before in (1e-3, 0.5, 3600.0))
    assert all(asked.wants(signer, expires + after) for signer, expires in held for after in (1e-3, 0.5, 3600.0))
    turned = unpack_asked(pack_asked(key, [("signer", 16384.0 * 1e5 - 1.0)], b"saltsalt", 8))
    assert turned.wants("signer", 16384.0 * 1e5 + 1.0)
    other = AskedKey(key, 8, b"tlastlas", asked.marks)
    assert all(other.wants(*row) for row in held)
    assert unpack_asked(key) == AskedKey(key)
    for size in (0, 3, KEY_BYTES - 1, KEY_BYTES + 1, KEY_BYTES + 10, KEY_BYTES + 9 + 6 * 9999):
        assert len(unpack_asked(b"\xff" * size).marks) <= MOST_ASKED


@pytest.mark.parametrize("many", [0, 1, 30, 700])
def test_the_nearest_of_a_table_are_those_that_hivemind_finds(many: int) -> None:
    """With one left out, and without; also more than there are."""
    rng = random.Random(many)

    def place() -> DHTID:
        return DHTID(rng.getrandbits(160))

    table = BoundedTable(place(), BUCKET_SIZE, DEPTH_MODULO)
    for number in range(many):
        table.add_or_update_node(place(), PeerID(number.to_bytes(34, "big")))
    nodes = list(table.uid_to_peer_id)
    for key in (place(), *nodes[:5]):
        for most, without in ((1, None), (20, None), (20, rng.choice(nodes) if nodes else None), (2000, None)):
            theirs = RoutingTable.get_nearest_neighbors(table, key, most, exclude=without)
            assert table.get_nearest_neighbors(key, most, exclude=without) == theirs


def asked_by(member: Member) -> int:
    """How many requests for records it has sent."""
    return sum(name.endswith("rpc_find") for _, name in member.p2p.calls)
