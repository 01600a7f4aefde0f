"""The thread that owns the device: order, cancellation, failures, and its end."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import torch

from noloco_node import ambient
from noloco_node.errors import ExitCode, UserError
from noloco_node.process_memory import NoMemory
from noloco_node.training.compute_thread import ComputeThread, DeviceWaits, Priority
from tests.support import eventually


@asynccontextmanager
async def held(thread: ComputeThread) -> AsyncIterator[threading.Event]:
    """The thread works on something else for as long as the block lasts, or until the event is set."""
    release, blocked = threading.Event(), threading.Event()

    def block() -> None:
        blocked.set()
        assert release.wait(10)

    blocking = asyncio.create_task(thread.run(Priority.STEP, block))
    await eventually(blocked.is_set, what="the thread is busy")
    try:
        yield release
    finally:
        release.set()
        await blocking


@asynccontextmanager
async def busy_thread() -> AsyncIterator[tuple[ComputeThread, threading.Event]]:
    """A thread that is busy until the event is set."""
    thread = ComputeThread()
    async with held(thread) as release:
        yield thread, release
    await thread.close()


async def test_work_is_taken_in_the_order_step_backward_forward_draw() -> None:
    """Whatever the order of asking; equals keep their order."""
    done: list[tuple[Priority, int]] = []
    asked = [
        (priority, number)
        for number in range(3)
        for priority in (Priority.DRAW, Priority.BACKWARD, Priority.FORWARD, Priority.STEP)
    ]
    async with busy_thread() as (thread, release):
        tasks = [asyncio.create_task(thread.run(each[0], lambda each=each: done.append(each))) for each in asked]
        await eventually(lambda: thread.waiting == len(asked), what="all are queued")
        release.set()
        await asyncio.gather(*tasks)
    order = (Priority.STEP, Priority.BACKWARD, Priority.FORWARD, Priority.DRAW)
    assert done == [(priority, number) for priority in order for number in range(3)]


async def test_a_call_cancelled_before_its_turn_is_not_run() -> None:
    """The next one is run."""
    done: list[str] = []
    async with busy_thread() as (thread, release):
        cancelled = asyncio.create_task(thread.run(Priority.BACKWARD, lambda: done.append("cancelled")))
        other = asyncio.create_task(thread.run(Priority.BACKWARD, lambda: done.append("other")))
        await eventually(lambda: thread.waiting == 2, what="both are queued")
        cancelled.cancel()
        await asyncio.wait((cancelled,))
        release.set()
        await other
    assert done == ["other"]


async def test_a_call_cancelled_after_it_began_runs_to_its_end() -> None:
    """No operation on the weights is ever half done."""
    thread, began, release, done = ComputeThread(), threading.Event(), threading.Event(), list[str]()

    def work() -> None:
        began.set()
        assert release.wait(10)
        done.append("whole")

    task = asyncio.create_task(thread.run(Priority.FORWARD, work))
    await eventually(began.is_set)
    task.cancel()
    await asyncio.wait((task,))
    assert task.cancelled()
    release.set()
    await thread.close()
    assert done == ["whole"]


async def test_a_call_says_how_long_it_waited_for_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not say what it took."""
    waits, at_once, now = DeviceWaits(), DeviceWaits(), 100.0

    def works() -> None:
        nonlocal now
        now += 5.0

    async with busy_thread() as (thread, release):
        monkeypatch.setattr(ambient, "monotonic", lambda: now)
        waiting = asyncio.create_task(thread.run(Priority.FORWARD, works, waits=waits))
        await eventually(lambda: thread.waiting, what="it is queued")
        now += 3.0
        release.set()
        await waiting
        await thread.run(Priority.FORWARD, works, waits=at_once)
    assert (waits.seconds, at_once.seconds) == (3.0, 0.0)


async def test_an_exception_comes_back_to_its_caller_and_the_thread_lives_on() -> None:
    """Even one that iterators use for themselves, which a future cannot carry."""

    def fail(error: Exception) -> None:
        raise error

    thread = ComputeThread()
    with pytest.raises(ZeroDivisionError, match="mine"):
        await thread.run(Priority.FORWARD, lambda: fail(ZeroDivisionError("mine")))
    async with asyncio.timeout(60):
        with pytest.raises(RuntimeError):
            await thread.run(Priority.FORWARD, lambda: fail(StopIteration()))
    assert await thread.run(Priority.FORWARD, lambda: 7) == 7
    assert thread.busy_seconds > 0
    await thread.close()


async def test_closing_finishes_what_is_queued_and_ends_the_thread() -> None:
    """Afterwards nothing is taken; closing twice is closing once."""
    done: list[int] = []
    async with busy_thread() as (thread, release):
        tasks = [asyncio.create_task(thread.run(Priority.DRAW, lambda n=n: done.append(n))) for n in range(5)]
        await eventually(lambda: thread.waiting == 5, what="all are queued")
        closing = asyncio.create_task(thread.close())
        release.set()
        await closing
        await asyncio.gather(*tasks)
        with pytest.raises(RuntimeError, match="closed"):
            await thread.run(Priority.STEP, lambda: done.append(99))
        await thread.close()
    assert done == [0, 1, 2, 3, 4]
    assert not [t for t in threading.enumerate() if t.name == "compute"]


async def test_a_call_that_fails_keeps_nothing_of_what_it_worked_with() -> None:
    """A device that had no memory for a microbatch has it back before the next one, whatever the collector does. So has
    one whose error was raised anew as another."""
    held: list[weakref.ref[torch.Tensor]] = []

    def work() -> None:
        graph = torch.zeros(1)
        held.append(weakref.ref(graph))
        raise torch.OutOfMemoryError("CUDA out of memory")

    def renamed() -> None:
        try:
            work()
        except torch.OutOfMemoryError as error:
            raise ValueError(str(error)) from None

    thread = ComputeThread()
    gc.disable()
    try:
        for each in (work, renamed):
            with pytest.raises((NoMemory, ValueError)):
                await thread.run(Priority.FORWARD, each)
        assert [each() for each in held] == [None, None]
    finally:
        gc.enable()
    await thread.close()


async def test_a_device_that_is_lost_is_told_of_once_and_for_all_and_one_without_memory_is_not() -> None:
    """The error of every call says so, and so does the one that waits for it, whatever becomes of the call's own
    error."""

    def fails(words: str) -> Callable[[], None]:
        def work() -> None:
            raise torch.AcceleratorError(words)

        return work

    thread = ComputeThread()
    with pytest.raises(NoMemory):  # so says CUDA of the host's memory that is never paged out
        await thread.run(Priority.FORWARD, fails("CUDA error: out of memory\nCUDA kernel errors might be"))
    with pytest.raises(TimeoutError):  # as a node's stay at one stage ends, before another begins
        await asyncio.wait_for(thread.ends_when_lost(), 0.01)
    next_stay = asyncio.create_task(thread.ends_when_lost())
    for _ in range(2):
        with pytest.raises(UserError, match="nothing any more: CUDA error: unspecified launch failure\n"):
            await thread.run(Priority.FORWARD, fails("CUDA error: unspecified launch failure\nSearch for"))
    with pytest.raises(UserError, match="nothing any more") as lost:
        await next_stay
    assert lost.value.exit_code is ExitCode.CHECK_FAILED
    await thread.close()
