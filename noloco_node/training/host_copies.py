"""Tensors between the host and the device of a stage: pinned memory and a stream of their own where that is a GPU.

The processor and a GPU go the same way through here. On the processor nothing is copied that is there already.

What a microbatch needs is waited for. What an outer step needs, a vector as long as the stage, crosses on a stream of
its own: the device computes on meanwhile, and who waits for it is not the thread that keeps the device at work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class HostCopies:
    """What crosses. Belongs to the compute thread but for `bring`; it waits for the device nowhere else as it trains.

    A GPU's own queue is not asked before everything that a microbatch needs of it is in there: `to_host` is that one
    question.
    """

    def __init__(self, device: torch.device, *, apart: bool | None = None) -> None:
        """`apart`: by pinned memory and a stream of copies; None: where the device is CUDA's."""
        self._device = device
        self._streams: Any = None
        if device.type == "cuda" if apart is None else apart:
            self._streams = torch.get_device_module(device)
            self._stream, self._long = self._streams.Stream(device), self._streams.Stream(device)
        self.waits = 0
        """How often the device was waited for."""

    def to_device(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """A host tensor on the device; itself where it is there in this precision. Waits for nothing. What crosses is
        as narrow as it came."""
        if self._streams is None:
            return tensor.to(device=self._device, dtype=dtype)
        there = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        self._beside([(there, self._pinned(tensor.shape, tensor.dtype).copy_(tensor))], self._stream)
        self._streams.current_stream(self._device).wait_stream(self._stream)
        return there.to(dtype)

    def to_host(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """These tensors of the device on the host, all by one wait."""
        self.waits += 1
        if self._streams is None:
            return tuple(tensor.to("cpu") for tensor in tensors)
        here = [(self._pinned(tensor.shape, tensor.dtype), tensor) for tensor in tensors]
        self._beside(here, self._stream)
        done = self._streams.Event()
        done.record(self._stream)
        done.synchronize()
        return tuple(to for to, _ in here)

    def begin_to_host(self, room: Tensor, source: Tensor) -> Callable[[], None] | None:
        """Copy a long vector of the device, as it is now, into the host's `room`. None where that is done; else what
        waits for it, on any thread, and `source` is written only after `before_writing`."""
        if self._streams is None:
            room.copy_(source)
            return None
        return self._begin(room, source)

    def before_writing(self) -> None:
        """What the device is given from now on may write to vectors that are on their way to the host: it waits for
        them, and nobody else does."""
        if self._streams is not None:
            self._streams.current_stream(self._device).wait_stream(self._long)

    def bring(self, vector: Tensor) -> Tensor:
        """A long host vector on the device, when it is there; itself where it needs no way. For any thread but the one
        that keeps the device at work."""
        if self._streams is None:
            return vector.to(self._device)
        there = torch.empty_like(vector, device=self._device)
        self._begin(there, vector)()
        return there

    def _begin(self, to: Tensor, source: Tensor) -> Callable[[], None]:
        self._beside([(to, source)], self._long)
        done = self._streams.Event()
        done.record(self._long)
        return done.synchronize

    def _beside(self, copies: list[tuple[Tensor, Tensor]], stream: Any) -> None:
        """Copy the second of each pair into the first on a stream of copies, after what the device has in hand now: the
        memory of either may be of that."""
        stream.wait_stream(self._streams.current_stream(self._device))
        with self._streams.stream(stream):
            for to, source in copies:
                to.copy_(source, non_blocking=True)

    def _pinned(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=self._device.type == "cuda")
