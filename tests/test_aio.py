"""No cancellation is lost, whatever ends in the same moment: a task that is told to end and goes on is awaited for
ever."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import pytest

from noloco_node import aio
from noloco_node.aio import LoopLag, all_of, cancel_and_wait, first_alone, run_to_end, some_at_a_time
from noloco_node.simulator.loop import in_virtual_time
from noloco_node.transport.calls import Width, side_by_side
from tests.support import one_turn

TURNS = range(6)
SOON = 5.0


async def ends(task: asyncio.Task[None]) -> bool:
    """Whether a task that was cancelled is cancelled, and soon."""
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.wait((task,), timeout=SOON)
    return task.cancelled()


async def for_ever() -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("turns", TURNS)
@pytest.mark.parametrize("fails", [False, True])
async def test_who_runs_something_to_its_end_sees_a_cancellation_of_that_moment(turns: int, fails: bool) -> None:
    """`turns` of the loop after the work could go on; whether it comes to a result or to a failure."""
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        await may_end.wait()
        if fails:
            raise OSError

    async def caller() -> None:
        while True:  # as a task that writes down a receipt now and then
            with contextlib.suppress(OSError):
                await run_to_end(work())
            await for_ever()

    task = asyncio.create_task(caller())
    await begun.wait()
    may_end.set()
    for _ in range(turns):
        await one_turn()
    task.cancel()
    assert await ends(task)


async def test_what_is_run_to_its_end_comes_to_it_though_its_caller_is_cancelled_again_and_again() -> None:
    """Only then does the caller see it."""
    may_end, done = asyncio.Event(), list[bool]()

    async def work() -> None:
        await may_end.wait()
        done.append(True)

    task = asyncio.create_task(run_to_end(work()))
    for _ in range(3):
        await one_turn()
        task.cancel()
    await one_turn()
    assert not task.done()
    may_end.set()
    assert await ends(task)
    assert done == [True]


async def lost_by_the_others(run: Callable[[Callable[[int], Awaitable[None]]], Awaitable[None]], turns: int) -> bool:
    """Tell whether a caller ends that is cancelled so many turns after one of its two pieces has failed. The other one
    still takes a few turns to end; the caller takes a failure and goes on."""
    failed = asyncio.Event()

    async def piece(number: int) -> None:
        if number == 0:
            await one_turn()
            failed.set()
            raise ValueError
        try:
            await for_ever()
        finally:
            for _ in range(3):
                await one_turn()

    async def caller() -> None:
        while True:
            with contextlib.suppress(ValueError):
                await run(piece)
            await for_ever()

    task = asyncio.create_task(caller())
    await failed.wait()
    for _ in range(turns):
        await one_turn()
    task.cancel()
    return await ends(task)


@pytest.mark.parametrize("turns", TURNS)
async def test_a_failure_among_several_hides_no_cancellation(turns: int) -> None:
    """Where the caller is cancelled while the others are ended."""

    async def run(piece: Callable[[int], Awaitable[None]]) -> None:
        async def one(number: int) -> None:
            await piece(number)

        await all_of([asyncio.create_task(one(number)) for number in range(2)])

    assert await lost_by_the_others(run, turns)


@pytest.mark.parametrize("turns", TURNS)
async def test_a_transfer_that_breaks_off_hides_no_cancellation(turns: int) -> None:
    """A stream breaks as this node is told to leave: the dialling code takes the failure, and would try again."""

    async def run(piece: Callable[[int], Awaitable[None]]) -> None:
        await side_by_side(range(2), Width(1.0, 2), piece)

    assert await lost_by_the_others(run, turns)


async def test_the_first_failure_ends_the_others_and_is_the_one_that_is_raised() -> None:
    """Those that were added on the way among them."""
    tasks = list[asyncio.Task[None]]()

    async def fails() -> None:
        tasks.append(asyncio.create_task(for_ever()))
        await one_turn()
        raise ValueError("first")

    tasks += [asyncio.create_task(for_ever()), asyncio.create_task(fails())]
    with pytest.raises(ValueError, match="first"):
        await all_of(tasks)
    assert [task.cancelled() for task in tasks] == [True, False, True]


async def test_no_task_outlives_the_caller_however_often_that_is_cancelled() -> None:
    """What they write to is the caller's, which lets go of it then: a second signal, or one that is told again."""
    begun, may_end, ended = asyncio.Event(), asyncio.Event(), list[bool]()

    async def writes() -> None:
        begun.set()
        try:
            await for_ever()
        finally:
            await run_to_end(asyncio.wait_for(may_end.wait(), SOON))
            ended.append(True)

    async def lends() -> None:
        try:
            await all_of([asyncio.create_task(writes())])
        finally:
            assert ended

    caller = asyncio.create_task(lends())
    await begun.wait()
    for _ in range(3):
        caller.cancel()
        await one_turn()
    may_end.set()
    assert await ends(caller)


