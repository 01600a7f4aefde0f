"""Where the C library takes memory from. It is told where it is glibc; elsewhere nothing is done."""

from __future__ import annotations

import os
import sys

_MOST_ARENAS = -8
"""M_ARENA_MAX of mallopt(3)."""
CHOSEN = ("MALLOC_ARENA_MAX", "GLIBC_TUNABLES")
"""Variables by which whoever starts the process may have chosen something else."""


def share_one_arena() -> bool:
    """Have all threads that begin from now on take memory from one place, so that what one of them gives back serves
    the others; whether that was done. Else each takes it from a place of its own, up to eight times the cores."""
    if sys.platform != "linux" or any(name in os.environ for name in CHOSEN):
        return False
    import ctypes  # not for a command that only prints

    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    return set_option is not None and bool(set_option(_MOST_ARENAS, 1))
