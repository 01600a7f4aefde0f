"""The peers that a node sees, as its pages show them: of a swarm in memory that trains."""

from __future__ import annotations

from noloco_node.accounting.stats import surroundings
from noloco_node.directory.records import PeerRecord, PeerState
from noloco_node.directory.summary import node_seen
from noloco_node.pipeline.routing import LoadBalancer
from noloco_node.telemetry.node_state import MOST_NODES
from tests.worlds import MICROBATCH, all_train, micro_spec, peer_name, world


async def test_a_node_sees_its_peers_by_stage_with_load_lag_and_work() -> None:
    """Stage 0 of a swarm of 2 + 2, after microbatches to one replica of stage 1."""
    async with world(micro_spec(), replicas=2) as made:
        await all_train(made)
        viewer = made.replicas[0]
        assert viewer.pipeline.origin is not None
        for _ in range(4):
            assert await viewer.pipeline.origin.train_one()
        around = viewer.books.surroundings()
        viewer.pipeline.balancer.failed(peer_name(1, 0))
        failed = viewer.books.surroundings().peers[1]
    assert "a request to it failed" in failed.left_alone
    assert (around.introduced, around.in_hand, around.queued) == (3, 0, 0)
    assert [(peer.stage, peer.peer_id) for peer in around.peers] == [
        (0, peer_name(0, 1)),
        (1, peer_name(1, 0)),
        (1, peer_name(1, 1)),
    ]
    stage_peer, *later = around.peers
    assert all(peer.answers and peer.state == "training" for peer in around.peers)
    assert stage_peer.load is None
    assert stage_peer.lag > 0.0, "it has trained nothing yet"
    assert sum(peer.together for peer in later) == 4 * MICROBATCH
    assert any(peer.load == 0 for peer in later)
    assert not any(peer.under_way or peer.left_alone for peer in later)


def test_one_that_comes_or_rests_is_not_behind_by_all_that_was_trained() -> None:
    """Its announcement tells no clock: a paused node was shown behind by the whole run."""
    record = PeerRecord(peer_id="one-that-rests", stage=1, state=PeerState.DRAINING, protocol=1, version="1")
    for state in (PeerState.DRAINING, PeerState.JOINING):
        seen = node_seen(record.model_copy(update={"state": state}), clock=0.0, against=1e6, answers=True)
        assert (seen.clock, seen.lag) == (None, None)
    began = record.model_copy(update={"state": PeerState.TRAINING})
    assert node_seen(began, clock=0.0, against=1e6, answers=True).lag == 1e6
    leaves = record.model_copy(update={"clock": 4e5})
    assert node_seen(leaves, clock=5e5, against=1e6, answers=True).lag == 5e5


async def test_of_a_large_swarm_those_are_shown_that_answer() -> None:
    """A bounded number, whatever records strangers write."""
    async with world(micro_spec(), replicas=1) as made:
        viewer, other = made.replicas
        await other.membership.announce(PeerState.TRAINING)
        row = viewer.membership
        await row.refresh()
        real = row.others()[0]
        ghosts = [real.model_copy(update={"peer_id": f"a-ghost-{n:04}"}) for n in range(2 * MOST_NODES)]
        row.others = lambda *_: [*ghosts, real]
        known, balancer = viewer.context.transport.peer_stats, viewer.pipeline.balancer
        assert isinstance(balancer, LoadBalancer)
        around = surroundings(row, known, balancer, 0.0, in_hand=0, queued=0)
    assert (len(around.peers), around.introduced) == (MOST_NODES, 2 * MOST_NODES + 1)
    assert [peer.peer_id for peer in around.peers if peer.answers] == [real.peer_id]
