"""How a donor's bytes are shared among those who read at the same time."""

from __future__ import annotations

import asyncio

from noloco_node import ambient
from noloco_node.aio import cancel_and_wait
from noloco_node.simulator.loop import in_virtual_time
from noloco_node.state_transfer.rate import DonorRate
from noloco_node.training.progress import LastTrained

CHUNK = 1 << 20
AT_ONCE = 64


def donor() -> DonorRate:
    """One that gives a chunk in a second."""
    made = DonorRate(lambda: LastTrained(0, 0.0), lowest=1.0)
    made.rate = float(CHUNK)
    return made


def test_a_reader_that_asks_for_sixty_four_chunks_at_once_has_its_turn_like_others() -> None:
    """Whoever asks for one at a time gets every other chunk, and no time is lost."""

    async def work() -> tuple[float, int]:
        rate, given = donor(), 0

        async def hog() -> None:
            nonlocal given
            while True:
                await rate.take(CHUNK, "hog")
                given += 1

        hogs = [asyncio.create_task(hog()) for _ in range(AT_ONCE)]
        await asyncio.sleep(0)
        for _ in range(10):
            await rate.take(CHUNK, "honest")
        took, beside = ambient.monotonic(), given
        await cancel_and_wait(hogs)
        return took, beside

    took, beside = in_virtual_time(work)
    assert took <= 22.0
    assert took - 3.0 <= 10 + beside


def test_chunks_that_nobody_waits_for_any_more_delay_nobody() -> None:
    """A reader that asks and hangs up, again and again: its chunks were never given, so their time is not used up."""

    async def work() -> float:
        rate = donor()
        for _ in range(10):
            asked = [asyncio.create_task(rate.take(CHUNK, "hangs up")) for _ in range(AT_ONCE)]
            await asyncio.sleep(0)
            await cancel_and_wait(asked)
        before = ambient.monotonic()
        await rate.take(CHUNK, "honest")
        await rate.take(CHUNK, "honest")
        return ambient.monotonic() - before

    assert in_virtual_time(work) <= 4.0
