"""An event loop in virtual time: its clock jumps to the next timer, and its chance comes from one seed.

Work elsewhere is done in its turn on the loop's own thread. All that takes time and chance from `noloco_node.ambient`
runs on it. What runs belongs to a `Machine`, or to none: each has a wall clock and chance of its own, and can be
halted.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Executor
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from noloco_node.ambient import Ambience, OneThread
from noloco_node.errors import SHOWN

T = TypeVar("T")

WALL = 1.8e9
"""Seconds since 1970 when a simulation begins, as its nodes believe."""
TURNS_AT_ONE_MOMENT = 1_000_000
"""After so many turns of the loop without a step of the clock, it will never move any more."""


ThreadSeconds = Callable[[str], float]
"""A function that gives the seconds of a piece of work on the thread of this name; the name is empty without a
thread."""


class Stuck(RuntimeError):
    """The simulation cannot go on: no timer runs and nothing is ready, or time does not move any more."""


class Machine:
    """The place where a node's code runs: its own wall clock and source of chance.

    While it is halted nothing runs on it, as when its process is stopped or its lid is closed. What came due meanwhile
    is done at once when it goes on.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock_ahead = 0.0
        """Seconds by which its wall clock is wrong."""
        self.sources = 0
        self.held: list[_Handle] | None = None
        """What waits for it to go on; None while it runs."""

    def context(self) -> Context:
        """The context for tasks that are this machine's, whichever task begins them."""
        context = copy_context()
        context.run(_MACHINE.set, self)
        return context


_MACHINE: ContextVar[Machine | None] = ContextVar("machine", default=None)


class _Handle(asyncio.TimerHandle):
    """A call that is due at a moment, on a machine.

    It has only the face of asyncio's. A simulation makes more of them than of anything else, and those have much that
    is not needed here.
    """

    __slots__ = ("args", "home", "machine", "moment", "void", "work")

    def __init__(self, when: float, callback: Callable[..., object], args: Any, context: Context | None = None) -> None:
        self.moment = when
        self.work: Callable[..., object] | None = callback
        self.args = args
        self.home = copy_context() if context is None else context
        self.machine = self.home.get(_MACHINE)
        self.void = False

    def __repr__(self) -> str:
        return f"<{self.work!r} at {self.moment:g} s>"

    def when(self) -> float:
        """See `asyncio`."""
        return self.moment

    def cancel(self) -> None:
        """See `asyncio`: it is passed over when its time comes."""
        self.void, self.work, self.args = True, None, ()

    def cancelled(self) -> bool:
        """See `asyncio`."""
        return self.void

    def run(self, loop: SimulatedLoop) -> None:
        """Call, unless it was cancelled."""
        if self.work is None:
            return
        try:
            self.home.run(self.work, *self.args)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # noqa: BLE001 - as asyncio does: told where the loop tells it
            loop.call_exception_handler({"message": f"Exception in callback {self.work!r}", "exception": error})


class _Future(asyncio.Future[Any]):
    """Hashed by when it was made and not by where it lies, so that sets of futures have an order that repeats."""

    number: int

    def __hash__(self) -> int:
        return self.number


class _Task(asyncio.Task[Any]):
    """A task on a machine. It has its number before asyncio files it among all tasks: filed as alike, each looked at
    all."""

    def __init__(self, number: int, work: Any, **options: Any) -> None:
        self.number = number
        super().__init__(work, **options)

    def __hash__(self) -> int:
        return self.number


