"""The one thread that owns the device. Work is taken in the order: step, backward, forward, new draw; forwards of
several sources take turns. What the next call needs on a device with memory of its own is sent there meanwhile. What a
call gives may arrive while the next one is worked on."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import queue
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch

from noloco_node import ambient
from noloco_node.errors import ExitCode, UserError
from noloco_node.process_memory import NoMemory, refused_memory
from noloco_node.tallies import FairQueue
from noloco_node.training.host_copies import Ahead, UnderWay

T = TypeVar("T")


class QueueTurn(NamedTuple):
    """On whose account a piece of work goes: a source, a source within it and so on, and what it costs (tokens)."""

    sources: tuple[str, ...] = ("",)
    cost: float = 0.0


OWN = QueueTurn()
"""This node's own work: it is not counted."""


logger = logging.getLogger(__name__)

C = TypeVar("C")

MOST_AHEAD = 2
"""Calls whose inputs are sent before their turn: the next one, and one that was the next until another overtook it."""

STARVED_CALLS, STARVED_SECONDS = 8, 60.0
"""A device that has had no memory for so many calls of a kind in a row, and for so long, is of no use to anybody."""


class Priority(IntEnum):
    """Lower goes first. Backward before forward before draw keeps memory bounded and the path free of deadlocks."""

    STEP = 0
    BACKWARD = 1
    FORWARD = 2
    DRAW = 3
    STOP = 4


@dataclass(slots=True)
class DeviceWaits:
    """What calls have waited for."""

    seconds: float = 0.0
    """Until their turn came."""


class DeviceLoad(NamedTuple):
    """How much there is to do for a device."""

    waiting: int = 0
    """Forwards of others that wait for their turn."""
    busy_seconds: float = 0.0
    """For which it has worked so far."""


class Compute(ABC):
    """What owns a device: it runs callables one at a time and hands their results to the event loop.

    A call whose future was cancelled before its turn is not run; one that has begun runs to its end, so no operation on
    the weights is ever half done.
    """

    def __init__(self) -> None:
        self.busy_seconds = 0.0
        """For which calls have run. A microbatch's call ends when what it gives is on the host, and time in which two
        run counts once. What a step leaves a GPU to do is in the next call's time."""
        self._busy = dict.fromkeys(Priority, 0.0)

    @property
    def busy_by_work(self) -> dict[str, float]:
        """`busy_seconds` by what was worked on."""
        return {work.name.lower(): seconds for work, seconds in self._busy.items() if work is not Priority.STOP}

    def _worked(self, priority: Priority, seconds: float) -> None:
        self.busy_seconds += seconds
        self._busy[priority] += seconds

    @property
    @abstractmethod
    def waiting(self) -> int:
        """Calls that wait for their turn."""

    @property
    @abstractmethod
    def load(self) -> DeviceLoad:
        """What there is to do now, and what was done."""

    @abstractmethod
    async def run(
        self,
        priority: Priority,
        work: Callable[[], T | UnderWay[T]],
        turn: QueueTurn = OWN,
        waits: DeviceWaits | None = None,
        ahead: Ahead | None = None,
    ) -> T:
        """Run `work` on the device; its result or exception comes back, in the order in which calls are taken. Forwards
        go by their `turn`. What it waits is added to `waits`. What it needs may come `ahead` of it."""

    @abstractmethod
    async def close(self) -> None:
        """Finish what is queued and end."""


_Came = tuple[Any, Exception | None]
"""What a call returned, or raised."""


