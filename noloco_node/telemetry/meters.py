"""Counts in buckets, cheap enough for every microbatch: what is made of them is made every two seconds."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from noloco_node.telemetry.events import Distribution


class Meter:
    """How often values fell between `bounds`, and their sum. Not for several threads at once."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        """One more."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def distribution(self) -> Distribution:
        """So far."""
        return Distribution(bounds=self._bounds, counts=tuple(self._counts), sum=self._sum)
