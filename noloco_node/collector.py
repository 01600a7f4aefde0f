"""Tells when Python's garbage collector stays away: while libraries are loaded, whose objects stay for good."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Generator


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
