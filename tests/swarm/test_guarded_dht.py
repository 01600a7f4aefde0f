"""The DHT among strangers, whole directories in memory: which nodes have a place in it, what is believed, what is
answered."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer

from noloco_node.directory import dht_node as guarded_dht
from noloco_node.directory import dht_walk
from noloco_node.directory.dht_node import ANSWER_BYTES, ASKED_BYTES, BUCKET_SIZE, node_id_of
from noloco_node.directory.dht_walk import MOST_BY_ONE, MOST_INTRODUCED
from noloco_node.directory.records import PeerState
from noloco_node.directory.store import MOST_HEARSAY, MOST_RECORDS
from noloco_node.errors import ExitCode, UserError
from noloco_node.identity.keys import Identity
from noloco_node.identity.peer_id import PeerId
from tests.inside import intake_of, node_of, records_of, rows_of, walker_of
from tests.support import eventually
from tests.swarm.hostile_dht import FIND, PING, Stranger, ghost, key_ids, throw_away_key
from tests.swarm.memory_dht import Member, MemoryP2P
from tests.swarm.test_directory import RUN, live_ids
from tests.worlds import record_of

P2PD_CARRIES = 4 << 20
MORE_LOOKS = 3
"""A look asks some of those that were met, by chance: one of eight was missed by one of them in some 4 % of runs."""
KEY = key_ids(RUN, 1)[0]
pb: Any = dht_pb2


async def members(count: int, network: dict[str, MemoryP2P] | None = None) -> list[Member]:
    """So many nodes of one stage that have published and looked; each joined through the one before it."""
    network = {} if network is None else network
    made: list[Member] = []
    for _ in range(count):
        made.append(await Member(network).join(RUN, 1, *(member.peer for member in made[-1:])))
    await publish(made)
    return made


async def publish(made: list[Member], sequence: int = 0) -> None:
    """Everybody stores its record anew, and looks."""
    for member in made:
        assert await member.directory.publish(record_of(member.peer, sequence=sequence), 60.0)
    for member in made:
        await member.directory.refresh()


async def look_at_everybody(member: Member) -> None:
    """As once in half a record's life."""
    member.directory._walked_at.clear()
    await member.directory.refresh()


class BlackHole(Stranger):
    """Has a place in the DHT by its own key; keeps nothing, and knows only its kind."""

    def __init__(self, network: dict[str, MemoryP2P], identity: Identity, kind: list[Any]) -> None:
        self.p2p = MemoryP2P(network, identity.peer_id)
        super().__init__(self.p2p, kind)

    async def enter(self, made: list[Member]) -> None:
        """Answer from now on, and make itself known to everybody."""
        await self.answer()
        for member in made:
            await self._call(member.peer, PING, pb.PingRequest(peer=self.info()), pb.PingResponse)


def ground(count: int, made: list[Member]) -> list[Identity]:
    """Keys whose node ids are nearer to the stage's key than those of all members."""
    nearest = min(node_id_of(member.p2p.peer_id).xor_distance(KEY) for member in made)
    found: list[Identity] = []
    while len(found) < count:
        identity = throw_away_key()
        if node_id_of(PeerID.from_base58(identity.peer_id)).xor_distance(KEY) < nearest:
            found.append(identity)
    return found


async def test_a_swarm_larger_than_a_bucket_sees_itself() -> None:
    """Each of its nodes entered through one other."""
    made = await members(BUCKET_SIZE + 4)
    await publish(made[:1], 1)
    everyone = {member.peer for member in made}
    for member in made:
        await member.directory.refresh()
        assert live_ids(member.directory, 0) == everyone


@pytest.mark.parametrize("introduced", [False, True])
async def test_a_node_id_that_is_not_the_peers_gets_no_place(introduced: bool) -> None:
    """Neither by asking nor by answering nor on another's word."""
    made = await members(2)
    stranger = BlackHole(made[0].p2p.network, throw_away_key(), [])
    stranger.own = DHTID(int(KEY) ^ 1)
    if introduced:
        await stranger.answer()
        liar = BlackHole(made[0].p2p.network, throw_away_key(), [])
        liar._find = lying(liar, [(stranger.own, stranger.p2p.peer_id)])  # type: ignore[method-assign]
        await liar.enter(made)
    else:
        await stranger.enter(made)
        assert await node_of(made[0].directory).ping(stranger.p2p.peer_id) is False
    await publish(made, 1)
    for member in made:
        assert stranger.p2p.peer_id not in node_of(member.directory).table
        assert live_ids(member.directory, 0) == {member.peer for member in made}
    assert stranger.stored == 0


