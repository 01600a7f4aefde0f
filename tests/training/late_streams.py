"""Streams of copies that do as a GPU's do: what is put on one happens when somebody waits for it, and not before."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from noloco_node.training.host_copies import HostCopies

CPU = torch.device("cpu")


class LateStream:
    """Keeps what is put on it."""

    def __init__(self, _device: object = None) -> None:
        self.put = 0
        self.waiting: deque[Callable[[], object]] = deque()
        self.waited: list[LateEvent] = []
        """Events that what is put here now must wait for."""
        self.made: list[Tensor] = []
        """Memory that was taken for it."""
        self.worked = 0.0
        """Milliseconds for which the device has worked there: by its own clock, which the test sets."""

    def wait_stream(self, other: LateStream) -> None:
        """What is put here from now on finds all that was put on the other one done. The device's own has nothing that
        waits; for it this is the moment."""
        if other.waiting and not isinstance(self, Prompt):
            raise AssertionError("a stream of copies waits for another one")
        other.run()

    def wait_event(self, event: LateEvent) -> None:
        """The same of what was put there before the event."""
        self.waited.append(event)
        event.synchronize()

    def run(self, until: int | None = None) -> None:
        """Do what was put here, the first so many."""
        left = self.put - (self.put if until is None else until)
        while len(self.waiting) > left:
            self.waiting.popleft()()


class Prompt(LateStream):
    """The device's own: whatever it is given is done at once."""


class LateEvent:
    """See `torch.cuda.Event`."""

    def __init__(self, *, enable_timing: bool = False) -> None:
        self._timed = enable_timing
        self.waiters: list[str] = []
        """Threads that have waited for it."""

    def record(self, stream: LateStream) -> None:
        """The moment at which what is on the stream now is done."""
        self.stream, self._until, self._at = stream, stream.put, stream.worked

    def elapsed_time(self, later: LateEvent) -> float:
        """Milliseconds of the device's own clock. Both must have been waited for."""
        assert self._timed
        assert later.waiters
        return later._at - self._at

    def synchronize(self) -> None:
        """Wait for it."""
        self.waiters.append(threading.current_thread().name)
        self.stream.run(self._until)


class _Put(TorchDispatchMode):
    def __init__(self, stream: LateStream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ != "copy_":
            made = func(*args, **(kwargs or {}))
            self._stream.made.append(made)
            return made
        self._stream.put += 1
        self._stream.waiting.append(lambda: func(*args, **(kwargs or {})))
        return args[0]


class LateStreams:
    """A module of a device, as `torch.cuda` is one."""

    def __init__(self) -> None:
        self.timed: list[LateEvent] = []
        """Events that the device's clock is read by."""
        self.own = Prompt()
        self.made: list[LateStream] = []
        self.chosen: list[object] = []
        """The devices that are the thread's own, as `torch.cuda.device` makes them."""
        self.strayed = 0
        """How often a stream was entered while another device was the thread's own: torch sets that one up then."""

    def Event(self, *, enable_timing: bool = False) -> LateEvent:
        """One more."""
        event = LateEvent(enable_timing=enable_timing)
        self.timed += [event] * enable_timing
        return event

    def Stream(self, _device: object) -> LateStream:
        """One more."""
        self.made.append(LateStream())
        return self.made[-1]

    def current_stream(self, _device: object) -> LateStream:
        """The device's own."""
        return self.own

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
        with _Put(stream):
            yield


def late_copies(monkeypatch: pytest.MonkeyPatch) -> tuple[HostCopies, LateStreams]:
    """Copies to a device apart, whose streams are late."""
    streams = LateStreams()
    monkeypatch.setattr(torch, "get_device_module", lambda _device: streams)
    return HostCopies(CPU, apart=True), streams
