"""The giving side of a state transfer: one consistent snapshot at a time, for a few readers, at a bounded rate."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from noloco_node import ambient
from noloco_node.identity.peer_id import PeerId
from noloco_node.participant import Participant, ReplicaContext
from noloco_node.peers.scorecard import ANSWER_SECONDS
from noloco_node.state_transfer.fetch import (
    CHUNK,
    OFFER,
    OPEN,
    PackedState,
    SignedManifest,
    StateManifest,
    StateOffer,
    StateRequest,
    pack,
    root_of,
    sign_manifest,
)
from noloco_node.state_transfer.rate import WINDOW_SECONDS, DonorRate, Readers, least_rate
from noloco_node.transport.calls import NOTHING, Nothing, Reply, on
from noloco_node.transport.errors import Refusal, Refused
from noloco_node.transport.interface import Withdraw
from noloco_node.transport.messages import check_addressed

SNAPSHOT_SHARED_SECONDS = ANSWER_SECONDS / 6
HELD_SHARE = 0.05
"""The training waits for snapshots of a large stage. They may cost at most this share of a donor's time, since any
stranger may ask for one."""
DONOR_PLACES = 2
"""Late joiners that may copy a node's state at once; others are told `busy` and ask another node."""


@dataclass(slots=True)
class _Held:
    manifest: StateManifest
    packed: PackedState
    digests: Tensor
    shared_until: float
    """Monotonic time until which newcomers get this snapshot instead of a new one."""
    used: float


async def nobody_relayed(_peer: PeerId) -> bool:
    """Stands for the look at a peer's connections where there are no relays."""
    return False