def lying(stranger: BlackHole, pairs: list[tuple[Any, Any]]) -> Any:
    """An answer to look-ups with any pairs of node id and peer as neighbours."""

    async def find(request: Any, _context: Any) -> Any:
        result = pb.FindResult(type=pb.NOT_FOUND)
        for node_id, peer in pairs:
            result.nearest_node_ids.append(node_id.to_bytes())
            result.nearest_peer_ids.append(peer.to_bytes())
        return pb.FindResponse(results=[result] * len(request.keys), peer=stranger.info())

    return find


async def test_one_bad_record_takes_no_other_with_it() -> None:
    """In what a node hands over, and in what it answers: of another key, too long a life, no record, no bytes."""
    one, two = await members(2)
    expires = one.directory.now() + 60
    good = [ghost(RUN, 0, expires) for _ in range(3)]
    bad = [ghost("another-run", 0, expires), (good[0][0][:-1] + "x", b"no record"), ("x" * 9999, b"")]
    stranger = Stranger(MemoryP2P(one.p2p.network, throw_away_key().peer_id), [])
    for member in (one, two):
        await stranger.store_whole(member.peer, KEY, [bad[0], good[0], bad[1], good[1], bad[2], good[2]], expires)
        await member.directory.refresh()
        assert live_ids(member.directory, 0) == {one.peer, two.peer, *(signer for signer, _ in good)}
        assert member.directory.records_held == 5


async def test_answers_are_cut_to_what_p2pd_carries_and_those_that_are_known_come_first() -> None:
    """A full key, asked for by itself and under hundreds of names; hivemind reads what comes."""
    one, two = await members(2)
    one.met.worked(two.peer)
    expires, network = one.directory.now() + 60, one.p2p.network
    stranger = Stranger(MemoryP2P(network, throw_away_key().peer_id), [])
    intake_of(one.directory)._may_check = lambda *_: True  # type: ignore[method-assign]
    count = MOST_RECORDS // MOST_HEARSAY + 1
    bringers = [Stranger(MemoryP2P(network, throw_away_key().peer_id), []) for _ in range(count)]
    for bringer in bringers:
        told = [ghost(RUN, 0, expires, padding=500) for _ in range(MOST_HEARSAY)]
        await bringer.store(one.peer, KEY, told, expires)
    assert one.directory.records_held == MOST_RECORDS
    found: Any = MSGPackSerializer.loads((await stranger.find(one.peer, [KEY])).results[0].value)
    assert len(found) == 2, "nobody's word"
    await one.directory.refresh()
    for signer in one.directory.view.stages[0]:
        one.met.answered(signer)
    alone = await stranger.find(one.peer, [KEY])
    rows: Any = MSGPackSerializer.loads(alone.results[0].value)
    assert rows.get(two.peer) is not None
    assert rows.get(one.peer) is not None
    many = await stranger.find(one.peer, [KEY] * 5000)
    assert ANSWER_BYTES / 2 < many.ByteSize() < P2PD_CARRIES / 2
    node_of(one.directory)._answers.of(PeerId(str(stranger._p2p.peer_id))).spend(100 * ASKED_BYTES)
    assert not (await stranger.find(one.peer, [KEY])).results[0].value, "one peer is given so much a second"
    assert (await bringers[-1].find(one.peer, [KEY])).results[0].value, "others are not concerned"


