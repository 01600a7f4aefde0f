"""Copies of other stages' slow weights, kept for the day on which a stage loses its last replica.

They are in half precision, without momenta: enough to go on from. A node gives its own stage's weights to their
keepers. It gives what it keeps to a node that restores that stage. Both use the same two methods, chunk by chunk.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from noloco_node import ambient
from noloco_node.config.run_spec import RunSpec
from noloco_node.directory.membership import Membership
from noloco_node.directory.records import PeerRecord, PeerState
from noloco_node.identity.peer_id import PeerId
from noloco_node.peers.hop import REST_A_SECOND
from noloco_node.state_transfer.copies import (
    COPY_CHUNK,
    DTYPES,
    OPEN_COPY,
    CopyManifest,
    CopyPrecision,
    CopyRequest,
    StageCopy,
    ask_for_copy,
    choose_copy,
    chunks_of_copy,
    root_of_weights,
    sign_copy,
    two_faced,
)
from noloco_node.state_transfer.fetch import DiskMemory, SignedManifest, pack
from noloco_node.state_transfer.rate import MOST_TRIED, longest_reading
from noloco_node.tallies import FEW_PEERS, PeerTable
from noloco_node.training.frozen_state import FrozenState
from noloco_node.training.stage_worker import StageWorker
from noloco_node.transport.calls import ASKED_AT_ONCE, ATTEMPTS, NOTHING, Nothing, Reply, on
from noloco_node.transport.errors import Refusal, Refused, TransportError
from noloco_node.transport.interface import Transport, Withdraw

logger = logging.getLogger(__name__)

_Pace = Callable[[int, str], Awaitable[None]]
"""A function that waits until so many bytes may be given to this reader."""

SPARE_KEEPERS = 3
"""In a stage that is seen in part, on average so many nodes take themselves for each one that is to keep a copy. With
one, there would be none more than a third of the time."""
RETRY_SHARE = 0.1
"""After a failure a keeper asks for a newer copy again in this share of the usual time."""
OFFER_SECONDS, OFFER_ATTEMPTS = 10.0, 2
"""An offer is asked for with this deadline in seconds, and so many times. One lost request must not decide what a stage
goes on from."""


async def unpaced(_size: int, _reader: str) -> None:
    """Stands for a donor's pace where nothing is trained."""


class _Offered(NamedTuple):
    """What a keeper offers: the manifest, and the same as its source has signed it."""

    keeper: PeerId
    manifest: CopyManifest
    signed: SignedManifest


@dataclass(slots=True)
class _Reader:
    progress: float
    """When it came, or asked for weights beyond those before."""
    beyond: int = -1
    ends: bool = False
    """It has asked for the last weights. It may have to ask once more, since a link may break."""


