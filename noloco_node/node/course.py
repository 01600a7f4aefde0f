"""A replica's way through the run, once it has its state: train, wait for the others at the end, average once more."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from noloco_node.averaging.step import Averaging
from noloco_node.data.samples import Samples
from noloco_node.directory.membership import Membership
from noloco_node.directory.records import PeerState
from noloco_node.directory.signed_end import SignedEnd
from noloco_node.participant import ReplicaContext
from noloco_node.pipeline.evaluation import Evaluations
from noloco_node.pipeline.microbatch import MicrobatchSource
from noloco_node.pipeline.participant import Pipeline
from noloco_node.placement.arrival import CommonStart, MissingStages
from noloco_node.placement.run_end import EndOfRun

logger = logging.getLogger(__name__)

COLLECTORS_GRACES = 3.0
"""A peer that collects the run's model has so many grace times to begin with the last weights. After one, a seed on a
busy machine found the last replica of a stage gone. Its model had that stage as it was at the run's begin."""


async def nothing_to_hand_over(_seconds: float) -> None:
    """Stands for copies of the weights where none are given."""


class ReplicaCourse:
    """Goes through the run once (`go`), cut short by `stop`. `samples` are those of stage 0; `signed` has what is known
    of the run's end."""

    def __init__(
        self,
        context: ReplicaContext,
        membership: Membership,
        pipeline: Pipeline,
        averaging: Averaging,
        samples: Samples | None,
        signed: SignedEnd,
    ) -> None:
        spec, worker, self._origin = context.spec, context.worker, pipeline.origin
        self._context = context
        self._membership = membership
        self._averaging = averaging
        self._samples = samples
        self.missing = missing = MissingStages()
        self.end = EndOfRun(
            context.transport.peer_id,
            membership,
            context.transport.peer_stats,
            pipeline.server.origins_seen if context.stage > 0 else None,
            signed,
            clock=lambda: worker.progress.clock,
            last_trained=lambda: worker.last_trained.at,
            held_up=lambda: bool(missing.stages),
            target=spec.inner.target_tokens,
            max_lag=spec.max_lag_tokens,
            grace=spec.limits.grace_seconds,
        )
        """When the run is over for it."""
        self._start = CommonStart(context.settings.start_replicas)
        self._begun = self._origin is None or context.settings.start_replicas <= 1
        if not self._begun:
            membership.hurry()
        self.stop = asyncio.Event()
        self.hand_over: Callable[[float], Awaitable[None]] = nothing_to_hand_over
        """Given so many seconds after the last outer step for peers that collect the run's model."""
        self._over = False
        """An origin has found the run to be over before its own clock was at the target."""

    async def go(self) -> None:
        """Go to the run's end. When told to stop it ends without a word: a node that only leaves must not tell the
        others that the run is over."""
        if self._origin is not None and self._samples is not None:
            context = self._context
            evaluations = Evaluations(self._origin, self._samples, context.worker, context.spec, context.emit)
            await self._train(self._origin, evaluations)
            if self.stop.is_set():
                return
            if not self._over:
                await evaluations.last()
        else:
            await self.end.wait(self.stop, self._context.moved)
        if not self.stop.is_set():
            await self._last_outer_step()
            await self.hand_over(COLLECTORS_GRACES * self._context.spec.limits.grace_seconds)

    def look(self) -> None:
        """Take in what the directory says of stages without a replica."""
        members = self._membership
        if self.run_goes_on():
            self.missing.look(members.unserved(), self._context.spec.stages, members.paused())
        else:
            self.missing.look_back(members.unserved())

    def run_goes_on(self) -> bool:
        """False once this replica leaves or the origins do: stages that empty at the run's end are not lost."""
        return self._membership.state is PeerState.TRAINING and not self.end.in_sight()

    async def _train(self, origin: MicrobatchSource, evaluations: Evaluations) -> None:
        """Until the clock is at the target, or the run turns out to be over without this node."""
        async with asyncio.TaskGroup() as group:
            evaluating = group.create_task(evaluations.now_and_then(self._context.moved, self._way_is_open))
            watching = group.create_task(self._until_over())
            await origin.run(self._training_goes_on, self._way_is_open)
            evaluating.cancel()
            watching.cancel()

    async def _until_over(self) -> None:
        await self.end.wait(self.stop, self._context.moved)
        if not self.stop.is_set():
            logger.warning("the run has come to its end before this node's own clock has")
            self._over = True
            self._context.moved.fire()

    async def _way_is_open(self) -> None:
        """Return once every other stage has a replica and the run has begun, or the training is over."""
        while not self._may_draw() and self._training_goes_on():
            await self._context.moved.wait()

    def _may_draw(self) -> bool:
        if self.missing.stages or not self.missing.looked:
            return False
        if not self._begun:  # asked before every sample: the records are looked at only until then
            up, others = self._membership.replicas_per_stage(), self._membership.usual_clock()
            trained = self._context.worker.progress.clock > 0.0 or others > 0.0
            self._begun = self._start.over(up, trained, asyncio.get_running_loop().time())
            if self._begun:
                self._membership.hurry(False)
        return self._begun

    def _training_goes_on(self) -> bool:
        reached = self._context.worker.progress.clock >= self._context.spec.inner.target_tokens
        return not (reached or self._over or self.stop.is_set())

    async def _last_outer_step(self) -> None:
        """Average once more with a peer that is still there, and stay for stage peers that lack their last step."""
        membership, moved = self._membership, self._context.moved
        self._averaging.side.begin_last_round()
        await membership.announce(PeerState.FINISHING)
        moved.fire()
        try:
            async with asyncio.timeout(self._context.spec.limits.grace_seconds):
                while not self._averaging.side.last_taken:
                    await moved.wait()
                await membership.announce(PeerState.DRAINING)
                while membership.stage_peers(PeerState.TRAINING, PeerState.FINISHING) or self._averaging.under_way:
                    await membership.refresh()
                    await moved.wait(0.3)
        except TimeoutError:
            logger.info("the grace time is over: leaving; stage peers still there: %d", len(membership.stage_peers()))
        if not self._averaging.side.last_taken and not self._averaging.under_way:
            await self._averaging.step_alone()
