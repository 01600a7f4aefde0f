"""A node's way out has one bound, whatever it meets there: then the process says what it still waits for, and ends.

What waits on the way out has bounds of its own; this one is for what nobody thought of. It needs neither the event loop
nor the disk: both may be what hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import os
import sys
import threading
from collections.abc import Callable, Coroutine, Generator, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeVar

import psutil

import noloco_node
from noloco_node import ambient
from noloco_node.errors import SHOWN, ExitCode

T = TypeVar("T")

AT_ONCE_SECONDS = 60.0
"""The seconds that a node has to end after a second signal. Peers, directory and p2pd have some twenty seconds in all,
and nothing is saved; a busy machine takes longer."""
SAY_SECONDS = 5.0
"""The seconds that the last words may take: their reader may be what hangs."""

LISTENING = "signals"
"""The thread that hears them; it never does anything else."""
PACKAGE = str(Path(noloco_node.__file__).parent)
IDLE = "concurrent/futures/thread.py"
"""Where a thread of a pool stands that has nothing to do."""


class WayOut:
    """Ends the process by `end`, with an exit code, where a way out that has begun takes too long. `say` is told why
    before that, on a thread of its own."""

    def __init__(self, end: Callable[[int], None] | None = None) -> None:
        self._end = end or end_at_once
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._began, self._ends_at = 0.0, 0.0
        self._under_way = False
        self.code = int(ExitCode.FAILURE)
        """What the process ends with."""
        self.loop: asyncio.AbstractEventLoop | None = None
        """Whose tasks are named."""
        self.say: Callable[[str], None] = lambda _: None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work` on an event loop of its own. Threads that nobody awaits any more are left behind."""
        import uvloop  # with what `work` needs of torch and hivemind, not before

        def loop() -> uvloop.Loop:
            made = uvloop.new_event_loop()
            made.set_default_executor(ambient.LeftBehind())
            return made

        return uvloop.run(work, loop_factory=loop)

    def begin(self, seconds: float, code: ExitCode) -> None:
        """The process has so long from now on, or what an earlier call left it, if that is less. Not from a handler of
        signals: those interrupt the thread that holds a lock."""
        with self._changed:
            now = ambient.monotonic()
            if not self._under_way:
                self._under_way, self._began, self._ends_at = True, now, now + seconds
            self._ends_at, self.code = min(self._ends_at, now + seconds), int(code)
            self.stand_by()
            self._changed.notify()

    def stand_by(self) -> None:
        """Have the thread that watches, while there is room for one."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="way out", daemon=True)
            self._thread.start()

    def over(self) -> None:
        """It has come to its end, or the node stays after all."""
        with self._changed:
            self._under_way = False
            self._changed.notify()

    def _left(self) -> float | None:
        return self._ends_at - ambient.monotonic() if self._under_way else None

    def _watch(self) -> None:
        with self._changed:
            while (left := self._left()) is None or left > 0.0:
                self._changed.wait(left)
            took, code = ambient.monotonic() - self._began, self.code
        try:
            self._say_why(took)
        finally:  # also where there is no memory and no thread left to say anything
            self._end(code)

    def _say_why(self, took: float) -> None:
        words = last_words(took, standing(self.loop))
        for tell in (_print, self.say):
            saying = threading.Thread(target=tell, args=(words,), name="last words", daemon=True)
            saying.start()
            saying.join(SAY_SECONDS)


@contextlib.contextmanager
def bounded_way_out() -> Generator[WayOut]:
    """For the work of this process in the block; whatever it began there is over at its end."""
    way_out = WayOut()
    way_out.stand_by()
    try:
        yield way_out
    finally:
        way_out.over()


def end_at_once(code: int) -> None:
    """This process and those that it has started. Where that is not left to the system (`launcher.py`), p2pd would
    stay."""
    try:
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
    finally:  # a process without descriptors left cannot look for them
        os._exit(code)


def last_words(seconds: float, waits_for: list[str]) -> str:
    """What a person is told of a way out that was given up after so many seconds."""
    told = "".join(f"\n  {line}" for line in waits_for) or "\n  nothing that it knows of"
    return (
        f"leaving has taken {seconds:.0f} s and is given up; the last checkpoint that was written whole stands. "
        f"This node still waited for:{told}\n"
        "  remedy: where a line names storage, see to the disk, or set node.leave_seconds to what it needs; else this "
        "is a defect of noloco-node: please report these lines"
    )


def standing(loop: asyncio.AbstractEventLoop | None) -> list[str]:
    """Where the tasks of an event loop and the threads of this process stand, as far as that is in this package."""
    tasks = [] if loop is None else [task for task in _tasks_of(loop) if not task.done()]
    lines = [f"task {task.get_name()}: {steps}" for task in tasks if (steps := _steps(_frames_of(task.get_coro())))]
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    unasked = {threading.get_ident(), *(ident for ident, name in names.items() if name == LISTENING)}
    for ident, frame in sys._current_frames().items():  # pyright: ignore[reportPrivateUsage]  # there is no other way
        stack = list(_back_from(frame))[::-1]
        steps = _steps(stack)
        if steps and ident not in unasked and not stack[-1].f_code.co_filename.endswith(IDLE):
            lines.append(f"thread {names.get(ident, ident)}: {steps}")
    more = len(lines) - SHOWN
    return lines[:SHOWN] + ([f"and {more} more"] if more > 0 else [])


def _tasks_of(loop: asyncio.AbstractEventLoop) -> list[asyncio.Task[Any]]:
    """Those made first, first: the way through a run is one of the oldest."""
    try:
        return sorted(asyncio.all_tasks(loop), key=lambda task: (len(task.get_name()), task.get_name()))
    except RuntimeError:  # the loop makes them faster than they can be read
        return []


def _frames_of(awaited: Any) -> Iterator[FrameType]:
    """The frames of a coroutine and of what it awaits, and so on."""
    while awaited is not None:
        for kind in ("cr", "gi", "ag"):
            frame = getattr(awaited, f"{kind}_frame", None)
            if frame is not None:
                yield frame
        awaited = next(
            (found for name in ("cr_await", "gi_yieldfrom", "ag_await") if (found := getattr(awaited, name, None))),
            # The step of an asynchronous generator says of itself nothing but what it holds.
            None if inspect.isgenerator(awaited) or hasattr(awaited, "cr_frame") else _generator_in(awaited),
        )


def _generator_in(step: Any) -> Any:
    if inspect.isasyncgen(step):
        return None
    return next((held for held in gc.get_referents(step) if inspect.isasyncgen(held)), None)


def _back_from(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _steps(frames: Iterator[FrameType] | list[FrameType]) -> str:
    """The last few of this package, as a person may report them."""
    own = [frame for frame in frames if frame.f_code.co_filename.startswith(PACKAGE)]
    return " > ".join(f"{frame.f_code.co_qualname} ({_place(frame.f_code)}:{frame.f_lineno})" for frame in own[-4:])


def _place(code: CodeType) -> str:
    return str(Path(code.co_filename).relative_to(PACKAGE))


def _print(words: str) -> None:
    """Past everything that buffers."""
    os.write(sys.stderr.fileno(), f"noloco-node: {words}\n".encode())
