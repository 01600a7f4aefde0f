"""The one thread that owns the device. Work is taken in the order: step, backward, forward, new draw."""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
import time
from collections.abc import Callable
from enum import IntEnum
from typing import Any, TypeVar

T = TypeVar("T")


class Priority(IntEnum):
    """Lower goes first. Backward before forward before draw keeps memory bounded and the path free of deadlocks."""

    STEP = 0
    BACKWARD = 1
    FORWARD = 2
    DRAW = 3
    STOP = 4


class ComputeThread:
    """Runs callables one at a time on a thread of its own and hands their results to the event loop.

    Must be created and closed inside a running loop. A call whose future was cancelled before its turn is not run;
    one that has begun runs to its end, so no operation on the weights is ever half done.
    """

    def __init__(self, name: str = "compute") -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: queue.PriorityQueue[tuple[int, int, Callable[[], None]]] = queue.PriorityQueue()
        self._order = itertools.count()
        self._stopping = False
        self.busy_seconds = 0.0
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Calls that wait for their turn."""
        return self._queue.qsize()

    async def run(self, priority: Priority, work: Callable[[], T]) -> T:
        """Run `work` on the device thread; its result or exception comes back."""
        if self._stopping:
            raise RuntimeError("the compute thread is closed")
        future: asyncio.Future[T] = self._loop.create_future()
        self._queue.put((priority, next(self._order), lambda: self._carry_out(work, future)))
        return await future

    async def close(self) -> None:
        """Finish what is queued and end the thread."""
        if not self._stopping:
            self._stopping = True
            self._queue.put((Priority.STOP, next(self._order), _leave))
        await asyncio.to_thread(self._thread.join)

    def _carry_out(self, work: Callable[[], T], future: asyncio.Future[T]) -> None:
        if future.cancelled():
            return
        started = time.monotonic()
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - not hidden: it is raised where the call was made
            self._loop.call_soon_threadsafe(_settle, future, None, error)
        else:
            self._loop.call_soon_threadsafe(_settle, future, result, None)
        finally:
            self.busy_seconds += time.monotonic() - started

    def _work(self) -> None:
        while True:
            _, _, call = self._queue.get()
            try:
                call()
            except _Leave:
                return
            finally:
                del call  # else it would hold what it was called with, and its result, until the next one comes


class _Leave(Exception):
    pass


def _leave() -> None:
    raise _Leave


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.cancelled():
        return
    if isinstance(error, StopIteration):  # a future cannot carry it: its caller would wait for ever
        future.set_exception(RuntimeError(f"work ended with {error!r}"))
    elif error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
