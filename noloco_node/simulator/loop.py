"""An event loop in virtual time: its clock jumps to the next timer, its chance comes from one seed, and work elsewhere
is done in its turn on the loop's own thread. Whatever takes time and chance from `noloco_node.ambient` runs on it."""

from __future__ import annotations

import asyncio
import random
import selectors
import threading
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Executor
from contextvars import Context
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from noloco_node.ambient import Ambience

T = TypeVar("T")

WALL = 1.8e9
"""Seconds since 1970 when a simulation begins, as its nodes believe."""
TURNS_AT_ONE_MOMENT = 1_000_000
"""Turns of the loop without a step of the clock, after which it will never move any more."""
SHOWN_TASKS = 20


class Stuck(RuntimeError):
    """The simulation cannot go on: no timer runs and nothing is ready, or time does not move any more."""


class _Jump(selectors.DefaultSelector):
    """Waits for nobody, and for no socket; what it would have waited is added to the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.stuck: Callable[[str], Exception] = Stuck
        self._turns = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """See `selectors`. Raises Stuck."""
        if timeout is None:
            raise self.stuck("nothing is ready, and no timer runs")
        if timeout > 0:
            self.now += timeout
            self._turns = 0
        self._turns += 1
        if self._turns > TURNS_AT_ONE_MOMENT:
            raise self.stuck(f"{TURNS_AT_ONE_MOMENT:,} turns at one moment")
        return []


class _Numbered:
    """Hashed by when it was made and not by where it lies, so that sets of futures have an order that repeats."""

    number = 0

    def __hash__(self) -> int:
        return self.number


class _Future(_Numbered, asyncio.Future[Any]):
    __hash__ = _Numbered.__hash__


class _Task(_Numbered, asyncio.Task[Any]):
    __hash__ = _Numbered.__hash__


class SimulatedLoop(asyncio.SelectorEventLoop, Ambience):
    """One seed, one course of events. `elsewhere_seconds` is what each piece of work off the loop takes.

    There are no threads, sockets or processes here: call_soon_threadsafe from another thread is refused, and who waits
    for a socket waits for ever, which is told as `Stuck`.
    """

    def __init__(self, seed: int, elsewhere_seconds: float = 0.0) -> None:
        self._jump = _Jump()
        self._jump.stuck = self._stuck
        self._made = 0
        super().__init__(self._jump)
        self.set_task_factory(self._task)
        self._seed = seed
        self._sources = 0
        self._tokens = random.Random(f"tokens/{seed}")
        self._elsewhere_seconds = elsewhere_seconds
        self._free_at: WeakKeyDictionary[Executor, float] = WeakKeyDictionary()
        self._thread = threading.get_ident()

    def time(self) -> float:
        """Virtual seconds since the beginning."""
        return self._jump.now

    def wall(self) -> float:
        """See `Ambience.wall`."""
        return WALL + self._jump.now

    def chance(self) -> random.Random:
        """See `Ambience.chance`."""
        self._sources += 1
        return random.Random(f"chance/{self._seed}/{self._sources}")

    def token(self, octets: int) -> str:
        """See `Ambience.token`."""
        return self._tokens.randbytes(octets).hex()

    def create_future(self) -> asyncio.Future[Any]:
        """See `asyncio`."""
        return self._number(_Future(loop=self))

    def run_in_executor(  # pyright: ignore[reportIncompatibleMethodOverride] - asyncio's own type says `Any` here
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Done when its time is over, on this thread; one after another where there is an `executor`."""
        future: asyncio.Future[T] = self.create_future()
        now = self.time()
        begin = now if executor is None else max(now, self._free_at.get(executor, now))
        end = begin + self._elsewhere_seconds
        if executor is not None:
            self._free_at[executor] = end
        if end > now:
            self.call_at(end, _carry_out, future, func, args)
        else:  # timers of one moment come in no order
            self.call_soon(_carry_out, future, func, args)
        return future

    def call_soon_threadsafe(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """See `asyncio`. RuntimeError from another thread."""
        if threading.get_ident() != self._thread:
            raise RuntimeError("a simulation has one thread")
        return self.call_soon(callback, *args, context=context)

    def _task(
        self, loop: asyncio.AbstractEventLoop, work: Generator[Any, None, T] | Coroutine[Any, Any, T], **options: Any
    ) -> asyncio.Future[T]:
        return self._number(_Task(work, loop=loop, **options))

    def _number(self, made: Any) -> Any:
        self._made += 1
        made.number = self._made
        return made

    def _stuck(self, why: str) -> Stuck:
        tasks = sorted((task for task in asyncio.all_tasks(self)), key=hash)
        lines = [f"  {task.get_name()}: {_place(task)}" for task in tasks[:SHOWN_TASKS]]
        more = len(tasks) - SHOWN_TASKS
        return Stuck("\n".join([f"at {self.time():g} s {why}", *lines, *([f"  and {more} more"] if more > 0 else [])]))


def _carry_out(future: asyncio.Future[T], work: Callable[..., T], args: tuple[Any, ...]) -> None:
    if future.cancelled():
        return
    try:
        result = work(*args)
    except asyncio.CancelledError:
        future.cancel()
    except Exception as error:  # noqa: BLE001 - not hidden: it is raised where the work was asked for
        future.set_exception(error)
    else:
        future.set_result(result)


def _place(task: asyncio.Task[Any]) -> str:
    """The innermost coroutine at which a task waits, and its line."""
    inner: Any = task.get_coro()
    while getattr(getattr(inner, "cr_await", None), "cr_frame", None) is not None:
        inner = inner.cr_await
    frame = getattr(inner, "cr_frame", None)
    name = getattr(inner, "__qualname__", repr(inner))
    return name if frame is None else f"{name}, line {frame.f_lineno} of {frame.f_code.co_filename.rpartition('/')[2]}"


def in_virtual_time(work: Callable[[], Coroutine[Any, Any, T]], *, seed: int = 0, elsewhere_seconds: float = 0.0) -> T:
    """Run `work()` on a loop of its own to its end. Raises what it raises, and Stuck."""
    with asyncio.Runner(loop_factory=lambda: SimulatedLoop(seed, elsewhere_seconds)) as runner:
        return runner.run(work())