class GivenCopy:
    """The copy of its own stage that a node gives: it takes memory, so there is one. Times are in monotonic seconds.

    It goes to newcomers for `fresh_seconds`, and never an old one to a new reader. A peer that asks for nothing new in
    `idle_seconds` reads no more. It is held for `reading_seconds` at most after it stops going to newcomers.
    """

    def __init__(self, fresh_seconds: float, idle_seconds: float, reading_seconds: float) -> None:
        self._fresh, self._idle, self._reading = fresh_seconds, idle_seconds, reading_seconds
        self._copy: StageCopy | None = None
        self._since = 0.0
        self._readers: dict[PeerId, _Reader] = {}

    def clear(self) -> None:
        self._copy = None
        self._readers.clear()

    def tend(self, now: float) -> None:
        """Let go of what nobody reads and newcomers do not get."""
        for peer, reader in list(self._readers.items()):
            if now - reader.progress > self._idle:
                del self._readers[peer]
        age = now - self._since
        if age > self._fresh and (not self._readers or age > self._fresh + self._reading):
            self.clear()

    def reading(self, now: float) -> set[PeerId]:
        self.tend(now)
        return set(self._readers)

    def fresh(self, peer: PeerId, now: float) -> StageCopy | None:
        """The copy for this newcomer, where it is young enough."""
        self.tend(now)
        if self._copy is None or now - self._since > self._fresh:
            return None
        self._read(peer, now)
        return self._copy

    def room(self, now: float) -> bool:
        """Whether a new copy may be taken: not while one is read."""
        self.tend(now)
        if all(reader.ends for reader in self._readers.values()):
            self.clear()
        return self._copy is None

    def add(self, copy: StageCopy, peer: PeerId, taken: float, now: float) -> None:
        """A new copy, begun to be taken at `taken`, for this newcomer and the peers that come after it."""
        self.clear()
        self._copy, self._since = copy, taken
        self._read(peer, now)

    def asked(self, root: str, peer: PeerId, at: int, end: int, now: float) -> StageCopy | None:
        """The copy, where this peer asks for its weights from `at` to `end` and may have it."""
        if self._copy is None or self._copy.manifest.root != root:
            return None
        if now - self._since <= self._fresh:
            self._read(peer, now)
        reader, size = self._readers.get(peer), self._copy.manifest.size
        if reader is None:
            return None
        if reader.beyond < at < size:
            reader.beyond, reader.progress = at, now
        reader.ends |= end >= size
        return self._copy

    def _read(self, peer: PeerId, now: float) -> None:
        reader = self._readers.get(peer)
        if reader.ends if reader else len(self._readers) < FEW_PEERS:
            self._readers[peer] = _Reader(now)


