"""Tensors between the host and the device of a stage: pinned memory and a stream of their own where that is a GPU.

The processor and a GPU go the same way through here. On the processor nothing is copied that is there already.

What a microbatch needs there may come ahead of it, while the device works on another: then only the device waits for
it. What it gives may arrive late, while the device works on the next one. The thread that keeps the device at work then
waits for those numbers alone that decide something. What an outer step needs, a vector as long as the stage, crosses on
a stream of its own: the device computes on meanwhile, and that thread does not wait for it either.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from noloco_node import ambient
from noloco_node.training.compute_device import memory_of_device, new_event, streams_of
from noloco_node.training.frozen_state import PIECE

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class _OnItsWay:
    """A tensor of the host and what becomes of it on the device."""

    source: Tensor
    there: Tensor
    done: Any
    """The event at which it is there."""


@dataclass(frozen=True, slots=True, eq=False)
class UnderWay(Generic[T]):
    """What a call on the device came to, of which something has yet to arrive on the host. For any thread."""

    result: T
    arrivals: tuple[Callable[[], None], ...]

    def wait(self) -> T:
        """The result, when all of it is there. Raises what its arrival raises."""
        for arrive in self.arrivals:
            arrive()
        return self.result


class HostCopies:
    """What crosses. Belongs to the compute thread but for `bring`, `room`, what comes ahead and what arrives late; it
    waits for the device nowhere else as it trains.

    A GPU's own queue is not asked before everything that a microbatch needs of it is in there: `to_host` is that one
    question.
    """

    def __init__(self, device: torch.device, *, apart: bool | None = None) -> None:
        """`apart`: by pinned memory and a stream of copies; None: where the device has such."""
        self._device = device
        self._streams: Any = torch.get_device_module(device) if apart else streams_of(device)
        if self._streams is not None:
            self._of_thread: Any = getattr(self._streams, "device", nullcontext)  # the processor is every thread's
            self._coming, self._going, self._long = (self._streams.Stream(device) for _ in range(3))
        self._ahead: dict[int, _OnItsWay] = {}
        self._lock = threading.Lock()
        self._taken: Any = None
        """The event at which the device has read what came last."""
        self._late: list[Callable[[], None]] | None = None
        """What waits for answers, where they may arrive late."""
        self._widening, self._widened = threading.Lock(), 0
        """Long vectors that are made wider on the host; so many have been begun."""
        self.waits = 0
        """How often the thread that keeps the device at work has waited for it."""

    def to_device(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """A host tensor on the device; itself where it is there in this precision. Waits for nothing. What crosses is
        as narrow as it came, and what comes `ahead` is not sent again."""
        if self._streams is None:
            return tensor.to(device=self._device, dtype=dtype)
        with self._lock:
            coming = self._ahead.pop(id(tensor), None)
        coming = coming or self._send(tensor)
        current = self._streams.current_stream(self._device)
        current.wait_event(coming.done)
        here = coming.there.to(dtype, copy=True)
        taken = self._streams.Event()
        taken.record(current)
        self._taken = taken  # before what came is let go: see `_send`
        return here

    def ahead(self, *tensors: Tensor) -> Ahead | None:
        """These host tensors, which `to_device` will be asked for by a call that waits for its turn. None where they
        need no way. For any thread, as what it returns is."""
        return None if self._streams is None else Ahead(self, tensors)

    def begin(self, tensor: Tensor, wanted: Callable[[], bool]) -> None:
        """Send a host tensor to the device, and keep what comes of it if it is still `wanted` then. Nothing is sent
        where the device takes nothing, or there is no memory for it, of the device or of the host's that is never paged
        out: its call will say so, or find some."""
        try:
            coming = self._send(tensor)
        except RuntimeError:  # OutOfMemoryError and AcceleratorError are such
            return
        with self._lock:
            if wanted():
                self._ahead[id(tensor)] = coming

    def forget(self, tensor: Tensor) -> None:
        """It is not wanted any more: the device's memory for it is free."""
        with self._lock:
            self._ahead.pop(id(tensor), None)

    @property
    def coming(self) -> int:
        """Tensors that have been sent ahead and not been taken."""
        return len(self._ahead)

    def _send(self, tensor: Tensor) -> _OnItsWay:
        """Begin to copy a tensor of the host.

        Its memory there is of the stream that brings it, and is used anew by that stream alone. Nobody gives it back
        before `_taken` says that the device has read it, so a caller that gets memory here and then looks at `_taken`
        waits for every earlier reader of it, and for no computation beyond that.
        """
        pinned = self.room(tensor.shape, tensor.dtype).copy_(tensor)
        with self._on(self._coming):
            there = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
            if (taken := self._taken) is not None:
                self._coming.wait_event(taken)
            there.copy_(pinned, non_blocking=True)
        done = self._streams.Event()
        done.record(self._coming)
        return _OnItsWay(tensor, there, done)

    def to_host(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """These tensors of the device on the host, all by one wait."""
        self.waits += 1
        if self._streams is None:
            return tuple(tensor.to("cpu") for tensor in tensors)
        here = [(self.room(tensor.shape, tensor.dtype), tensor) for tensor in tensors]
        self._beside(here, self._going)()
        return tuple(to for to, _ in here)

    def late(self, work: Callable[[], T]) -> T | UnderWay[T]:
        """What `work` returns. Where an `answer` of it has a way to go, that is waited for afterwards, and the device
        can be given something else before."""
        if self._streams is None:
            return work()
        self._late = late = list[Callable[[], None]]()
        try:
            result = work()
        finally:
            self._late = None
        return UnderWay(result, tuple(late)) if late else result

    @property
    def answers_late(self) -> bool:
        """Whether an `answer` is waited for afterwards."""
        return self._late is not None

    def answer(self, tensors: Sequence[Tensor], then: Callable[..., None]) -> tuple[Tensor, ...]:
        """These tensors of the device on the host, for `then` to look at: by one wait, or `late`."""
        if self._late is None:
            here = self.to_host(*tensors)
            then(*here)
            return here
        pairs = [(self.room(tensor.shape, tensor.dtype), tensor) for tensor in tensors]
        crossed = self._beside(pairs, self._going)

        def arrive() -> None:
            crossed()
            # What it came from is held until now: the device's memory of it would be used for something else.
            then(*(to for to, _ in pairs))

        self._late.append(arrive)
        return tuple(to for to, _ in pairs)

    def begin_to_host(self, room: Tensor, source: Tensor) -> Callable[[], None] | None:
        """Copy a long vector of the device, as it is now, into the host's `room`. None where that is done; else what
        waits for it, on any thread, and `source` is written only after `before_writing`."""
        if self._streams is None:
            room.copy_(source)
            return None
        if room.dtype == source.dtype:
            return self._beside([(room, source)], self._long)
        narrow = self.room(source.shape, source.dtype)  # what is made wider there takes as much of the device's memory
        crossed = self._beside([(narrow, source)], self._long)
        self._widened = number = self._widened + 1

        def wait() -> None:
            crossed()
            with self._widening:
                if number == self._widened:  # else its outer step was given up, and the room is another one's
                    room.copy_(narrow)

        return wait

    def piece_to_host(self, source: Tensor) -> Tensor:
        """A piece of a long vector of the device on the host: itself where it is there. For any thread; nobody changes
        it meanwhile."""
        if self._streams is None:
            return source.to("cpu")
        room = self.room(source.shape, source.dtype)
        self._beside([(room, source)], self._long)()
        return room

    def before_writing(self) -> None:
        """What the device is given from now on may write to vectors that are on their way to the host: it waits for
        them, and nobody else does."""
        if self._streams is not None:
            self._streams.current_stream(self._device).wait_stream(self._long)

    def bring(self, vector: Tensor) -> Tensor:
        """A long host vector on the device, when it is there; itself where it needs no way, or where the device has no
        memory for it. For any thread but the one that keeps the device at work."""
        if self._streams is None:
            return vector.to(self._device)
        try:
            there = torch.empty_like(vector, device=self._device)
        except torch.OutOfMemoryError:
            return vector
        self._beside([(there, vector)], self._long)()
        return there

    def fill(self, there: Tensor, vector: Tensor) -> None:
        """Replace a long vector of the device by one of the host, and wait for it. It crosses in pieces, by memory that
        is never paged out: a driver copies from other memory at a fraction of the pace."""
        if self._streams is None:
            there.copy_(vector)
            return
        for at in range(0, len(there), PIECE):
            to = there[at : at + PIECE]
            piece = self.room(to.shape, to.dtype).copy_(vector[at : at + PIECE])
            self._beside([(to, piece)], self._long)()

    def beside(self) -> Beside | None:
        """The device, for arithmetic beside the training. None where it has no memory or no queues of its own."""
        return None if self._streams is None else Beside(self._device, self._on, self._streams.Stream(self._device))

    def watch(self) -> DeviceWatch:
        """Begin to take the time of what the device is given from now on."""
        return DeviceWatch(self._streams, self._device)

    def room(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Memory of the host, with whatever it held, for what crosses: it is never paged out where there is a way to
        go, since only such memory is copied beside the computing, and without a thread that is held for it."""
        return torch.empty(shape, dtype=dtype, pin_memory=self._streams is not None)

    def _beside(self, copies: list[tuple[Tensor, Tensor]], stream: Any) -> Callable[[], None]:
        """Copy the second of each pair into the first on a stream of copies, after what the device has in hand now: the
        memory of either may be of that. Returns what waits for it, asleep: by default such a wait keeps a core busy."""
        stream.wait_stream(self._streams.current_stream(self._device))
        with self._on(stream):
            for to, source in copies:
                to.copy_(source, non_blocking=True)
        done = new_event(self._streams, self._device)
        done.record(stream)
        return done.synchronize

    @contextmanager
    def _on(self, stream: Any) -> Generator[None]:
        """What the block gives the device is put on this stream. The device is made the thread's own first: as torch
        leaves the stream of another one it sets up the thread's, which takes some hundred MB of a GPU on which nothing
        is computed here."""
        with self._of_thread(self._device), self._streams.stream(stream):
            yield


class Beside:
    """An `Accelerator`: the device by a queue of its own, on which only the arithmetic of outer steps is put. It never
    waits for the training there, nor the training for it; what it reads and writes is in the host's memory."""

    def __init__(self, device: torch.device, on: Callable[[Any], AbstractContextManager[None]], stream: Any) -> None:
        self._device, self._on, self._stream = device, on, stream

    @property
    def device(self) -> torch.device:
        return self._device

    def has_room(self, size: int) -> bool:
        """See `Accelerator.has_room`: torch gives back nothing that training has taken once."""
        return size <= memory_of_device(self._device).get("free", 0)

    def beside(self) -> AbstractContextManager[None]:
        return self._on(self._stream)


class DeviceWatch:
    """How long the device works on what is given to it between the making of this and `stop`, whenever it gets to that:
    it is asked afterwards, so that nothing waits for the answer but who wants it. On the processor, the time between
    both."""

    def __init__(self, streams: Any, device: torch.device) -> None:
        self._streams, self._device = streams, device
        self._began, self._ended = self._moment(), None

    def stop(self) -> None:
        """On the thread that keeps the device at work, as the making."""
        self._ended = self._moment()

    def seconds(self) -> float:
        """Waits until the device has got to the end. For any thread, once it is stopped."""
        assert self._ended is not None, "a watch is stopped before it is read"
        if self._streams is None:
            return self._ended - self._began
        self._ended.synchronize()
        return 1e-3 * self._began.elapsed_time(self._ended)

    def _moment(self) -> Any:
        if self._streams is None:
            return ambient.monotonic()
        moment = new_event(self._streams, self._device, timed=True)  # see `_beside`
        moment.record(self._streams.current_stream(self._device))
        return moment


class Ahead:
    """Tensors of the host that a call wants on the device, and that may wait. For any thread."""

    def __init__(self, copies: HostCopies, tensors: tuple[Tensor, ...]) -> None:
        self._copies = copies
        self._tensors = tensors
        self._wanted = True

    def begin(self) -> None:
        """Send them now, while the device works on something else."""
        for tensor in self._tensors:
            if self._wanted:
                self._copies.begin(tensor, lambda: self._wanted)

    def forget(self) -> None:
        """The call is over, or will not be: whatever was sent and not taken is let go, and nothing is sent any more."""
        self._wanted = False
        for tensor in self._tensors:
            self._copies.forget(tensor)
