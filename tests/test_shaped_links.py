"""The links that benchmarks give to real daemons: as fast as they say, however late their carrier is woken."""

from __future__ import annotations

import pytest

from benchmarks.shaped_links import Uplink
from tests.chaos.proxy import GRAIN_SECONDS, PIECE_BYTES

PIECES = 64


@pytest.mark.parametrize("late", [0.0, 0.001, 0.0019])
def test_an_uplink_carries_its_rate_though_each_wait_ends_late(late: float) -> None:
    """A mebibyte at 100 Mbit/s, whose carrier sleeps until a piece has left, where that is worth it, and wakes so much
    later."""
    uplink, now, left = Uplink(12.5e6, 0.05), 10.0, 0.0
    for _ in range(PIECES):
        left = uplink.take(PIECE_BYTES, now)
        now = left + late if left > now + GRAIN_SECONDS else now
    assert left - 10.0 == pytest.approx(PIECES * PIECE_BYTES / 12.5e6, abs=1.5 * GRAIN_SECONDS)


def test_a_long_and_fast_line_holds_what_is_under_way() -> None:
    """At 1000 Mbit/s and 100 ms there are 6.25 MB on the way, and no fewer because pieces are small."""
    assert Uplink(125e6, 0.05).pieces_under_way * PIECE_BYTES >= 6.25e6
