"""Buckets in the DHT: real directories and signatures, without p2pd, with buckets of a few records."""

from __future__ import annotations

import pytest

from noloco_node.directory import buckets
from noloco_node.directory.buckets import CROWDED, MOST_LEVEL, Place, bucket_of, prefix_of
from noloco_node.directory.records import PeerState
from noloco_node.directory.validator import RecordValidator, bucket_key, sign_record
from tests.inside import intake_of, level_of, records_of, sampled_of, walker_of
from tests.swarm.hostile_dht import throw_away_key
from tests.swarm.memory_dht import Member, MemoryP2P
from tests.worlds import record_of

RUN = "run-under-test"
LIFE = 30.0


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four records a bucket, and more than four are many."""
    monkeypatch.setattr(buckets, "TARGET", 4)
    monkeypatch.setattr(buckets, "READ_AGAIN", 0.0)
    monkeypatch.setattr(buckets, "READ_AGAIN_AT_LAST", 0.0)


async def swarm_of(many: int) -> list[Member]:
    """Members of one stage, which enter through the first, as many in each half of it."""
    network: dict[str, MemoryP2P] = {}
    members = [await Member(network).join(RUN, 1)]
    while len(members) < many:
        member = Member(network)
        while bucket_of(prefix_of(member.peer), 1) == bucket_of(prefix_of(members[-1].peer), 1):
            member = Member(network)
        members.append(await member.join(RUN, 1, members[0].peer))
    return members


async def live_for_a_while(members: list[Member], looks: int) -> None:
    """Everybody publishes and looks, in turn."""
    for sequence in range(looks):
        for member in members:
            await member.directory.publish(record_of(member.peer, state=PeerState.TRAINING, sequence=sequence), LIFE)
            await member.directory.refresh()


def digest(place: Place) -> bytes:
    """The DHT's key of a place."""
    from hivemind.dht.routing import DHTID

    return bytes(DHTID.generate(source=bucket_key(RUN, place)).to_bytes())


@pytest.mark.usefixtures("small_buckets")
async def test_a_stage_that_grows_beyond_one_key_is_seen_in_part_and_counted() -> None:
    """Ten members, and then a farewell, which goes wherever the leaver's record still lives."""
    members = await swarm_of(10)
    await live_for_a_while(members, 8)
    assert {level_of(sampled_of(member.directory), 0).level for member in members} <= {0, 1, 2}
    everybody = {member.peer for member in members}
    for member in members:
        view, now = member.directory.view, member.directory.now()
        assert 2 <= len(view.stages[0]) <= 10
        assert set(view.stages[0]) <= everybody
        assert 1 <= view.number(0, now) <= 18
    leaver = max(members, key=lambda member: level_of(sampled_of(member.directory), 0).level)
    assert level_of(sampled_of(leaver.directory), 0).level > 0
    written = set(leaver.directory._written)
    assert {place.level for place in written} >= {0, 1}
    await leaver.directory.publish(record_of(leaver.peer, state=PeerState.GONE, sequence=99), LIFE + 5)
    rows = [records_of(leaver.directory).held(digest(place), leaver.peer) for place in written]
    assert [row and row.record.state for row in rows] == [PeerState.GONE] * len(written)


@pytest.mark.usefixtures("small_buckets")
async def test_records_of_a_bucket_are_told_over_own_links() -> None:
    """They come with the level that they were signed for; the listener takes them in."""
    members = await swarm_of(8)
    await live_for_a_while(members, 8)
    teller = next(m for m in members if level_of(sampled_of(m.directory), 0).level > 0)
    told = teller.directory.to_tell(12)
    assert told[0].peer == teller.peer
    assert [row.peer for row in told].count(teller.peer) == 1
    stranger = await Member({}).join(RUN, 1)
    assert stranger.directory.told(teller.peer, told) == len(told)


def test_a_record_lies_in_its_own_peers_buckets_only() -> None:
    """At every level there is one. Nothing is accepted under another bucket's key, another stage's, or beyond the
    highest level. A validator that has never seen the key finds it out."""
    identity, expires = throw_away_key(), 2e9
    record, prefix = record_of(identity.peer_id, stage=1), prefix_of(identity.peer_id)
    for level in (1, 5, MOST_LEVEL):
        right = Place(1, level, bucket_of(prefix, level))
        wrong = [
            right._replace(bucket=right.bucket ^ 1),
            right._replace(stage=0),
            Place(1, MOST_LEVEL + 1, bucket_of(prefix, MOST_LEVEL + 1)),
        ]
        for place in (right, *wrong):
            signed = sign_record(identity, bucket_key(RUN, place), record, expires)
            taken = RecordValidator(RUN, 2).read(digest(place), identity.peer_id, signed, expires)
            assert (taken is not None) == (place == right)
            elsewhere = Place(1, 2, bucket_of(prefix, 2))
            assert RecordValidator(RUN, 2).read(digest(elsewhere), identity.peer_id, signed, expires) is None


async def test_a_full_bucket_is_read_whole_from_one_holder() -> None:
    """Ninety records of which nobody is known, in a DHT of two: else its count, and with it the stage's, is wrong."""
    holder, reader = await swarm_of(2)
    bring(holder, Place(0, 1, 1), 90)
    assert await read_by(reader, Place(0, 1, 1)) == 90


async def test_that_a_bucket_is_crowded_is_known_from_one_holder() -> None:
    """The holder brings no more of others than it may."""
    holder, reader = await swarm_of(2)
    bring(holder, Place(0, 1, 1), CROWDED + 20)
    found = await read_by(reader, Place(0, 1, 1))
    assert found == CROWDED


async def test_of_a_bucket_two_holders_are_asked() -> None:
    """Each has what the other lacks: publisher and reader need not know the same nodes near its key."""
    one, other, reader = await swarm_of(3)
    assert await read_by(reader, Place(0, 1, 1)) == 0
    bring(one, Place(0, 1, 1), 10)
    bring(other, Place(0, 1, 1), 10)
    assert await read_by(reader, Place(0, 1, 1)) == 20


async def read_by(reader: Member, place: Place) -> int:
    """How many records it holds of a bucket after a look at it."""
    from hivemind.dht.routing import DHTID

    assert await walker_of(reader.directory).glance(DHTID.from_bytes(digest(place)))
    return len(records_of(reader.directory).live(digest(place), reader.directory.now()))


def bring(holder: Member, place: Place, many: int) -> None:
    """So many signers bring it their records at a bucket."""
    expires = holder.directory.now() + LIFE
    while many:
        signer = throw_away_key()
        if bucket_of(prefix_of(signer.peer_id), place.level) == place.bucket:
            signed = sign_record(signer, bucket_key(RUN, place), record_of(signer.peer_id), expires)
            assert intake_of(holder.directory).take(signer.peer_id, digest(place), signer.peer_id, signed, expires)
            many -= 1
