"""A view that is a sample of a large stage: bounded, renewed, even, and right in the number that it speaks for."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Collection
from statistics import fmean

import pytest

from noloco_node import PROTOCOL_VERSION
from noloco_node.directory.buckets import CROWDED, RENEWED_SECONDS, TARGET, Place, bucket_of, levels_to_write, prefix_of
from noloco_node.directory.records import DirectoryView, LiveRecord, PeerRecord, PeerState, Scale
from noloco_node.directory.sampled_view import SampledView, root_again
from noloco_node.identity.peer_id import PeerId
from tests.inside import level_of

LIFE, LOOK = 20.0, 2.0
OWN = PeerId("observes-the-others")


class Keys:
    """The keys of two stages of so many nodes, all at the level that is right for them."""

    def __init__(self, *sizes: int) -> None:
        self.rows: dict[Place, list[PeerId]] = {}
        self.read, self.roots = 0, 0
        for stage, many in enumerate(sizes):
            level = next(level for level in range(32) if many / (1 << level) <= 1.4 * TARGET)
            for number in range(many):
                self.write(PeerId(f"peer-{stage}-{number:06}"), stage, level, many / (1 << level))

    def write(self, peer: PeerId, stage: int, level: int, fullness: float) -> None:
        """As a node of that level does."""
        prefix = prefix_of(peer)
        for at in levels_to_write(prefix, level, fullness):
            self.rows.setdefault(Place(stage, at, bucket_of(prefix, at)), []).append(peer)

    def at(self, place: Place, now: float, only: Collection[PeerId] | None = None) -> dict[PeerId, LiveRecord]:
        """Records of middle age."""
        peers = sorted(peer for peer in self.rows.get(place, ()) if only is None or peer in only)
        self.read += len(peers)
        self.roots += place.level == 0
        return {peer: LiveRecord(record_of(peer, place.stage), now + 0.8 * LIFE) for peer in peers}


RECORDS: dict[tuple[PeerId, int], PeerRecord] = {}


def record_of(peer: PeerId, stage: int) -> PeerRecord:
    """Made once: thousands are read again and again."""
    if (peer, stage) not in RECORDS:
        RECORDS[peer, stage] = PeerRecord(
            peer_id=peer, stage=stage, state=PeerState.TRAINING, protocol=PROTOCOL_VERSION, version="0"
        )
    return RECORDS[peer, stage]


class Observer:
    """A node of stage 0, or of none."""

    def __init__(self, keys: Keys, stages: int = 2, seed: int = 0, *, serves: bool = True) -> None:
        self.keys, self.now = keys, 1000.0
        self.sampled = SampledView(stages, random.Random(seed))
        if serves:
            self.sampled.to_write(OWN, 0, LIFE)
        self.view = self.sampled.view(self.now)

    def look(self, times: int = 1, fails: Callable[[Place], bool] = lambda _: False) -> DirectoryView:
        """Read what is to be read."""
        for _ in range(times):
            self.now += LOOK
            for place in self.sampled.to_read(self.now):
                if not fails(place):
                    self.sampled.took(place, self.keys.at(place, self.now), self.now)
        self.view = self.sampled.view(self.now)
        return self.view

    def peers(self, stage: int = 0) -> set[PeerId]:
        """The peers that it sees."""
        return set(self.view.stages[stage])


def test_small_stages_are_read_whole_at_every_look() -> None:
    """As many keys as stages, the stages' own; the view is everybody, and each stands for itself."""
    observer = Observer(Keys(64, 40, 1), stages=3)
    for _ in range(5):
        assert observer.sampled.to_read(observer.now) == [Place(stage, 0, 0) for stage in range(3)]
        view = observer.look()
        assert [len(rows) for rows in view.stages] == [64, 40, 1]
        assert view.scales == (Scale(), Scale(), Scale())
    assert observer.sampled.to_write(OWN, 1, LIFE) == (Place(1, 0, 0),)


def test_who_lives_no_longer_than_until_the_next_look_stands_for_nobody() -> None:
    """A bucket that another has taken the place of is shown until its records end, one after another. A tenth of them
    end between two looks, and nobody would stand for these."""
    keys = Keys(600)

    def of_every_age(place: Place, now: float, only: Collection[PeerId] | None = None) -> dict[PeerId, LiveRecord]:
        rows = Keys.at(keys, place, now, only)
        return {
            p: LiveRecord(row.record, now + LIFE * (0.34 + 0.66 * (i % 9) / 9))
            for i, (p, row) in enumerate(rows.items())
        }

    keys.at = of_every_age
    observer = Observer(keys, stages=1)
    observer.look(50)
    numbers = list[float]()
    for _ in range(150):
        view = observer.look()
        here, later = (len(view.live(0, observer.now + seconds)) for seconds in (0.0, 0.99 * LOOK))
        numbers.append(later / here)
    assert min(numbers) == 1.0


