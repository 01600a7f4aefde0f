"""One weight exchange between two replicas of a stage: propose, headers, chunks, commit.

Every step is a request with an answer, so an exchange needs no stream of its own: the dialler sends its chunk and the
answer is the partner's chunk, several in flight on pooled streams. Training goes on meanwhile. A side commits once it
holds the partner's whole payload, verified and finite; otherwise nothing changes there. One side may commit and the
other not: no protocol can exclude it, it is legal, and it shifts the mean over replicas by half the difference / N.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Literal

from torch import Tensor

from noloco_node import ambient
from noloco_node.aio import Pulse
from noloco_node.averaging.arithmetic import Arithmetic
from noloco_node.averaging.backoff import Patience, Visits
from noloco_node.averaging.matchmaking import Window, answer_proposal
from noloco_node.averaging.messages import (
    CHUNK,
    LEAVE,
    OPEN,
    PROPOSE,
    Acceptance,
    ChunkHeader,
    Leave,
    Opening,
    Proposal,
    check_proposal,
)
from noloco_node.averaging.probation import Meeting, Standing
from noloco_node.averaging.session import (
    Session,
    abort_event,
    account_of,
    begin,
    commit_event,
    failure_of,
    opening_of,
    opening_specs,
    overdue,
    remember,
    say_goodbye,
    streams_for,
)
from noloco_node.config.run_spec import RunSpec
from noloco_node.directory.peer_clocks import FellowClocks
from noloco_node.identity.peer_id import PeerId
from noloco_node.outer.clipping import Judgement, PartnerBound
from noloco_node.outer.replica import NotFinite, Part
from noloco_node.outer.update import token_weights
from noloco_node.telemetry.events import OuterStep
from noloco_node.training.stage_worker import Commit, StageWorker
from noloco_node.transport.calls import NOTHING, A, Answer, Method, Nothing, Q, Reply, ask, on, on_tensors
from noloco_node.transport.errors import ProtocolViolation, Refusal, Refused, TransportError
from noloco_node.transport.interface import Transport
from noloco_node.transport.messages import DTYPE_NAMES, TensorSpec, specs_of
from noloco_node.transport.tensor_checks import all_finite

logger = logging.getLogger(__name__)


class Exchanger:
    """This replica's outer steps: dials, answers, and steps alone; at most one exchange at a time.

    `run()` must be running in the owner's task group. `on_outer_step` receives an event for every commit and every try
    that came to nothing. `moved` fires when an exchange has ended or a catch-up is due. A fragment is named by its
    index; None is the whole stage, also where it is cut into one.
    """

    def __init__(
        self,
        spec: RunSpec,
        stage: int,
        transport: Transport,
        worker: StageWorker,
        *,
        streams: int,
        clocks: FellowClocks,
        standing: Standing,
        on_outer_step: Callable[[OuterStep], None],
        moved: Pulse,
    ) -> None:
        self._spec = spec
        self._stage = stage
        self._transport = transport
        self._worker = worker
        self._streams = streams
        self._clocks = clocks
        self._standing = standing
        self._on_outer_step = on_outer_step
        parts = (*worker.outer.fragments, worker.outer.whole)
        self._bounds = {part: PartnerBound(spec.outer.clip_multiple) for part in parts}
        self._contract = worker.contract
        self._arithmetic = Arithmetic(transport, worker)
        self._session: Session | None = None
        self._dialling: PeerId | None = None
        self._applying: asyncio.Task[Commit] | None = None
        self._ready_to_commit: asyncio.Queue[Session] = asyncio.Queue()
        self.patience = Patience()
        self._visits = Visits()
        self.window = Window(spec.outer.inner_steps, spec.outer.effective_min_inner_steps)
        self.accepting = False
        self.last_round = False
        self.catch_up_from: PeerId | None = None
        self.catching_up = False
        """While a fellow's state is fetched and loaded no exchange may open: it would mix the two states."""
        self.free_since_step = 0
        """Inner steps of this replica when its last exchange ended; a step alone is none."""
        self._moved = moved

    @property
    def engaged(self) -> bool:
        """True while an exchange is open or proposed, or a fellow's state is being taken over."""
        return self._session is not None or self._dialling is not None or self.catching_up

    def serve(self) -> None:
        """Register the methods with the transport."""
        on(self._transport, PROPOSE, self._handle_propose)
        on_tensors(self._transport, OPEN, self._handle_open, self._admit_open)
        on_tensors(self._transport, CHUNK, self._handle_chunk, self._admit_chunk)
        on(self._transport, LEAVE, self._handle_leave)

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
                await (self._measure(session) if session.gives_only else self._commit(session))
                self._close(session)
        finally:
            if self._applying is not None:
                await asyncio.wait((self._applying,))
            self._arithmetic.stop()

    async def dial(self, partner: PeerId, fragment: int | None = None) -> bool:
        """Average a fragment with `partner`; True when committed. Refusals and failures are reported as events, never
        raised."""
        if self.engaged:
            return False
        session = self._new_session(ambient.token(16), partner, "dialler", fragment)
        self._dialling = partner
        try:
            await self._propose(session)
        except (Refused, TransportError) as error:
            self._note_refusal(partner, error)
            return False
        finally:
            self._dialling = None
        if self._session is not None:  # the partner's own proposal arrived first and stands
            return False
        self._session = session
        try:
            await self._lead(session)
        except (Refused, TransportError, NotFinite) as error:
            self._report_abort(session, failure_of(error))
            self._close(session)
            await say_goodbye(self._transport, session)
            return False
        finally:
            self._close(session)
        return True

    async def step_alone(self, fragment: int | None = None) -> None:
        """The outer step of a fragment without a partner."""
        session = self._session = self._new_session(ambient.token(16), PeerId(""), "dialler", fragment)
        try:
            session.snapshot = await self._worker.snapshot(session.fragment)
            await self._arithmetic.do(lambda: self._worker.outer.open(session.part, members=1, weight=1.0))
            await self._commit(session)
        finally:
            self._close(session)

    def _new_session(
        self, exchange: str, partner: PeerId, role: Literal["dialler", "dialled"], fragment: int | None
    ) -> Session:
        part = self._worker.part(fragment)
        return Session(exchange, partner, role, None if part == self._worker.outer.whole else fragment, part)

    async def _propose(self, session: Session) -> None:
        """Name run, contract, fragment, clock and tokens; raises Refused or TransportError, or fixes the weights."""
        progress = self._worker.progress
        proposal = Proposal(
            exchange=session.exchange,
            run=self._spec.run_id,
            stage=self._stage,
            contract=self._contract,
            clock=progress.clock,
            tokens=progress.tokens_since(session.fragment),
            fragment=session.fragment,
            newcomer=self._standing.newcomer,
        )
        acceptance = (await self._ask(session.partner, PROPOSE, proposal)).header
        session.fellow_loss = acceptance.loss
        if not acceptance.weightless:
            session.weight, _ = token_weights((proposal.tokens, acceptance.tokens))

    async def _lead(self, session: Session) -> None:
        """The dialler's part after acceptance: headers, then all chunks, then the commit."""
        snapshot = session.snapshot = await self._worker.snapshot(session.fragment)
        own = await self._arithmetic.do(lambda: self._begin(session))
        specs = self._opening_specs(session.part)
        answer = await self._ask(session.partner, OPEN, opening_of(session, snapshot), own, specs)
        opening = answer.header
        session.bound = opening.bound
        self._refuse_laggards(session.partner, opening.clock)
        await self._arithmetic.take_in(session.partner, lambda: self._worker.outer.agree(answer.tensors[1:]))
        session.meet(self._clocks.met(opening.clock), own, answer.tensors)
        pending = list(reversed(range(self._worker.outer.chunks)))

        async def stripe() -> None:
            while pending:
                await self._swap_chunk(session, pending.pop())

        began = ambient.monotonic()
        await self._swap_chunk(session, pending.pop())
        took, limit = ambient.monotonic() - began, self._spec.limits.exchange_progress_seconds
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(streams_for(took, limit, self._streams), len(pending))):
                    group.create_task(stripe())
        except* (Refused, TransportError, NotFinite) as failures:
            raise failures.exceptions[0] from None
        await self._commit(session)

    async def _swap_chunk(self, session: Session, index: int) -> None:
        header = ChunkHeader(exchange=session.exchange, index=index)
        own = await self._arithmetic.do(lambda: self._worker.outer.encoded_chunk(index))
        specs = (TensorSpec.of(own),)
        try:
            answer = await self._ask(session.partner, CHUNK, header, (own,), specs)
        except ProtocolViolation:
            raise
        except TransportError:  # one broken stream need not cost the exchange; the partner adds a chunk only once
            answer = await self._ask(session.partner, CHUNK, header, (own,), specs)
        outer, taken = self._worker.outer, answer.tensors[0]
        await self._arithmetic.take_in(session.partner, lambda: outer.add_chunk(index, taken))
        session.sent += own.nbytes
        session.received += answer.tensors[0].nbytes

    async def _handle_leave(self, peer: PeerId, leave: Leave) -> Nothing:
        session = self._session_of(peer, leave.exchange)
        if not session.committing:
            self._report_abort(session, "left: the partner left")
            self._close(session)
        return NOTHING

    async def _handle_propose(self, peer: PeerId, proposal: Proposal) -> Acceptance:
        if not self.accepting:
            raise Refused(Refusal.DRAINING)
        check_proposal(proposal, self._spec, self._stage, self._contract)
        if self._session is not None or self.catching_up:
            raise Refused(Refusal.BUSY)
        now = ambient.monotonic()
        if self.patience.resting(peer, now) or self.patience.dials_too_soon(account_of(peer, self._transport), now):
            raise Refused(Refusal.BUSY, "the last exchanges with you came to nothing")
        self._refuse_laggards(peer, proposal.clock, newcomer=proposal.newcomer)
        progress = self._worker.progress
        weightless = self._weightless(peer, proposal, progress.steps)
        if not weightless and self.patience.stays_far(peer, ambient.monotonic()):
            raise Refused(Refusal.BUSY, "your weights stay far from mine")
        if not (weightless or self.last_round) and self._visits.too_many(peer, self._fellows):
            raise Refused(Refusal.TOO_EARLY, "others have their part too")
        refusal = answer_proposal(
            own=self._transport.peer_id,
            dialler=peer,
            dialling=self._dialling,
            exchange_open=self._session is not None,
            steps_since_outer=self.window.inner_steps if weightless else progress.steps_since(proposal.fragment),
            window=self.window,
            last_round=self.last_round,
        )
        if refusal is not None:
            raise Refused(refusal)
        session = self._session = self._new_session(proposal.exchange, peer, "dialled", proposal.fragment)
        tokens = progress.tokens_since(session.fragment)
        session.gives_only = weightless
        if weightless:
            self._standing.gave(progress.steps)
        else:
            session.weight, _ = token_weights((tokens, proposal.tokens))
        return Acceptance(tokens=tokens, weightless=weightless, loss=self._standing.loss.mean)

    def _weightless(self, peer: PeerId, proposal: Proposal, steps: int) -> bool:
        """Whether this replica will only give; Refused where it does not exchange with this peer at all now."""
        if self._standing.newcomer:
            raise Refused(Refusal.ON_PROBATION)
        if not proposal.newcomer and self._standing.counts(peer, steps):
            return False
        if not self.last_round and not self._standing.may_give(steps, self.window.min_inner_steps):
            raise Refused(Refusal.TOO_EARLY, "another newcomer was here just now")
        return True

    def _refuse_laggards(self, peer: PeerId, claimed: float, *, newcomer: bool = False) -> None:
        """Refused where one of the two lags. A newcomer does not: what it has copied grew old on the way, another copy
        would again, and it moves nobody while each exchange draws it nearer."""
        if newcomer or self._standing.newcomer:
            return
        lagging = self._clocks.laggard(claimed)
        if lagging == "own":
            self.catch_up_from = peer
            self._moved.fire()
            raise Refused(Refusal.LAGGING, "mine")
        if lagging == "other":
            raise Refused(Refusal.LAGGING, "yours")

    def _admit_open(self, peer: PeerId, opening: Opening, specs: tuple[TensorSpec, ...]) -> None:
        session = self._session_of(peer, opening.exchange)
        if specs != self._opening_specs(session.part):
            raise Refused(Refusal.MALFORMED, "the gauge or the sketch does not have the agreed size")

    async def _handle_open(self, peer: PeerId, opening: Opening, tensors: tuple[Tensor, ...]) -> Reply[Opening]:
        self._admit_open(peer, opening, specs_of(tensors))  # a namesake may have opened since, for another fragment
        session = self._session_of(peer, opening.exchange)
        if session.opening:
            raise Refused(Refusal.MALFORMED, "this exchange is open already")
        session.opening = True
        if not await all_finite(tensors[0]):
            raise self._broken_off(session, "not_finite: the gauge holds NaN or infinity")
        snapshot = await self._worker.snapshot(session.fragment)
        self._check_still_open(session)

        def work() -> tuple[Tensor, ...]:
            own = self._begin(session)
            self._worker.outer.agree(tensors[1:])
            if session.gives_only:
                session.bound = self._bounds[session.part].difference.bound(self._worker.outer.own_motion())
            return own

        try:
            own = await self._arithmetic.do(work)
        except NotFinite as error:
            raise self._broken_off(session, failure_of(error), own=not await self._arithmetic.own_is_finite()) from None
        self._check_still_open(session)
        session.meet(self._clocks.met(opening.clock), own, tensors)
        session.snapshot = snapshot
        return Reply(opening_of(session, snapshot), own)

    def _check_still_open(self, session: Session) -> None:
        """Refuse to go on where the exchange was given up: another outer step may own the buffers by now."""
        if self._session is not session:
            raise Refused(Refusal.UNKNOWN_EXCHANGE)

    def _admit_chunk(self, peer: PeerId, chunk: ChunkHeader, specs: tuple[TensorSpec, ...]) -> None:
        session = self._session_of(peer, chunk.exchange)
        if session.snapshot is None or chunk.index >= self._worker.outer.chunks:
            raise Refused(Refusal.MALFORMED, f"chunk {chunk.index} before the headers, or out of range")
        codec = self._worker.outer.codec
        size = codec.wire_elements(self._worker.outer.chunk_size(chunk.index))
        if specs != (TensorSpec(DTYPE_NAMES[codec.wire_dtype], (size,)),):
            raise Refused(Refusal.MALFORMED, f"chunk {chunk.index} does not have the agreed size and precision")

    async def _handle_chunk(self, peer: PeerId, header: ChunkHeader, tensors: tuple[Tensor, ...]) -> Reply[Nothing]:
        self._admit_chunk(peer, header, specs_of(tensors))  # a namesake may have come while the body was on its way
        session, index = self._session_of(peer, header.exchange), header.index
        if session.committing:
            raise Refused(Refusal.UNKNOWN_EXCHANGE, "already committed here")

        def work() -> Tensor:
            own = self._worker.outer.encoded_chunk(index)
            if index not in session.added:
                self._worker.outer.add_chunk(index, tensors[0])
                session.added.add(index)
            return own

        try:
            own = await self._arithmetic.do(work)
        except NotFinite as error:
            raise self._broken_off(session, failure_of(error), own=not await self._arithmetic.own_is_finite()) from None
        session.last_progress = ambient.monotonic()
        session.sent += own.nbytes
        session.received += tensors[0].nbytes
        if len(session.added) == self._worker.outer.chunks and self._session is session and not session.committing:
            session.committing = True
            self._ready_to_commit.put_nowait(session)
        return Reply(NOTHING, (own,))

    def _begin(self, session: Session) -> tuple[Tensor, ...]:
        return begin(self._worker.outer, session, self._spec.outer.gauge_coordinates)

    def _opening_specs(self, part: Part) -> tuple[TensorSpec, ...]:
        return opening_specs(self._worker.outer.codec, part.size, self._spec.outer.gauge_coordinates)

    async def _commit(self, session: Session) -> None:
        """Clip, apply between two device operations, and report. Once begun it is carried to its end."""
        session.committing = True
        snapshot = session.snapshot
        assert snapshot is not None
        outer, bound = self._worker.outer, self._bounds[session.part]
        # Of itself a newcomer knows that it may be the one that is far; of two, nobody knows which one is.
        fellows = 0 if self._standing.newcomer else self._fellows
        judgement = Judgement(0.0, 0.0, 1.0)
        if paired := bool(session.partner):
            judgement = await self._arithmetic.do(lambda: bound.judge(outer, session.partner, fellows=fellows))
        # A newcomer's clock is that of its copy, however long that was on its way; what time it is, the fellow knows.
        share = 1.0 if self._standing.newcomer else 0.5
        shift = share * (session.partner_clock - snapshot.progress.clock) if paired else 0.0
        self._applying = asyncio.ensure_future(
            self._worker.commit(snapshot, scale=judgement.scale, clock_shift=shift, on_host=self._arithmetic.do)
        )
        commit = await asyncio.shield(self._applying)
        if paired:
            bound.accept(session.partner, judgement)
            if fellows > 1:
                self.patience.met(
                    session.partner, session.fragment, judgement.norm, judgement.bound, ambient.monotonic()
                )
            largest = judgement.bound if session.bound is None else min(judgement.bound, session.bound)
            meeting = Meeting(judgement.norm, largest, self._standing.loss.mean, session.fellow_loss)
            self._standing.met(meeting, commit.progress.steps)
        self._on_outer_step(commit_event(session, snapshot, commit, judgement))

    async def _measure(self, session: Session) -> None:
        """The end of a weightless exchange on the side that gave: it only looks how far the newcomer is away."""
        norm, largest = await self._arithmetic.do(self._worker.outer.difference_norm), session.bound
        assert largest is not None, "measured when the exchange was opened"
        self._standing.measured(session.partner, Meeting(norm, largest))
        self.patience.met(session.partner, session.fragment, norm, largest, ambient.monotonic())
        logger.debug("newcomer %s is %.3g away, %.3g would be whole", session.partner, norm, largest)

    def _report_abort(self, session: Session, reason: str) -> None:
        progress, rate = self._worker.progress, self._worker.current_learning_rate()
        self._on_outer_step(abort_event(session, progress, rate, reason))

    def _note_refusal(self, partner: PeerId, error: Refused | TransportError) -> None:
        told_to_catch_up = isinstance(error, Refused) and error.reason is Refusal.LAGGING and error.detail == "yours"
        if told_to_catch_up and not self._standing.newcomer and self._clocks.own_lags():
            self.catch_up_from = partner
        logger.debug("proposal to %s came to nothing: %r", partner, error)

    def _give_up_if_stalled(self, limit: float) -> None:
        session = self._session
        if session is None or session.role != "dialled" or session.committing:
            return
        late = overdue(session, ambient.monotonic(), limit, self._worker.outer.chunks)
        if late is not None:
            self._report_abort(session, late)
            self._close(session)

    def _broken_off(self, session: Session, reason: str, *, own: bool = False) -> Refused:
        """End an exchange in which something is not finite; the refusal to give. `own`: the fault is not the partner's,
        and is no offence."""
        if self._session is session:
            self._report_abort(session, reason)
            self._close(session)
        return Refused(Refusal.DIVERGED if own else Refusal.NOT_FINITE, reason)

    def _close(self, session: Session) -> None:
        if self._session is session:
            self._session = None
            remember(session, self._transport, self.patience, self._visits, self._fellows)
            if session.partner:
                self.free_since_step = self._worker.progress.steps
            self._moved.fire()

    @property
    def _fellows(self) -> int:
        return self._worker.live_replicas - 1

    def _session_of(self, peer: PeerId, exchange: str) -> Session:
        session = self._session
        if session is None or session.role != "dialled" or session.partner != peer or session.exchange != exchange:
            raise Refused(Refusal.UNKNOWN_EXCHANGE)
        return session

    async def _ask(
        self,
        peer: PeerId,
        method: Method[Q, A],
        request: Q,
        tensors: tuple[Tensor, ...] = (),
        specs: tuple[TensorSpec, ...] = (),
    ) -> Answer[A]:
        limit = self._spec.limits.exchange_progress_seconds
        return await ask(self._transport, peer, method, request, tensors=tensors, specs=specs, seconds=limit)