async def test_ghosts_fade_within_a_records_life_and_wander_nowhere_whatever_end_they_claim() -> None:
    """One node was told of them, in a swarm that looks again and again. A node that brought its own record is seen by
    all, as one is whose clock is five minutes ahead."""
    made = await members(4)
    time = [0.0]
    for member in made:
        records_of(member.directory)._clock = lambda: time[0]
        records_of(member.directory)._longest = 60.0
    one, now = made[0], made[0].directory.now()
    honest = {member.peer for member in made}
    stranger = Stranger(MemoryP2P(one.p2p.network, throw_away_key().peer_id), [])
    ghosts = [ghost(RUN, 0, now + 350.0) for _ in range(MOST_HEARSAY)]
    await stranger.store(one.peer, KEY, ghosts, now + 350.0)
    newcomer = throw_away_key()
    alone = Stranger(MemoryP2P(one.p2p.network, newcomer.peer_id), [])
    await alone.store(one.peer, KEY, [ghost(RUN, 0, now + 350.0, identity=newcomer)], now + 350.0)
    for _ in range(3):
        for member in made:
            await look_at_everybody(member)
    for member in made[1:]:
        assert live_ids(member.directory, 0) == honest | {newcomer.peer_id}, "hearsay is not handed on"
    assert len(live_ids(one.directory, 0)) == len(honest) + 1 + MOST_HEARSAY
    time[0] = 59.0
    await publish(made, 1)
    await alone.store(one.peer, KEY, [ghost(RUN, 0, now + 360.0, identity=newcomer)], now + 360.0)
    time[0] = 61.0
    for member in made:
        await look_at_everybody(member)
        assert live_ids(member.directory, 0) == honest | {newcomer.peer_id}


def asked_of(table: Any) -> set[Any]:
    """Nodes that were asked whether they are still there."""
    return {node for bucket in table.buckets for node in bucket.nodes_requested_for_ping}


async def test_routing_tables_do_not_grow_with_invented_keys() -> None:
    """Hundreds of peers ask once and are gone; the nodes that were there stay."""
    made = await members(2)
    table = node_of(made[0].directory).table
    for _ in range(600):
        passing = BlackHole(made[0].p2p.network, throw_away_key(), [])
        await passing.enter(made[:1])
        del made[0].p2p.network[str(passing.p2p.peer_id)]
    await asyncio.sleep(0)
    assert len(table.uid_to_peer_id) <= 2 * BUCKET_SIZE * len(table.buckets)
    assert len(table.peer_id_to_uid) == len(table.uid_to_peer_id)
    await eventually(lambda: asked_of(table) <= set(table.uid_to_peer_id), 20, "of the dead nothing is remembered")
    await made[1].directory.refresh()
    assert live_ids(made[1].directory, 0) == {member.peer for member in made}


async def test_neighbours_that_are_not_there_cost_a_look_up_a_bounded_number_of_calls() -> None:
    """Names of peers without end, all near the key: each is tried once, and not again for a while."""
    made = await members(3)
    nobody = [PeerID.from_base58(identity.peer_id) for identity in ground(60, made)]
    liar = BlackHole(made[0].p2p.network, throw_away_key(), nobody)
    await liar.enter(made)
    calls = made[0].p2p.calls
    for most in (MOST_BY_ONE, MOST_BY_ONE):
        del calls[:]
        await made[0].directory.refresh()
        assert sum(name == FIND for _, name in calls) <= 3 + most <= MOST_INTRODUCED
        assert live_ids(made[0].directory, 0) == {member.peer for member in made}
    assert await made[0].directory.publish(record_of(made[0].peer, sequence=1), 60.0)


