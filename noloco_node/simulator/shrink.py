"""The shortest part of a failing schedule that still fails (ddmin: Zeller and Hildebrandt, 2002)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def shortest_failing(items: Sequence[T], fails: Callable[[Sequence[T]], bool], most_tries: int = 500) -> list[T]:
    """A part of `items`, in their order, that still `fails`, and does so without none of its own. `items` itself must
    fail. Gives up growing shorter after `most_tries`."""
    kept, parts, tries = list(items), 2, 0
    while kept:
        size = max(1, -(-len(kept) // parts))
        for start in range(0, len(kept), size):
            rest = kept[:start] + kept[start + size :]
            tries += 1
            if tries > most_tries:
                return kept
            if fails(rest):
                kept, parts = rest, max(2, parts - 1)
                break
        else:
            if size == 1:
                break
            parts = min(len(kept), 2 * parts)
    return kept
