"""Text read ahead: in order, bounded, its errors raised at the draw, its thread gone when it is closed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from noloco_node.data.prefetch import MOST_PORTIONS, Portion, Portions, Prefetch
from noloco_node.data.sampler import SamplerPosition
from noloco_node.data.samples import Position
from noloco_node.errors import ExitCode, UserError
from tests.support import eventually

BEGIN = SamplerPosition()
SIZE = 2 * 5 * 4
"""Bytes of a portion."""


def portion(number: int) -> Portion:
    """The windows hold the number; after it reading goes on at the next."""
    return Portion(torch.full((2, 5), number, dtype=torch.int32), SamplerPosition(offset=number + 1))


def numbered(most: int = 1 << 30, end: Exception | None = None) -> Portions:
    """Portions 0, 1, …; after `most` of them comes the error."""
    for number in range(most):
        yield portion(number)
    if end is not None:
        raise end


class Ahead:
    """Counts the portions that are made. When one more is under way, all before it are kept."""

    def __init__(self) -> None:
        self._made = 0

    def portions(self) -> Portions:
        """Each counted as it is made."""
        for self._made, each in enumerate(numbered(), 1):
            yield each

    def of(self, drawn: int) -> int:
        """Kept ahead of those that were drawn, where one more waits for room."""
        return self._made - 1 - drawn

    async def comes_to(self, kept: int, drawn: int) -> None:
        """Return once so many are kept."""
        await eventually(lambda: self.of(drawn) == kept, what="the thread has read ahead")


class Gate:
    """Portions that come only as they are let through."""

    def __init__(self) -> None:
        self.let_through = threading.Semaphore(0)

    def portions(self) -> Portions:
        """Each waits to be let through."""
        for each in numbered():
            self.let_through.acquire()
            yield each


@contextmanager
def opened(portions: Portions, limit_bytes: int = 4 * SIZE, begin: Position = BEGIN) -> Iterator[Prefetch]:
    """Closed at the end, with its thread."""
    prefetch = Prefetch(portions, begin, limit_bytes)
    try:
        yield prefetch
    finally:
        prefetch.close()
        assert not prefetch.thread.is_alive()


async def draw(prefetch: Prefetch) -> int:
    """The number of the next portion."""
    return int((await prefetch.draw())[0, 0])


async def test_portions_come_in_order_and_the_position_is_that_of_what_was_drawn() -> None:
    """However far the thread has read ahead."""
    ahead = Ahead()
    with opened(ahead.portions()) as prefetch:
        for number in range(50):
            await ahead.comes_to(4, number)
            assert prefetch.position == SamplerPosition(offset=number)
            assert await draw(prefetch) == number
    assert prefetch.position == SamplerPosition(offset=50)


@pytest.mark.parametrize(("limit", "held"), [(4 * SIZE, 4), (4 * SIZE - 1, 3), (SIZE, 1), (1, 1)])
async def test_what_is_read_ahead_is_bounded_and_at_least_one_microbatch(limit: int, held: int) -> None:
    """In bytes."""
    ahead = Ahead()
    with opened(ahead.portions(), limit) as prefetch:
        for number in range(20):
            await ahead.comes_to(held, number)
            assert await draw(prefetch) == number
            assert ahead.of(number + 1) <= held


async def test_small_portions_are_bounded_by_their_number() -> None:
    """Each takes time to make and memory beside its bytes."""
    ahead = Ahead()
    with opened(ahead.portions(), 1 << 30) as prefetch:
        for number in range(3):
            await ahead.comes_to(MOST_PORTIONS, number)
            assert await draw(prefetch) == number
            assert ahead.of(number + 1) <= MOST_PORTIONS


async def test_who_draws_never_waits_once_enough_is_read_ahead() -> None:
    """Not one turn of the event loop, and no time is counted."""
    ahead = Ahead()
    with opened(ahead.portions()) as prefetch:
        for number in range(50):
            await ahead.comes_to(4, number)
            drawing = prefetch.draw()
            with pytest.raises(StopIteration):
                drawing.send(None)
        assert prefetch.waited_seconds == 0.0


async def test_several_wait_at_once_and_their_time_counts_once() -> None:
    """Each gets one portion, and nobody another's; one that gives up loses nothing."""
    gate = Gate()
    with opened(gate.portions()) as prefetch:
        began = asyncio.get_running_loop().time()
        drawing = [asyncio.create_task(draw(prefetch)) for _ in range(4)]
        await asyncio.sleep(0)
        drawing[1].cancel()
        gate.let_through.release(3)
        found = await asyncio.gather(*drawing, return_exceptions=True)
        assert isinstance(found.pop(1), asyncio.CancelledError)
        assert sorted(number for number in found if isinstance(number, int)) == [0, 1, 2]
        assert 0.0 < prefetch.waited_seconds <= asyncio.get_running_loop().time() - began
        assert prefetch._waiters == []
        gate.let_through.release(9)


async def test_what_ends_the_reading_is_told_to_everybody_who_draws_after_what_was_read() -> None:
    """A hang would be the alternative."""
    error = UserError(ExitCode.DATA, "the file breaks off", "copy it again")
    with opened(numbered(2, error)) as prefetch:
        assert [await draw(prefetch), await draw(prefetch)] == [0, 1]
        found = await asyncio.gather(*(draw(prefetch) for _ in range(3)), return_exceptions=True)
        assert found == [error] * 3
    with opened(numbered(1, KeyError("a fault of ours"))) as prefetch:
        assert await draw(prefetch) == 0
        with pytest.raises(KeyError):
            await draw(prefetch)


async def test_each_portion_says_when_it_was_drawn() -> None:
    """Not when it was read."""
    drawn: list[int] = []
    ahead = Ahead()

    def telling() -> Portions:
        for number, each in enumerate(ahead.portions()):
            yield Portion(each.windows, each.position, lambda number=number: drawn.append(number))

    with opened(telling()) as prefetch:
        await ahead.comes_to(4, 0)
        assert drawn == []
        await draw(prefetch)
        assert drawn == [0]


async def test_closing_ends_the_thread_and_its_files() -> None:
    """Be the buffer full or the reader at work; what the reader holds open is closed."""
    closed = threading.Event()

    def holding() -> Portions:
        try:
            yield from numbered()
        finally:
            closed.set()

    with opened(holding()) as prefetch:
        await draw(prefetch)
    assert closed.is_set()
