"""The memory of this process: what it may still take of its address space, how a refusal looks, and when Python's
garbage collector stays away.

Batch systems and `ulimit -v` bound the address space; nothing in what the machine says of its memory shows it.
"""

from __future__ import annotations

import contextlib
import gc
import resource
import sys
from collections.abc import Generator
from typing import cast

import psutil

_REFUSED = (
    "can't allocate memory",
    "out of memory",
    "Cannot allocate memory",
    "failed to map segment",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_NOT_INITIALIZED",
    "HIPBLAS_STATUS_ALLOC_FAILED",
    "HIPBLAS_STATUS_NOT_INITIALIZED",
    "OUT_OF_DEVICE_MEMORY",
    "OUT_OF_HOST_MEMORY",
)
"""torch, its devices, their libraries and the loader say this; the last two come from Intel's driver. A library without
room for its handle says that it is not initialised."""


def address_space_left() -> int | None:
    """Bytes that this process may add to its address space; None where nothing bounds it."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    return max(0, limit - int(psutil.Process().memory_info().vms))


class NoMemory(RuntimeError):
    """Memory was asked for, of the machine or of a device, and not given. The caller is as before."""


def refused_memory(error: BaseException) -> BaseException | None:
    """What says that memory was asked for and not given: this error, or one of a group; None where nothing does."""
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        return next((cause for each in group.exceptions if (cause := refused_memory(each)) is not None), None)
    told = isinstance(error, RuntimeError | OSError | ImportError) and any(word in str(error) for word in _REFUSED)
    return error if isinstance(error, MemoryError | NoMemory) or told else None


@contextlib.contextmanager
def loading() -> Generator[None]:
    """Nothing is collected in the block; where it has loaded a module, all that is there by its end is never gone
    through again. Within another such block it does nothing.

    torch and transformers make so many objects that going through them took a fifth of the CPU time of a node's start.
    """
    if not gc.isenabled():
        yield
        return
    before = len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > before:
            gc.freeze()
        gc.enable()
