"""Processes for long work: each takes one task at a time, on one thread, and ends with the process that started it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import TracebackType
from typing import Generic, TypeVar, cast

from noloco_node.errors import ExitCode, UserError

Task = TypeVar("Task")
_Answer = TypeVar("_Answer")


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class _Failure:
    """An exception on its way out of a worker; `remedy` and `exit_code` where it is the user's."""

    message: str
    remedy: str | None = None
    exit_code: int = 0

    def error(self) -> Exception:
        if self.remedy is None:
            return RuntimeError(f"a task failed in its worker\n{self.message}")
        return UserError(ExitCode(self.exit_code), self.message, self.remedy)


@dataclass(slots=True)
class _Worker(Generic[Task]):
    process: SpawnProcess
    pipe: Connection
    task: Task | None = None


class Workers(AbstractContextManager["Workers[Task, _Answer]"], Generic[Task, _Answer]):
    """A pool of `count` processes that call `work` (a function of a module, importable by its name). `setting` is where
    the user has said how many.

    Leaving the block ends them, whatever they are at; so does the end of this process, however it ends.
    """

    def __init__(self, count: int, work: Callable[[Task], _Answer], setting: str) -> None:
        self._count = count
        self._setting = setting
        self._work = work
        self._workers: list[_Worker[Task]] = []

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[Task, _Answer]]:
        """Do all tasks, begun in the order given; yields each with its answer as it ends.

        Raises the UserError of a task, RuntimeError with the traceback of any other failure, and UserError (FAILURE)
        where a worker died.
        """
        waiting = list(reversed(tasks))
        while len(self._workers) < min(self._count, len(waiting)):
            self._workers.append(self._start())
        for worker in self._workers:
            self._give(worker, waiting)
        while busy := [worker for worker in self._workers if worker.task is not None]:
            ready = wait([worker.pipe for worker in busy])
            for worker in busy:
                if worker.pipe in ready:
                    task, answer = self._take(worker)
                    self._give(worker, waiting)
                    yield task, answer

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            worker.process.terminate()
        for worker in self._workers:
            worker.process.join(5.0)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.pipe.close()
        self._workers.clear()

    def _start(self) -> _Worker[Task]:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self._work), name="noloco-node worker", daemon=True)
        process.start()
        theirs.close()
        return _Worker(process, ours)

    def _give(self, worker: _Worker[Task], waiting: list[Task]) -> None:
        worker.task = waiting.pop() if waiting else None
        if worker.task is not None:
            worker.pipe.send(worker.task)

    def _take(self, worker: _Worker[Task]) -> tuple[Task, _Answer]:
        assert worker.task is not None
        try:
            answer: object = worker.pipe.recv()
        except EOFError:
            worker.process.join()
            raise self._death(worker.process.exitcode) from None
        if isinstance(answer, _Failure):
            raise answer.error()
        return worker.task, cast("_Answer", answer)

    def _death(self, code: int | None) -> UserError:
        return UserError(
            ExitCode.FAILURE,
            f"a worker died (exit code {code}); -9 means that it was killed, often for want of memory",
            f"start the same command again; where memory is short, lower {self._setting}",
        )


def _serve(pipe: Connection, work: Callable[[Task], _Answer]) -> None:
    """The life of a worker. Ctrl-C is the parent's to handle."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["OMP_NUM_THREADS"] = "1"
    threading.Thread(target=_end_with_parent, name="end with parent", daemon=True).start()
    while True:
        try:
            task: Task = pipe.recv()
        except EOFError:
            return
        pipe.send(_answer(work, task))


def _answer(work: Callable[[Task], _Answer], task: Task) -> _Answer | _Failure:
    try:
        return work(task)
    except UserError as error:
        return _Failure(error.message, error.remedy, int(error.exit_code))
    except Exception:  # noqa: BLE001 - it is raised again in the parent, with this traceback
        return _Failure(traceback.format_exc())


def _end_with_parent() -> None:
    """A parent that is killed cannot end its workers."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker is started by a process"
    wait([parent.sentinel])
    os._exit(1)
