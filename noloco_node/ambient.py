"""Time, chance and work that is done elsewhere. All of the package takes them from here, and from nowhere else.

They are the machine's own, unless the running event loop brings its own (`Ambience`). A simulation is a loop, and
nothing else has to be handed about or replaced.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


SOON_SECONDS = 0.25
"""What is about to come and cannot be awaited is looked at once in so many seconds."""
LOOK_SECONDS = 1.0
"""What cannot be awaited, such as a file, a clock or a view of others, is looked at once in so many seconds."""


class Ambience:
    """What an event loop brings that is not in the real world. Its `run_in_executor` counts too."""

    @contextmanager
    def around(self) -> Generator[None]:
        """In the block, on this thread, everything comes from here: for while the loop runs."""
        _here.own = self
        try:
            yield
        finally:
            _here.own = None

    def time(self) -> float:
        """Seconds from a moment that means nothing."""
        raise NotImplementedError

    def wall(self) -> float:
        """Seconds since 1970."""
        raise NotImplementedError

    def chance(self) -> random.Random:
        """A new source of chance, unlike those before it."""
        raise NotImplementedError

    def token(self, octets: int) -> str:
        """So many random bytes, in hexadecimal."""
        raise NotImplementedError


class _Here(threading.local):
    """Where a thread's time and chance come from. A clock is read many times for each microbatch, and asking asyncio
    which loop runs takes longer than that."""

    own: Ambience | None = None
    """Brought by the loop that runs on the thread."""


_here = _Here()


def monotonic() -> float:
    """Seconds from a moment that means nothing, for measuring and waiting.

    On a real loop not the loop's own time: uvloop's stands still within a turn and knows milliseconds only.
    """
    own = _here.own
    return time.monotonic() if own is None else own.time()


def wall() -> float:
    """Seconds since 1970, as this machine believes."""
    own = _here.own
    return time.time() if own is None else own.wall()


def chance() -> random.Random:
    """A new source of chance that nobody can foretell. What a seed must repeat takes a `random.Random` instead."""
    own = _here.own
    return random.Random() if own is None else own.chance()


def token(octets: int) -> str:
    """So many random bytes, in hexadecimal, that nobody can guess."""
    own = _here.own
    return secrets.token_hex(octets) if own is None else own.token(octets)


def punctual() -> bool:
    """Whether the loop that runs wakes everybody at the moment that was asked for, however busy the processor is."""
    return _here.own is not None


async def elsewhere(work: Callable[P, T], /, *args: P.args, **named: P.kwargs) -> T:
    """Do `work` off the event loop, beside it; what it returns or raises."""
    return await asyncio.to_thread(work, *args, **named)


class LeftBehind(ThreadPoolExecutor):
    """Threads for `elsewhere` in a process that ends at once after its loop (`cli.main.entry`): work that nobody awaits
    any more is not waited for. It may be a disk or a server that never answers."""

    def __init__(self) -> None:
        super().__init__(thread_name_prefix="elsewhere")

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002 - neither is asked
        """Begin nothing more."""
        super().shutdown(wait=False, cancel_futures=True)


class OneThread(ThreadPoolExecutor):
    """One thread. By its `name` a loop in virtual time knows what its work takes."""

    def __init__(self, name: str) -> None:
        super().__init__(1, name)
        self.name = name


class OneByOne:
    """Work off the event loop, one piece after another, on a thread of this name."""

    def __init__(self, name: str) -> None:
        self._pool = OneThread(name)
        self._stopped = False

    async def do(self, work: Callable[[], T]) -> T:
        """What `work` returns, or raises."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._begin, work)

    def _begin(self, work: Callable[[], T]) -> T:
        if self._stopped:
            raise asyncio.CancelledError
        return work()

    def stop(self) -> None:
        """End the thread once the piece under way is done; the others are not begun."""
        self._stopped = True
        self._pool.shutdown(wait=False, cancel_futures=True)
