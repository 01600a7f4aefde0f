"""The one thread that owns the device. Work is taken in the order: step, backward, forward, new draw; forwards of
several sources take turns."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
from collections.abc import Callable
from enum import IntEnum
from typing import Any, TypeVar

from noloco_node import ambient
from noloco_node.training.fair_queue import OWN, FairQueue, Turn

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
        self._queue = _Waiting()
        self._stopping = False
        self.busy_seconds = 0.0
        self._busy = dict.fromkeys(Priority, 0.0)
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Calls that wait for their turn."""
        return len(self._queue)

    @property
    def busy_by_work(self) -> dict[str, float]:
        """`busy_seconds` by what was worked on."""
        return {work.name.lower(): seconds for work, seconds in self._busy.items() if work is not Priority.STOP}

    async def run(self, priority: Priority, work: Callable[[], T], turn: Turn = OWN) -> T:
        """Run `work` on the device thread; its result or exception comes back. Forwards go by their `turn`."""
        if self._stopping:
            raise RuntimeError("the compute thread is closed")
        future: asyncio.Future[T] = self._loop.create_future()
        self._queue.put(priority, lambda: self._carry_out(priority, work, future), turn)
        return await future

    async def close(self) -> None:
        """Finish what is queued and end the thread."""
        if not self._stopping:
            self._stopping = True
            self._queue.put(Priority.STOP, _leave, OWN)
        await ambient.elsewhere(self._thread.join)

    def _carry_out(self, priority: Priority, work: Callable[[], T], future: asyncio.Future[T]) -> None:
        if future.cancelled():
            return
        started = ambient.monotonic()
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - not hidden: it is raised where the call was made
            self._loop.call_soon_threadsafe(_settle, future, None, error)
        else:
            self._loop.call_soon_threadsafe(_settle, future, result, None)
        finally:
            took = ambient.monotonic() - started
            self.busy_seconds += took
            self._busy[priority] += took

    def _work(self) -> None:
        while True:
            call = self._queue.get()
            try:
                call()
            except _Leave:
                return
            finally:
                del call  # else it would hold what it was called with, and its result, until the next one comes


class _Waiting:
    """Calls by priority, and forwards in turn: others put them in, the compute thread takes them out."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._order = itertools.count()
        self._heap: list[tuple[Priority, int, Callable[[], None]]] = []
        self._forwards: FairQueue[Callable[[], None]] = FairQueue()

    def __len__(self) -> int:
        with self._changed:
            return len(self._heap) + len(self._forwards)

    def put(self, priority: Priority, call: Callable[[], None], turn: Turn) -> None:
        with self._changed:
            if priority is Priority.FORWARD:
                self._forwards.push(turn.sources, turn.cost, call)
            else:
                heapq.heappush(self._heap, (priority, next(self._order), call))
            self._changed.notify()

    def get(self) -> Callable[[], None]:
        """The next call; waits for one."""
        with self._changed:
            while not self._heap and not len(self._forwards):
                self._changed.wait()
            if self._heap and (self._heap[0][0] < Priority.FORWARD or not len(self._forwards)):
                return heapq.heappop(self._heap)[2]
            return self._forwards.pop()


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
