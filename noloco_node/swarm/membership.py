"""This node's place in the swarm: its record, renewed by heartbeat, and what the directory says of the others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from noloco_node import PROTOCOL_VERSION, __version__
from noloco_node.swarm.directory import Directory, PeerRecord, PeerState
from noloco_node.swarm.first_look import LOOK_AGAIN_SECONDS, look_for_others
from noloco_node.swarm.transport import PeerId

logger = logging.getLogger(__name__)

REFRESH_SECONDS = 2.0
WITHDRAWAL_MARGIN_SECONDS = 5.0

SERVING = (PeerState.TRAINING, PeerState.FINISHING)


@dataclass(frozen=True, slots=True)
class OwnFigures:
    """What a node's record says besides its state."""

    clock: float
    tokens_per_second: float
    outer_rounds: int
    capacity: float = 0.0
    guards: int | None = None


class Membership:
    """Publishes this node's record and answers questions about the live records of others.

    `describe` gives the figures for the record; `on_change` is called after every look at the directory.
    """

    def __init__(
        self,
        directory: Directory,
        own: PeerId,
        stage: int,
        stages: int,
        record_seconds: float,
        describe: Callable[[], OwnFigures],
        on_change: Callable[[], None],
    ) -> None:
        self._directory = directory
        self._own = own
        self.stage = stage
        self.stages = stages
        self._record_seconds = record_seconds
        self._describe = describe
        self._on_change = on_change
        self._sequence = int(directory.now() * 1000)
        self._announced_speed = 0.0
        self.origins_clock = 0.0
        """The furthest that stage 0 has been seen, as the median of its records: a stage that was restored lags it."""
        self._announced_newcomer = False
        self.state = PeerState.JOINING
        self._finished = False
        self.eager = False
        """Look at the others more often: whatever this node waits for, the others wait for as well."""
        self.newcomer = False
        """Goes into the record: this node is on probation."""

    def live(self, stage: int, *states: PeerState) -> tuple[PeerRecord, ...]:
        """Live records of a stage, this node's own included if it has been read back."""
        return self._directory.view.live(stage, self._directory.now(), *states)

    def fellows(self, *states: PeerState) -> list[PeerId]:
        """Live peers of the own stage, without this one."""
        return [PeerId(r.peer_id) for r in self.live(self.stage, *states) if r.peer_id != self._own]

    def newcomers(self) -> set[PeerId]:
        """Fellows that say they are on probation."""
        return {PeerId(r.peer_id) for r in self.live(self.stage) if r.newcomer}

    def next_stage_peers(self) -> list[PeerId]:
        """Live peers that microbatches may be sent to; none on the last stage."""
        if self.stage + 1 >= self.stages:
            return []
        return [PeerId(r.peer_id) for r in self.live(self.stage + 1, *SERVING) if r.peer_id != self._own]

    def own_rank(self) -> int:
        """This peer's place among the live replicas of its stage, by peer id."""
        return sum(peer < self._own for peer in self.fellows(*SERVING))

    def live_replicas(self) -> int:
        """Replicas of the own stage that train, this one included."""
        return 1 + len(self.fellows(PeerState.TRAINING))

    def recorded_clocks(self) -> list[float]:
        """Clocks of the own stage's live fellows as their records say: never ahead of the true ones. A newcomer's clock
        is that of its copy, and tells nobody the time."""
        return [r.clock for r in self.live(self.stage, *SERVING) if r.peer_id != self._own and not r.newcomer]

    def fellow_clocks(self) -> list[float]:
        """Present clocks of the same fellows: what each record says, moved on by its age.

        A record is renewed a few times in its life only, in which a fast swarm's clocks run far: without this, partners
        would be held to the past and the swarm's time would stand still.
        """
        now, replicas = self._directory.now(), self.live_replicas()
        clocks: list[float] = []
        for peer, row in self._directory.view.stages[self.stage].items():
            if peer != self._own and row.expires > now and row.record.state in SERVING and not row.record.newcomer:
                age = min(max(0.0, now - (row.expires - self._record_seconds)), self._record_seconds)
                moving = row.record.state is PeerState.TRAINING
                clocks.append(row.record.clock + moving * age * row.record.tokens_per_second * replicas)
        return clocks

    def others(self, *states: PeerState) -> list[PeerRecord]:
        """Live records of all stages without this node's own, which its former life may have left there."""
        records = [record for stage in range(self.stages) for record in self.live(stage, *states)]
        return [record for record in records if record.peer_id != self._own]

    def unserved(self) -> list[int]:
        """Stages, the own one aside, that no live replica serves."""
        return [s for s in range(self.stages) if s != self.stage and not self._served(s)]

    def _served(self, stage: int) -> bool:
        return any(record.peer_id != self._own for record in self.live(stage, *SERVING))

    def replicas_per_stage(self) -> list[int]:
        """Live replicas of each stage that can be met, this one included."""
        return self._counts(*SERVING, own=1)

    def furthest_clock(self) -> float:
        """The largest clock in any other node's record."""
        return max((record.clock for record in self.others()), default=0.0)

    def nodes_per_stage(self) -> list[int]:
        """Live nodes of each stage; this one counts even where its record has not been read back."""
        return self._counts(own=int(self.state is not PeerState.GONE))

    def _counts(self, *states: PeerState, own: int) -> list[int]:
        """Other live nodes of each stage, and `own` at this one's."""
        counts = [len({r.peer_id for r in self.live(stage, *states)} - {self._own}) for stage in range(self.stages)]
        counts[self.stage] += own
        return counts

    async def announce(self, state: PeerState) -> bool:
        """Publish the own record in a new state now. False when no peer took it."""
        self.state = state
        self._finished |= state is PeerState.FINISHING
        life = self._record_seconds
        if state is PeerState.GONE:  # must outlive every earlier record, or those would come back to life
            life += WITHDRAWAL_MARGIN_SECONDS
        figures = self._describe()
        self._sequence += 1
        self._announced_speed, self._announced_newcomer = figures.tokens_per_second, self.newcomer
        record = PeerRecord(
            peer_id=self._own,
            stage=self.stage,
            state=state,
            clock=figures.clock,
            tokens_per_second=figures.tokens_per_second,
            capacity=figures.capacity,
            guards=figures.guards,
            outer_rounds=figures.outer_rounds,
            finished=self._finished,
            newcomer=self.newcomer,
            protocol=PROTOCOL_VERSION,
            version=__version__,
            sequence=self._sequence,
        )
        stored = await self._directory.publish(record, life)
        if not stored:
            logger.debug("no peer took this node's record (state %s)", state)
        return stored

    async def refresh(self) -> None:
        """Look at the directory once."""
        await self._directory.refresh()
        self._take_in()

    async def look_for_others(self, seconds: float) -> None:
        """Look until another node is seen, `seconds` at most (`first_look`)."""
        await look_for_others(self._directory, self._own, seconds)
        self._take_in()

    def _take_in(self) -> None:
        clocks = [record.clock for record in self.live(0, *SERVING)]
        self.origins_clock = max(self.origins_clock, median(clocks) if clocks else 0.0)
        self._on_change()

    async def run(self) -> None:
        """Renew the record three times within its life, and once as soon as this node knows its speed, without which
        fellows take its clock to stand still, or it ceases to be a newcomer. Look at the others every two seconds."""
        loop = asyncio.get_running_loop()
        renew_at = loop.time()
        while True:
            speed_known = self._announced_speed == 0.0 and self._describe().tokens_per_second > 0.0
            if loop.time() >= renew_at or speed_known or self._announced_newcomer != self.newcomer:
                await self.announce(self.state)
                renew_at = loop.time() + self._record_seconds / 3
            await self.refresh()
            usual = min(REFRESH_SECONDS, self._record_seconds / 5)
            await asyncio.sleep(min(usual, LOOK_AGAIN_SECONDS) if self.eager else usual)
