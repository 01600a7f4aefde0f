"""Many nodes' levels at once are the levels of each."""

from __future__ import annotations

import random

import numpy as np

from noloco_node.directory.buckets import TARGET, StageLevel, levels_to_write
from noloco_node.simulator.bucket_arrays import StageLevels

NODES, LOOKS = 40, 300


def test_rows_of_arrays_decide_as_one_node_does() -> None:
    """Counts swing as a stage grows and shrinks. Some are of a crowded bucket, some do not come, and looks at level 0
    speak of levels far above, true and false ones. After every look level, estimate, fullness and what is written are
    the same."""
    rng = random.Random(3)
    each = [StageLevel(random.Random(i)) for i in range(NODES)]
    rows = StageLevels(NODES, np.random.default_rng(1))
    everybody = np.arange(NODES)
    prefixes = [rng.getrandbits(32) >> rng.choice((0, 0, 6)) for _ in everybody]
    seen, number = set[int](), 0.0
    for look in range(LOOKS):
        if look % 20 == 0:
            number = TARGET * 2.0 ** rng.uniform(-2.0, 9.0)
        behind = rng.choice((0, 0, 3, 7, 12))
        root = [1 << (31 - behind)] * TARGET if behind else [1 << 31]
        for node in each:
            if node.level:
                node.took(0, 0, root)
        above = np.flatnonzero(rows.level > 0)
        rows.look_behind(above, np.full(len(above), behind))
        levels = [node.next_bucket() for node in each]
        assert [level for level, _ in levels] == rows.next_buckets(everybody)[0].tolist()
        counts = [max(0, int(rng.gauss(number / 2**level, 5.0))) for level, _ in levels]
        counts = [
            count + 400 * (level > 0 and bucket == 1) for (level, bucket), count in zip(levels, counts, strict=True)
        ]
        at, in_bucket = np.array([level for level, _ in levels]), np.array([bucket for _, bucket in levels])
        answered = np.array([i for i in everybody if rng.random() < 0.9], np.int64)
        rooted = answered[at[answered] == 0]
        rows.look_behind(rooted, np.zeros(len(rooted), np.int64))
        for i in answered.tolist():
            each[i].took(*levels[i], [1 << 31] * counts[i])
        rows.took(answered, at[answered], in_bucket[answered], np.array(counts)[answered])
        assert rows.level.tolist() == [node.level for node in each]
        assert rows.estimates(everybody).tolist() == [node.estimate.number for node in each]
        assert [rows.estimate(i) for i in everybody] == [node.estimate for node in each]
        assert rows.fullness(everybody).tolist() == [node.fullness for node in each]
        written = [set[int]() for _ in each]
        for where, who in rows.levels_to_write(everybody, np.array(prefixes)):
            for i in np.flatnonzero(who):
                written[i].add(int(where[i]))
        wanted = zip(prefixes, each, strict=True)
        assert written == [set(levels_to_write(prefix, node.level, node.fullness)) for prefix, node in wanted]
        seen.update(rows.level.tolist())
    assert len(seen) > 6


def test_of_a_few_buckets_none_comes_twice_before_all_have_come() -> None:
    """At the levels where a node goes through all of them."""
    rows = StageLevels(50, np.random.default_rng(2))
    rows.level[:] = 3
    drawn = np.array([rows.next_buckets(np.arange(50))[1] for _ in range(8)])
    assert all(sorted(drawn[:, i]) == list(range(8)) for i in range(50))
    rows.level[:] = 9
    assert len(np.unique(rows.next_buckets(np.arange(50))[1])) > 40
