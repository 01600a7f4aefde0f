"""One weight exchange between two replicas of a stage: propose, headers, chunks, commit.

Every step is a request with an answer, so an exchange needs no stream of its own: the dialler sends its chunk and the
answer is the partner's chunk, several in flight on pooled streams. Training goes on meanwhile. A side commits once it
holds the partner's whole payload, verified and finite; otherwise nothing changes there. One side may commit and the
other not: no protocol can exclude it, it is legal, and it shifts the mean over replicas by half the difference / N.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from torch import Tensor

from noloco_node.aio import Pulse
from noloco_node.config.run_spec import RunSpec
from noloco_node.outer.clipping import DifferenceBound
from noloco_node.outer.gauge import gauge_coordinates, spread
from noloco_node.outer.replica import NotFinite
from noloco_node.outer.update import token_weights
from noloco_node.swarm.exchange_messages import CHUNK, OPEN, PROPOSE, ChunkHeader, Opening, Proposal
from noloco_node.swarm.microbatch import all_finite
from noloco_node.swarm.pairing import Window, answer_proposal, believed_clock, laggard, lags
from noloco_node.swarm.transport import (
    JsonObject,
    Message,
    PeerId,
    ProtocolViolation,
    Refusal,
    Refused,
    TensorSpec,
    Transport,
    TransportError,
)
from noloco_node.swarm.wire import check_addressed, no_tensors, parse
from noloco_node.telemetry.events import OuterStep
from noloco_node.training.stage_worker import Snapshot, StageWorker

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Session:
    """One open exchange."""

    exchange: str
    partner: PeerId
    role: Literal["dialler", "dialled"]
    started: float
    last_progress: float
    opening: bool = False
    snapshot: Snapshot | None = None
    partner_clock: float = 0.0
    spread: float | None = None
    added: set[int] = field(default_factory=set[int])
    """Chunks whose arithmetic is done (kept by the arithmetic's thread); the commit waits for all of them."""
    committing: bool = False
    sent: int = 0
    received: int = 0


class Exchanger:
    """This replica's outer steps: dials, answers, and steps alone; at most one exchange at a time.

    `run()` must be running in the owner's task group. `on_outer_step` receives an event for every commit and every try
    that came to nothing. `clocks` estimates the present clocks of live fellows, `recorded_clocks` gives those of their
    records. `moved` fires when an exchange has
    ended or a catch-up is due.
    """

    def __init__(
        self,
        spec: RunSpec,
        stage: int,
        transport: Transport,
        worker: StageWorker,
        *,
        streams: int,
        clocks: Callable[[], Sequence[float]],
        recorded_clocks: Callable[[], Sequence[float]],
        on_outer_step: Callable[[OuterStep], None],
        moved: Pulse,
    ) -> None:
        self._spec = spec
        self._stage = stage
        self._transport = transport
        self._worker = worker
        self._streams = streams
        self._clocks = clocks
        self._recorded_clocks = recorded_clocks
        self._on_outer_step = on_outer_step
        self._bound = DifferenceBound(spec.outer.clip_multiple)
        self._contract = worker.contract
        self._arithmetic = ThreadPoolExecutor(1, "outer")
        self._session: Session | None = None
        self._dialling: PeerId | None = None
        self._ready_to_commit: asyncio.Queue[Session] = asyncio.Queue()
        self.window = Window(spec.outer.inner_steps, spec.outer.effective_min_inner_steps)
        self.accepting = False
        self.last_round = False
        self.catch_up_from: PeerId | None = None
        self.catching_up = False
        """While a fellow's state is fetched and loaded no exchange may open: it would mix the two states."""
        self.free_since_step = 0
        """Inner steps of this replica when its last exchange ended."""
        self._moved = moved

    @property
    def engaged(self) -> bool:
        """True while an exchange is open or proposed, or a fellow's state is being taken over."""
        return self._session is not None or self._dialling is not None or self.catching_up

    def serve(self) -> None:
        """Register the three methods with the transport."""
        self._transport.serve(PROPOSE, no_tensors, self._handle_propose, max_concurrent_per_peer=2)
        self._transport.serve(OPEN, self._admit_open, self._handle_open, max_concurrent_per_peer=2)
        self._transport.serve(CHUNK, self._admit_chunk, self._handle_chunk, max_concurrent_per_peer=64)

    async def run(self) -> None:
        """Commit exchanges that others dialled, and give up those that make no progress."""
        limit = self._spec.limits.exchange_progress_seconds
        try:
            while True:
                try:
                    async with asyncio.timeout(limit / 4):
                        session = await self._ready_to_commit.get()
                except TimeoutError:
                    self._give_up_if_stalled(limit)
                    continue
                await self._commit(session)
                self._close(session)
        finally:
            self._arithmetic.shutdown(wait=False, cancel_futures=True)

    async def dial(self, partner: PeerId) -> bool:
        """Average with `partner`; True when committed. Refusals and failures are reported as events, never raised."""
        if self.engaged:
            return False
        exchange = secrets.token_hex(16)
        self._dialling = partner
        try:
            await self._propose(partner, exchange)
        except (Refused, TransportError) as error:
            self._note_refusal(partner, error)
            return False
        finally:
            self._dialling = None
        if self._session is not None:  # the partner's own proposal arrived first and stands
            return False
        now = time.monotonic()
        session = self._session = Session(exchange, partner, "dialler", now, now)
        try:
            await self._lead(session)
        except (Refused, TransportError, NotFinite) as error:
            self._report_abort(session, repr(error) if not isinstance(error, Refused) else str(error))
            return False
        finally:
            self._close(session)
        return True

    async def step_alone(self) -> None:
        """The outer step without a partner."""
        now = time.monotonic()
        session = self._session = Session(secrets.token_hex(16), PeerId(""), "dialler", now, now)
        try:
            session.snapshot = await self._worker.snapshot()
            await self._compute(lambda: self._worker.outer.open(members=1, weight=1.0))
            await self._commit(session)
        finally:
            self._close(session)

    async def _propose(self, partner: PeerId, exchange: str) -> None:
        proposal = Proposal(
            exchange=exchange,
            run=self._spec.run_id,
            stage=self._stage,
            contract=self._contract,
            clock=self._worker.progress.clock,
        )
        await self._call(partner, PROPOSE, Message(proposal.model_dump(mode="json")), 0)

    async def _lead(self, session: Session) -> None:
        """The dialler's part after acceptance: headers, then all chunks, then the commit."""
        snapshot = session.snapshot = await self._worker.snapshot()
        own = self._sample(session.exchange)
        answer = await self._call(session.partner, OPEN, self._opening(session, snapshot, own), own.nbytes)
        if len(answer.tensors) != 1 or answer.specs[0] != TensorSpec.of(own):
            raise ProtocolViolation("the gauge does not have the agreed size")
        if not await all_finite(answer.tensors[0]):
            raise ProtocolViolation("the gauge holds NaN or infinity")
        opening = parse(Opening, answer.header)
        self._refuse_laggards(session.partner, opening.clock)
        await self._join(session, snapshot, opening, own, answer.tensors[0])
        pending = list(reversed(range(self._worker.outer.chunks)))

        async def stripe() -> None:
            while pending:
                await self._swap_chunk(session, pending.pop())

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self._streams, len(pending))):
                    group.create_task(stripe())
        except* (Refused, TransportError, NotFinite) as failures:
            raise failures.exceptions[0] from None
        await self._commit(session)

    async def _swap_chunk(self, session: Session, index: int) -> None:
        header = ChunkHeader(exchange=session.exchange, index=index).model_dump(mode="json")
        own = await self._compute(lambda: self._worker.outer.encoded_chunk(index))
        try:
            answer = await self._call(session.partner, CHUNK, Message(header, (own,)), own.nbytes)
        except TransportError:  # one broken stream need not cost the exchange; the partner adds a chunk only once
            answer = await self._call(session.partner, CHUNK, Message(header, (own,)), own.nbytes)
        if len(answer.tensors) != 1 or answer.specs[0] != TensorSpec.of(own):
            raise ProtocolViolation(f"chunk {index} does not have the agreed size and precision")
        await self._compute(lambda: self._worker.outer.add_chunk(index, answer.tensors[0]))
        session.sent += own.nbytes
        session.received += answer.tensors[0].nbytes

    async def _handle_propose(self, peer: PeerId, message: Message) -> Message:
        proposal = parse(Proposal, message.header)
        if not self.accepting:
            raise Refused(Refusal.DRAINING)
        check_addressed(
            run=proposal.run,
            stage=proposal.stage,
            own_run=self._spec.run_id,
            own_stage=self._stage,
            protocol=proposal.protocol,
        )
        if proposal.contract != self._contract:
            raise Refused(Refusal.WRONG_CONTRACT, "the stages differ in shapes, order, codec or chunk size")
        if self._session is not None or self.catching_up:
            raise Refused(Refusal.BUSY)
        self._refuse_laggards(peer, proposal.clock)
        refusal = answer_proposal(
            own=self._transport.peer_id,
            dialler=peer,
            dialling=self._dialling,
            exchange_open=self._session is not None,
            steps_since_outer=self._worker.progress.steps_since_outer,
            window=self.window,
            last_round=self.last_round,
        )
        if refusal is not None:
            raise Refused(refusal)
        now = time.monotonic()
        self._session = Session(proposal.exchange, peer, "dialled", now, now)
        return Message()

    def _refuse_laggards(self, peer: PeerId, claimed: float) -> None:
        lag = self._spec.max_lag_tokens
        match laggard(self._worker.progress.clock, claimed, self._clocks(), lag):
            case "own":
                if not lags(self._worker.progress.clock, self._recorded_clocks(), lag):
                    return  # only the estimate of present clocks says so
                self.catch_up_from = peer
                self._moved.fire()
                raise Refused(Refusal.LAGGING, "mine")
            case "other":
                raise Refused(Refusal.LAGGING, "yours")
            case _:
                return

    def _admit_open(self, peer: PeerId, header: JsonObject, specs: tuple[TensorSpec, ...]) -> None:
        self._session_of(peer, parse(Opening, header).exchange)
        if specs != (TensorSpec("fp32", (self._gauge_size,)),):
            raise Refused(Refusal.MALFORMED, "the gauge does not have the agreed size")

    async def _handle_open(self, peer: PeerId, message: Message) -> Message:
        opening = parse(Opening, message.header)
        session = self._session_of(peer, opening.exchange)
        if session.opening:
            raise Refused(Refusal.MALFORMED, "this exchange is open already")
        session.opening = True
        if not await all_finite(message.tensors[0]):
            raise self._broken_off(session, "the gauge holds NaN or infinity")
        snapshot = await self._worker.snapshot()
        if self._session is not session:  # given up meanwhile: another outer step may own the buffers by now
            raise Refused(Refusal.UNKNOWN_EXCHANGE)
        own = self._sample(session.exchange)
        await self._join(session, snapshot, opening, own, message.tensors[0])
        session.snapshot = snapshot
        return self._opening(session, snapshot, own)

    def _admit_chunk(self, peer: PeerId, header: JsonObject, specs: tuple[TensorSpec, ...]) -> None:
        chunk = parse(ChunkHeader, header)
        session = self._session_of(peer, chunk.exchange)
        if session.snapshot is None or chunk.index >= self._worker.outer.chunks:
            raise Refused(Refusal.MALFORMED, f"chunk {chunk.index} before the headers, or out of range")
        if specs != (TensorSpec(self._spec.outer.codec, (self._worker.outer.chunk_size(chunk.index),)),):
            raise Refused(Refusal.MALFORMED, f"chunk {chunk.index} does not have the agreed size and precision")

    async def _handle_chunk(self, peer: PeerId, message: Message) -> Message:
        index = parse(ChunkHeader, message.header).index
        session = self._session_of(peer, parse(ChunkHeader, message.header).exchange)
        if session.committing:
            raise Refused(Refusal.UNKNOWN_EXCHANGE, "already committed here")
        if session.snapshot is None:  # another exchange of this name, opened while the body was on its way
            raise Refused(Refusal.MALFORMED, f"chunk {index} before the headers")

        def work() -> Tensor:
            own = self._worker.outer.encoded_chunk(index)
            if index not in session.added:
                self._worker.outer.add_chunk(index, message.tensors[0])
                session.added.add(index)
            return own

        try:
            own = await self._compute(work)
        except NotFinite as error:
            raise self._broken_off(session, str(error)) from None
        session.last_progress = time.monotonic()
        session.sent += own.nbytes
        session.received += message.tensors[0].nbytes
        if len(session.added) == self._worker.outer.chunks and self._session is session and not session.committing:
            session.committing = True
            self._ready_to_commit.put_nowait(session)
        return Message({}, (own,))

    async def _join(
        self, session: Session, snapshot: Snapshot, other: Opening, own_gauge: Tensor, gauge: Tensor
    ) -> None:
        """Both headers are known: fix weights, clock and spread, and open the outer step on the snapshot."""
        session.partner_clock = self._believed(other.clock)
        session.spread = spread(own_gauge, gauge)
        session.sent += own_gauge.nbytes
        session.received += gauge.nbytes
        weight, _ = token_weights((snapshot.tokens, other.tokens))
        await self._compute(lambda: self._worker.outer.open(members=2, weight=weight))
        session.last_progress = time.monotonic()

    async def _commit(self, session: Session) -> None:
        """Clip, apply between two device operations, and report. Once begun it is carried to its end."""
        snapshot = session.snapshot
        assert snapshot is not None
        outer = self._worker.outer
        norm, motion = await self._compute(lambda: (outer.difference_norm(), outer.own_motion()))
        paired = bool(session.partner)
        scale = self._bound.scale(norm, motion) if paired else 1.0
        shift = (session.partner_clock - snapshot.progress.clock) / 2 if paired else 0.0
        commit = await asyncio.shield(
            asyncio.ensure_future(self._worker.commit(snapshot, scale=scale, clock_shift=shift))
        )
        if paired:
            self._bound.accept(session.partner, norm * scale)
        self._on_outer_step(
            OuterStep(
                kind="paired" if paired else "alone",
                round=commit.progress.outer_rounds,
                step=snapshot.progress.steps,
                clock=commit.progress.clock,
                learning_rate=snapshot.learning_rate,
                partner=session.partner or None,
                role=session.role if paired else "none",
                reason="",
                spread=session.spread,
                difference_norm=norm if paired else None,
                clipped=scale < 1.0,
                bytes_sent=session.sent,
                bytes_received=session.received,
                seconds=time.monotonic() - session.started,
                held_seconds=snapshot.held_seconds + commit.held_seconds,
                inner_steps_meanwhile=commit.inner_steps_meanwhile,
            )
        )

    def _note_refusal(self, partner: PeerId, error: Refused | TransportError) -> None:
        told_to_catch_up = isinstance(error, Refused) and error.reason is Refusal.LAGGING and error.detail == "yours"
        if told_to_catch_up and lags(self._worker.progress.clock, self._recorded_clocks(), self._spec.max_lag_tokens):
            self.catch_up_from = partner
        logger.debug("proposal to %s came to nothing: %r", partner, error)

    def _believed(self, claimed: float) -> float:
        """A partner's clock within bounds; where the directory knows no fellow, around the own clock."""
        own = self._worker.progress.clock
        return believed_clock(claimed, self._clocks() or (own,), self._spec.max_lag_tokens)

    def _report_abort(self, session: Session, reason: str) -> None:
        progress = self._worker.progress
        self._on_outer_step(
            OuterStep(
                kind="aborted",
                round=progress.outer_rounds,
                step=progress.steps,
                clock=progress.clock,
                learning_rate=self._worker.current_learning_rate(),
                partner=session.partner,
                role=session.role,
                reason=reason,
                spread=session.spread,
                difference_norm=None,
                clipped=False,
                bytes_sent=session.sent,
                bytes_received=session.received,
                seconds=time.monotonic() - session.started,
                held_seconds=session.snapshot.held_seconds if session.snapshot else 0.0,
                inner_steps_meanwhile=0,
            )
        )

    def _give_up_if_stalled(self, limit: float) -> None:
        session = self._session
        if session is None or session.role != "dialled" or session.committing:
            return
        if time.monotonic() - session.last_progress > limit:
            self._report_abort(session, f"no chunk for {limit:g} s")
            self._close(session)

    def _broken_off(self, session: Session, reason: str) -> Refused:
        """End an exchange whose partner sent NaN or infinity; the refusal to give."""
        if self._session is session:
            self._report_abort(session, reason)
            self._close(session)
        return Refused(Refusal.NOT_FINITE, reason)

    def _close(self, session: Session) -> None:
        if self._session is session:
            self._session = None
            self.free_since_step = self._worker.progress.steps
            self._moved.fire()

    def _session_of(self, peer: PeerId, exchange: str) -> Session:
        session = self._session
        if session is None or session.role != "dialled" or session.partner != peer or session.exchange != exchange:
            raise Refused(Refusal.UNKNOWN_EXCHANGE)
        return session

    @property
    def _gauge_size(self) -> int:
        return gauge_coordinates("", self._worker.outer.size, self._spec.outer.gauge_coordinates).numel()

    def _sample(self, exchange: str) -> Tensor:
        outer = self._worker.outer
        return outer.snapshot[gauge_coordinates(exchange, outer.size, self._spec.outer.gauge_coordinates)]

    def _opening(self, session: Session, snapshot: Snapshot, gauge: Tensor) -> Message:
        opening = Opening(exchange=session.exchange, clock=snapshot.progress.clock, tokens=snapshot.tokens)
        return Message(opening.model_dump(mode="json"), (gauge,))

    async def _call(self, peer: PeerId, method: str, message: Message, max_answer_bytes: int) -> Message:
        limit = self._spec.limits.exchange_progress_seconds
        return await self._transport.call(
            peer, method, message, timeout=limit, progress=limit, max_answer_bytes=max_answer_bytes
        )

    async def _compute(self, work: Callable[[], T]) -> T:
        """Arithmetic of the open step, one piece after another on its own thread: what a closed session left there is
        done before the next session clears the buffers."""
        return await asyncio.get_running_loop().run_in_executor(self._arithmetic, work)
