"""What a node remembers by peer is bounded, however many keys strangers make, and what is used is kept longest."""

from __future__ import annotations

import random
from pathlib import Path

from noloco_node.tallies import PeerTable, PeerTimes

PACKAGE = Path(__file__).parent.parent / "noloco_node"


def test_what_was_set_longest_ago_goes_first_and_is_told() -> None:
    """By whichever of a dictionary's ways it is set; reading keeps nobody."""
    gone: list[tuple[str, int]] = []
    table = PeerTable[str, int](3, lambda peer, value: gone.append((peer, value)))
    table["a"], table["b"], table["c"] = 1, 2, 3
    table["a"] = 4
    assert table["b"] == 2
    table["d"] = 5
    assert gone == [("b", 2)]
    table.setdefault("e", 6)
    table.update({"f": 7})
    table.move_to_end("d")
    table["g"] = 8
    assert list(table.items()) == [("f", 7), ("d", 5), ("g", 8)]
    assert gone == [("b", 2), ("c", 3), ("a", 4), ("e", 6)]


def test_a_table_never_has_more_than_its_most() -> None:
    """Whatever is set, read and taken out, in any order."""
    rng, table = random.Random(7), PeerTable[int, int](10)
    for _ in range(5000):
        peer = rng.randrange(40)
        if rng.random() < 0.2:
            table.pop(peer, None)
        else:
            table[peer] = table.get(peer, 0) + 1
        assert len(table) <= 10


def test_times_hold_to_their_end_and_are_forgotten_from_the_oldest() -> None:
    """Each peer's time is its own, also behind one whose time is longer."""
    times = PeerTimes[str](8)
    times["long"], times["short"] = 20.0, 10.0
    assert [times.holds(peer, 9.9) for peer in ("long", "short", "none")] == [True, True, False]
    assert [times.holds(peer, 10.0) for peer in ("long", "short")] == [True, False]
    times.expire(10.0)
    assert times
    times.expire(20.0)
    assert not times


def test_no_file_keeps_a_bounded_table_by_hand() -> None:
    """One that forgets its oldest entry when it is full is a `PeerTable`."""
    by_hand = [path for path in PACKAGE.rglob("*.py") if "OrderedDict" in path.read_text(encoding="utf-8")]
    assert {str(path.relative_to(PACKAGE)) for path in by_hand} == {"tallies.py"}
