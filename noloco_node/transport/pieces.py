"""Many pieces of one transfer under way at once: as many as the link needs, found by trying."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from noloco_node import ambient
from noloco_node.aio import all_of
from noloco_node.pauses import moved

T = TypeVar("T")

FIRST_PIECES = 4
MOST_PIECES = 32
"""The most pieces under way: 1 Gbit/s holds so many of 1 MiB over a round trip of 250 ms."""
GAIN, LOSS = 1.2, 1.05
"""Twice as many pieces are kept under way if the rate grows by the first factor. Half as many are kept if it falls by
no more than the second."""
REST, MOST_REST = 4, 64
"""The looks between a trial that changed nothing and the next, at first and at most. The number doubles after each such
trial."""


class Width:
    """How many pieces to have under way.

    The number is doubled again and again while that makes the transfer faster. On a line that is full more pieces would
    only wait, and other traffic on it would wait behind them. Now and then, more and more seldom, half as many and
    twice as many are tried. Neither a bad moment nor a good one then decides for a transfer of an hour. The number is
    also halved if a piece took a quarter of its time: a line may become slow under way.

    The rate is the number under way over the mean time that a piece takes (Little's law). It is not what came in some
    time, since pieces of many streams come in bursts.
    """

    def __init__(self, fixed: int | None, limit: float) -> None:
        """`fixed`, from the beginning, where that is a number. `limit`: seconds within which a piece must be
        there."""
        self.most = MOST_PIECES if fixed is None else fixed
        self.pieces: int = FIRST_PIECES if fixed is None else fixed
        """Under way from now on."""
        self._kept: int = self.pieces
        self._fixed, self._limit = fixed, limit
        self._narrowed_at = -math.inf
        self._rate = 0.0
        self._rest, self._rested, self._fewer_next = 0, 0, True
        self._first = 0
        self._look_anew(-math.inf)

    def begin_with(self, pieces: int) -> None:
        """No more than so many pieces are under way at first.

        If that is fewer than a fixed number, the number is no longer fixed: a slow beginning must not hold the whole
        transfer to less.
        """
        if pieces < self.pieces:
            self.pieces = self._kept = pieces
            self._fixed = None

    def wider(self) -> None:
        """One more piece is under way from now on.

        Its first piece may take many times as long as others. A new stream begins slowly, and its time says nothing of
        the line.
        """
        self._first += 1

    def not_wider(self) -> None:
        """Nothing was left for one more."""
        self._first -= 1

    def came(self, began: float, now: float, *, first: bool = False) -> None:
        """One more piece is here; it was asked for when it `began`, both in monotonic seconds.

        `first` marks the first piece of a lane that fetches pieces one after another.
        """
        self._first -= first
        if self._fixed is not None:
            return
        if not first and 4.0 * (now - began) > self._limit and began >= self._narrowed_at:
            self._narrow(now)
            return
        self._slowest = max(self._slowest, now - began)
        if first or self._first:
            self._came = 0
            self._spent = 0.0
        elif began >= self._since:
            self._came += 1
            self._spent += now - began
        if self._came >= self.pieces:
            self._set_anew(self.pieces * self._came / max(self._spent, 1e-9))
            self._look_anew(now)

    def _look_anew(self, now: float) -> None:
        """Only pieces that begin from now on say what so many under way bring."""
        self._since = now
        self._came = 0
        self._spent = self._slowest = 0.0

    def _narrow(self, now: float) -> None:
        """The line has become slow: half as many, and a rest before more are tried, for it may go on becoming slower.
        Those under way are as slow; they say no more."""
        self.pieces = self._kept = max(1, self.pieces // 2)
        self._rest, self._rested = REST, 0
        self._narrowed_at = now
        self._look_anew(now)

    def _set_anew(self, rate: float) -> None:
        """After a look at as many pieces as are under way; `rate` in pieces a second."""
        if self.pieces == self._kept:
            self._rested += 1
            if rate > GAIN * self._rate:  # the first look, too
                self._rate = rate
                self._try_more()
            else:
                self._rate = moved(self._rate, rate)
                if self._rested >= self._rest:
                    self._try_next()
            return
        more = self.pieces > self._kept
        brings = rate > (GAIN if more else 1.0 / LOSS) * self._rate
        if brings:
            self._kept, self._rate, self._rest = self.pieces, rate, REST
        else:
            if not (more or self._bears_twice):
                self._kept = self.pieces
            self.pieces, self._rest = self._kept, min(MOST_REST, max(REST, 2 * self._rest))
        self._rested = 0
        if brings and more:
            self._try_more()

    def _try_next(self) -> None:
        self._rested = 0
        if self._fewer_next:
            self.pieces = max(1, self.pieces // 2)
        else:
            self._try_more()
        self._fewer_next = not self._fewer_next

    def _try_more(self) -> None:
        if self._bears_twice:
            self.pieces = max(self.pieces, min(self.most, 2 * self.pieces))

    @property
    def _bears_twice(self) -> bool:
        """Whether twice as many pieces would be there in a quarter of the time, should they only share the line: it may
        become slower meanwhile."""
        return 8.0 * self._slowest <= self._limit


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