class ComputeThread(Compute):
    """A thread of its own. Must be created and closed inside a running loop."""

    def __init__(self, name: str = "compute") -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._queue = _Waiting()
        self._stopping = False
        self._starving = Starving()
        self._sender: threading.Thread | None = None
        """Sends what calls need ahead of them; made for the first that needs anything."""
        self._answers: _Answers | None = None
        """Tells what came of calls; made for the first whose answer arrives late."""
        self._worked_until = 0.0
        """Monotonic seconds up to which work has been counted."""
        self.lost: asyncio.Future[UserError] = self._loop.create_future()
        """Why the device answers nothing any more, once that is so: no call after it does better in this process."""
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def load(self) -> DeviceLoad:
        return DeviceLoad(self._queue.forwards, self.busy_seconds)

    async def run(
        self,
        priority: Priority,
        work: Callable[[], T | UnderWay[T]],
        turn: QueueTurn = OWN,
        waits: DeviceWaits | None = None,
        ahead: Ahead | None = None,
    ) -> T:
        """See `Compute.run`. RuntimeError once it is closed."""
        if self._stopping:
            raise RuntimeError("the compute thread is closed")
        future: asyncio.Future[T] = self._loop.create_future()
        asked = ambient.monotonic()

        def call() -> None:
            if waits is not None:
                waits.seconds += ambient.monotonic() - asked
            self._carry_out(priority, work, future)

        if ahead is None:
            self._queue.put(priority, _Call(call), turn)
            return await future
        if self._sender is None:
            self._sender = threading.Thread(target=self._send, name="copies", daemon=True)
            self._sender.start()
        try:
            self._queue.put(priority, _Call(call, ahead), turn)
            return await future
        finally:
            ahead.forget()

    async def close(self) -> None:
        """See `Compute.close`: the thread ends."""
        if not self._stopping:
            self._stopping = True
            self._queue.put(Priority.STOP, _Call(_leave), OWN)
        await ambient.elsewhere(self._thread.join)
        if self._answers is not None:
            await ambient.elsewhere(self._answers.close)
        if self._sender is not None:
            self._queue.close()
            await ambient.elsewhere(self._sender.join)

    def _carry_out(self, priority: Priority, work: Callable[[], Any], future: asyncio.Future[Any]) -> None:
        if future.cancelled():
            return
        began = ambient.monotonic()
        came = attempt(work)
        ended = ambient.monotonic()
        late = cast("UnderWay[Any] | None", came[0] if isinstance(came[0], UnderWay) else None)
        if late is not None and self._answers is None:
            self._answers = _Answers()
        if self._answers is None:
            self._tell(priority, (began, ended), came, future)
        elif late is None:
            self._answers.put(lambda: self._tell(priority, (began, ended), came, future))
        else:
            self._answers.put_late(late, lambda came: self._tell(priority, (began, ambient.monotonic()), came, future))

    def _tell(self, priority: Priority, worked: tuple[float, float], came: _Came, future: asyncio.Future[Any]) -> None:
        """What came of a call that was worked on from then until then: on one thread at a time, in the order of
        calls."""
        (began, ended), (result, error) = worked, came
        self._worked(priority, max(0.0, ended - max(began, self._worked_until)))
        self._worked_until = max(ended, self._worked_until)
        starved = self._starving.after(priority, error, ended)
        if isinstance(error, torch.AcceleratorError):
            starved = error = _lost_by(error)
        if starved is not None:
            self._loop.call_soon_threadsafe(self._is_lost, starved)
        self._loop.call_soon_threadsafe(settle, future, result, error)

    async def ends_when_lost(self) -> None:
        """Raises UserError (CHECK_FAILED) once the device is lost, or has no memory for anything: a node that serves
        others would refuse all.
        A caller that is cancelled as it waits here leaves it to the next: a thread outlives the stays of its node."""
        raise await asyncio.shield(self.lost)

    def _is_lost(self, why: UserError) -> None:
        if not self.lost.done():
            self.lost.set_result(why)

    def _work(self) -> None:
        while True:
            call = self._queue.get()
            try:
                call.work()
            except _Leave:
                return
            finally:
                del call  # else it would hold what it was called with, and its result, until the next one comes

    def _send(self) -> None:
        while (ahead := self._queue.next_ahead()) is not None:
            ahead.begin()
            del ahead


