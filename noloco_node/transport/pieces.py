"""Many pieces of one transfer under way at once: as many as come quickly."""

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
"""The most pieces under way: 1 Gbit/s holds so many of 1 MiB over a round trip of 250 ms."""
QUICK, SLOW = 1 / 32, 1 / 4
"""A round of pieces that each come within the first share of their deadline lets twice as many be under way. A piece
that takes more than the second share halves their number: a line may become slow under way."""


class Width:
    """How many pieces to have under way.

    More and more of them, as long as each comes quickly. Beyond that they would only wait for the line, and other
    traffic on it would wait behind them.
    """

    def __init__(self, limit: float, pieces: int = FIRST_PIECES, most: int | None = None) -> None:
        """`limit`: seconds within which a piece must be there. `pieces` are under way at first, later at most
        `most`, or `MOST_PIECES`."""
        self._limit = limit
        self.most = MOST_PIECES if most is None else most
        self.pieces: int = pieces
        """Under way from now on."""
        self._since, self._quick = -math.inf, 0
        """When the number changed last, and the quick pieces in a row that were asked for since."""

    def came(self, began: float, now: float) -> None:
        """One more piece is here; it was asked for when it `began`, both in monotonic seconds."""
        if began < self._since:
            return  # it went beside as many as there were before
        took = now - began
        self._quick = self._quick + 1 if took <= QUICK * self._limit else 0
        if self._quick == self.pieces:
            self._change(min(self.most, 2 * self.pieces), now)
        elif took > SLOW * self._limit:
            self._change(max(1, self.pieces // 2), now)

    def _change(self, pieces: int, now: float) -> None:
        self.pieces, self._since, self._quick = pieces, now, 0


async def side_by_side(items: Iterable[T], width: Width, work: Callable[[T], Awaitable[None]]) -> None:
    """Do `work` on each item, in their order, on `width.pieces` at once. Raises the first failure, and does no more
    then."""
    waiting, working, tasks = deque(items), 0, list[asyncio.Task[None]]()

    async def go_on() -> None:
        nonlocal working
        while waiting and working <= width.pieces:
            began = ambient.monotonic()
            try:
                await work(waiting.popleft())
            except BaseException:
                waiting.clear()
                raise
            width.came(began, ambient.monotonic())
            begin()
        working -= 1

    def begin() -> None:
        nonlocal working
        for _ in range(min(width.pieces - working, len(waiting))):
            working += 1
            tasks.append(asyncio.create_task(go_on()))

    begin()
    await all_of(tasks)
