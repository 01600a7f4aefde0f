"""Each node finds alone at which level a stage's records lie, and how many there are, from any start."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest

from noloco_node.directory.buckets import (
    CROWDED,
    LOWER,
    PREFIX_BITS,
    TARGET,
    StageLevel,
    bucket_of,
    level_behind,
    levels_to_write,
)
from tests.profiles import tries
from tests.swarm.bucket_world import LIFE, LOOK, BucketWorld

LEAST_VOTE = int(LOWER * TARGET) + 1


def within_one(levels: set[int]) -> bool:
    """Neighbours see each other."""
    return max(levels) - min(levels) <= 1


def test_up_to_64_replicas_there_is_one_key_and_the_number_is_exact() -> None:
    """Nobody writes anywhere else while there are fewer than 48."""
    world = BucketWorld()
    world.add(47)
    world.look(20)
    assert world.levels == {0}
    assert {place[:2] for place, rows in world.records.items() if rows} == {(0, 0)}
    assert world.rms_error() == 0.0
    world.add(17)
    world.look(20)
    assert world.levels == {0}
    assert world.rms_error() == 0.0


@pytest.mark.parametrize("many", [100, 200, 700])
def test_a_flash_crowd_finds_its_level_and_its_number(many: int) -> None:
    """Within a minute all are at neighbouring levels, and their estimates within 10 % rms."""
    world = BucketWorld(many)
    world.add(many)
    world.look(30)
    assert within_one(world.levels)
    assert world.rms_error() < 0.1


def test_who_leaves_level_0_goes_on_with_the_number_that_was_seen_there() -> None:
    """Few have written at level 1 by then, and what level 0 held before all had come is over. Of 256, by 61 as if they
    were all that came, the estimate would be half or less."""
    node = StageLevel(random.Random(1))
    for seen in (1, 40, 256):
        node.took(0, 0, range(1 << 31, (1 << 31) + seen))
    while node.confirming:
        node.took(*node.next_bucket(), range(LEAST_VOTE))
    assert node.level == 1
    assert node.number == 256
    for here in (131, 125, 131):
        node.took(*node.next_bucket(), range(here))
        assert abs(node.number / 256 - 1) < 0.05


def test_of_a_few_buckets_each_counts_once_as_it_was_seen_last() -> None:
    """So what dies at once is seen to have died when each was read once more, and all that are read are all there
    are."""
    node = StageLevel(random.Random(1), 2)
    sizes = [50, 59, 70, 81]
    for _ in range(12):
        level, bucket = node.next_bucket()
        node.took(level, bucket, range(sizes[bucket]))
    assert node.number == sum(sizes)
    for _ in range(4):
        level, bucket = node.next_bucket()
        node.took(level, bucket, range(sizes[bucket] * 3 // 4))
    assert node.number == sum(size * 3 // 4 for size in sizes)


def test_a_stage_that_outgrows_its_level_goes_where_its_records_are() -> None:
    """One level at a time: whose buckets are full writes at the next, and at none beyond."""
    node = StageLevel(random.Random(1), 1)
    for _ in range(4):
        node.took(*node.next_bucket(), range(6 * TARGET))
    assert node.level == 2
    for _ in range(4):
        node.took(*node.next_bucket(), range(3 * TARGET))
    assert node.level == 3
    assert node.number < 16 * TARGET, "what was crowded says how many there are at least"


@pytest.mark.parametrize("seed", [6, 24])
def test_a_swarm_that_grows_from_one_node_stays_one(seed: int) -> None:
    """It grows by a tenth at each look, a hundredfold in all. Level 0 may speak of a level that is too high by chance.
    32 nodes of 600, none of whose buckets anybody wrote at any more, took it for nothing, and themselves for all."""
    world = BucketWorld(seed)
    world.add(1)
    while len(world.nodes) < 600:
        world.add(max(1, len(world.nodes) // 10))
        world.look()
    world.look(20)
    assert within_one(world.levels)
    assert world.rms_error() < 0.1


@pytest.mark.parametrize(("few", "many"), [(5, 600), (100, 700)])
def test_swarms_of_very_different_size_become_one(few: int, many: int) -> None:
    """The small one is at a level that the large one does not write at, but for the nodes of its first bucket."""
    world = BucketWorld()
    world.add(few, half=0)
    world.add(many, half=1)
    world.look(25)
    small, large = ({node.level.level for node in world.nodes if node.half == half} for half in (0, 1))
    assert max(small) < min(large)
    world.heal()
    world.look(24)
    assert within_one(world.levels)
    assert world.rms_error() < 0.1


def test_a_swarm_of_which_few_are_left_falls_to_the_level_of_these() -> None:
    """They end where everybody sees everybody."""
    world = BucketWorld()
    world.add(600)
    world.look(25)
    assert min(world.levels) >= 2
    world.nodes = world.nodes[:20]
    world.look(40)
    assert world.levels == {0}
    assert world.rms_error() == 0.0


def test_a_stage_that_everybody_left_is_empty_at_level_0_when_the_last_life_ends() -> None:
    """While it is served, that key shows some of its nodes, however many there are."""
    world = BucketWorld()
    world.add(600)
    world.look(30)
    assert LOWER * TARGET <= len(list(world.read(0, 0, 0))) <= 3 * TARGET
    world.nodes = []
    world.look(int(LIFE / LOOK) + 1)
    assert list(world.read(0, 0, 0)) == []


@pytest.mark.parametrize("many", [128, 300])
def test_ids_that_are_sought_for_one_bucket_move_nobody(many: int) -> None:
    """Five hundred in a bucket of the others' level, of two or of four, renewed for as long as they look. Of two it
    counts as a crowded one, of four not at all."""
    world = BucketWorld()
    world.add(many)
    world.look(30)
    levels = Counter(node.level.level for node in world.nodes)
    level = levels.most_common(1)[0][0]
    assert level == (1 if many == 128 else 2)
    crowd = [(1 << (32 - level)) + number for number in range(500)]
    for _ in range(30):
        for prefix in crowd:
            world.write(0, level, prefix)
        world.look()
        assert within_one(world.levels | {level})
    assert world.rms_error() < (0.15 if level > 1 else CROWDED / many)


def test_of_two_buckets_neither_decides_alone_while_nobody_answers_for_the_other() -> None:
    """Neither one that somebody filled nor one that its holder shows empty; both together do."""
    for shown in (range(500), range(0)):
        level = StageLevel(random.Random(1), 1)
        for _ in range(20):
            level.took(1, 1, shown)
        assert level.level == 1
        level.took(1, 0, shown)
        assert level.level != 1


def test_ids_that_are_sought_for_the_first_bucket_draw_nobody_to_their_level() -> None:
    """A hundred at level 0 whose hashes begin with twenty zeros: the buckets there are looked at, and are empty."""
    world = BucketWorld()
    world.add(60)
    for _ in range(40):
        for number in range(25):
            world.write(0, 0, number)
        world.look()
    assert max(world.levels) <= 1


def test_records_at_level_0_alone_part_nobody() -> None:
    """Four hundred of them at the key of a stage of twenty: nobody follows them to a level of its own."""
    world = BucketWorld()
    world.add(20)
    world.look(10)
    for _ in range(40):
        for number in range(400):
            world.write(0, 0, number * 0x9E3779B1 & 0xFFFFFFFF)
        world.look()
        assert world.levels == {0}


def test_who_is_in_the_first_bucket_writes_at_level_0_too() -> None:
    """Each also writes at its own level, below it, and above it if that is soon somebody's."""
    assert levels_to_write(1 << 31, 0, 10) == (0,)
    assert levels_to_write(1 << 31, 0, 60) == (0, 1)
    assert levels_to_write(1 << 31, 5, 30) == (4, 5)
    assert levels_to_write(1 << 31, 5, 60) == (4, 5, 6)
    assert levels_to_write(3, 5, 30) == (0, 4, 5)


