"""What a node does when it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Generator

logger = logging.getLogger(__name__)


class Interrupts:
    """SIGINT and SIGTERM: the first asks for an orderly end, the second (or one before training) cancels at once."""

    def __init__(self) -> None:
        self._main = asyncio.current_task()
        self._stop: asyncio.Event | None = None
        self.asked = False
        """A signal has come."""
        self.cancelled_by_signal = False
        self.told: Callable[[], None] = lambda: None
        """Called when a signal has come."""

    def graceful(self, stop: asyncio.Event) -> None:
        """From now on the first signal sets `stop`; at once where it has come already."""
        self._stop = stop
        if self.asked:
            stop.set()

    def on_signal(self) -> None:
        """A signal has come."""
        self.told()
        if self._stop is not None and not self.asked:
            self.asked = True
            logger.info("stopping: finishing what is under way; once more to leave at once")
            self._stop.set()
        elif self._main is not None:
            self.cancelled_by_signal = True
            self._main.cancel()


@contextlib.contextmanager
def interruptible() -> Generator[Interrupts]:
    """The signals of this process, as long as the block lasts."""
    loop = asyncio.get_running_loop()
    interrupts = Interrupts()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupts.on_signal)
    try:
        yield interrupts
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