async def test_who_loses_a_cancellation_is_told_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody waits for ever for a task that has gone on, and the log names it."""
    monkeypatch.setattr(aio, "STUCK_SECONDS", 0.05)
    lost = list[bool]()

    async def loses_one() -> None:
        try:
            await for_ever()
        except asyncio.CancelledError:
            lost.append(True)
        await for_ever()

    task = asyncio.create_task(loses_one(), name="the one that goes on")
    await one_turn()
    async with asyncio.timeout(SOON):
        await cancel_and_wait((task,))
    assert lost
    assert task.cancelled()
    assert "the one that goes on" in caplog.text
    assert "loses_one" in caplog.text


def test_in_virtual_time_nobody_measures_how_late_the_loop_is() -> None:
    """It is never late, and a look ten times a second would be a tenth of all that a node does."""

    async def measure() -> float:
        lag = LoopLag()
        async with asyncio.timeout(SOON):
            await lag.measure()
        return lag.take()

    assert in_virtual_time(measure) == 0.0


@pytest.mark.parametrize("others", [[], [KeyError("of another kind")]])
def test_of_a_group_of_errors_of_one_kind_the_first_goes_on_alone(others: list[Exception]) -> None:
    """With others among them the group does. Whatever this version of Python makes of `except*`."""
    group = ExceptionGroup("", [ExceptionGroup("", [ValueError("first"), ValueError("second")]), *others])
    with pytest.raises((ValueError, ExceptionGroup)) as caught, first_alone(ValueError):
        raise group
    assert (str(caught.value) == "first") is not bool(others)
    assert (caught.value is group) is bool(others)


async def test_some_at_a_time_are_done_in_their_order_and_no_more_at_once() -> None:
    begun, under_way, most = list[int](), 0, 0

    async def work(item: int) -> None:
        nonlocal under_way, most
        begun.append(item)
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.001 * (item % 3))
        under_way -= 1

    await some_at_a_time(4, range(20), work)
    assert (begun, most) == (list(range(20)), 4)
    await some_at_a_time(4, (), work)
    assert len(begun) == 20


async def test_of_some_at_a_time_the_first_failure_ends_the_rest() -> None:
    done = list[int]()

    async def work(item: int) -> None:
        if item == 3:
            raise ValueError(item)
        await asyncio.sleep(0.001)
        done.append(item)

    with pytest.raises(ValueError, match="3"):
        await some_at_a_time(2, range(20), work)
    assert max(done) < 6


async def test_a_piece_that_ends_cancelled_is_not_taken_for_done() -> None:
    """By whatever it awaited and somebody else had cancelled: the transfer would be whole, and all after it missing."""
    done: list[int] = []

    async def work(number: int) -> None:
        await asyncio.sleep(0)
        if number == 2:
            raise asyncio.CancelledError
        done.append(number)

    with pytest.raises(RuntimeError, match="no waiting task cancelled it"):
        await side_by_side(range(40), Width(SOON, 2, 2), work)
    assert len(done) < 39