def test_many_that_came_at_once_do_not_hide_the_first_bucket_of_a_large_stage() -> None:
    """Sixty are at level 0 beside 30 of a first bucket of level 2. In more than a quarter of such stages it said
    nothing, and they took all that they saw, 90, for the whole stage. Few small stages speak so."""
    rng = random.Random(9)
    missed = false = 0
    for _ in range(400):
        came = [rng.getrandbits(PREFIX_BITS) for _ in range(60)]
        missed += level_behind([*(rng.getrandbits(PREFIX_BITS - 2) for _ in range(30)), *came]) < 2
        false += level_behind([*came, *(rng.getrandbits(PREFIX_BITS) for _ in range(20))]) > 0
    assert missed <= 8
    assert false <= 20


def newcomer_of(keys: dict[tuple[int, int], list[int]], looks: int, seed: int = 0) -> tuple[int, int]:
    """The level of a newcomer that looks so often at a stage with these records, and after how many looks it left level
    0."""
    level, left = StageLevel(random.Random(seed)), looks
    for look in range(looks):
        if level.level == 0:
            level.took(0, 0, keys[0, 0])
        if level.level or level.confirming:
            at, bucket = level.next_bucket()
            level.took(at, bucket, keys.get((at, bucket), []))
        left = min(left, look if level.level else looks)
    return level.level, left