async def test_a_node_that_stalls_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the others answer is there after the patience for strangers, and what it says later is not lost."""
    monkeypatch.setattr(dht_walk, "REFRESH_SECONDS", 0.05)
    monkeypatch.setattr(guarded_dht, "QUESTION_SECONDS", 300.0)
    made = await members(3)
    network, stalled = made[0].p2p.network, asyncio.Event()
    slow = BlackHole(network, throw_away_key(), [])
    answer = slow._find

    async def find(request: Any, context: Any) -> Any:
        await stalled.wait()
        return await answer(request, context)

    slow._find = find  # type: ignore[method-assign]
    await slow.enter(made)
    async with asyncio.timeout(60.0):
        await publish(made, 1)
    assert live_ids(made[0].directory, 0) == {member.peer for member in made}
    stalled.set()
    for member in made:
        await member.directory.close()


async def test_ground_keys_around_a_stage_come_not_between_those_that_have_answered_each_other() -> None:
    """More live keys than a bucket holds, nearer to the stage's key than anybody, take every place near it. A node
    still asks and tells the peers that it has met; a joiner through one member sees all that it has met."""
    made = await members(8)
    for one in made:
        for other in made:
            if one is not other:
                one.met.answered(other.peer)
    kind = list[Any]()
    for identity in ground(BUCKET_SIZE + 4, made):
        hole = BlackHole(made[0].p2p.network, identity, kind)
        kind.append(hole.p2p.peer_id)
        await hole.enter(made)
    forget_all_records(made)
    await publish(made, 1)
    for member in made:
        await look_at_everybody(member)
    await publish(made, 2)
    everyone = {member.peer for member in made}
    for _ in range(MORE_LOOKS):
        for member in made:
            if live_ids(member.directory, 0) != everyone:
                await look_at_everybody(member)
    assert [live_ids(member.directory, 0) for member in made] == [everyone] * len(made)
    newcomer = await Member(made[0].p2p.network).join(RUN, 1, made[3].peer)
    await newcomer.directory.refresh()
    assert live_ids(newcomer.directory, 0) >= everyone


def forget_all_records(made: list[Member]) -> None:
    """As when every record has ended."""
    for member in made:
        store = records_of(member.directory)
        for key in list(rows_of(store)):
            for signer in list(rows_of(store)[key]):
                store._drop(key, signer)
        walker_of(member.directory).forget()


async def test_records_told_over_own_links_reach_those_whose_dht_says_nothing() -> None:
    """Two nodes have a hostile neighbour only in the DHT; one has met a newcomer. What is told is checked as what is
    stored is. Nobody's record is passed on that has not answered the teller."""
    one, two, newcomer = [await Member({}).join(RUN, 1) for _ in range(3)]
    hole = BlackHole(one.p2p.network, throw_away_key(), [])
    await hole.enter([one])
    await publish([one, two, newcomer])
    expires = one.directory.now() + 60
    one.met.answered(newcomer.peer)
    assert one.directory.told(newcomer.peer, newcomer.directory.to_tell(12)) == 1
    key = KEY.to_bytes()
    intake_of(one.directory).take(newcomer.identity.peer_id, key, *ghost(RUN, 0, expires), expires)
    await one.directory.refresh()
    rows = one.directory.to_tell(12)
    assert [row.peer for row in rows] == [one.peer, newcomer.peer]
    assert two.directory.told(one.peer, rows) == 2
    await two.directory.refresh()
    assert live_ids(two.directory, 0) == {one.peer, two.peer, newcomer.peer}
    gone = record_of(newcomer.peer, state=PeerState.GONE, sequence=9)
    await newcomer.directory.publish(gone, 60.0)
    assert two.directory.told(newcomer.peer, newcomer.directory.to_tell(12)) == 1
    assert two.directory.told(one.peer, one.directory.to_tell(12)) == 1, "of the newcomer it holds a later one"
    await two.directory.refresh()
    assert live_ids(two.directory, 0) == {one.peer, two.peer}


async def test_one_initial_peer_that_turns_this_node_away_does_not_keep_it_out() -> None:
    """Whatever it says of this node's clock or reach; where all say so, the reason is told."""
    made = await members(1)
    network = made[0].p2p.network
    liar = BlackHole(network, throw_away_key(), [])

    async def ping(_request: Any, _context: Any) -> Any:
        return pb.PingResponse(peer=liar.info(), dht_time=1.0, available=False)

    liar._ping = ping  # type: ignore[method-assign]
    await liar.answer()
    newcomer = await Member(network).join(RUN, 1, str(liar.p2p.peer_id), made[0].peer)
    await newcomer.directory.refresh()
    assert live_ids(newcomer.directory, 0) == {made[0].peer}
    with pytest.raises(UserError) as refused:
        await Member(network).join(RUN, 1, str(liar.p2p.peer_id))
    assert refused.value.exit_code is ExitCode.CONFIG
    with pytest.raises(UserError) as unreachable:
        await Member(network).join(RUN, 1, throw_away_key().peer_id)
    assert unreachable.value.exit_code is ExitCode.PEERS_UNREACHABLE


async def test_a_seed_of_no_run_introduces_those_of_every_run_to_each_other_beside_a_flood() -> None:
    """Two nodes of one run that know only the seed, and a stranger with keys without number at keys without number."""
    network: dict[str, MemoryP2P] = {}
    seed = await Member(network).join(None, 0)
    one, two = [await Member(network).join(RUN, 1, seed.peer) for _ in range(2)]
    del network[two.peer]
    await publish([one])
    network[two.peer] = two.p2p
    stranger, expires = Stranger(MemoryP2P(network, throw_away_key().peer_id), []), one.directory.now() + 60
    for number in range(600):
        key = DHTID.generate(source=f"any.stage.{number}")
        await stranger.store(seed.peer, key, [ghost("any", number % 4, expires)], expires)
    await two.directory.refresh()
    assert live_ids(two.directory, 0) == {one.peer}