class StateDonor(Participant):
    """Gives this replica's state to stage peers: one snapshot at a time, shared by all that ask at the same time.

    At most `DONOR_PLACES` peers read at once. Others are told `busy`, which is no offence, and the first of them gets
    the next place (`Readers`). Peers that `relayed` says are connected through a relay only are refused. `tend` must be
    called every second or two.
    """

    def __init__(self, context: ReplicaContext, relayed: Callable[[PeerId], Awaitable[bool]] = nobody_relayed) -> None:
        """A snapshot lies on the disk of the run's folder."""
        self.relayed = relayed
        self._context = context
        self._spec, self._transport, self._worker = context.spec, context.transport, context.worker
        self._places = DONOR_PLACES
        self._held: _Held | None = None
        self._taking = asyncio.Lock()
        limits = context.spec.limits
        patience = limits.exchange_progress_seconds
        self._readers = Readers(self._places, patience, limits.chunk_bytes)
        self.rate = DonorRate(
            lambda: context.worker.last_trained,
            lowest=least_rate(limits),
            places=self._places,
            window=min(WINDOW_SECONDS, patience / 4),
        )
        self.accepting = False
        """Whether it gives its state now."""

    def serve(self) -> tuple[Withdraw, ...]:
        return (
            on(self._transport, OFFER, self._handle_offer, self._admit),
            on(self._transport, OPEN, self.handle_open, self._admit),
            on(self._transport, CHUNK, self.handle_chunk, self._admit),
        )

    def open(self) -> None:
        self.accepting = True

    def shut(self) -> None:
        """Give it to nobody from now on; a reader that has begun goes on, and there is no pace to measure any more."""
        self.accepting = False
        self.rate.giving.set()

    def drain(self) -> None:
        """A leaving node gives its state as long as it is there: it may be the last of its stage."""

    @property
    def readers(self) -> int:
        return len(self._readers.reading(ambient.monotonic()))

    def tend(self) -> None:
        """Measure what giving costs, and free a snapshot once its last reader no longer counts as answering."""
        self.rate.tend()
        if self._held is not None and ambient.monotonic() - self._held.used > ANSWER_SECONDS:
            self.close()

    def close(self) -> None:
        """The replica has left, or nobody asks: free the snapshot at once."""
        self._held = None
        self._readers.clear()

    def _admit(self, peer: PeerId, request: StateRequest) -> None:
        held = self._held
        goes_on = held is not None and held.manifest.snapshot == request.snapshot and self._readers.has_place(peer)
        if not self.accepting and not goes_on:
            raise Refused(Refusal.DRAINING)
        check_addressed(
            run=request.run,
            stage=request.stage,
            own_run=self._spec.run_id,
            own_stage=self._context.stage,
            protocol=request.protocol,
        )
        if request.contract != self._worker.contract:
            raise Refused(Refusal.WRONG_CONTRACT)

    async def refuse_relayed(self, peer: PeerId) -> None:
        """Raises Refused where this node and `peer` are connected through a relay only."""
        if await self.relayed(peer):
            raise Refused(Refusal.RELAYED, "a state is not sent through a relay: one side must dial the other")

    async def _handle_offer(self, peer: PeerId, _request: StateRequest) -> StateOffer:
        """What `peer` can have: all places are taken where it would have to wait till an older snapshot is read."""
        await self.refuse_relayed(peer)
        now, progress = ambient.monotonic(), self._worker.progress
        others = [each for each in self._readers.reading(now) if each != peer]
        waits = bool(others) and self._held is not None and now >= self._held.shared_until
        readers = self._places if waits else len(others)
        return StateOffer(
            clock=progress.clock, outer_rounds=progress.outer_rounds, readers=readers, places=self._places
        )

    async def handle_open(self, peer: PeerId, request: StateRequest) -> Reply[SignedManifest]:
        """The signed manifest of a snapshot; `peer` has a place as a reader then. Raises Refused: relayed, or busy. It
        is the snapshot that is held, if that is the one asked for or not old yet, else a new one."""
        await self.refuse_relayed(peer)
        async with self._taking:
            now, held = ambient.monotonic(), self._held
            resumed = held is not None and held.manifest.snapshot == request.snapshot
            if held is None or not (resumed or now < held.shared_until):
                if not self._readers.renew(peer, now):
                    raise Refused(Refusal.BUSY, "an older snapshot is being read")
                held = self._held = await self._take_snapshot()
                self._readers.begin(len(held.digests))
            held.used = ambient.monotonic()
            if not self._readers.enter(peer, held.used):
                raise Refused(Refusal.BUSY, f"{self.readers} joiners read this node's state, and it serves no more")
        return sign_manifest(self._transport, held.manifest, held.digests)

    async def _take_snapshot(self) -> _Held:
        packed, state, at = await pack(self._worker, self._worker.state_sizes(), self._context.settings.run_folder)
        digests = await ambient.elsewhere(packed.digests, self._spec.limits.chunk_bytes)
        manifest = StateManifest(
            source=self._transport.peer_id,
            run=self._spec.run_id,
            stage=self._context.stage,
            contract=self._worker.contract,
            snapshot=ambient.token(8),
            clock=state.progress.clock,
            outer_rounds=state.progress.outer_rounds,
            size=packed.size,
            root=root_of(digests),
        )
        shared = max(SNAPSHOT_SHARED_SECONDS, state.held_seconds / HELD_SHARE)
        return _Held(manifest, packed, digests, shared_until=at + shared, used=at)

    async def handle_chunk(self, peer: PeerId, request: StateRequest) -> Reply[Nothing]:
        """A chunk of the snapshot that is held, as fast as the rate allows. Raises Refused where another one is meant,
        it has no such chunk, or `peer` has lost its place to others."""
        held = self._held
        if held is None or held.manifest.snapshot != request.snapshot:
            raise Refused(Refusal.UNKNOWN_SNAPSHOT)
        if request.index >= len(held.digests):
            raise Refused(Refusal.MALFORMED, f"chunk {request.index} of {len(held.digests)}")
        size = self._spec.limits.chunk_bytes
        part = await ambient.elsewhere(held.packed.part, request.index * size, (request.index + 1) * size)
        if not self._readers.has_place(peer) and not self._readers.enter(peer, ambient.monotonic()):
            raise Refused(Refusal.BUSY, "this reader was away, and its place is taken")
        await self.rate.take(len(part), peer)
        held.used = ambient.monotonic()
        if self._held is held:
            self._readers.gave(peer, request.index, held.used, self.rate.rate)
        return Reply(NOTHING, (torch.frombuffer(part, dtype=torch.uint8),))
