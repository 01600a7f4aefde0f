"""A device in virtual time: real arithmetic, in the order of the compute thread, that takes as long as a model says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from noloco_node.training.compute_thread import (
    OWN,
    CallOrder,
    Compute,
    DeviceLoad,
    DeviceWaits,
    Priority,
    QueueTurn,
    attempt,
    settle,
)
from noloco_node.training.host_copies import Ahead

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    priority: Priority
    work: Callable[[], Any]
    future: asyncio.Future[Any]
    asked: float
    waits: DeviceWaits | None


class SimulatedDevice(Compute):
    """`seconds` says what a kind of work takes. A call takes effect when its time is over, on the loop's own thread.

    Must be made and closed inside a running loop.
    """

    def __init__(self, seconds: Callable[[Priority], float]) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._seconds = seconds
        self._order: CallOrder[_Call] = CallOrder()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def waiting(self) -> int:
        """See `Compute.waiting`."""
        return len(self._order)

    @property
    def load(self) -> DeviceLoad:
        """See `Compute.load`."""
        return DeviceLoad(self._order.forwards, self.busy_seconds)

    async def run(
        self,
        priority: Priority,
        work: Callable[[], T],
        turn: QueueTurn = OWN,
        waits: DeviceWaits | None = None,
        ahead: Ahead | None = None,
    ) -> T:
        """See `Compute.run`. It has no memory of its own that anything could come to."""
        del ahead
        future: asyncio.Future[T] = self._loop.create_future()
        self._order.put(priority, _Call(priority, work, future, self._loop.time(), waits), turn)
        if self._idle.is_set():
            self._idle.clear()
            self._loop.call_soon(self._next)
        return await future

    async def close(self) -> None:
        """See `Compute.close`."""
        await self._idle.wait()

    def _next(self) -> None:
        while len(self._order):
            call = self._order.take()
            if not call.future.cancelled():
                if call.waits is not None:
                    call.waits.seconds += self._loop.time() - call.asked
                seconds = self._seconds(call.priority)
                self._loop.call_later(seconds, self._finish, call, seconds)
                return
        self._idle.set()

    def _finish(self, call: _Call, seconds: float) -> None:
        self._worked(call.priority, seconds)
        settle(call.future, *attempt(call.work))
        self._next()
