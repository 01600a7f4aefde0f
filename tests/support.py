"""Shared by tests: waiting for conditions, and proof that a test left nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import psutil

from noloco_node.simulator.loop import SimulatedLoop
from noloco_node.telemetry.events import Account, AnyEvent
from noloco_node.workers import cores

T = TypeVar("T")

TURNS = 20
"""After so many turns of the loop `eventually` looks only now and then."""
RAREST = 0.2
"""Seconds between two looks of `eventually` after some seconds of waiting."""
ENDS_WITHIN = 10.0
"""Seconds in which a p2pd whose node has ended is gone."""
TORCH_CACHE = "torchinductor_"
"""torch makes an empty folder of this name, one a user, among the temporary ones when the first optimizer steps."""


def free_port() -> int:
    """A free port of this machine, which the system usually gives to no outgoing connection. Such a connection could
    take it before its node comes to listen on it."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", random.SystemRandom().randrange(10_000, 32_000)))
            return int(probe.getsockname()[1])


def patience(seconds: float) -> float:
    """What so many seconds of a quiet machine are on this one, where work waits for the cores. In virtual time none
    does."""
    busy = 0.0 if isinstance(asyncio.get_running_loop(), SimulatedLoop) else os.getloadavg()[0] / cores()
    return seconds * max(1.0, busy)


async def eventually(check: Callable[[], T], within: float = 60.0, what: str = "", *, every: float = 0.01) -> T:
    """Return `check()` once it is truthy; fail after `within` seconds, naming `what` was awaited. What only tasks of
    this process bring about is seen within a few turns of the loop, other things by looking `every` so many seconds.
    Where the wait is long the looks are rarer: a look may read a whole file, and daemons need the processor.
    Seconds are the loop's: in virtual time a busy machine ends no wait.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    looks = 0
    while not (result := check()):
        waited = loop.time() - began
        if waited > within and waited > patience(within):
            raise AssertionError(f"not within {within:g} s: {what or check}")
        pause = max(every, min(RAREST, waited / 20))
        await asyncio.sleep(0.0 if looks < TURNS and every < 0.1 else pause)
        looks += 1
    return result


def last_account(events: Sequence[AnyEvent]) -> Account:
    """A node's books as it wrote them last."""
    return [event for event in events if isinstance(event, Account)][-1]


@contextlib.asynccontextmanager
async def alongside(*work: Coroutine[Any, Any, object]) -> AsyncIterator[list[asyncio.Task[object]]]:
    """Run this beside the block, which cancels it at its end and waits until it has ended."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def one_turn() -> None:
    """Let every task that can go on do so once."""
    await asyncio.sleep(0)


def p2pd_children() -> list[int]:
    """Process ids of the p2pd processes that this process, or one it started, has running."""
    found: list[int] = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE and any(part.endswith("/p2pd") for part in child.cmdline()[:6]):
                found.append(child.pid)
    return found


@contextlib.contextmanager
def nothing_left_behind() -> Iterator[Path]:
    """Temporary folders go into one of their own, which is yielded. At the end: no new p2pd, no folder, no socket.

    A fixture that uses it must ask for `tmp_path` first: pytest chooses its own temporary folder when first asked.
    """
    before = set(p2pd_children())
    previous = tempfile.tempdir
    assert previous is None or Path(previous).is_dir(), f"an earlier test left {previous} as the temporary folder"
    base = Path(tempfile.mkdtemp(prefix="nlt-", dir="/tmp"))
    tempfile.tempdir = str(base)
    try:
        yield base
        until = time.monotonic() + ENDS_WITHIN
        while set(p2pd_children()) - before:  # one that was killed is there until the system has taken it away
            assert time.monotonic() < until, "a p2pd is still running"
            time.sleep(0.02)
        left = sorted(str(path) for path in base.rglob("*") if not path.name.startswith(TORCH_CACHE))
        assert not left, f"left behind: {left}"
    finally:
        tempfile.tempdir = previous
        shutil.rmtree(base, ignore_errors=True)


@dataclass
class Clock:
    """Seconds that pass when a test says so."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


class SkewedClock:
    """A monotonic clock that runs `ahead` seconds before the real one."""

    ahead = 0.0

    def monotonic(self) -> float:
        """See `time.monotonic`."""
        return time.monotonic() + self.ahead


@contextlib.contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """The file system refuses to this process what would make a file larger than `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def printed_file(folder: Path) -> IO[bytes]:
    """Where a node's words go."""
    folder.mkdir(exist_ok=True)
    return (folder / "printed").open("wb")
