"""Text read ahead on a thread of its own, so that drawing a microbatch does not wait for files and tokenizers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass

from torch import Tensor

from noloco_node import ambient
from noloco_node.aio import STUCK_SECONDS
from noloco_node.data.samples import Position

MOST_PORTIONS = 1024
"""At most so many portions are read ahead, however small. Making one takes time and memory that its bytes do not say.
With microbatches of 128 tokens a node read thirty thousand ahead. That took six seconds of CPU beside its first steps,
and a short run drew few of them."""


def _nothing() -> None:
    """Nobody wants to know."""


@dataclass(frozen=True, slots=True)
class Portion:
    """A microbatch that was read, and where reading goes on after it."""

    windows: Tensor
    position: Position
    drawn: Callable[[], None] = _nothing
    """Called once it has been drawn."""


Portions = Generator[Portion, None, None]


class Prefetch:
    """Reads portions ahead, `limit_bytes` of them, always at least one and never more than MOST_PORTIONS. `draw` gives
    them in their order.

    `position` is that of what was drawn: what was only read ahead is read again in the next life.
    """

    def __init__(self, portions: Portions, begin: Position, limit_bytes: int) -> None:
        self._portions, self._limit = portions, limit_bytes
        self._position = begin
        self._ready: deque[Portion] = deque()
        self._bytes = 0
        self._error: Exception | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._waiters: list[asyncio.Future[None]] = []
        self._waited, self._waits_since = 0.0, 0.0
        self.thread = threading.Thread(target=self._read, name="text", daemon=True)
        self.thread.start()

    @property
    def position(self) -> Position:
        """Where drawing goes on."""
        return self._position

    @property
    def waited_seconds(self) -> float:
        """Time in which at least one draw waited."""
        return self._waited + (ambient.monotonic() - self._waits_since if self._waiters else 0.0)

    async def draw(self) -> Tensor:
        """The next windows; it returns at once if some were read ahead. An error that ended the reading is raised here,
        after all that was read before it has been drawn. A text that cannot be read raises UserError (DATA)."""
        while True:
            with self._changed:
                if self._ready:
                    portion = self._ready.popleft()
                    self._bytes -= portion.windows.nbytes
                    self._changed.notify()
                    break
                if self._error is not None:
                    raise self._error
                waiter = asyncio.get_running_loop().create_future()
                if not self._waiters:
                    self._waits_since = ambient.monotonic()
                self._waiters.append(waiter)
            try:
                await waiter
            finally:
                self._forget(waiter)
        self._position = portion.position
        portion.drawn()
        return portion.windows

    def close(self) -> None:
        """End the thread; waits for the document that it reads just now, but not for ever for a dead disk."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self.thread.join(STUCK_SECONDS)

    def _forget(self, waiter: asyncio.Future[None]) -> None:
        with self._changed:
            self._waiters.remove(waiter)
            if not self._waiters:
                self._waited += ambient.monotonic() - self._waits_since

    def _read(self) -> None:
        error: Exception | None = None
        try:
            with contextlib.closing(self._portions) as portions:
                for portion in portions:
                    if not self._keep(portion):
                        return
        except Exception as reason:  # noqa: BLE001 - not hidden: it is raised where windows are drawn
            error = reason
        with self._changed:
            self._error = error or RuntimeError("the text has come to an end")
            self._wake()

    def _keep(self, portion: Portion) -> bool:
        """Put it to the others once there is room; False where no more is wanted."""
        size = portion.windows.nbytes
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._has_room(size))
            if self._closed:
                return False
            self._ready.append(portion)
            self._bytes += size
            self._wake()
        return True

    def _has_room(self, size: int) -> bool:
        return not self._ready or (len(self._ready) < MOST_PORTIONS and self._bytes + size <= self._limit)

    def _wake(self) -> None:
        for waiter in self._waiters:
            waiter.get_loop().call_soon_threadsafe(_resolve, waiter)


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