class _Answers:
    """A thread that tells what came of calls, each after those before it. So the device is given call n + 1 before
    anybody waits for call n; that one is waited for before call n + 2."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(1)
        """One answer is on its way beside the call that is worked on: more would hold memory, and work that is more
        urgent would wait behind what the device has been given."""
        self._thread = threading.Thread(target=self._work, name="answers", daemon=True)
        self._thread.start()

    def put(self, tell: Callable[[], None]) -> None:
        """Tell it once all before it was told."""
        self._calls.put(tell)

    def put_late(self, answer: UnderWay[Any], tell: Callable[[_Came], None]) -> None:
        """Wait for the answer there, and tell what it is. Waits here for the one before it."""
        self._room.acquire()

        def arrive() -> None:
            came = attempt(answer.wait)
            self._room.release()
            tell(came)

        self._calls.put(arrive)

    def close(self) -> None:
        """Tell all, and end."""
        self._calls.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call


class Starving:
    """How often in a row a device had no memory for calls of one kind. Belongs to the thread that tells of calls."""

    def __init__(self) -> None:
        self._in_a_row: dict[Priority, tuple[int, float]] = {}
        """So many, and since when."""

    def after(self, kind: Priority, error: Exception | None, now: float) -> UserError | None:
        """What a call of this kind came to. Why the device is of no use any more, once that is so."""
        if kind not in (Priority.BACKWARD, Priority.FORWARD, Priority.DRAW):
            return None
        if not isinstance(error, NoMemory):
            if error is None:
                self._in_a_row.pop(kind, None)
            return None
        count, since = self._in_a_row.get(kind, (0, now))
        self._in_a_row[kind] = count + 1, since
        if count == 0:
            logger.warning("there is no memory for a microbatch now, so it is refused: %s", error)
        if count + 1 < STARVED_CALLS or now - since < STARVED_SECONDS:
            return None
        return UserError(
            ExitCode.CHECK_FAILED,
            f"the device has had no memory for a microbatch for {now - since:.0f} s ({error})",
            "close what else computes on it, let fewer microbatches be under way (node.in_flight at the first stage, "
            "node.max_pending at the others), or serve a smaller stage with --stage",
        )


class CallOrder(Generic[C]):
    """Calls that wait: by priority, and forwards in turn."""

    def __init__(self) -> None:
        self._number = itertools.count()
        self._heap: list[tuple[Priority, int, C]] = []
        self._forwards: FairQueue[C] = FairQueue()

    def __len__(self) -> int:
        return len(self._heap) + len(self._forwards)

    @property
    def forwards(self) -> int:
        return len(self._forwards)

    def put(self, priority: Priority, call: C, turn: QueueTurn) -> None:
        if priority is Priority.FORWARD:
            self._forwards.push(turn.sources, turn.cost, call)
        else:
            heapq.heappush(self._heap, (priority, next(self._number), call))

    def first(self) -> C:
        """The call that would be next now. IndexError where none waits."""
        if self._heap and (self._heap[0][0] < Priority.FORWARD or not len(self._forwards)):
            return self._heap[0][2]
        return self._forwards.first()

    def take(self) -> C:
        """The next call. IndexError where none waits."""
        if self._heap and (self._heap[0][0] < Priority.FORWARD or not len(self._forwards)):
            return heapq.heappop(self._heap)[2]
        return self._forwards.pop()


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    work: Callable[[], None]
    ahead: Ahead | None = None


class _Waiting:
    """Others put calls in, the compute thread takes them out, and a third one has the next one's inputs sent."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._order: CallOrder[_Call] = CallOrder()
        self._sent: set[_Call] = set()
        """Calls that wait, and whose inputs need not be sent any more."""
        self._closed = False

    def __len__(self) -> int:
        with self._changed:
            return len(self._order)

    @property
    def forwards(self) -> int:
        with self._changed:
            return self._order.forwards

    def put(self, priority: Priority, call: _Call, turn: QueueTurn) -> None:
        with self._changed:
            self._order.put(priority, call, turn)
            self._changed.notify_all()

    def get(self) -> _Call:
        """The next call; waits for one."""
        with self._changed:
            while not len(self._order):
                self._changed.wait()
            call = self._order.take()
            self._sent.discard(call)
            self._changed.notify_all()
            return call

    def next_ahead(self) -> Ahead | None:
        """What the next call needs, once; waits for one that needs anything. None when it is closed."""
        with self._changed:
            while not self._closed:
                call = self._order.first() if len(self._order) else None
                if call is not None and call.ahead and call not in self._sent and len(self._sent) < MOST_AHEAD:
                    self._sent.add(call)
                    return call.ahead
                self._changed.wait()
            return None

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class _Leave(Exception):
    pass


def _leave() -> None:
    raise _Leave


def attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """What `work` returns, or raises: for `settle`, perhaps on another thread. What raised holds nothing any more of
    what it worked with. Memory that was asked for in vain is NoMemory, by the device or by the system."""
    try:
        return work(), None
    except Exception as error:  # noqa: BLE001 - not hidden: it is raised where the call was made
        _let_go(error)
        refused = isinstance(error, RuntimeError | MemoryError) and refused_memory(error) is not None
        return None, NoMemory(str(error).partition("\n")[0] or type(error).__name__) if refused else error


def _let_go(error: BaseException | None) -> None:
    """Free what the calls that ended with an error, or with one that led to it, still hold: a microbatch's whole graph,
    where the device had no memory left for it. The future, its error and who awaited it hold each other, and so the
    collector of garbage alone would free it, which does not know how large it is."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _lost_by(error: torch.AcceleratorError) -> UserError:
    """CUDA gives a process nothing more after such an error, a driver that was reset or a memory fault: all later calls
    end with the same one."""
    return UserError(
        ExitCode.CHECK_FAILED,
        f"the device answers nothing any more: {str(error).splitlines()[0]}",
        "start the node again: it goes on from its last checkpoint; if that comes again, look at what the driver logs",
    )


def settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    """Tell the task that waits for a call what came of it."""
    if future.cancelled():
        return
    if isinstance(error, StopIteration):  # a future cannot carry it: its caller would wait for ever
        future.set_exception(RuntimeError(f"work ended with {error!r}"))
    elif error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