class SimulatedLoop(asyncio.BaseEventLoop, Ambience):
    """One seed, one course of events. `elsewhere_seconds` says what a piece of work off the loop takes.

    There are no threads, sockets or processes here. call_soon_threadsafe from another thread is refused. A task that
    waits for a socket waits for ever, which is reported as `Stuck`.
    """

    def __init__(self, seed: int, elsewhere_seconds: ThreadSeconds = lambda _thread: 0.0) -> None:
        super().__init__()
        self.set_task_factory(self._task)
        self._now = 0.0
        self._soon: deque[_Handle] = deque()
        self._timers: list[tuple[float, int, _Handle]] = []
        self._timed = 0
        self._turns = 0
        self._made = 0
        self._seed = seed
        self._sources = 0
        self._tokens = random.Random(f"tokens/{seed}")
        self._elsewhere_seconds = elsewhere_seconds
        self._free_at: WeakKeyDictionary[Executor, float] = WeakKeyDictionary()
        self._thread = threading.get_ident()

    def run_forever(self) -> None:
        """See `asyncio`."""
        with self.around():
            super().run_forever()

    def time(self) -> float:
        """Virtual seconds since the beginning."""
        return self._now

    def wall(self) -> float:
        """See `Ambience.wall`: that of the machine whose code asks."""
        machine = _MACHINE.get()
        return WALL + self._now + (machine.clock_ahead if machine else 0.0)

    def chance(self) -> random.Random:
        """See `Ambience.chance`: a machine's draws are not moved by what others draw."""
        machine = _MACHINE.get()
        if machine is None:
            self._sources += 1
            return random.Random(f"chance/{self._seed}/{self._sources}")
        machine.sources += 1
        return random.Random(f"chance/{self._seed}/{machine.name}/{machine.sources}")

    def token(self, octets: int) -> str:
        """See `Ambience.token`."""
        return self._tokens.randbytes(octets).hex()

    def create_future(self) -> asyncio.Future[Any]:
        """See `asyncio`."""
        self._made += 1
        future = _Future(loop=self)
        future.number = self._made
        return future

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """See `asyncio`."""
        handle = _Handle(self._now, callback, args, context)
        self._put_soon(handle)
        return handle

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """See `asyncio`; calls of one moment come in the order in which they were asked for."""
        handle = _Handle(when, callback, args, context)
        self._put_timer(handle)
        return handle

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """See `asyncio`."""
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_soon_threadsafe(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """See `asyncio`. RuntimeError from another thread."""
        if threading.get_ident() != self._thread:
            raise RuntimeError("a simulation has one thread")
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(  # pyright: ignore[reportIncompatibleMethodOverride] - asyncio's own type says `Any` here
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Done when its time is over, on this thread; one after another where there is an `executor`."""
        future: asyncio.Future[T] = self.create_future()
        begin = self._now if executor is None else max(self._now, self._free_at.get(executor, self._now))
        end = begin + self._elsewhere_seconds(executor.name if isinstance(executor, OneThread) else "")
        if executor is not None:
            self._free_at[executor] = end
        if end > self._now:
            self.call_at(end, _carry_out, future, func, args)
        else:
            self.call_soon(_carry_out, future, func, args)
        return future

    def halt(self, machine: Machine) -> None:
        """Let nothing run on it from now on. Halting one that is halted does nothing."""
        if machine.held is not None:
            return
        soon = [handle for handle in self._soon if handle.machine is machine]
        timers = sorted(entry for entry in self._timers if entry[2].machine is machine)
        self._soon = deque(handle for handle in self._soon if handle.machine is not machine)
        self._timers = [entry for entry in self._timers if entry[2].machine is not machine]
        heapq.heapify(self._timers)
        machine.held = [*soon, *(handle for _, _, handle in timers)]

    def go_on(self, machine: Machine) -> None:
        """Do what has come due meanwhile, and the rest in its time. Nothing for a machine that runs."""
        held, machine.held = machine.held or [], None
        for handle in held:
            (self._put_timer if handle.moment > self._now else self._put_soon)(handle)

    def _put_soon(self, handle: _Handle) -> None:
        if handle.machine is not None and handle.machine.held is not None:
            handle.machine.held.append(handle)
        else:
            self._soon.append(handle)

    def _put_timer(self, handle: _Handle) -> None:
        if handle.machine is not None and handle.machine.held is not None:
            handle.machine.held.append(handle)
        else:
            self._timed += 1
            heapq.heappush(self._timers, (handle.moment, self._timed, handle))

    def _run_once(self) -> None:
        """One turn, as `BaseEventLoop.run_forever` asks for it: what was ready as it began, and timers of now."""
        timers, soon = self._timers, self._soon
        while timers and timers[0][2].void:
            heapq.heappop(timers)
        if not soon:
            if not timers:
                raise self._stuck("nothing is ready, and no timer runs")
            if timers[0][0] > self._now:
                self._now, self._turns = timers[0][0], 0
        while timers and timers[0][0] <= self._now:
            soon.append(heapq.heappop(timers)[2])
        self._turns += 1
        if self._turns > TURNS_AT_ONE_MOMENT:
            raise self._stuck(f"{TURNS_AT_ONE_MOMENT:,} turns at one moment")
        for _ in range(len(soon)):
            if not self._soon:  # a machine was halted meanwhile
                break
            self._soon.popleft().run(self)

    def _task(
        self, loop: asyncio.AbstractEventLoop, work: Generator[Any, None, T] | Coroutine[Any, Any, T], **options: Any
    ) -> asyncio.Future[T]:
        self._made += 1
        return _Task(self._made, work, loop=loop, **options)

    def _stuck(self, why: str) -> Stuck:
        tasks = sorted((task for task in asyncio.all_tasks(self)), key=hash)
        lines = [f"  {task.get_name()}: {_place(task)}" for task in tasks[:SHOWN]]
        more = len(tasks) - SHOWN
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


def in_virtual_time(
    work: Callable[[], Coroutine[Any, Any, T]],
    *,
    seed: int = 0,
    elsewhere_seconds: ThreadSeconds = lambda _thread: 0.0,
) -> T:
    """Run `work()` on a loop of its own to its end. Raises what it raises, and Stuck."""
    with asyncio.Runner(loop_factory=lambda: SimulatedLoop(seed, elsewhere_seconds)) as runner:
        return runner.run(work())


def this_loop() -> SimulatedLoop:
    """The loop that runs. RuntimeError outside a simulation."""
    loop = asyncio.get_running_loop()
    if not isinstance(loop, SimulatedLoop):
        raise RuntimeError("this needs a loop in virtual time")
    return loop
