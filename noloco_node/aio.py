"""Small tools for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Sequence
from typing import Any, TypeVar

from noloco_node import ambient

logger = logging.getLogger(__name__)

T = TypeVar("T")

STUCK_SECONDS = 10.0
"""What was told to end or to answer, or should have come round, hangs after so many seconds. No clean-up and no healthy
process takes as long."""


async def cancel_and_wait(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel `tasks` and wait until every one has ended. What they end with is not raised.

    One that has not ended after some seconds is cancelled again: a task may lose a cancellation that comes while it
    fails, and never end. What must not be cut short runs under `run_to_end`. If the caller itself is cancelled
    meanwhile, it still sees that cancellation.
    """
    every = list(tasks)
    while pending := [task for task in every if not task.done()]:
        for task in pending:
            task.cancel()
        _, there = await asyncio.wait(pending, timeout=STUCK_SECONDS)
        if there:
            logger.warning("told to end and still there: %s", ", ".join(sorted(map(_name_of, there))))
    for task in every:
        if task.done() and not task.cancelled():
            task.exception()


def _name_of(task: asyncio.Future[Any]) -> str:
    """What a task is about, for a log."""
    if not isinstance(task, asyncio.Task):
        return repr(task)
    coroutine = task.get_coro()
    return f"{task.get_name()} ({getattr(coroutine, '__qualname__', coroutine)})"


@contextlib.contextmanager
def first_alone(kind: type[Exception]) -> Generator[None]:
    """If all errors of a group (or of groups in it) are of this kind, raise the first of them alone. What is raised in
    an `except*` comes in a group of its own before Python 3.11.4."""
    try:
        yield
    except BaseExceptionGroup as errors:
        told, others = errors.split(kind)
        if told is None or others is not None:
            raise
        error: BaseException = told
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None


async def all_of(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Wait until all of `tasks` have ended, and those that they add to it. If one fails the others are ended, and its
    failure is raised.

    A task that ends cancelled, although nobody here has cancelled it, raises RuntimeError, since its work is not done.
    If the caller is cancelled meanwhile, it sees that only when they have ended: they may still be writing to what it
    has lent them.

    It replaces a TaskGroup wherever the failure is taken and the caller goes on. A TaskGroup (before Python 3.13) that
    ends the others just then forgets a cancellation of the caller, and that would never end.
    """
    failed: asyncio.Task[None] | None = None
    try:
        while failed is None and (pending := [task for task in tasks if not task.done()]):
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            failed = next((task for task in pending if task in done and _has_failed(task)), None)
    finally:
        await run_to_end(cancel_and_wait(tasks))
    if failed is not None:
        if failed.cancelled():
            raise RuntimeError(f"cancelled, though no waiting task cancelled it: {_name_of(failed)}")
        failed.result()


async def some_at_a_time(most: int, items: Sequence[T], work: Callable[[T], Awaitable[None]]) -> None:
    """Do the work of each item, in their order and `most` at once. Ends with the first failure, as `all_of`."""
    left = iter(items)

    async def work_off() -> None:
        for item in left:
            await work(item)

    await all_of([asyncio.create_task(work_off()) for _ in range(min(most, len(items)))])


def _has_failed(task: asyncio.Task[None]) -> bool:
    return task.cancelled() or task.exception() is not None


class Pulse:
    """Wakes all waiting tasks every time something has moved. Waiters read the state themselves.

    Unlike an Event there is nothing to clear, so several waiters cannot take each other's wake-ups. It belongs to one
    event loop. Nothing is lost between a look at the state and `wait` as long as no await stands between them.
    """

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], None] = {}  # woken in the order in which they came

    def fire(self) -> None:
        """Wake all tasks that wait now."""
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
        self._waiting.clear()

    async def wait(self, at_most: float | None = None) -> None:
        """Return at the next `fire()`, or after `at_most` seconds."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[future] = None
        try:
            await asyncio.wait((future,), timeout=at_most)
        finally:
            self._waiting.pop(future, None)


class LoopLag:
    """How late the event loop wakes sleeping tasks: it must stay responsive while tensors stream."""

    def __init__(self) -> None:
        self._worst = 0.0

    async def measure(self) -> None:
        """Goes on until it is cancelled, or ends at once in virtual time, where nothing is ever late."""
        loop = asyncio.get_running_loop()
        while not ambient.punctual():
            due = loop.time() + ambient.SOON_SECONDS
            await asyncio.sleep(ambient.SOON_SECONDS)
            self._worst = max(self._worst, loop.time() - due)

    def take(self) -> float:
        """The worst delay, in seconds, since the last time that it was asked for."""
        worst, self._worst = self._worst, 0.0
        return worst


class Heartbeat:
    """The time when an event loop last came round, for observers on another thread.

    It beats once a second until `stop`, and calls `on_beat` with the count of beats, which must be quick.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_beat: Callable[[int], None] = lambda _: None) -> None:
        self._loop = loop
        self._on_beat = on_beat
        self._beats = -1
        self._beat()

    @property
    def age(self) -> float:
        """Seconds since the last beat."""
        return ambient.monotonic() - self._last

    def _beat(self) -> None:
        self._last = ambient.monotonic()
        self._next = self._loop.call_later(1.0, self._beat)
        self._beats += 1
        if self._beats:  # the first is this object's making, before anybody knows it
            self._on_beat(self._beats)

    def stop(self) -> None:
        """Beat no more. On the loop's own thread."""
        self._next.cancel()


async def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end even if the caller is cancelled meanwhile; the cancellation is raised afterwards.

    For clean-ups that must not stop half-way. They need deadlines of their own.
    """
    task = asyncio.create_task(work)
    cancellation: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait((task,))  # not its shield: that tells its failure before a cancellation
        except asyncio.CancelledError as error:  # also where the work has ended in the same turn of the loop
            cancellation = error
    if cancellation is not None:
        if not task.cancelled():
            task.exception()
        raise cancellation
    return task.result()


async def end_process(child: asyncio.subprocess.Process, patience: float) -> None:
    """SIGTERM, and SIGKILL to one that still runs after `patience` seconds; returns when it is gone."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if child.returncode is not None:
            return
        # Not child.terminate(): it polls, and may take the exit status away from asyncio's watcher.
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, number)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await child.wait()