@pytest.mark.parametrize("many", [256, 300, 700])
def test_the_number_of_a_stage_in_a_few_buckets_is_nearly_their_sum(many: int) -> None:
    """It is taken over stages of other peers, whose buckets are unequal by chance, for all observers alike. The middle
    bucket alone is off by 4 to 6 % rms."""
    errors = list[float]()
    for names in range(12):
        keys = Keys()
        level = 2 if many <= 300 else 3
        for number in range(many):
            keys.write(PeerId(f"peers-of-{names}-{number:06}"), 0, level, many / (1 << level))
        observer = Observer(keys, stages=1, seed=names)
        observer.look(50)
        errors.append(level_of(observer.sampled, 0).number / many - 1.0)
    assert math.sqrt(fmean(error * error for error in errors)) < (0.02 if many <= 300 else 0.035)


@pytest.mark.parametrize("many", [150, 1000, 5000])
def test_of_a_large_stage_a_bounded_sample_is_seen_and_its_number_known(many: int) -> None:
    """For the own stage and the next it is within 10 % rms over observers, which read 60 records a second at most."""
    keys, errors = Keys(many, many), list[float]()
    for seed in range(10):
        observer = Observer(keys, seed=seed)
        observer.look(30)
        keys.read = 0
        observer.look(30)
        assert keys.read / (30 * LOOK) < 60
        for stage in (0, 1):
            assert 0.5 * TARGET <= len(observer.peers(stage)) <= 4 * 1.5 * TARGET
            errors.append(observer.view.number(stage, observer.now) / many - 1.0)
    rms = (sum(error**2 for error in errors) / len(errors)) ** 0.5
    assert rms < 0.1


def test_a_view_is_renewed_by_a_quarter_a_minute() -> None:
    """Two buckets, of which one is another after two minutes."""
    observer = Observer(Keys(20_000, 10))
    observer.look(40)
    lost = list[float]()
    for _ in range(4):
        before = observer.peers()
        observer.look(int(2 * RENEWED_SECONDS / LOOK))
        lost.append(1.0 - len(before & observer.peers()) / len(before))
        assert len(observer.peers()) <= 3 * 1.5 * TARGET
    assert sum(lost) / len(lost) > 0.9
    before = observer.peers()
    observer.look(int(RENEWED_SECONDS / 2 / LOOK))
    assert len(before & observer.peers()) / len(before) >= 0.4


def test_everybody_is_seen_as_often_as_anybody() -> None:
    """Those of the first bucket, which also lie at level 0, are seen no more than others: each within 40 % of its
    share."""
    keys, seen = Keys(640, 1), Counter[int]()
    for seed in range(100):
        observer = Observer(keys, seed=seed)
        observer.look(20)
        for _ in range(2):
            observer.look(4)
            seen.update(bucket_of(prefix_of(peer), 3) for peer in observer.peers())
    sizes = Counter(bucket_of(prefix_of(peer), 3) for peer in keys.rows[Place(0, 3, 0)])
    assert list(sizes) == [0]
    sizes = Counter({bucket: len(keys.rows[Place(0, 3, bucket)]) for bucket in range(8)})
    shares = [seen[bucket] / sizes[bucket] for bucket in range(8)]
    mean = sum(shares) / 8
    assert all(0.6 * mean < share < 1.4 * mean for share in shares)


def flood(keys: Keys, level: int, bucket: int, many: int, stage: int = 0) -> set[PeerId]:
    """So many ids that were sought for a bucket of a stage, and lie there beside those that do by chance."""
    sought, number = set[PeerId](), 0
    while len(sought) < many:
        number += 1
        peer = PeerId(f"sought-{bucket}-{number}")
        if bucket_of(prefix_of(peer), level) == bucket:
            sought.add(peer)
    keys.rows[Place(stage, level, bucket)].extend(sorted(sought))
    return sought


