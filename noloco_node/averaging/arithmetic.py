"""The arithmetic of an open outer step runs on a thread of its own. A number that is not finite is blamed on the side
it came from."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

from noloco_node.ambient import OneByOne
from noloco_node.identity.peer_id import PeerId
from noloco_node.outer.replica import NotFinite
from noloco_node.training.stage_worker import StageWorker
from noloco_node.transport.calls import BadAnswer, judging
from noloco_node.transport.interface import Transport

T = TypeVar("T")

THREAD = "outer"


class Arithmetic:
    """One piece after another: what a closed session left there is done before the next session clears the buffers."""

    def __init__(self, transport: Transport, worker: StageWorker) -> None:
        self._transport = transport
        self._worker = worker
        self._thread = OneByOne(THREAD)

    async def do(self, work: Callable[[], T]) -> T:
        """What `work` returns, or raises."""
        return await self._thread.do(work)

    async def take_in(self, partner: PeerId, work: Callable[[], None]) -> None:
        """Arithmetic on what the partner has answered. Raises ProtocolViolation, booked against the partner, where that
        is not finite; NotFinite where this replica's own weights are not, for which it must blame nobody."""
        with judging(self._transport, partner, "exchange"):
            try:
                await self.do(work)
            except NotFinite as error:
                if not await self.own_is_finite():
                    raise
                raise BadAnswer(str(error)) from None

    async def own_is_finite(self) -> bool:
        """Whether this replica's own weights of the open step are."""
        return math.isfinite(await self.do(self._worker.outer.own_motion))

    def stop(self) -> None:
        """End the thread once the piece under way is done; the others are not begun."""
        self._thread.stop()
