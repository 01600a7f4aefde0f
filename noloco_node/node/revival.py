"""Bringing a stage back that nobody serves any more. Its last holders are waited for. Then it is restored from the
newest copy or own checkpoint that is left, else from the run's seed."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from statistics import median, median_high, median_low
from typing import Literal

from torch import Tensor

from noloco_node import ambient
from noloco_node.ambient import LOOK_SECONDS
from noloco_node.config.run_spec import RunSpec
from noloco_node.directory.known_peers import HeldState
from noloco_node.directory.membership import Membership
from noloco_node.directory.records import SERVING, PeerState
from noloco_node.identity.peer_id import PeerId
from noloco_node.model.stage import build_stage
from noloco_node.placement.arrival import DOUBT_SECONDS, START_SECONDS, lacks_first_weights, no_first_weights
from noloco_node.state_transfer.backups import StageCopies
from noloco_node.state_transfer.rate import WHOLE_SECONDS
from noloco_node.storage.checkpoint import Checkpoint
from noloco_node.telemetry.events import Warned
from noloco_node.telemetry.words import as_long
from noloco_node.training.frozen_state import sizes_of
from noloco_node.training.layout import FlatLayout
from noloco_node.training.stage_worker import StageWorker

logger = logging.getLogger(__name__)

FirstWeights = Callable[[], Awaitable[Tensor]]
"""A function that gives the first weights [parameters] of a stage of the run, fp32."""


def first_weights(spec: RunSpec, stage: int) -> FirstWeights:
    """Builds the stage anew for them, off the event loop: they are wanted so seldom that nobody keeps them."""

    def built() -> Tensor:
        parameters = dict(build_stage(spec.model, stage).named_parameters())
        return FlatLayout.of(parameters).flatten(parameters)

    return lambda: ambient.elsewhere(built)


async def wait_for_holder(membership: Membership, holders: Sequence[tuple[PeerId, HeldState]]) -> bool:
    """Wait, once and within bounds, until a stage peer serves the stage: one that held its state when it was last seen
    at work. Longer while one of `holders` is on its way back to it. False where none came."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    while not membership.stage_peers(*SERVING):
        back = {peer for peer, _ in holders} & set(membership.stage_peers(PeerState.JOINING))
        if loop.time() - began >= (START_SECONDS if back else DOUBT_SECONDS):
            return False
        # The directory gives no sign of a change: asking again is the only way.
        await asyncio.sleep(LOOK_SECONDS)
        await membership.refresh()
    return True


def state_elsewhere(stage: int, holders: Sequence[tuple[PeerId, HeldState]], seconds: float) -> Warned:
    """Names who held a stage's state, the furthest first."""
    now = ambient.wall()
    rows = [f"{peer} at {held.clock:,.0f} tokens, seen {as_long(now - held.seen)} ago" for peer, held in holders[:3]]
    return Warned(
        what="state_elsewhere",
        detail=f"THE STATE OF STAGE {stage} IS ELSEWHERE: it was held by {'; '.join(rows)}. Waiting {seconds:.0f} s "
        "for it to come back; else this node begins the stage without it. Ask that node's owner to start it again",
    )


async def revive_if_lost(
    spec: RunSpec,
    membership: Membership,
    worker: StageWorker,
    copies: StageCopies,
    own: PeerId,
    *,
    confirmed: bool,
    saved: Callable[[], Checkpoint | None] = lambda: None,
    first: FirstWeights | None = None,
) -> Literal["standby", "checkpoint", "seed"] | None:
    """Load the furthest trained state of this replica's stage, or keep its seeded weights, if nobody serves it although
    others train.

    None if a stage peer serves it, and in a swarm before its first outer step.

    The states that are left are the copies that nodes keep, and this node's own checkpoint of an earlier stay (`saved`,
    called off the event loop). `first` gives the run's first weights, if the replica was resumed from what this node
    had: that state then stands in place of `saved`, which may be older. One failed look-up must not bring forth
    untrained weights beside trained ones. Unless the loss is `confirmed`, the stage must therefore be seen empty for
    the life of a record.

    If several nodes come at once, the one with the smallest peer id restores the stage, and the others wait for it, for
    as long as a copy may take. A
    seeded stage's clock is 0: should a stage peer appear after all, it is this replica that lags and takes the other's
    state. Raises UserError (NO_STATE_SOURCE) if the run began with weights that this node does not have, and nothing
    else is left.
    """
    if not await _is_lost(spec, membership, own, confirmed):
        return None
    return await revive(spec, membership, worker, copies, saved, first)