def test_a_bucket_that_somebody_filled_counts_for_little() -> None:
    """Five hundred ids in each of two buckets of sixteen: the number of the stage is nearly what it was."""
    keys = Keys(1000, 1)
    flood(keys, 4, 3, 500)
    flood(keys, 4, 9, 500)
    for seed in range(10):
        observer = Observer(keys, seed=seed)
        observer.look(30)
        for _ in range(4):
            observer.look(int(RENEWED_SECONDS / LOOK))
            assert abs(observer.view.number(0, observer.now) / 1000 - 1.0) < 0.35


def test_a_stage_that_everybody_left_is_seen_empty_when_the_last_life_has_ended() -> None:
    """The next one, and one further on."""
    keys = Keys(10, 1000, 1000)
    observer = Observer(keys, stages=3)
    observer.look(40)
    assert observer.peers(1)
    assert observer.peers(2)
    keys.rows = {place: peers for place, peers in keys.rows.items() if place.stage == 0}
    observer.look(int(LIFE / LOOK) + 1)
    assert observer.peers(1) == observer.peers(2) == set()
    assert observer.peers(0)


def test_buckets_that_nobody_answers_for_are_not_empty_ones() -> None:
    """While every look-up of one fails, level and number stay; the view ends with the records' lives."""
    observer = Observer(Keys(1000, 1))
    observer.look(40)
    level, number = level_of(observer.sampled, 0).level, level_of(observer.sampled, 0).number
    observer.look(30, fails=lambda place: place.level > 0)
    assert level_of(observer.sampled, 0).level == level
    assert level_of(observer.sampled, 0).number == number


def test_of_other_stages_some_are_seen_and_the_number_is_known() -> None:
    """A node of stage 0 sees two buckets of the third, and how many they stand for."""
    observer = Observer(Keys(10, 10, 2000), stages=3)
    observer.look(150)
    assert TARGET <= len(observer.peers(2)) <= 2 * CROWDED
    assert observer.view.number(2, observer.now) == pytest.approx(2000, rel=0.25)


def test_who_serves_no_stage_sees_some_of_each() -> None:
    """An onlooker: whatever the size."""
    observer = Observer(Keys(2000, 30), serves=False)
    observer.look(60)
    assert observer.view.number(0, observer.now) == pytest.approx(2000, rel=0.25)
    assert observer.view.number(1, observer.now) == 30


def test_where_both_halves_of_a_stage_are_read_everybody_is_seen_and_counts_once() -> None:
    """At level 1: nothing is an estimate there."""
    observer = Observer(Keys(110, 40))
    observer.look(40)
    assert len(observer.peers()) == 110
    assert observer.view.scale(0) == Scale()


@pytest.mark.parametrize(("many", "level"), [(150, 1), (1200, 4)])
def test_level_0_of_a_large_stage_is_read_as_often_however_large_it_is(many: int, level: int) -> None:
    """Own, next and further stage alike: by each node half as often with each level, so by all together alike."""
    keys = Keys(many, many, many)
    observer = Observer(keys, stages=3)
    observer.look(60)
    assert {level_of(observer.sampled, stage).level for stage in range(3)} <= {level, level + 1}
    seconds = root_again(level, LIFE)
    keys.roots = 0
    observer.look(int(2 * seconds / LOOK))
    assert 0 < keys.roots <= 3 * 2
    assert keys.roots / (2 * seconds) * many < 3 * 2.5 * TARGET / LIFE


def test_an_empty_bucket_of_a_further_stage_is_one_holders_word() -> None:
    """While an eighth of the buckets is shown empty the stage is seen to be served, at every look."""
    observer = Observer(Keys(10, 10, 1000), stages=3)
    observer.look(40)
    for _ in range(100):
        observer.now += LOOK
        for place in observer.sampled.to_read(observer.now):
            shown = {} if place.level and place.bucket % 8 == 1 else observer.keys.at(place, observer.now)
            observer.sampled.took(place, shown, observer.now)
        assert len(observer.sampled.view(observer.now).live(2, observer.now)) >= TARGET // 2


def test_a_clock_that_goes_back_holds_no_look_up() -> None:
    """By an hour, as when a machine's time is set: all is read as often as before, and nobody lives an hour longer."""
    observer = Observer(keys := Keys(800, 800, 800), stages=3)
    observer.look(60)
    before = keys.read
    observer.look(30)
    usual = keys.read - before
    observer.now -= 3600.0
    observer.look(30)
    assert keys.read - before > 1.7 * usual
    keys.rows.clear()
    assert not any(observer.look(16).stages)
