"""How many replicas train: by what they have shown, not by their records, and no hello counts for ever."""

from __future__ import annotations

import pytest

from noloco_node.swarm.acquaintance import ASKS_ALLOWED, IDLES_ALLOWED, Acquaintances
from noloco_node.swarm.directory import PeerRecord, PeerState
from noloco_node.swarm.headcount import STILL_STEPS, Headcount, count, welcome_share
from noloco_node.swarm.transport import PeerId

LIFE = 20.0


class Stage:
    """A replica that looks at its fellows, and time that passes when it is told to."""

    def __init__(self) -> None:
        self.now, self.steps = 100.0, 0
        self.known = Acquaintances(lambda: self.now)
        self.heads = Headcount(self.known, lambda: self.now)
        self.clocks: dict[PeerId, float] = {}

    def come(self, *peers: PeerId) -> None:
        for peer in peers:
            self.clocks[peer] = 1.0
        self.look()

    def look(self, seconds: float = 0.0, steps: int = 0) -> None:
        """Time passes, this replica trains, and all of `clocks` move but those of hung fellows."""
        self.now += seconds
        self.steps += steps
        records = [
            PeerRecord(peer_id=peer, stage=0, state=PeerState.TRAINING, clock=clock, protocol=1, version="0")
            for peer, clock in self.clocks.items()
        ]
        self.heads.look(records, self.steps, LIFE)

    def move(self, *peers: PeerId) -> None:
        for peer in peers:
            self.clocks[peer] += 1.0

    @property
    def replicas(self) -> int:
        return round(self.heads.replicas(list(self.clocks)))


def named(what: str, many: int) -> list[PeerId]:
    """Peers of one kind."""
    return [PeerId(f"{what}-{number:06d}") for number in range(many)]


@pytest.mark.parametrize("many", [1, 3, 15, 200])
def test_a_common_start_counts_all_that_answer_at_once(many: int) -> None:
    """Nobody has shown anything yet."""
    stage = Stage()
    stage.come(*named("honest", many))
    assert stage.replicas == 1 + many


def test_who_joins_later_counts_at_once_and_a_crowd_that_only_answers_does_not() -> None:
    """One process answers for four hundred keys; asked for work they refuse. Seven honest fellows go on working."""
    stage, honest = Stage(), named("honest", 7)
    stage.come(*honest)
    for peer in honest:
        stage.known.worked(peer)
    stage.look(1.0)
    assert stage.replicas == 8
    stage.look(60.0)
    stage.come(*named("joiner", 1))
    assert stage.replicas == 9
    stage.known.worked(named("joiner", 1)[0])
    crowd = named("crowd", 400)
    stage.come(*crowd)
    assert stage.replicas <= 9 + 2, "a quarter more at once, whoever they are"
    for peer in crowd[:300]:
        stage.known.asked(peer, 1.0)
        stage.known.idle(peer)
        stage.look(1.0)
        assert stage.replicas <= 9 + 2
    for peer in crowd:
        for _ in range(IDLES_ALLOWED + 1):
            stage.known.idle(peer)
    assert stage.replicas == 9


def test_a_crowd_at_a_common_start_is_found_out_as_it_is_asked() -> None:
    """Four hundred keys that answer before anybody has worked count at first, and no longer than they are asked."""
    stage, honest, crowd = Stage(), named("honest", 7), named("crowd", 400)
    stage.come(*honest, *crowd)
    for peer in crowd[:64]:
        stage.known.asked(peer, 1.0)
    for peer in honest:
        stage.known.worked(peer)
    stage.look(1.0)
    assert stage.replicas == 8


def test_who_refuses_in_window_after_window_counts_nothing_until_it_works() -> None:
    """To be busy now and then is honest; asks within one window count once."""
    stage, (busy, other) = Stage(), named("fellow", 2)
    stage.come(busy, other)
    stage.known.worked(other)
    for _ in range(ASKS_ALLOWED):
        for _ in range(5):
            stage.known.asked(busy, 10.0)
        stage.now += 10.0
        assert stage.replicas == 3
    stage.known.asked(busy, 10.0)
    assert stage.replicas == 2
    stage.known.worked(busy)
    assert stage.replicas == 3


def test_a_hung_replica_leaves_within_a_records_life_and_a_slow_one_stays() -> None:
    """Its process answers and renews its record, in which its clock stands still while this replica's own moves. One
    that is merely slow moves its clock now and then; and where nobody trains, nobody is hung."""
    stage, (hung, slow) = Stage(), named("fellow", 2)
    stage.come(hung, slow)
    stage.known.worked(hung)
    stage.known.worked(slow)
    stage.look(5 * LIFE)
    assert stage.replicas == 3, "the way was closed: nobody trained"
    for _ in range(4):
        stage.move(slow)
        stage.look(LIFE / 4, steps=STILL_STEPS // 4)
    assert stage.replicas == 2
    assert (stage.heads.works(hung), stage.heads.works(slow)) == (False, True)
    stage.move(hung)
    stage.look(1.0)
    assert stage.replicas == 3, "it goes on"


def test_shares_are_bounded_and_a_hundred_asks_in_vain_leave_nothing() -> None:
    """Whatever was asked and answered."""
    for start in (False, True):
        for asks in range(65):
            shares = [welcome_share(asks, worked, from_the_start=start) for worked in range(asks + 1)]
            assert all(0.0 <= share <= 1.0 for share in shares)
            assert shares == sorted(shares)
        assert welcome_share(64, 0, from_the_start=start) == 0.0
    assert count(0, 0, [], 0.0) == 1.0
    assert count(4, 0, [0.0] * 400, 0.0) == 6.0