async def revive(
    spec: RunSpec,
    membership: Membership,
    worker: StageWorker,
    copies: StageCopies,
    saved: Callable[[], Checkpoint | None],
    first: FirstWeights | None = None,
) -> Literal["standby", "checkpoint", "seed"]:
    """Load what is left of this replica's stage, or keep its seeded weights: as `revive_if_lost`, which finds out
    whether the stage is lost."""
    stage = membership.stage
    checkpoint = None if first is not None else _that_fits(await ambient.elsewhere(saved), worker)
    progress, slow = await worker.slow_weights()
    began, beyond, had = slow, -1.0, None
    if first is not None:
        began, beyond, had = await first(), progress.clock, slow
    elif checkpoint is not None:
        beyond, had = checkpoint.standing.progress.clock, checkpoint.tensors["slow"]
    there = membership.others_there(*SERVING)
    reached = median_low(record.clock for record in there) if there else math.inf
    copy = await copies.newest(stage, membership.others(), began, beyond=beyond, own=had, reached=reached)
    if copy is None and had is not None:
        if checkpoint is not None:
            await worker.load_full_state(beyond, checkpoint.standing.progress.outer_rounds, checkpoint.tensors)
        logger.warning(
            "stage %d was restored from this node's own checkpoint at %s tokens: nobody served it any more",
            stage,
            f"{beyond:,.0f}",
        )
        return "checkpoint"
    if copy is None:
        if lacks_first_weights(spec):
            raise no_first_weights(spec, stage)
        return "seed"
    clock = min(copy.clock, max(beyond, median(record.clock for record in there))) if there else copy.clock
    rounds = [record.outer_steps_taken for record in there] or [copy.manifest.outer_rounds]
    await worker.load_slow_weights(clock, min(median_high(rounds), copy.manifest.outer_rounds), copy.weights)
    logger.warning("stage %d was restored from a copy at %s tokens: nobody served it any more", stage, f"{clock:,.0f}")
    return "standby"


def _that_fits(checkpoint: Checkpoint | None, worker: StageWorker) -> Checkpoint | None:
    if checkpoint is None:
        return None
    if worker.state_sizes().items() <= sizes_of(checkpoint.tensors).items():
        return checkpoint
    logger.warning("checkpoint %s is not used: its tensors are not those of this stage", checkpoint.path)
    return None


async def _is_lost(spec: RunSpec, membership: Membership, own: PeerId, confirmed: bool) -> bool:
    loop = asyncio.get_running_loop()
    await membership.refresh()
    until = loop.time() + (0.0 if confirmed else spec.limits.record_seconds)
    while True:
        trains = membership.others_there(PeerState.TRAINING)
        if not any(record.outer_steps_taken for record in trains) or membership.willing_stage_peers(*SERVING):
            return False
        first_comer = all(own < stage_peer for stage_peer in membership.stage_peers(PeerState.JOINING))
        if loop.time() >= until + (0.0 if first_comer else WHOLE_SECONDS):
            return True
        # The directory gives no sign of a change: asking again is the only way.
        await asyncio.sleep(LOOK_SECONDS)
        await membership.refresh()


def stage_lost(spec: RunSpec, stage: int) -> Warned:
    """What to say where a stage of a run under way begins anew."""
    asked = "run.standby_copies is 0" if spec.standby_copies == 0 else "no node that kept one is left"
    return Warned(
        what="stage_lost",
        detail=f"STAGE {stage} STARTS AGAIN FROM THE RUN'S SEED: all of its replicas are gone and no copy is left "
        f"({asked}); what it had learnt is lost. If the machine of a former replica still has its run folder, stop "
        "this node and start that one",
    )
