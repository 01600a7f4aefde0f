"""Streams that do as a GPU's do: what is put on one happens when somebody waits for it, and not before.

Until then what it is to write is no number. A copy that a GPU cannot make beside the host holds the host here too.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from noloco_node.training.host_copies import HostCopies

CPU = torch.device("cpu")


def spoil(tensor: Tensor) -> None:
    """What memory holds that nobody has written yet: NaN, and where there is none a number that is no token's."""
    tensor.detach().fill_(torch.nan if tensor.is_floating_point() else -1)


class LateStream:
    """Keeps what is put on it."""

    def __init__(self, streams: LateStreams) -> None:
        self._streams = streams
        self._put = 0
        self.waiting: deque[Callable[[], object]] = deque()
        self.waited: list[LateEvent] = []
        """Events that what is put here now must wait for."""
        self.made: list[Tensor] = []
        """Memory that was taken for it."""
        self.worked = 0.0
        """Milliseconds for which the device has worked there: by its own clock, which the test sets."""

    def put(self, work: Callable[[], object]) -> None:
        """Do it once all is done that was put here before, and somebody waits for it."""
        with self._streams.lock:
            self._put += 1
            self.waiting.append(work)

    def wait_stream(self, other: LateStream) -> None:
        """What is put here from now on finds all done that is on the other one now."""
        assert self._streams.own in (self, other), "a stream of copies waits for another one"
        event = self._streams.Event()
        event.record(other)
        self._wait(event)

    def wait_event(self, event: LateEvent) -> None:
        """Wait for what was put there before the event."""
        self.waited.append(event)
        self._wait(event)

    def _wait(self, event: LateEvent) -> None:
        self.put(event.reach)
        if (
            self is self._streams.own
        ):  # what the test computes is not put anywhere, so now it must be as if it had waited
            self.run()

    def until_now(self) -> Callable[[], None]:
        """What does all that is here now."""
        put = self._put
        return lambda: self.run(put)

    def run(self, until: int | None = None) -> None:
        """Do what was put here, the first so many."""
        with self._streams.lock:
            left = self._put - (self._put if until is None else until)
            while len(self.waiting) > left:
                self.waiting.popleft()()


class LateEvent:
    """See `torch.cuda.Event`."""

    def __init__(self, *, enable_timing: bool = False, blocking: bool = False) -> None:
        self._timed, self._blocking = enable_timing, blocking
        self.waiters: list[str] = []
        """Threads that have waited for it."""

    def record(self, stream: LateStream) -> None:
        """The moment at which what is on the stream now is done."""
        self.stream, self.reach, self._at = stream, stream.until_now(), stream.worked

    def elapsed_time(self, later: LateEvent) -> float:
        """Milliseconds of the device's own clock. Both must have been waited for."""
        assert self._timed
        assert later.waiters
        return later._at - self._at

    def synchronize(self) -> None:
        """Wait for it, as a thread of the host."""
        assert self._blocking, "a thread that waits for such an event keeps a core busy"
        self.waiters.append(threading.current_thread().name)
        self.reach()


class LateCopy(NamedTuple):
    """What was to be copied on a stream of copies."""

    stream: LateStream
    to: Tensor
    source: Tensor
    non_blocking: bool
    pinned: bool
    """Whether its host side is memory that is never paged out."""


class _Put(TorchDispatchMode):
    def __init__(self, streams: LateStreams, stream: LateStream) -> None:
        super().__init__()
        self._streams = streams
        self._stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func.overloadpacket.__name__ == "copy_":
            to, source, *rest = args
            self._streams.copy(self._stream, to, source, named.get("non_blocking", bool(rest and rest[0])))
            return to
        made = func(*args, **named)
        if func.overloadpacket.__name__ == "empty":
            self._stream.made.append(made)
        return made


class LateStreams:
    """A module of a device, as `torch.cuda` is one."""

    def __init__(self) -> None:
        self.timed: list[LateEvent] = []
        """Events that the device's clock is read by."""
        self.lock = threading.RLock()
        self._empty = torch.empty
        self._pinned: dict[int, object] = {}
        """By its address, memory that is never paged out; kept, or others would get the address."""
        self.own = LateStream(self)
        """The device's: what a test computes is done at once, and what it `computes` here is late."""
        self.made: list[LateStream] = []
        self.copies: list[LateCopy] = []
        self.held = 0
        """Copies that the host was held for, since a GPU makes only those beside it that are `non_blocking` and whose
        host side is never paged out."""
        self.chosen: list[object] = []
        """The devices that are the thread's own, as `torch.cuda.device` makes them."""
        self.strayed = 0
        """How often a stream was entered while another device was the thread's own: torch sets that one up then."""

    def Event(self, *, enable_timing: bool = False, blocking: bool = False) -> LateEvent:
        """One more."""
        event = LateEvent(enable_timing=enable_timing, blocking=blocking)
        self.timed += [event] * enable_timing
        return event

    def Stream(self, _device: object) -> LateStream:
        """One more."""
        self.made.append(LateStream(self))
        return self.made[-1]

    def is_available(self) -> bool:
        """Whether torch may use it otherwise: a build for GPUs asks the module that this stands for."""
        return False

    def current_stream(self, _device: object) -> LateStream:
        """The device's own."""
        return self.own

    def computes(self, there: Tensor, values: Tensor) -> None:
        """The device is asked to work something out, and is not done with it."""
        spoil(there)
        self.own.put(lambda: there.copy_(values))

    def copy(self, stream: LateStream, to: Tensor, source: Tensor, non_blocking: bool) -> None:
        """Put a copy on a stream."""
        pinned = any(each.untyped_storage().data_ptr() in self._pinned for each in (to, source))
        self.copies.append(LateCopy(stream, to, source, non_blocking, pinned))
        spoil(to)
        stream.put(lambda: to.copy_(source))
        if not (non_blocking and pinned):
            self.held += 1
            stream.run()

    def empty(self, *size: Any, pin_memory: bool = False, **kind: Any) -> Tensor:
        """In place of `torch.empty`: no processor has memory that is never paged out."""
        made = self._empty(*size, **kind)
        spoil(made)
        if pin_memory:
            self._pinned[made.untyped_storage().data_ptr()] = made
        return made

    @contextmanager
    def device(self, device: object) -> Generator[None]:
        """In the block it is the thread's own."""
        self.chosen.append(device)
        try:
            yield
        finally:
            self.chosen.pop()

    @contextmanager
    def stream(self, stream: LateStream) -> Generator[None]:
        """What is copied in the block is put on the stream."""
        self.strayed += self.chosen[-1:] != [CPU]
        with _Put(self, stream):
            yield


def late_copies(monkeypatch: pytest.MonkeyPatch) -> tuple[HostCopies, LateStreams]:
    """Copies to a device apart, whose streams are late."""
    streams = LateStreams()
    monkeypatch.setattr(torch, "get_device_module", lambda _device: streams)
    monkeypatch.setattr(torch, "empty", streams.empty)
    return HostCopies(CPU, apart=True), streams
