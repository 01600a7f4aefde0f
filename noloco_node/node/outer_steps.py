"""When a replica takes its outer steps, and with which stage peer: decided after every inner step, exchange and
refusal.

A replica that has fallen too far behind copies a stage peer instead and begins on probation.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from noloco_node import ambient
from noloco_node.averaging.matchmaking import Dial, PairingState, StepAlone, decide, retry_delay
from noloco_node.averaging.step import Averaging
from noloco_node.directory.clocks import FarBehind
from noloco_node.directory.membership import Membership
from noloco_node.directory.records import SERVING, PeerState
from noloco_node.identity.peer_id import PeerId
from noloco_node.participant import ReplicaContext
from noloco_node.state_transfer.donor_choice import StateCopier
from noloco_node.state_transfer.fetch import DiskFull, StateManifest
from noloco_node.telemetry.events import OuterStep
from noloco_node.training.progress import Pace, Progress
from noloco_node.transport.errors import Refused, TransportError

logger = logging.getLogger(__name__)


class OuterSteps:
    """Has one replica take its outer steps. `moved` fires whenever a decision may have become another."""

    def __init__(
        self,
        context: ReplicaContext,
        membership: Membership,
        averaging: Averaging,
        copier: StateCopier,
        pace: Pace,
        behind: FarBehind,
    ) -> None:
        """`behind`: whether this replica is far behind its stage peers."""
        self._transport = context.transport
        self._worker = context.worker
        self._rng = context.rng
        self._moved = context.moved
        self._emit = context.emit
        self._membership = membership
        self._averaging = averaging
        self._side = averaging.side
        self._standing = averaging.standing
        self._copier = copier
        self._pace = pace
        self._behind = behind
        self._book = context.transport.peer_stats.book
        self._no_room_told = False

    @property
    def partners(self) -> dict[str, int]:
        return {peer: known.committed for peer, known in self._book.partners if known.committed}

    async def run(self) -> None:
        """Decide after every pulse, until cancelled."""
        loop = asyncio.get_running_loop()
        next_try = 0.0
        while True:
            if (ahead := self._side.take_catch_up()) is not None:
                await self.catch_up(ahead)
            now = loop.time()
            decision = decide(self.pairing_state(next_try), self._side.window, now=now, rng=self._rng)
            if isinstance(decision, Dial):
                window = self._side.window.inner_steps * self._pace.step_seconds
                self._transport.peer_stats.asked(decision.partner, window)
                if not await self._averaging.dial(decision.partner):
                    next_try = loop.time() + retry_delay(self._pace.step_seconds, self._rng)
            elif isinstance(decision, StepAlone):
                await self._averaging.step_alone()
            else:
                await self._moved.wait(next_try - now if next_try > now else None)

    def worth_dialling(self, *states: PeerState) -> list[PeerId]:
        stage_peers, newcomers = self._membership.partners(*states), self._membership.newcomers()
        counting = self._standing.partners(stage_peers, newcomers, self._worker.progress.steps)
        return list(self._side.partners.ready(counting, ambient.monotonic()))

    def pairing_state(self, next_try: float) -> PairingState:
        """What the next decision depends on; `next_try` in seconds of the event loop."""
        last_round = self._side.last_round
        states = (*SERVING, PeerState.DRAINING) if last_round else SERVING
        return PairingState(
            steps_since_outer=self._worker.progress.steps_since_outer,
            steps_free=self._worker.progress.steps - self._side.free_since_step,
            stage_peers=lambda: self.worth_dialling(*states),
            engaged=self._averaging.under_way or self._membership.state is PeerState.DRAINING,
            next_try=next_try,
            last_round=last_round,
            behind=self._behind.stands_back,
            last_done=self._side.last_taken,
            weigh=self._weights,
        )

    def _weights(self, stage_peers: Sequence[PeerId]) -> list[float]:
        return self._side.partners.weights(stage_peers, ambient.monotonic())

    async def catch_up(self, partner: PeerId) -> None:
        """Too far behind `partner`: take its state instead of averaging with it."""
        if partner not in self._membership.stage_peers(*SERVING):
            return
        started = ambient.monotonic()
        try:
            with self._averaging.taking_state():
                manifest = await self._copier.copy_from(partner, self._membership.stage_peers(*SERVING))
        except (Refused, TransportError) as error:
            logger.debug("could not catch up with %s: %r", partner, error)
            return
        except DiskFull as error:
            if not self._no_room_told:
                self._no_room_told = True
                logger.warning("this node is too far behind to be averaged with, and trains alone meanwhile: %s", error)
            return
        self._no_room_told = False
        self._behind.look()
        self._standing.begin(self._worker.progress.steps)
        logger.info("caught up with %s: %.0f tokens", partner, manifest.clock)
        rate, seconds = self._worker.current_learning_rate(), ambient.monotonic() - started
        self._emit(_caught_up_event(partner, self._worker.progress, manifest, rate, seconds))


def _caught_up_event(
    partner: PeerId, progress: Progress, manifest: StateManifest, learning_rate: float, seconds: float
) -> OuterStep:
    """What is reported of a replica that took a stage peer's state instead of averaging with it."""
    return OuterStep(
        kind="caught_up",
        outer_steps_taken=manifest.outer_rounds,
        step=progress.steps,
        clock=manifest.clock,
        learning_rate=learning_rate,
        partner=partner,
        role="none",
        reason="this replica lagged its partner",
        replica_divergence=None,
        difference_norm=None,
        clipped=False,
        bytes_sent=0,
        bytes_received=manifest.size,
        seconds=seconds,
        held_seconds=0.0,
        inner_steps_meanwhile=0,
    )
