"""The peers that a node sees, for displays: by stage, with load and lag."""

from __future__ import annotations

from collections import Counter

from noloco_node.directory.headcount import is_there
from noloco_node.directory.membership import Membership
from noloco_node.directory.records import PeerRecord, PeerState
from noloco_node.identity.peer_id import PeerId
from noloco_node.pipeline.routing import RoutingBook
from noloco_node.telemetry.state import MOST_PEERS, PeerSeen, Surroundings
from noloco_node.transport.acquaintance import Acquaintances


def surroundings(
    membership: Membership,
    known: Acquaintances,
    book: RoutingBook,
    clock: float,
    *,
    in_hand: int,
    queued: int,
) -> Surroundings:
    """The surroundings of a node whose clock stands at `clock`, at this moment."""
    records = membership.others()
    there = [record for record in records if is_there(known, record)]
    replicas = Counter(record.stage for record in there if record.state is PeerState.TRAINING)
    replicas[membership.stage] += membership.state is PeerState.TRAINING
    answering = {record.peer_id for record in there}
    shown = [*there, *(record for record in records if record.peer_id not in answering)][:MOST_PEERS]

    def seen(record: PeerRecord) -> PeerSeen:
        peer = PeerId(record.peer_id)
        training = round(replicas[record.stage] * membership.scale(record.stage))
        present = membership.present_clock(record, training)
        under_way, load = book.burden_of(peer)
        return PeerSeen(
            peer_id=record.peer_id,
            stage=record.stage,
            state=record.state.value,
            version=record.version,
            clock=present,
            lag=clock - present,
            tokens_per_second=record.tokens_per_second,
            capacity=record.capacity,
            outer_rounds=record.outer_rounds,
            newcomer=record.newcomer,
            answers=record.peer_id in answering,
            tokens=known.of(peer).tokens,
            under_way=under_way,
            load=load,
            passed_over=book.passed_over(peer),
            name=record.shown.name,
        )

    peers = tuple(seen(record) for record in sorted(shown, key=lambda record: (record.stage, record.peer_id)))
    return Surroundings(peers, len(records), in_hand, queued)