async def test_messages_of_any_content_raise_nothing() -> None:
    """Keys and ids of wrong lengths, lists that do not match, values that are no MessagePack."""
    [one] = await members(1)
    node = node_of(one.directory)
    context = SimpleNamespace(remote_id=PeerID.from_base58(throw_away_key().peer_id))
    for junk in (b"", b"\xff" * 7, b"\xff" * 40):
        info = pb.NodeInfo(node_id=junk)
        assert not (await node.handle_ping(pb.PingRequest(peer=info, validate=True), context)).available
        found = await node.handle_find(pb.FindRequest(keys=[junk, KEY.to_bytes()], peer=info), context)
        assert len(found.results) == 2
        request = pb.StoreRequest(
            keys=[junk] * 3, subkeys=[b"", junk, b"\xc0"], values=[junk] * 3, expiration_time=[1e12] * 3, peer=info
        )
        assert list((await node.handle_store(request, context)).store_ok) == []
        request.in_cache.extend([False] * 3)
        assert list((await node.handle_store(request, context)).store_ok) == [False] * 3
    assert one.directory.records_held == 1


async def test_call_backs_that_hang_hold_up_no_calls_of_a_nodes_own() -> None:
    """Hundreds of introductions by a stranger that lets the call back hang, each peer's one at a time."""
    made = await members(2)
    hung, stranger = asyncio.Event(), BlackHole(made[0].p2p.network, throw_away_key(), [])

    async def hang(_request: Any, _context: Any) -> Any:
        await hung.wait()
        return pb.PingResponse(peer=stranger.info(), dht_time=0.0, available=True)

    stranger._ping = hang  # type: ignore[method-assign]
    await stranger.answer()
    request = pb.PingRequest(peer=stranger.info(), validate=True)
    asking = [asyncio.create_task(stranger._call(made[0].peer, PING, request, pb.PingResponse)) for _ in range(300)]
    async with asyncio.timeout(60.0):
        await publish(made, 1)
        newcomer = await Member(made[0].p2p.network).join(RUN, 1, made[0].peer)
    assert sum(peer == str(stranger.p2p.peer_id) for peer, _ in made[0].p2p.calls) == 1
    hung.set()
    answers = await asyncio.gather(*asking)
    assert sum(answer.available for answer in answers) == 1
    assert newcomer.peer in made[0].directory.neighbours()


async def test_looking_up_keys_without_number_is_paid_for_like_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests with as many keys as are answered: after some the answers are empty, and others still get theirs."""
    monkeypatch.setattr(guarded_dht, "ASKED_BYTES_A_SECOND", 0.0)
    made = await members(2)
    stranger = Stranger(MemoryP2P(made[0].p2p.network, throw_away_key().peer_id), [])
    most = guarded_dht.MOST_ASKED
    asked = [await stranger.find(made[0].peer, [KEY] * most) for _ in range(5)]
    known = [sum(bool(result.nearest_node_ids) for result in answer.results) for answer in asked]
    assert known[0] == most
    assert sum(known) <= ASKED_BYTES / guarded_dht.ASKED_KEY_COST
    await made[1].directory.refresh()
    assert live_ids(made[1].directory, 0) == {member.peer for member in made}


async def test_who_only_asks_sees_everybody_and_gets_no_place_and_no_records_to_hold() -> None:
    """Through one of ten nodes; no node knows it afterwards, not even the one that it asked first."""
    network: dict[str, MemoryP2P] = {}
    made = await members(10, network)
    watcher = await Member(network).join(RUN, 1, made[3].peer, only_asks=True)
    await watcher.directory.refresh()
    assert live_ids(watcher.directory, 0) == {member.peer for member in made}
    for member in made:
        assert watcher.peer not in member.directory.neighbours()
    asked = {name for peer, name in (call for member in made for call in member.p2p.calls) if peer == watcher.peer}
    assert asked == set(), "nobody pings it, stores at it or asks it"
    for member in (*made, watcher):
        await member.directory.close()
