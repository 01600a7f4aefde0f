"""How many pieces of a transfer are under way at once."""

from __future__ import annotations

import asyncio
import random

import pytest

from noloco_node import ambient
from noloco_node.simulator.loop import in_virtual_time
from noloco_node.transport.calls import FIRST_PIECES, MOST_PIECES, Width, side_by_side
from noloco_node.transport.errors import BrokenStream

LIMIT = 20.0
PIECE = 1 << 20


async def test_pieces_go_side_by_side_in_their_order_and_end_with_the_first_failure() -> None:
    """So many at once, never more; what fails is raised bare, and little is begun after it."""
    begun: list[int] = []
    under_way = most = 0

    async def work(index: int) -> None:
        nonlocal under_way, most
        begun.append(index)
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0)
        under_way -= 1
        if index == 7:
            raise BrokenStream("7")

    await side_by_side(range(7), Width(10.0, 3, 3), work)
    assert (begun, most) == ([*range(7)], 3)
    begun.clear()
    with pytest.raises(BrokenStream, match="7"):
        await side_by_side(range(5, 100), Width(10.0, 2, 2), work)
    assert begun[:4] == [5, 6, 7, 8]
    assert len(begun) <= 5, "whoever is free at that moment takes one more"


def carried(pieces: int, rate: float, round_trip: float, fixed: int | None = None) -> tuple[float, int]:
    """Seconds that so many pieces take over a line of so many bytes a second, and how many were under way at the
    most."""
    width, most = Width(LIMIT) if fixed is None else Width(LIMIT, fixed, fixed), 0

    async def work() -> float:
        free_at = 0.0
        under_way = 0

        async def piece(_: int) -> None:
            nonlocal free_at, under_way, most
            under_way += 1
            most = max(most, under_way)
            free_at = max(free_at, ambient.monotonic()) + PIECE / rate
            await asyncio.sleep(free_at + round_trip - ambient.monotonic())
            under_way -= 1

        began = ambient.monotonic()
        await side_by_side(range(pieces), width, piece)
        return ambient.monotonic() - began

    return in_virtual_time(work), most


def test_a_long_and_fast_line_is_filled() -> None:
    """1 Gbit/s and 200 ms: four pieces at once carry a sixth of what the line does."""
    few, _ = carried(400, 125e6, 0.2, fixed=4)
    many, most = carried(400, 125e6, 0.2)
    assert few > 19.0
    assert many < 6.5, "the line alone takes 3.4 s"
    assert most == MOST_PIECES


@pytest.mark.parametrize(("mbit", "round_trip"), [(20.0, 0.04), (100.0, 0.1), (2.0, 0.2)])
def test_a_line_that_four_pieces_fill_carries_little_more_at_once(mbit: float, round_trip: float) -> None:
    """More of them would only wait, and microbatches behind them; each must be there within its deadline."""
    _, most = carried(100, mbit * 125e3, round_trip)
    assert FIRST_PIECES <= most <= 2 * FIRST_PIECES
    width = Width(LIMIT)
    for turn in range(100):
        width.came(4.2 * turn, 4.2 * turn + 4.2)
    assert width.pieces == FIRST_PIECES, "more would only wait"


def test_a_transfer_that_becomes_faster_has_more_under_way_again() -> None:
    """As a donor does that gives more when it has seen that it costs nothing. Until then more under way would only
    wait."""
    faster_at, width = 120.0, Width(LIMIT)
    before: list[int] = []

    async def work() -> None:
        free_at = began = ambient.monotonic()

        async def piece(_: int) -> None:
            nonlocal free_at
            now = ambient.monotonic()
            if now < began + faster_at:
                before.append(width.pieces)
            free_at = max(free_at, now) + (0.5 if now < began + faster_at else 0.01)
            await asyncio.sleep(free_at + 0.2 - now)

        await side_by_side(range(1000), width, piece)

    in_virtual_time(work)
    assert max(before) <= FIRST_PIECES
    assert width.pieces > 2 * FIRST_PIECES


def test_on_a_line_that_becomes_slower_and_slower_every_piece_comes_in_time() -> None:
    """From 1 Gbit/s down by half every ten seconds to 4 Mbit/s, over which 32 pieces would take a minute."""
    slowest = 0.0

    async def work() -> None:
        free_at = 0.0

        async def piece(_: int) -> None:
            nonlocal free_at, slowest
            began = ambient.monotonic()
            start = max(free_at, began)
            free_at = start + 1.0 / max(0.5, 119.0 * 0.5 ** (start / 10.0))
            await asyncio.sleep(free_at + 0.25 - began)
            slowest = max(slowest, ambient.monotonic() - began)

        width = Width(LIMIT)
        await side_by_side(range(1000), width, piece)
        assert width.pieces > FIRST_PIECES
        await side_by_side(range(750), width, piece)

    in_virtual_time(work)
    assert slowest < LIMIT / 2.0


@pytest.mark.parametrize("seed", range(8))
def test_pieces_that_take_unlike_long_do_not_end_the_growing(seed: int) -> None:
    """On a kept stream of p2pd every second mebibyte waits a round trip more for its window, and each first one
    several. Pieces come in bursts, which say nothing of the line."""
    rng = random.Random(seed)
    width = Width(LIMIT)

    async def work() -> float:
        async def piece(_: int) -> None:
            await asyncio.sleep(rng.choice((0.22, 0.42)) + rng.uniform(0.0, 0.05))

        began = ambient.monotonic()
        await side_by_side(range(800), width, piece)
        return ambient.monotonic() - began

    took = in_virtual_time(work)
    assert width.pieces == MOST_PIECES
    assert took < 1.5 * (800 / MOST_PIECES + 6) * 0.35
