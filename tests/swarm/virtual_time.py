"""An event loop whose clock jumps to the next timer: an hour of waiting in the time that its work takes."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _NoWaiting(selectors.DefaultSelector):
    """Waits for nobody; what it would have waited is added to the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """See `selectors`."""
        ready = super().select(0 if timeout is not None else None)
        if not ready and timeout is not None:
            self.now += max(timeout, 0.0)
        return ready


def in_virtual_time(work: Callable[[Callable[[], float]], Coroutine[Any, Any, T]]) -> T:
    """Run `work(clock)` to its end; `clock` gives virtual seconds. It may use no threads, sockets or processes."""
    selector = _NoWaiting()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now  # pyright: ignore[reportAttributeAccessIssue]
    try:
        return loop.run_until_complete(work(lambda: selector.now))
    finally:
        loop.close()
