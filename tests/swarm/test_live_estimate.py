"""How many replicas train: by what they have shown, not by their records, and no hello counts for ever."""

from __future__ import annotations

import math
import random

import pytest

from noloco_node.directory.live_estimate import (
    STILL_STEPS,
    LiveReplicaEstimate,
    count,
    sampled_share,
    welcome_share,
)
from noloco_node.identity.peer_id import PeerId
from noloco_node.peers.stats import (
    ANSWER_SECONDS,
    ASKS_ALLOWED,
    ASKS_REMEMBERED,
    IDLES_ALLOWED,
    SAMPLE,
    SILENCES_TOLERATED,
    PeerStats,
    asks_allowed,
)
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

    def draw(self, peer: PeerId, *, answers: bool) -> None:
        """This replica calls a stage peer that it has drawn at random."""
        if answers:
            self.known.said(peer, 0)
            self.known.answered(peer)
        else:
            self.known.silent(peer)
        self.known.drew(peer, answers)

    @property
    def called_replicas(self) -> int:
        """Where only those answer that were called within the last minute."""
        there = [peer for peer in self.clocks if self.known.serves(peer, 0)]
        unsure = [peer for peer in self.clocks if peer not in set(there) and self.known.unsure(peer, 0)]
        return round(self.heads.replicas(there, unsure))


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
    stage, (busy, other) = Stage(), named("stage_peer", 2)
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


@pytest.mark.parametrize("share", [0.1, 0.2, 0.5])
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


def test_what_is_allowed_follows_how_often_those_refuse_that_work() -> None:
    """Four times where little is known or hardly any refuses, more the more they refuse, and never without end."""
    for asks in range(65):
        allowed = [asks_allowed(asks, came) for came in range(asks + 1)]
        assert all(ASKS_ALLOWED <= many <= ASKS_REMEMBERED for many in allowed)
        assert allowed == sorted(allowed, reverse=True)
        assert asks >= SAMPLE or set(allowed) == {ASKS_ALLOWED}
    assert [asks_allowed(64, came) for came in (64, 32, 13, 0)] == [4, 15, 64, 64]


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
    assert count(4, 0, [(1.0, 0.0)] * 400, 0.0) == 6.0


def test_a_thousand_honest_stage_peers_count_within_a_tenth_once_some_dozens_were_called() -> None:
    """Four are called a second, so that the first no longer answers for sure before all were called."""
    stage, honest = Stage(), named("honest", 1000)
    stage.come(*honest)
    order = random.Random(5).sample(honest, len(honest))
    for number, peer in enumerate(order):
        stage.draw(peer, answers=True)
        stage.now += 0.25
        if number + 1 < SAMPLE:
            assert stage.called_replicas == number + 2
        elif number % 50 == 49:
            assert 900 <= stage.called_replicas <= 1001
    one_in_five_gone = [number % 5 > 0 for number in range(1000)]
    assert 0.7 < sampled_share(200, sum(one_in_five_gone[:200])) < 0.8


@pytest.mark.parametrize("seed", range(4))
def test_hundreds_of_records_without_nodes_add_nothing_to_three_stage_peers_whenever_they_come(seed: int) -> None:
    """Whether they are there from the start or come to a swarm that knows itself: 4, one more or less, all the time."""
    for known_before in (True, False):
        stage, honest, ghosts = Stage(), named("honest", 3), named("ghost", 400)
        stage.come(*honest)
        if known_before:
            for peer in honest:
                stage.draw(peer, answers=True)
            stage.now += 1.0
        stage.come(*ghosts)
        everybody = [*honest, *ghosts]
        random.Random(seed).shuffle(everybody)
        for number, peer in enumerate(everybody):
            stage.draw(peer, answers=peer in honest)
            stage.now += 0.25
            if number % 8:
                continue
            for stage_peer in honest:
                stage.known.said(stage_peer, 0)
                stage.known.answered(stage_peer)
            assert 3 <= stage.called_replicas <= 5
        assert stage.called_replicas == 4


def test_who_answers_among_those_drawn_counts_for_the_rest_as_little_as_for_itself() -> None:
    """A crowd that answers does no work, and four hundred more records were not called yet. They count as a quarter of
    those that work, as if nobody stood behind the rest."""
    stage, honest, crowd = Stage(), named("honest", 7), named("crowd", 440)
    stage.come(*honest)
    for peer in honest:
        stage.draw(peer, answers=True)
        stage.known.worked(peer)
    stage.look(1.0)
    stage.now += 1.0
    stage.come(*crowd)
    for peer in crowd[:40]:
        stage.draw(peer, answers=True)
    assert stage.called_replicas <= 8 + 2