def keys_of(rng: random.Random, level: int, fullness: float) -> dict[tuple[int, int], list[int]]:
    """A stage that lies at a level, with so many records a bucket."""
    keys: dict[tuple[int, int], list[int]] = {(0, 0): []}
    for prefix in (rng.getrandbits(PREFIX_BITS) for _ in range(int(fullness * (1 << level)))):
        for at in levels_to_write(prefix, level, fullness):
            keys.setdefault((at, bucket_of(prefix, at)), []).append(prefix)
    return keys


def test_whoever_comes_to_a_large_stage_finds_its_level_whatever_lies_in_its_first_bucket() -> None:
    """Three of 600 stages were never found. By chance twenty of a first bucket had three zeros more, and one that held
    19 spoke of nothing."""
    rng, slowest = random.Random(0), 0
    for seed in range(tries(1500)):
        level = rng.randrange(2, 8)
        found, looks = newcomer_of(keys_of(rng, level, rng.uniform(30.0, 95.0)), 60, seed)
        assert abs(found - level) <= 1
        slowest = max(slowest, looks)
    assert slowest < 20


@pytest.mark.parametrize("zeros", [9, 20])
def test_ids_that_were_sought_keep_nobody_from_a_stages_level_for_good(zeros: int) -> None:
    """Fifteen that begin with so many zeros speak of a level at which nobody is. A newcomer tries those below one time
    after another. Half of all that came stayed at level 0."""
    rng = random.Random(1)
    for seed in range(tries(100, one_of=5)):
        level = rng.randrange(2, 8)
        keys = keys_of(rng, level, rng.uniform(30.0, 95.0))
        keys[0, 0] += [rng.getrandbits(PREFIX_BITS - zeros) for _ in range(15)]
        assert newcomer_of(keys, 240, seed)[0] >= level - 1


@pytest.mark.parametrize(("start", "seed"), [(300, 0), (600, 1)])
def test_a_stage_that_shrank_to_between_two_levels_lies_at_neighbouring_ones(start: int, seed: int) -> None:
    """Ninety-five are at most at level 0 and a quarter each of them nearly enough at level 2."""
    world = BucketWorld(seed)
    world.add(start)
    world.look(30)
    world.nodes = world.nodes[:95]
    world.look(60)
    assert max(world.levels) - min(world.levels) <= 1
    assert world.rms_error() < 0.1


def test_no_bucket_of_a_few_is_read_twice_in_a_row() -> None:
    """Of two, none is read oftener than the other among the latest."""
    for seed in range(20):
        level = StageLevel(random.Random(seed), 1 + seed % 2)
        read = list[int]()
        for _ in range(40):
            read.append(level.next_bucket()[1])
            level.took(level.level, read[-1], range(TARGET))
        assert all(one != next_one for one, next_one in pairwise(read))


def test_a_stage_of_whose_hashes_more_begin_with_zeros_by_chance_does_not_doubt_its_level_at_every_look() -> None:
    """It read both buckets of level 1 every two seconds, for good, which cost it a fifth of all its look-ups."""
    level, tall = StageLevel(random.Random(0)), PREFIX_BITS - 2
    rows = [(1 << tall - 1) + (number << 8) for number in range(35)] + [
        (1 << tall) + (number << 8) for number in range(7)
    ]
    rows += [(1 << (PREFIX_BITS - 1)) + (number << 8) for number in range(23)]
    assert level_behind(rows) == 2
    asked = 0
    for _ in range(40):
        level.took(0, 0, rows)
        if level.confirming:
            at, bucket = level.next_bucket()
            level.took(at, bucket, [row for row in rows if bucket_of(row, at) == bucket])
            asked += 1
    assert level.level == 0
    assert 0 < asked <= 40 / 2
