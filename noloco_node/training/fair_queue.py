"""A fair queue: of the sources that wait, the one that has had least of late goes next. No time is lost to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")

SOURCES_REMEMBERED = 64
"""Sources that are kept. Beyond them, sources with nothing waiting are forgotten; each is ahead by one item at most."""


class QueueTurn(NamedTuple):
    """On whose account a piece of work goes: a source, a source within it and so on, and what it costs (tokens)."""

    sources: tuple[str, ...] = ("",)
    cost: float = 0.0


OWN = QueueTurn()
"""This node's own work: it is not counted."""


class FairQueue(Generic[T]):
    """Start-time fair queueing: sources that wait get equal cost, and a source alone gets everything.

    The next item is of the source whose last work began the longest ago, counted in cost. A source with nothing waiting
    for a while neither saves anything up nor owes anything.
    """

    def __init__(self) -> None:
        self._now = 0.0
        """Cost at which the source stood that was served last."""
        self._latest = 0.0
        """Cost at which the source stands that has had most."""
        self._waiting: dict[str, _Line[T]] = {}
        """Sources with something waiting."""
        self._stood: dict[str, float] = {}
        """Cost at which other sources stand, if they have had more than the source that was served last."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, sources: Sequence[str], cost: float, item: T) -> None:
        """Let an item wait, on the account of `sources[0]`, within it on that of the next."""
        line = self._waiting.get(sources[0])
        if line is None:
            if len(self._waiting) + len(self._stood) >= SOURCES_REMEMBERED:
                self._stood = {}
            line = self._waiting[sources[0]] = _Line(max(self._stood.pop(sources[0], 0.0), self._now))
        self._count += 1
        if len(sources) > 1:
            line.parts = line.parts or FairQueue()
            line.parts.push(sources[1:], cost, item)
        else:
            line.items.append((cost, item))

    def pop(self) -> T:
        """The next item. IndexError where none waits."""
        return self.take()[1]

    def first(self) -> T:
        """The item that would be next now. IndexError where none waits."""
        return self._next()[1].first()

    def take(self) -> tuple[float, T]:
        """The next item and its cost. IndexError where none waits."""
        source, line = self._next()
        self._now = line.stands_at
        cost, item = line.take()
        self._count -= 1
        line.stands_at += cost
        self._latest = max(self._latest, line.stands_at)
        if not len(line):
            del self._waiting[source]
            self._stood[source] = line.stands_at
            if not self._waiting:  # nobody has to wait for anybody: all begin anew
                self._now = self._latest
                self._stood.clear()
        return cost, item

    def _next(self) -> tuple[str, _Line[T]]:
        if not self._waiting:
            raise IndexError("nothing waits")
        if len(self._waiting) > 1:
            return min(self._waiting.items(), key=_stands_at)
        return next(iter(self._waiting.items()))


def _stands_at(waiting: tuple[str, _Line[Any]]) -> float:
    return waiting[1].stands_at


class _Line(Generic[T]):
    """What one source has waiting, by itself or by its parts."""

    __slots__ = ("items", "parts", "stands_at")

    def __init__(self, stands_at: float) -> None:
        self.stands_at = stands_at
        self.items: list[tuple[float, T]] = []
        self.parts: FairQueue[T] | None = None

    def __len__(self) -> int:
        return len(self.items) + (len(self.parts) if self.parts else 0)

    def take(self) -> tuple[float, T]:
        return self.items.pop(0) if self.items or self.parts is None else self.parts.take()

    def first(self) -> T:
        return self.items[0][1] if self.items or self.parts is None else self.parts.first()