def test_a_small_sample_says_nothing_and_a_larger_one_what_is_safe() -> None:
    """A share lies between none and what was seen, and rises with what was seen."""
    for drawn in range(300):
        shares = [sampled_share(drawn, there) for there in range(drawn + 1)]
        assert all(0.0 <= share <= there / max(1, drawn) for there, share in enumerate(shares))
        assert shares == sorted(shares)
        assert drawn >= SAMPLE or not any(shares)
    assert [sampled_share(16, 16), sampled_share(16, 3), sampled_share(400, 3)] == [1.0, 0.0, 0.0]


def test_of_a_stage_seen_in_part_those_count_as_much_as_of_those_that_had_their_chance_worked() -> None:
    """Forty honest stage peers and forty that answer and never work, a quarter of each found out: not eighty."""
    stage, honest, idlers = Stage(), named("honest", 40), named("idler", 40)
    stage.come(*honest, *idlers)
    assert round(stage.heads.replicas(list(stage.clocks), sampled=True)) == 81
    for worker, idler in zip(honest[:10], idlers[:10], strict=True):
        stage.known.asked(worker, 1.0)
        stage.known.worked(worker)
        for _ in range(IDLES_ALLOWED + 1):
            stage.known.asked(idler, 1.0)
            stage.known.idle(idler)
        stage.look(0.5)
    assert 38 <= round(stage.heads.replicas(list(stage.clocks), sampled=True)) <= 47


@pytest.mark.parametrize(("hung", "counted"), [(0, 180), (6, 174), (60, 120), (170, 10)])
def test_of_a_stage_seen_in_part_newly_seen_ones_count_as_far_as_clocks_of_those_watched_move(
    hung: int, counted: int
) -> None:
    """One of them has worked here and nobody has failed. A few slow ones say little of two hundred, and as many as
    hang of those seen before hang of those seen next."""
    stage, honest, hanging = Stage(), named("honest", 180 - hung), named("hung", hung)
    stage.come(*honest, *hanging)
    stage.known.asked(honest[0], 1.0)
    stage.known.worked(honest[0])
    for _ in range(4):
        stage.move(*honest)
        stage.look(LIFE / 3, steps=STILL_STEPS // 3)
    before = stage.heads.replicas(list(stage.clocks), sampled=True)
    assert before == pytest.approx(1 + counted, abs=1)
    stage.come(*named("next", 60))
    assert stage.heads.replicas(list(stage.clocks), sampled=True) - before == pytest.approx(counted / 3, abs=2)


def test_who_answered_more_than_a_minute_ago_counts_though_few_that_came_later_were_called() -> None:
    """Most were not called but called here; half have done so of late. A crowd of records that come now adds nothing,
    and a peer that is called again and is silent goes."""
    stage, honest = Stage(), named("honest", 127)
    for peer in honest:
        stage.come(peer)
        stage.now += 0.1
    for number, peer in enumerate(honest):
        if number % 4 == 0:
            stage.draw(peer, answers=True)
        else:
            stage.known.said(peer, 0)
            stage.known.answered(peer)
    stage.now += ANSWER_SECONDS + 1.0
    for peer in honest[::2]:
        stage.known.answered(peer)
    assert stage.called_replicas >= 0.95 * 128
    stage.come(*named("ghost", 400))
    assert stage.called_replicas <= 128
    for peer in honest[1::2]:
        stage.draw(peer, answers=False)
    assert stage.called_replicas <= 66


def test_who_has_answered_before_counts_in_the_long_run_though_nobody_was_drawn() -> None:
    """All of a view have called this node before it drew them, half of them more than a minute ago. Where most of those
    that are called again are silent, the others count as little."""
    stage, honest = Stage(), named("honest", 140)
    stage.sampled = True
    stage.come(*honest)
    for number, peer in enumerate(honest):
        stage.now += ANSWER_SECONDS + 1.0 if number == 70 else 0.0
        stage.known.said(peer, 0)
        stage.known.answered(peer)
    stage.look()
    assert stage.called_replicas == 141
    for peer in honest[70:]:
        for _ in range(SILENCES_TOLERATED + 1):
            stage.known.silent(peer)
    assert stage.called_replicas == 1


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


@pytest.mark.parametrize(("seconds", "counted"), [(2 * LIFE, 111), (4.0, 62)])
def test_of_a_stage_that_is_seen_whole_again_nobody_was_seen_to_come(seconds: float, counted: int) -> None:
    """It shrinks to where everybody is seen. One that grew is seen in part for a moment: a crowd that comes then
    is one that comes later."""
    stage, seen, unseen = Stage(), named("seen", 60), named("unseen", 50)
    stage.come(*seen)
    for peer in seen[:4]:
        stage.known.asked(peer, 1.0)
        stage.known.worked(peer)
    stage.look(1.0)
    stage.sampled = True
    stage.look()
    for _ in range(8):
        stage.move(*seen)
        stage.look(seconds / 8, steps=2)
    stage.sampled = False
    stage.come(*unseen)
    assert stage.replicas == counted


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
