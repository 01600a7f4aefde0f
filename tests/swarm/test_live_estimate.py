"""How many replicas train: by what they have shown, not by their records, and no hello counts for ever."""

from __future__ import annotations

import math
import random

import pytest

from noloco_node.directory.live_estimate import LiveReplicaEstimate, count, proven_share
from noloco_node.identity.peer_id import PeerId
from noloco_node.peers.scorecard import ASKS_ALLOWED, FAILURE_ASKS, PeerStats
from tests.worlds import record_of

LIFE = 20.0


class Stage:
    """A replica that looks at its stage peers, and time that passes when it is told to."""

    def __init__(self) -> None:
        self.now, self.steps = 100.0, 0
        self.known = PeerStats(lambda: self.now)
        self.heads = LiveReplicaEstimate(self.known, lambda: self.now)
        self.clocks: dict[PeerId, float] = {}
        self.sampled = False
        """Whether it sees a part of them only."""

    def come(self, *peers: PeerId) -> None:
        for peer in peers:
            self.clocks[peer] = 1.0
        self.look()

    def look(self, seconds: float = 0.0, steps: int = 0) -> None:
        """Time passes, this replica trains, and all of `clocks` move but those of hung stage peers."""
        self.now += seconds
        self.steps += steps
        records = [record_of(peer, clock=clock) for peer, clock in self.clocks.items()]
        self.heads.look(records, self.steps, LIFE, sampled=self.sampled)

    def move(self, *peers: PeerId) -> None:
        for peer in peers:
            self.clocks[peer] += 1.0

    @property
    def replicas(self) -> int:
        return round(self.heads.replicas(list(self.clocks), sampled=self.sampled))


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
    """One process answers for four hundred keys; asked for work they refuse. Seven honest stage peers go on working."""
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
    for number, peer in enumerate(crowd[:300]):
        stage.known.asked(peer, 1.0)
        stage.known.idle(peer)
        stage.now += 1.0
        if number % 10 == 0:
            stage.look()
            assert stage.replicas <= 9 + 2
    for peer in crowd:
        for _ in range(ASKS_ALLOWED // FAILURE_ASKS + 1):
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
    stage, (busy, other) = Stage(), named("stage_peer", 2)
    stage.come(busy, other)
    stage.known.worked(other)
    for window in range(ASKS_ALLOWED):
        for _ in range(5):
            stage.known.asked(busy, 10.0)
        stage.now += 10.0
        assert stage.replicas == 3 or window >= 5
        assert not stage.known.failed(busy)
    stage.known.asked(busy, 10.0)
    assert stage.known.failed(busy)
    assert stage.replicas == 2
    stage.known.worked(busy)
    assert stage.replicas == 3


@pytest.mark.parametrize("share", [0.2, 0.5])
def test_stage_peers_that_refuse_most_asks_count_as_long_as_they_work_now_and_then(share: float) -> None:
    """A fast replica stands among slow ones: they are busy, or come too early, and are honest. It asks one after
    another for an hour, and leaves no peer out for good that refused it five times."""
    stage, honest, rng = Stage(), named("honest", 31), random.Random(7)
    stage.come(*honest)
    counted: list[int] = []
    for asks in range(4000):
        peer = rng.choice([peer for peer in honest if not stage.heads.idles(peer)])
        stage.known.asked(peer, 0.5)
        stage.now += 0.9
        if rng.random() < share:
            stage.known.worked(peer)
        if asks >= 200:
            counted.append(stage.replicas)
    assert min(counted) >= 29
    assert sum(counted) / len(counted) >= 31.5


def test_who_has_worked_once_and_refuses_ever_after_counts_ever_more_rarely() -> None:
    """It has another chance now and then, each after twice as long as the one before."""
    stage, (idler, *honest) = Stage(), named("stage_peer", 8)
    stage.come(idler, *honest)
    for peer in (idler, *honest):
        stage.known.worked(peer)
    rng, counted = random.Random(3), list[bool]()
    for _ in range(8000):
        peer = rng.choice([peer for peer in (idler, *honest) if not stage.heads.idles(peer)])
        stage.known.asked(peer, 0.5)
        if peer != idler and rng.random() < 0.6:
            stage.known.worked(peer)
        stage.now += 1.0
        counted.append(not stage.heads.idles(idler))
    parts = [sum(counted[at : at + 2000]) / 2000 for at in range(0, 8000, 2000)]
    assert parts[-1] < 0.2 < parts[0] < 0.7
    assert stage.heads.replicas([idler, *honest]) >= 8.0


@pytest.mark.parametrize("sampled", [False, True])
def test_of_a_large_stage_those_count_that_were_not_asked_yet_where_most_asks_are_refused(sampled: bool) -> None:
    """One in four of 255 that answer comes to work at once when asked."""
    stage, honest, rng = Stage(), named("honest", 255), random.Random(2)
    stage.come(*honest)
    counted: list[float] = []
    for asks in range(600):
        peer = rng.choice([peer for peer in honest if not stage.heads.idles(peer)])
        stage.known.asked(peer, 0.5)
        stage.now += 1.0
        if rng.random() < 0.25:
            stage.known.worked(peer)
        if asks % 10 == 0:
            stage.look()
            counted.append(stage.heads.replicas(list(stage.clocks), sampled=sampled) / 256)
    assert min(counted[30:]) > 0.85
    assert sum(counted[30:]) / 30 > 0.93


def test_a_hung_replica_leaves_within_a_records_life_and_a_slow_one_stays() -> None:
    """Its process answers and renews its record, in which its clock stands still while this replica's own moves. One
    that is merely slow moves its clock now and then; and where nobody trains, nobody is hung."""
    stage, (hung, slow) = Stage(), named("stage_peer", 2)
    stage.come(hung, slow)
    stage.known.worked(hung)
    stage.known.worked(slow)
    stage.look(5 * LIFE)
    assert stage.replicas == 3, "the way was closed: nobody trained"
    for _ in range(4):
        stage.move(slow)
        stage.look(LIFE / 4, steps=2)
    assert stage.replicas == 2
    assert (stage.heads.works(hung), stage.heads.works(slow)) == (False, True)
    stage.move(hung)
    stage.look(1.0)
    assert stage.replicas == 3, "it goes on"


def test_shares_are_bounded_and_a_hundred_asks_in_vain_leave_nothing() -> None:
    """Whatever was asked and answered."""
    for asks in range(65):
        shares = [proven_share(asks, worked) for worked in range(asks + 1)]
        assert all(0.0 <= share <= 1.0 for share in shares)
        assert shares == sorted(shares)
    assert proven_share(64, 0) == 0.0
    assert count(0, 0, 0, 0.0) == 1.0
    assert count(4, 0, 400, 0.0) == 6.0


def test_no_clock_stands_still_between_two_looks() -> None:
    """A bucket that is held no longer is read no more, and its records end before the next look. Until then they say
    nothing of those that are seen next."""
    stage, before, now = Stage(), named("before", 60), named("now", 60)
    stage.sampled = True
    stage.come(*before)
    stage.look(LIFE - 1.0, steps=20)
    stage.come(*now)
    stage.now, stage.steps = stage.now + 1.5, stage.steps + 2
    assert round(stage.heads.replicas(now, sampled=True)) == 61


def test_who_was_there_before_all_stood_still_does_not_come_anew() -> None:
    """All records end, for all machines stood still or this node was cut off. A peer that comes for the first time
    later is welcome as before."""
    stage, honest = Stage(), named("honest", 60)
    stage.come(*honest)
    for peer in honest[:4]:
        stage.known.asked(peer, 1.0)
        stage.known.worked(peer)
    stage.look(5.0, steps=1)
    assert stage.replicas == 61
    clocks, stage.clocks = stage.clocks, {}
    stage.look(60.0)
    stage.clocks = clocks
    stage.come(*named("later", 60))
    assert stage.replicas == 61 + 1


def test_who_has_worked_before_this_node_came_to_the_stage_says_nothing_of_its_start() -> None:
    """It comes from the stage behind: those that sent it microbatches are its stage peers now, and the next look shows
    the other half of them."""
    stage, half, other = Stage(), named("half", 50), named("other", 50)
    for peer in half[:9]:
        stage.known.worked(peer)
    stage.now += 1.0
    stage.come(*half)
    stage.look(2.0)
    stage.come(*other)
    assert stage.replicas == 101


@pytest.mark.parametrize("slower", [4, 16, 32])
def test_a_fifth_of_the_stage_that_is_many_times_slower_counts(slower: int) -> None:
    """Their clocks stand still for as many steps of this replica, and records are renewed thrice in their life. One
    that hangs leaves within twice its usual pause."""
    stage, quick, slow = Stage(), named("quick", 40), named("slow", 10)
    stage.come(*quick, *slow)
    for peer in (*quick, *slow):
        stage.known.worked(peer)
    step, counts = 2.5, list[int]()
    clocks, rng = dict.fromkeys(slow, 1.0), random.Random(slower)
    moves = {peer: stage.now + slower * step * rng.random() for peer in slow}
    for tick in range(240):
        stage.move(*quick)
        for number, peer in enumerate(slow):
            while moves[peer] <= stage.now:
                moves[peer] += slower * step
                clocks[peer] += 1.0
            if tick % 3 == number % 3:
                stage.clocks[peer] = clocks[peer]
        stage.look(step, steps=1)
        counts += [stage.replicas] if tick * step > 3 * slower * step else []
    assert min(counts) >= 50
    for _ in range(math.ceil(2 * slower + LIFE)):
        stage.move(*quick)
        stage.look(step, steps=1)
    assert stage.replicas == 41