class StageCopies:
    """What a node keeps of other stages and gives of its own, through all of its stays. `parameters`: of each stage.
    Copies lie on the disk of `folder`."""

    def __init__(
        self,
        spec: RunSpec,
        parameters: Sequence[int],
        transport: Transport,
        rng: random.Random,
        folder: Path | None = None,
    ) -> None:
        self._folder = folder
        self._spec = spec
        self._parameters = parameters
        self._transport = transport
        self._rng = rng
        self._own: tuple[int, StageWorker] | None = None
        limits = spec.limits
        idle = (1.0 + REST_A_SECOND) * limits.exchange_progress_seconds
        reading: dict[CopyPrecision, float] = {
            each: longest_reading(limits, dtype.itemsize * max(parameters, default=0)) for each, dtype in DTYPES.items()
        }
        self.reading_seconds = reading["fp32"]
        """A copy in full precision is held for its readers for at most so many seconds."""
        # An exporter asks all replicas at once.
        self._given: dict[CopyPrecision, GivenCopy] = {
            "fp16": GivenCopy(limits.standby_seconds / 2, idle, reading["fp16"]),
            "fp32": GivenCopy(30.0, idle, reading["fp32"]),
        }
        self._collectors = PeerTable[PeerId, str](FEW_PEERS)
        """Peers that have read a whole copy in full precision of this stay's weights, and the root of the latest."""
        self._pace: _Pace = unpaced
        self._taking = asyncio.Lock()
        self.gives = True
        """Whether it gives copies to others now."""
        self.kept: StageCopy | None = None

    @property
    def standby_of(self) -> int | None:
        """The stage of which this node keeps a copy."""
        return self.kept.stage if self.kept else None

    def serve(self) -> tuple[Withdraw, ...]:
        return (
            on(self._transport, OPEN_COPY, self._handle_open, self._admit),
            on(self._transport, COPY_CHUNK, self._handle_chunk, self._admit),
        )

    async def keep(self, membership: Membership, worker: StageWorker, pace: _Pace = unpaced) -> None:
        """During one stay give copies of this stage, those in full precision at this `pace`. Also keep a copy of
        another stage if the run asks for it."""
        self.let_go()
        self._own, self._pace = (membership.stage, worker), pace
        try:
            while True:
                renewed = await self.renew(membership)
                for given in self._given.values():
                    given.tend(ambient.monotonic())
                seconds = self._spec.limits.standby_seconds * (1.0 if renewed else RETRY_SHARE)
                await asyncio.sleep(seconds * self._rng.uniform(0.8, 1.2))
        finally:
            # Readers may read on while this node is there, since a broken link may have lost the last chunk.
            self._own, self._pace = None, unpaced
            self._collectors.clear()

    def let_go(self) -> None:
        """Give nobody any more what was copied of the own stage, and free its disk."""
        for given in self._given.values():
            given.clear()

    async def hand_over(self, seconds: float) -> None:
        """After this replica's last step: wait until each peer that has collected its weights before has the last ones
        too. Such a peer may take `seconds` to begin, and then as long as a copy may be read."""
        if self._own is None or not self._collectors:
            return
        given, began = self._given["fp32"], ambient.monotonic()
        given.clear()  # what was copied before the last step goes to nobody any more
        async with self._own[1].frozen("slow") as state:
            last = await ambient.elsewhere(_root_of, state)
        former = {root for root in self._collectors.values() if root != last}
        waited = [peer for peer, root in self._collectors.items() if root != last]
        while waited := [peer for peer in waited if self._collectors.get(peer) in former]:
            now = ambient.monotonic()
            late = now - began > seconds and not given.reading(now).intersection(waited)
            if late or now - began > self.reading_seconds:
                logger.info("collectors that have not taken the last weights: %s", ", ".join(waited))
                return
            await asyncio.sleep(0.2)

    async def newest(
        self,
        stage: int,
        records: Sequence[PeerRecord],
        first: Tensor,
        *,
        beyond: float = -1.0,
        own: Tensor | None = None,
        reached: float = math.inf,
    ) -> StageCopy | None:
        """The furthest trained copy of `stage` that this node and the owners of `records` keep; None if no clock is
        beyond `beyond`.

        Copies of sources that this node has seen work come before those of strangers. This node may have something
        itself: its own copy, or `own`, flat, of its checkpoint, whose clock `beyond` is. Then it takes the stranger's
        copy that goes on from that. Otherwise it takes one that is like another stranger's. It takes a single one only
        if there is nothing else, and warns of it.

        `first` are the weights that the run began with (flat). `reached` says how far the swarm is; a claim beyond it
        gains nothing.
        """
        offers = [each for each in await self._ask_all(stage, records) if each.manifest.clock > beyond]
        kept = self.kept if self.kept is not None and self.kept.stage == stage and self.kept.clock > beyond else None
        liars = two_faced([each.manifest for each in offers] + ([kept.manifest] if kept else []))
        least = kept.clock if kept else beyond
        offers = [each for each in offers if each.manifest.source not in liars and each.manifest.clock > least]
        offers.sort(key=lambda each: min(reached, each.manifest.clock), reverse=True)
        for offered in offers:
            if self._has_worked(offered.manifest.source) and (copy := await self._take(offered)) is not None:
                return copy
        strangers: dict[str, StageCopy] = {}
        for offered in offers:
            source = offered.manifest.source
            if len(strangers) < MOST_TRIED and source not in strangers:
                copy = None if self._has_worked(source) else await self._take(offered)
                strangers |= {source: copy} if copy is not None else {}
        has, at = (own, beyond) if kept is None else (kept.weights, kept.clock)
        mine = None if has is None or at <= 0.0 else (has, at)
        chosen, vouched = await ambient.elsewhere(choose_copy, list(strangers.values()), mine, first, reached)
        if chosen is None and strangers:
            logger.warning(
                "%d copies of stage %d are not taken: none has gone on from what this node has of it at %.0f tokens",
                len(strangers),
                stage,
                at,
            )
        if chosen is not None and not vouched:
            logger.warning(
                "STAGE %d IS TAKEN FROM A STRANGER'S COPY ALONE: %s signed it; this node has seen no work of it, and "
                "no other copy bears it out",
                stage,
                chosen.manifest.source,
            )
        return chosen or kept

    def _has_worked(self, source: str) -> bool:
        return self._transport.peer_stats.of(PeerId(source)).worked_at > -math.inf

    async def _ask_all(self, stage: int, records: Sequence[PeerRecord]) -> list[_Offered]:
        """The offers of the peers that say that they keep a copy; of many, those that have answered this node lately
        come first."""
        holders = [PeerId(record.peer_id) for record in records if record.standby_of == stage]
        self._rng.shuffle(holders)
        holders.sort(key=self._transport.peer_stats.answers, reverse=True)
        asked = holders[:ASKED_AT_ONCE]
        answers = await asyncio.gather(*(self._ask(peer, stage) for peer in asked))
        return [offered for offered in answers if offered is not None]

    async def _take(self, offered: _Offered) -> StageCopy | None:
        try:
            return await self._fetch(offered, idle_share=0.0, attempts=ATTEMPTS)
        except (Refused, TransportError) as error:
            stage, why = offered.manifest.stage, error or repr(error)
            logger.warning("could not take the copy of stage %d from %s: %s", stage, offered.keeper, why)
            return None

    async def renew(self, membership: Membership) -> bool:
        """Take a newer copy of the stage that this node keeps, if it is to keep one. Returns False if it got
        none that may take the place of what it keeps."""
        stage = standby_stage(membership.stage, standby_rank(membership), self._spec.stages, self._spec.standby_copies)
        if self.kept is not None and self.kept.stage != stage and membership.there(self.kept.stage, PeerState.TRAINING):
            self.kept = None  # never that of a stage which only this copy may be left of
        if stage is None:
            return True
        there = [PeerId(record.peer_id) for record in membership.there(stage, PeerState.TRAINING)]
        givers = [peer for peer in there if self._has_worked(peer)] or there
        if not givers:
            return False
        giver = self._rng.choice(givers)
        try:
            offered = await self._open(giver, stage, self._spec.limits.exchange_progress_seconds)
            copy = await self._fetch(offered, idle_share=REST_A_SECOND)
        except (Refused, TransportError) as error:
            logger.debug("could not copy stage %d from %s: %r", stage, giver, error)
            return False
        if not self._may_take_the_place(copy):
            logger.debug("keeps its copy of stage %d: that of %s is far behind it", stage, copy.manifest.source)
            return False
        self.kept = copy
        logger.debug("keeps a copy of stage %d at %.0f tokens", stage, copy.clock)
        return True

    def _may_take_the_place(self, copy: StageCopy) -> bool:
        """Tell whether the copy may take the place of the one that is kept, which may be all that is left of a stage.
        It may not if it is far behind that one and its source has not been seen to work."""
        kept = self.kept
        if kept is None or kept.stage != copy.stage or self._has_worked(copy.manifest.source):
            return True
        return kept.clock - copy.clock <= self._spec.max_lag_tokens

    async def _ask(self, peer: PeerId, stage: int) -> _Offered | None:
        try:
            return await self._open(peer, stage, OFFER_SECONDS, OFFER_ATTEMPTS)
        except (Refused, TransportError) as error:
            logger.warning("%s does not give its copy of stage %d: %s", peer, stage, error or repr(error))
            return None

    async def _open(self, peer: PeerId, stage: int, limit: float, attempts: int = 1) -> _Offered:
        size = self._parameters[stage]
        asked = ask_for_copy(self._spec, stage, self._transport, peer, size, seconds=limit, attempts=attempts)
        return _Offered(peer, *await asked)

    async def _fetch(self, offered: _Offered, *, idle_share: float, attempts: int = 1) -> StageCopy:
        """Take the copy that was offered, with a pause of `idle_share` times the duration after each chunk. It is not
        opened a second time: a keeper could then show the word of another source than it was judged by."""
        limit = self._spec.limits.exchange_progress_seconds
        peer, manifest, offer = offered
        size = DTYPES["fp16"].itemsize * manifest.size
        try:
            memory = await ambient.elsewhere(DiskMemory, size, self._folder)
        except OSError as error:
            raise Refused(Refusal.BUSY, f"no room for a copy of a stage, {size} bytes: {error}") from None
        weights = memory.tensor(DTYPES["fp16"])
        began = ambient.monotonic()
        chunks = chunks_of_copy(self._spec, self._transport, peer, manifest, weights, seconds=limit, attempts=attempts)
        async for _ in chunks:
            await asyncio.sleep(idle_share * (ambient.monotonic() - began))
            began = ambient.monotonic()
        memory.leave_memory()
        return StageCopy(manifest, offer, weights, memory)

    def _admit(self, _peer: PeerId, request: CopyRequest) -> None:
        if request.run != self._spec.run_id:
            raise Refused(Refusal.WRONG_RUN)
        if not self.gives or (self._own is None and self.kept is None and not request.root):
            raise Refused(Refusal.DRAINING)

    async def _handle_open(self, peer: PeerId, request: CopyRequest) -> SignedManifest:
        return (await self._copy_of(request.stage, peer, request.precision)).offer

    async def _handle_chunk(self, peer: PeerId, request: CopyRequest) -> Reply[Nothing]:
        step = self._spec.limits.chunk_bytes // DTYPES[request.precision].itemsize
        at, end = request.index * step, (request.index + 1) * step
        held = self._given[request.precision].asked(request.root, peer, at, end, ambient.monotonic())
        kept = self.kept if request.precision == "fp16" else None
        if held is None and kept is not None and kept.manifest.root == request.root:
            held = kept
        if held is None:
            raise Refused(Refusal.UNKNOWN_SNAPSHOT)
        part = await ambient.elsewhere(held.part, at, end)
        if not part.numel():
            raise Refused(Refusal.MALFORMED, f"the copy has no chunk {request.index}")
        if request.precision == "fp32":
            await self._pace(part.nbytes, peer)
            if end >= held.manifest.size:
                self._collectors[peer] = held.manifest.root
        return Reply(NOTHING, (part,))

    async def _copy_of(self, stage: int, peer: PeerId, precision: CopyPrecision) -> StageCopy:
        """The copy that this node gives `peer` of `stage`: of its own, or the one that it keeps. Raises Refused."""
        async with self._taking:
            given = self._given[precision]
            if self._own is None or self._own[0] != stage:
                if self.kept is None or self.kept.stage != stage or precision != "fp16":
                    raise Refused(Refusal.WRONG_STAGE)
                return self.kept
            taken = ambient.monotonic()
            copy = given.fresh(peer, taken)
            if copy is None:  # one copy for all that ask at the same time, since it takes memory
                if not given.room(taken):
                    raise Refused(Refusal.BUSY, "a copy of another moment is being read")
                copy = await self._copy_own(stage, self._own[1], precision)
                given.add(copy, peer, taken, ambient.monotonic())
            return copy

    async def _copy_own(self, stage: int, worker: StageWorker, precision: CopyPrecision) -> StageCopy:
        dtype, (_, shape) = DTYPES[precision], worker.state_sizes()["slow"]
        packed, state, _ = await pack(worker, {"slow": (dtype, shape)}, self._folder)
        weights = packed.memory.tensor(dtype)
        root = await ambient.elsewhere(root_of_weights, weights)
        packed.memory.leave_memory()
        manifest = CopyManifest(
            source=self._transport.peer_id,
            run=self._spec.run_id,
            stage=stage,
            clock=state.progress.clock,
            outer_rounds=state.progress.outer_rounds,
            size=weights.numel(),
            precision=precision,
            root=root,
        )
        return sign_copy(self._transport, manifest, weights, packed.memory)


def _root_of(slow: FrozenState) -> str:
    digest = hashlib.blake2b(digest_size=32)
    for _, _, piece in slow.pieces():
        digest.update(piece.numpy().data)
    return digest.hexdigest()


def standby_rank(membership: Membership) -> int:
    """A node's place among the nodes of its stage that may keep copies. In a stage that is seen in part others see
    others, so several of all that a node sees are meant to keep one."""
    in_part = membership.scale(membership.stage) > 1.0
    return membership.own_rank() // (SPARE_KEEPERS if in_part else 1)


def standby_stage(own_stage: int, rank: int, stages: int, copies: int) -> int | None:
    """The stage of which the node with this place among its stage peers keeps a copy, or None. `copies` nodes of
    each stage keep one each. The first copies the next stage, the second the one after that, and so on round the
    pipeline."""
    if stages < 2 or rank >= copies:
        return None
    return (own_stage + 1 + rank % (stages - 1)) % stages
