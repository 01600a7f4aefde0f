"""Copies of other stages' slow weights, kept against the day on which a stage loses its last replica.

Half precision, without momenta: enough to go on from. A node gives its own stage's weights to guards, and what it
guards to whoever restores that stage; both by the same two methods, chunk by chunk.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from noloco_node.config.run_spec import RunSpec
from noloco_node.swarm.balancing import guarded_stage
from noloco_node.swarm.directory import PeerRecord, PeerState
from noloco_node.swarm.membership import Membership
from noloco_node.swarm.transport import (
    JsonObject,
    Message,
    PeerId,
    Refusal,
    Refused,
    TensorSpec,
    Transport,
    TransportError,
)
from noloco_node.swarm.typed_calls import Nothing, ask
from noloco_node.swarm.wire import ClockValue, RunName, StageIndex, WireModel, no_tensors, parse
from noloco_node.training.stage_worker import StageWorker

logger = logging.getLogger(__name__)

OPEN = "copy.open"
CHUNK = "copy.chunk"

LIFE_SECONDS = 60.0
"""A snapshot for guards is let go of when nobody has asked for it for this long."""
IDLE_SHARE = 3.0
"""Pause after each chunk of a copy that is renewed, in times that the chunk took: training needs the network more."""
RETRY_SHARE = 0.1
"""After a failure a guard tries again in this share of the usual time."""
LARGEST = 65504.0
"""The largest number in half precision."""


class CopyRequest(WireModel):
    """Asks for a copy of a stage (no copy named), or for a chunk of one."""

    run: RunName
    stage: StageIndex
    copy_name: Annotated[str, Field(max_length=32)] = ""
    index: Annotated[int, Field(ge=0, le=1 << 32)] = 0


class CopyOffer(WireModel):
    """Names a copy, and says how far the stage had been trained."""

    copy_name: Annotated[str, Field(min_length=1, max_length=32)]
    clock: ClockValue
    outer_rounds: Annotated[int, Field(ge=0, le=1 << 40)]


@dataclass(slots=True)
class StageCopy:
    """Slow weights of one stage, fp16 [parameters]."""

    name: str
    stage: int
    clock: float
    outer_rounds: int
    weights: Tensor
    used: float


class StageCopies:
    """What a node keeps of other stages and gives of its own, through all of its stays. `parameters`: of each stage."""

    def __init__(self, spec: RunSpec, parameters: Sequence[int], transport: Transport, rng: random.Random) -> None:
        self._spec = spec
        self._parameters = parameters
        self._transport = transport
        self._rng = rng
        self._own: tuple[int, StageWorker] | None = None
        self._given: StageCopy | None = None
        self._taking = asyncio.Lock()
        self.kept: StageCopy | None = None

    @property
    def guards(self) -> int | None:
        """The stage of which this node keeps a copy."""
        return self.kept.stage if self.kept else None

    def serve(self) -> None:
        """Register with the transport."""
        self._transport.serve(OPEN, self._admit, self._handle_open, max_concurrent_per_peer=1)
        self._transport.serve(CHUNK, self._admit, self._handle_chunk, max_concurrent_per_peer=2)

    async def keep(self, membership: Membership, worker: StageWorker) -> None:
        """During one stay: give copies of this stage, and keep that of another one where the run asks for it."""
        self._own = membership.stage, worker
        try:
            while True:
                renewed = await self._renew(membership)
                self._forget_unused()
                seconds = self._spec.limits.guard_seconds * (1.0 if renewed else RETRY_SHARE)
                await asyncio.sleep(seconds * self._rng.uniform(0.8, 1.2))
        finally:
            self._own = self._given = None

    async def newest(self, stage: int, records: Sequence[PeerRecord], beyond: float = -1.0) -> StageCopy | None:
        """The copy of `stage` that was trained furthest, of those that this node and the owners of `records` keep; none
        where no clock is `beyond` that one."""
        offers: list[tuple[float, PeerId]] = []
        for record in records:
            peer = PeerId(record.peer_id)
            if record.guards == stage and (offer := await self._ask(peer, stage)) is not None and offer.clock > beyond:
                offers.append((offer.clock, peer))
        kept = self.kept
        if kept is not None and (kept.stage != stage or kept.clock <= beyond):
            kept = None
        for clock, peer in sorted(offers, reverse=True):
            if kept is not None and kept.clock >= clock:
                break
            try:
                return await self._fetch(peer, stage, idle_share=0.0)
            except (Refused, TransportError) as error:
                logger.warning("could not take the copy of stage %d from %s: %s", stage, peer, error or repr(error))
        return kept

    async def _renew(self, membership: Membership) -> bool:
        stage = guarded_stage(membership.stage, membership.own_rank(), self._spec.stages, self._spec.guard_copies)
        if self.kept is not None and self.kept.stage != stage and membership.live(self.kept.stage, PeerState.TRAINING):
            self.kept = None  # never that of a stage which only this copy may be left of
        if stage is None:
            return True
        givers = [PeerId(r.peer_id) for r in membership.live(stage, PeerState.TRAINING)]
        if not givers:
            return False
        giver = self._rng.choice(givers)
        try:
            self.kept = await self._fetch(giver, stage, idle_share=IDLE_SHARE)
        except (Refused, TransportError) as error:
            logger.debug("could not copy stage %d from %s: %r", stage, giver, error)
            return False
        logger.debug("keeps a copy of stage %d at clock %.0f", stage, self.kept.clock)
        return True

    async def _ask(self, peer: PeerId, stage: int) -> CopyOffer | None:
        try:
            return await self._open(peer, CopyRequest(run=self._spec.run_id, stage=stage))
        except (Refused, TransportError) as error:
            logger.warning("%s does not give its copy of stage %d: %s", peer, stage, error or repr(error))
            return None

    async def _open(self, peer: PeerId, request: CopyRequest) -> CopyOffer:
        limit = self._spec.limits.exchange_progress_seconds
        return (await ask(self._transport, peer, OPEN, request, CopyOffer, timeout=limit, progress=limit)).header

    async def _fetch(self, peer: PeerId, stage: int, *, idle_share: float) -> StageCopy:
        """Take a copy, one chunk after another, with a pause of `idle_share` times the duration after each."""
        request = CopyRequest(run=self._spec.run_id, stage=stage)
        offer = await self._open(peer, request)
        count = self._parameters[stage]
        weights = torch.empty(count, dtype=torch.float16)
        step, limit = self._spec.limits.chunk_bytes // 2, self._spec.limits.exchange_progress_seconds
        for index in range(math.ceil(count / step)):
            started = time.monotonic()
            part = weights[index * step : (index + 1) * step]
            named = request.model_copy(update={"copy_name": offer.copy_name, "index": index})
            specs = (TensorSpec.of(part),)
            answer = await ask(self._transport, peer, CHUNK, named, Nothing, specs=specs, timeout=limit, progress=limit)
            part.copy_(answer.tensors[0])
            await asyncio.sleep(idle_share * (time.monotonic() - started))
        return StageCopy(offer.copy_name, stage, offer.clock, offer.outer_rounds, weights, time.monotonic())

    def _admit(self, peer: PeerId, header: JsonObject, specs: tuple[TensorSpec, ...]) -> None:
        request = parse(CopyRequest, header)
        no_tensors(peer, header, specs)
        if request.run != self._spec.run_id:
            raise Refused(Refusal.WRONG_RUN)
        if self._own is None and self.kept is None:
            raise Refused(Refusal.DRAINING)

    async def _handle_open(self, _peer: PeerId, message: Message) -> Message:
        copy = await self._copy_of(CopyRequest.model_validate(message.header).stage)
        offer = CopyOffer(copy_name=copy.name, clock=copy.clock, outer_rounds=copy.outer_rounds)
        return Message(offer.model_dump(mode="json"))

    async def _handle_chunk(self, _peer: PeerId, message: Message) -> Message:
        request = CopyRequest.model_validate(message.header)
        held = next((c for c in (self._given, self.kept) if c is not None and c.name == request.copy_name), None)
        if held is None:
            raise Refused(Refusal.UNKNOWN_SNAPSHOT)
        step = self._spec.limits.chunk_bytes // 2
        part = held.weights[request.index * step : (request.index + 1) * step]
        if not part.numel():
            raise Refused(Refusal.MALFORMED, f"the copy has no chunk {request.index}")
        held.used = time.monotonic()
        return Message({}, (part,))

    async def _copy_of(self, stage: int) -> StageCopy:
        """The copy that this node gives of `stage`: of its own, or the one that it keeps. Raises Refused."""
        async with self._taking:
            if self._own is None or self._own[0] != stage:
                if self.kept is None or self.kept.stage != stage:
                    raise Refused(Refusal.WRONG_STAGE)
                return self.kept
            self._forget_unused()
            if self._given is None:  # one for all who ask at the same time: it takes memory
                progress, slow = await self._own[1].slow_weights()
                half = await asyncio.to_thread(lambda: slow.clamp_(-LARGEST, LARGEST).to(torch.float16))
                name, now = secrets.token_hex(8), time.monotonic()
                self._given = StageCopy(name, stage, progress.clock, progress.outer_rounds, half, now)
            return self._given

    def _forget_unused(self) -> None:
        age = min(LIFE_SECONDS, self._spec.limits.guard_seconds / 2)
        if self._given is not None and time.monotonic() - self._given.used > age:
            self._given = None
