"""Many pieces of one transfer under way at once: as many as the link needs, found by trying."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from noloco_node import ambient
from noloco_node.aio import all_of

T = TypeVar("T")

FIRST_PIECES = 4
MOST_PIECES = 32
"""What 1 Gbit/s holds over a round trip of 250 ms, in pieces of 1 MiB."""
GAIN = 1.2
"""Twice as many pieces under way are kept where so many times as many came in a second."""


class Width:
    """How many pieces to have under way: twice as many again and again while that makes the transfer faster, else as
    many as before. On a line that is full more of them would only wait, and whatever else goes over it behind them.
    Half as many where a piece took a quarter of its time: a line may become slow under way."""

    def __init__(self, fixed: int | None, limit: float) -> None:
        """`fixed`, from the beginning, where that is a number. `limit`: seconds within which a piece must be
        there."""
        self.most = MOST_PIECES if fixed is None else fixed
        self.pieces = FIRST_PIECES if fixed is None else fixed
        """Under way from now on."""
        self._kept = self.pieces
        self._fixed, self._limit = fixed, limit
        self._narrowed_at = -math.inf
        self._best = self._slowest = 0.0
        self._came = self._first = 0
        self._since: float | None = None

    def begin_with(self, pieces: int) -> None:
        """No more than so many at first."""
        self.pieces = self._kept = min(self.pieces, pieces)

    def wider(self) -> None:
        """One more is under way from now on. Its first piece may take many times as long as others: a new stream
        begins slowly, and what such a one takes says nothing of the line."""
        self._first += 1

    def not_wider(self) -> None:
        """Nothing was left for one more."""
        self._first -= 1

    def came(self, began: float, now: float, *, first: bool = False) -> None:
        """One more piece is here, which was asked for when it `began`, both in monotonic seconds; `first` of those that
        go one after another."""
        self._first -= first
        if self._fixed is None and not first and 4.0 * (now - began) > self._limit and began >= self._narrowed_at:
            self._narrow(now)
            return
        self._slowest = max(self._slowest, now - began)
        if self._since is None or self._first:  # nor is the way there a part of the line's rate
            self._since, self._came = now, 0
            return
        self._came += 1
        if self._came >= self.pieces:
            self._set_anew(self._came / max(now - self._since, 1e-9))
            self._came, self._since, self._slowest = 0, now, 0.0

    def _narrow(self, now: float) -> None:
        """The line has become slow: half as many, found anew from there on. Those under way are as slow; they say no
        more."""
        self.pieces = self._kept = max(1, self.pieces // 2)
        self._best, self._came, self._slowest = 0.0, 0, 0.0
        self._since = self._narrowed_at = now

    def _set_anew(self, rate: float) -> None:
        """After as many pieces as were under way; `rate` in pieces a second."""
        if rate <= GAIN * self._best:
            self.pieces = self._kept
            return
        self._best, self._kept = rate, self.pieces
        if 4.0 * self._slowest <= self._limit:  # should they only share the line, half of the time is enough
            self.pieces = max(self.pieces, min(self.most, 2 * self.pieces))


async def side_by_side(items: Iterable[T], width: Width, work: Callable[[T], Awaitable[None]]) -> None:
    """Do `work` on each item, in their order, on `width.pieces` at once. Raises the first failure, and does no more
    then."""
    waiting, working, tasks = deque(items), 0, list[asyncio.Task[None]]()

    async def go_on() -> None:
        nonlocal working
        first = True
        while waiting and working <= width.pieces:
            began = ambient.monotonic()
            try:
                await work(waiting.popleft())
            except BaseException:
                waiting.clear()
                raise
            width.came(began, ambient.monotonic(), first=first)
            first = False
            begin()
        working -= 1
        if first:
            width.not_wider()

    def begin() -> None:
        nonlocal working
        for _ in range(min(width.pieces - working, len(waiting))):
            working += 1
            width.wider()
            tasks.append(asyncio.create_task(go_on()))

    begin()
    await all_of(tasks)
