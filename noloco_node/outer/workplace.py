"""Where the arithmetic of an outer step is done: on the host, or on a device beside what is trained there.

Slow weights and all else of an outer step lie on the host. A device is given a chunk, and what comes of it goes back at
once: between two chunks nothing is held there. So an exchange that ends anywhere leaves nothing on the device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")

logger = logging.getLogger(__name__)

HOST = torch.device("cpu")
IN_CACHE = 1 << 16
"""The number of values that are worked on together on the host, so that they stay in a processor's cache."""


def on_host(device: torch.device) -> bool:
    """Whether its memory is the host's."""
    return device.type == HOST.type


class Accelerator(Protocol):
    """A device with memory of its own, which works on what it is given beside its training."""

    @property
    def device(self) -> torch.device: ...

    def has_room(self, size: int) -> bool:
        """Whether so many bytes of its memory are free, beyond all that training has ever taken."""
        ...

    def beside(self) -> AbstractContextManager[None]:
        """What this thread gives the device in the block does not wait for the training, nor the training for it."""
        ...


class Workplace:
    """The device where there is one with room, else the host. Belongs to one thread at a time."""

    def __init__(self, accelerator: Accelerator | None = None) -> None:
        self._accelerator = accelerator
        self._taken = 0
        """The most bytes for which there has been room: torch keeps them, and they are not seen as free any more."""
        self._there = False

    def begin(self, size: int) -> None:
        """An outer step begins whose chunks take so many bytes of a device: is there room?"""
        if self._accelerator is not None:
            self._there = size <= self._taken or self._accelerator.has_room(size)
            self._taken = max(self._taken, size if self._there else 0)

    def do(self, work: Callable[[torch.device], T]) -> T:
        """What `work` returns, given the device to do it on; no tensor of another place than the host may be in it.

        Where the device refuses, the work is done again on the host, and so is the rest of this step. Therefore `work`
        writes to the host's vectors only as the last thing it does, or what it would write again.
        """
        if self._there and self._accelerator is not None:
            try:
                with self._accelerator.beside():
                    return work(self._accelerator.device)
            except RuntimeError as refusal:  # OutOfMemoryError and AcceleratorError are such
                self._refused(refusal)
        return work(HOST)

    def _refused(self, refusal: RuntimeError) -> None:
        """Without memory the next step looks for room again. Whatever else it was would come again, too."""
        self._there, self._taken = False, 0
        first = str(refusal).partition("\n")[0]
        if isinstance(refusal, torch.OutOfMemoryError):
            logger.info("the rest of an outer step is computed on the host: the device has no memory (%s)", first)
            return
        self._accelerator = None
        logger.warning("outer steps are computed on the host from now on: the device refuses them (%s)", first)
