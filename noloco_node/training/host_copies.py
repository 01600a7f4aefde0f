"""Tensors between the host and the device of a stage: pinned memory and a stream of their own where that is a GPU.

The processor and a GPU go the same way through here. On the processor nothing is copied that is there already.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class HostCopies:
    """What crosses. Belongs to the compute thread, which waits for the device nowhere else while it trains.

    A GPU's own queue is not asked before everything that a microbatch needs of it is in there: `to_host` is that one
    question.
    """

    def __init__(self, device: torch.device, *, apart: bool | None = None) -> None:
        """`apart`: by pinned memory and a stream of copies; None: where the device is CUDA's."""
        self._device = device
        self._streams: Any = None
        if device.type == "cuda" if apart is None else apart:
            self._streams = torch.get_device_module(device)
            self._stream = self._streams.Stream(device)
        self.waits = 0
        """How often the device was waited for."""

    def to_device(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """A host tensor on the device; itself where it is there in this precision. Waits for nothing. What crosses is
        as narrow as it came."""
        if self._streams is None:
            return tensor.to(device=self._device, dtype=dtype)
        there = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        self._beside([(there, self._pinned(tensor.shape, tensor.dtype).copy_(tensor))])
        self._streams.current_stream(self._device).wait_stream(self._stream)
        return there.to(dtype)

    def to_host(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """These tensors of the device on the host, all by one wait."""
        self.waits += 1
        if self._streams is None:
            return tuple(tensor.to("cpu") for tensor in tensors)
        here = [(self._pinned(tensor.shape, tensor.dtype), tensor) for tensor in tensors]
        self._beside(here)
        done = self._streams.Event()
        done.record(self._stream)
        done.synchronize()
        return tuple(to for to, _ in here)

    def _beside(self, copies: list[tuple[Tensor, Tensor]]) -> None:
        """Copy the second of each pair into the first on the copies' stream, after what the device has in hand now: the
        memory of either may be of that."""
        self._stream.wait_stream(self._streams.current_stream(self._device))
        with self._streams.stream(self._stream):
            for to, source in copies:
                to.copy_(source, non_blocking=True)

    def _pinned(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=self._device.type == "cuda")
