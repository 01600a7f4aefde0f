"""A node on its way to a stage: it says so before it downloads, so that those who join together spread out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncGenerator, Callable, Collection, Sequence

from noloco_node import PROTOCOL_VERSION, __version__
from noloco_node.aio import cancel_and_wait
from noloco_node.swarm.balancing import Server, choose_stage, servers_of, settle_among, supply_of
from noloco_node.swarm.directory import Directory, PeerRecord, PeerState
from noloco_node.swarm.membership import WITHDRAWAL_MARGIN_SECONDS
from noloco_node.swarm.transport import PeerId

logger = logging.getLogger(__name__)


class Arrival:
    """Publishes this node's `joining` record, which lives `record_seconds` unless it is renewed."""

    def __init__(self, directory: Directory, own: PeerId, record_seconds: float) -> None:
        self._directory = directory
        self._own = own
        self._record_seconds = record_seconds

    async def choose(self, work: Sequence[float], fitting: Collection[int], rng: random.Random) -> int:
        """Announce this node at the stage that needs it most, look again, and yield where others chose the same at the
        same time. `work` as in `Supply`; `fitting` are the stages that this machine can hold."""
        first = servers_of(self._directory.view, work, self._directory.now(), without=self._own)
        chosen = choose_stage(supply_of(first, work), fitting, rng)
        await self._publish(chosen, PeerState.JOINING)
        view = await self._directory.refresh()
        others = servers_of(view, work, self._directory.now(), without=self._own)
        better = settle_among(others, {server.peer for server in first}, self._own, chosen, work, fitting)
        if better != chosen:
            logger.info("others are joining stage %d at the same time: taking stage %d", chosen, better)
            await self.withdraw(chosen)
            await self._publish(better, PeerState.JOINING)
        return better

    async def confirmed(self, stage: int, work: Sequence[float], worth: Callable[[Sequence[Server]], bool]) -> bool:
        """Announce this node at `stage`, look again, and keep to it if it is still `worth` it beside all others that
        count by then: of several nodes that decide within one look of each other, only one goes, or none."""
        await self._publish(stage, PeerState.JOINING)
        view = await self._directory.refresh()
        if worth(servers_of(view, work, self._directory.now(), without=self._own)):
            return True
        await self.withdraw(stage)
        return False

    @contextlib.asynccontextmanager
    async def announced(self, stage: int) -> AsyncGenerator[None]:
        """Keep the announcement alive while the block runs; withdraw it where the block fails."""
        await self._publish(stage, PeerState.JOINING)
        renewing = asyncio.create_task(self._renew(stage))
        try:
            yield
        except BaseException:
            await cancel_and_wait((renewing,))
            await self.withdraw(stage)
            raise
        finally:
            await cancel_and_wait((renewing,))

    async def withdraw(self, stage: int) -> None:
        """This node does not come to `stage` after all."""
        await self._publish(stage, PeerState.GONE)

    async def _renew(self, stage: int) -> None:
        while True:
            await asyncio.sleep(self._record_seconds / 3)
            await self._publish(stage, PeerState.JOINING)

    async def _publish(self, stage: int, state: PeerState) -> None:
        gone = state is PeerState.GONE
        record = PeerRecord(
            peer_id=self._own,
            stage=stage,
            state=state,
            protocol=PROTOCOL_VERSION,
            version=__version__,
            sequence=int(self._directory.now() * 1000),
        )
        life = self._record_seconds + (WITHDRAWAL_MARGIN_SECONDS if gone else 0.0)
        if not await self._directory.publish(record, life):
            logger.debug("no peer took this node's announcement (%s at stage %d)", state, stage)
