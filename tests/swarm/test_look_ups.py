"""What looking records up costs a node, and who pays for it: whole directories in memory."""

from __future__ import annotations

import pytest

from noloco_node.directory import dht_node as guarded_dht
from noloco_node.directory.dht_node import ASKED_BYTES
from noloco_node.directory.store import HeldRecord
from noloco_node.identity.peer_id import PeerId
from tests.swarm.hostile_dht import Stranger, throw_away_key
from tests.swarm.memory_dht import Member, MemoryP2P
from tests.swarm.test_directory import record_of
from tests.swarm.test_guarded_dht import KEY, members


async def test_keys_without_number_that_look_up_a_full_stage_share_one_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks with a new key each time is given no more than so much in all; a peer that has answered this node
    still gets its own, and one that works here whatever others take."""
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
    assert looked <= ASKED_BYTES / (400 * guarded_dht.LOOKED_AT_BYTES)


def fill(member: Member, count: int) -> None:
    """Have it hold records that their signers brought, of the usual size."""
    node = member.directory._node
    now, key = node._intake.now(), KEY.to_bytes()
    for number in range(count):
        peer = PeerId(f"a-signer-of-a-record-{number}")
        node._records.put(key, peer, HeldRecord(record_of(peer), bytes(450), now + 50.0, peer), now)
