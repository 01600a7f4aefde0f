"""The side of an exchange that was dialled: it agrees or refuses, answers openings and chunks, and commits when it
holds the partner's whole payload."""

from __future__ import annotations

import asyncio

from torch import Tensor

from noloco_node import ambient
from noloco_node.averaging.matchmaking import answer_proposal
from noloco_node.averaging.session import (
    CHUNK,
    LEAVE,
    OPEN,
    PROPOSE,
    Acceptance,
    ChunkHeader,
    LeaveExchange,
    Opening,
    Proposal,
    Session,
    check_proposal,
    failure_of,
    opened_late,
    opening_of,
    overdue,
)
from noloco_node.averaging.side import DIALLED, Change, Phase, Side
from noloco_node.finite import found_finite
from noloco_node.identity.peer_id import PeerId
from noloco_node.outer.replica import NotFinite
from noloco_node.transport.calls import NOTHING, Nothing, Reply, on, on_tensors
from noloco_node.transport.errors import Refusal, Refused
from noloco_node.transport.interface import Withdraw
from noloco_node.transport.messages import DTYPE_NAMES, TensorSpec, specs_of


class Responder:
    """Answers for one side."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self._accepting = False
        self._complete: asyncio.Queue[Session] = asyncio.Queue()
        """Exchanges wait here once all their chunks have come. There is one at most, since nothing else is begun before
        its commit."""

    def open(self) -> None:
        self._accepting = True

    def shut(self) -> None:
        self._accepting = False

    def serve(self) -> tuple[Withdraw, ...]:
        """Register the methods with the transport, and how each is taken back."""
        transport = self._side.transport
        return (
            on(transport, PROPOSE, self.handle_propose),
            on_tensors(transport, OPEN, self.handle_open, self.admit_open),
            on_tensors(transport, CHUNK, self.handle_chunk, self.admit_chunk),
            on(transport, LEAVE, self.handle_leave),
        )

    async def run(self) -> None:
        """Commit what is complete, and give up what makes no progress, until cancelled."""
        side, limit = self._side, self._side.spec.limits.exchange_progress_seconds
        while True:
            try:
                async with asyncio.timeout(limit / 4):
                    session = await self._complete.get()
            except TimeoutError:
                self.give_up_if_stalled(limit)
                continue
            await (side.measure(session) if session.gives_only else side.commit(session))

    def give_up_if_stalled(self, limit: float) -> None:
        """End an exchange in which nothing has moved for `limit` seconds, or too little."""
        session = self._side.engagement.session
        if session is None or self._side.engagement.phase not in DIALLED:
            return
        late = overdue(session, ambient.monotonic(), limit, self._side.floor)
        if late is not None:
            self._side.report_abort(session, late)
            self._side.close(session)

    def leave(self) -> None:
        """This replica leaves. What is not complete is over, by no fault of the partner's: nothing is booked."""
        engagement = self._side.engagement
        if engagement.phase in DIALLED:
            engagement.go_on(engagement.session, Change.BREAK_OFF)

    async def handle_leave(self, peer: PeerId, leave: LeaveExchange) -> Nothing:
        session = self._session_of(peer, leave.exchange)
        if self._side.engagement.phase in DIALLED:
            self._side.report_abort(session, "left: the partner left")
            self._side.close(session)
        return NOTHING

    async def handle_propose(self, peer: PeerId, proposal: Proposal) -> Acceptance:
        side, engagement = self._side, self._side.engagement
        if not self._accepting:
            raise Refused(Refusal.DRAINING)
        check_proposal(proposal, side.spec, side.stage, side.contract)
        if engagement.phase not in (Phase.FREE, Phase.PROPOSING):
            raise Refused(Refusal.BUSY)
        now = ambient.monotonic()
        if side.partners.resting(peer, now):
            raise Refused(Refusal.BUSY, "the last exchanges with you came to nothing")
        side.refuse_laggards(peer, proposal.clock, newcomer=proposal.newcomer)
        progress = side.worker.progress
        weightless = self._weightless(peer, proposal, progress.steps, now)
        refusal = answer_proposal(
            own=side.transport.peer_id,
            dialler=peer,
            dialling=engagement.session.partner if engagement.session else None,
            too_often=not weightless and side.partners.too_many(*side.account_of(peer)),
            steps_since_outer=side.window.inner_steps if weightless else progress.steps_since_outer,
            window=side.window,
            last_round=side.last_round,
        )
        if refusal is not None:
            raise Refused(refusal)
        session = Session(proposal.exchange, peer, "dialled", opening_seconds=side.opening_seconds)
        tokens = progress.tokens_since_outer
        session.agreed(progress.steps, tokens, proposal.tokens, gives_only=weightless)
        engagement.begin(Change.AGREE, session)
        return Acceptance(tokens=tokens, weightless=weightless, loss=side.standing.loss.mean)

    def _weightless(self, peer: PeerId, proposal: Proposal, steps: int, now: float) -> bool:
        """Whether this replica will only give; Refused where it does not exchange with this peer at all now."""
        side = self._side
        if side.standing.newcomer:
            raise Refused(Refusal.ON_PROBATION)
        if not proposal.newcomer and side.standing.counts(peer, steps):
            return False
        if not side.partners.may_give(now):
            raise Refused(Refusal.TOO_EARLY, "newcomers have had their part of my time for now")
        return True

    def admit_open(self, peer: PeerId, opening: Opening, specs: tuple[TensorSpec, ...]) -> None:
        """Refuse an opening that does not fit the exchange."""
        self._session_of(peer, opening.exchange)
        if specs != self._side.opening_specs():
            raise Refused(Refusal.MALFORMED, "the gauge or the sketch does not have the agreed size")

    async def handle_open(self, peer: PeerId, opening: Opening, tensors: tuple[Tensor, ...]) -> Reply[Opening]:
        self.admit_open(peer, opening, specs_of(tensors))  # a namesake may have opened since
        side, session = self._side, self._session_of(peer, opening.exchange)
        outer = side.worker.outer
        if not side.engagement.holds(session, Phase.AGREED):
            raise Refused(Refusal.MALFORMED, "this exchange is open already")
        late = opened_late(session, ambient.monotonic(), side.worker.progress.steps, side.spec.outer.inner_steps)
        if late is not None:
            side.report_abort(session, late)
            side.close(session)
            raise Refused(Refusal.UNKNOWN_EXCHANGE, late)
        side.engagement.go_on(session, Change.OPEN)
        if not await found_finite(tensors[0]):
            raise self._broken_off(session, "not_finite: the gauge holds NaN or infinity")
        self._check_still_open(session)
        snapshot = await side.worker.snapshot()
        self._check_still_open(session)

        def work() -> tuple[tuple[Tensor, ...], float | None]:
            own = side.open(session)
            outer.agree(tensors[1:])
            return own, side.bound.difference.bound(outer.own_motion()) if session.gives_only else None

        try:
            own, bound = await side.arithmetic.do(work)
        except NotFinite as error:
            raise self._broken_off(session, failure_of(error), own=not await side.arithmetic.own_is_finite()) from None
        self._check_still_open(session)
        session.took(snapshot)
        session.meet(side.clocks.met(opening.clock), own, tensors, bound)
        side.engagement.go_on(session, Change.OPENED)
        return Reply(opening_of(session, snapshot), own)

    def admit_chunk(self, peer: PeerId, chunk: ChunkHeader, specs: tuple[TensorSpec, ...]) -> None:
        """Refuse a chunk that does not fit the exchange."""
        session, outer = self._session_of(peer, chunk.exchange), self._side.worker.outer
        opened = self._side.engagement.holds(session, Phase.ANSWERING, Phase.COMMITTING)
        if not opened or chunk.index >= outer.chunks:
            raise Refused(Refusal.MALFORMED, f"chunk {chunk.index} before the openings, or out of range")
        size = outer.codec.wire_elements(outer.chunk_size(chunk.index))
        if specs != (TensorSpec(DTYPE_NAMES[outer.codec.wire_dtype], (size,)),):
            raise Refused(Refusal.MALFORMED, f"chunk {chunk.index} does not have the agreed size and precision")

    async def handle_chunk(self, peer: PeerId, header: ChunkHeader, tensors: tuple[Tensor, ...]) -> Reply[Nothing]:
        """Take in the partner's chunk and answer with this side's."""
        self.admit_chunk(peer, header, specs_of(tensors))  # a namesake may have come while the body was on its way
        side, session = self._side, self._session_of(peer, header.exchange)
        outer, taken = side.worker.outer, tensors[0]
        if not side.engagement.holds(session, Phase.ANSWERING):
            raise Refused(Refusal.UNKNOWN_EXCHANGE, "already committed here")

        def work() -> tuple[Tensor, bool]:
            own = outer.encoded_chunk(header.index)
            return own, session.add_once(header.index, lambda: outer.add_chunk(header.index, taken))

        try:
            own, new = await side.arithmetic.do(work)
        except NotFinite as error:
            raise self._broken_off(session, failure_of(error), own=not await side.arithmetic.own_is_finite()) from None
        if new:  # or a dialler that repeats a chunk would hold this replica for as long as it likes
            session.moved((own,), (taken,))
        if session.added == outer.chunks and side.engagement.holds(session, Phase.ANSWERING):
            side.engagement.go_on(session, Change.COMPLETE)
            self._complete.put_nowait(session)
        return Reply(NOTHING, (own,))

    def _check_still_open(self, session: Session) -> None:
        """Refuse to go on where the exchange was given up: another outer step may own the buffers by now."""
        if not self._side.engagement.holds(session, Phase.OPENING):
            raise Refused(Refusal.UNKNOWN_EXCHANGE)

    def _broken_off(self, session: Session, reason: str, *, own: bool = False) -> Refused:
        """End an exchange in which something is not finite, unless it is being committed: its buffers must stay as they
        are. The refusal to give. `own`: the fault is not the partner's, and is no offence."""
        if self._side.engagement.holds(session, *DIALLED):
            self._side.report_abort(session, reason)
            self._side.close(session)
        return Refused(Refusal.DIVERGED if own else Refusal.NOT_FINITE, reason)

    def _session_of(self, peer: PeerId, exchange: str) -> Session:
        session = self._side.engagement.session
        if session is None or session.role != "dialled" or session.partner != peer or session.exchange != exchange:
            raise Refused(Refusal.UNKNOWN_EXCHANGE)
        return session
