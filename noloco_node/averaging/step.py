"""An outer step, from the proposal to the commit: match → snapshot → exchange → commit.

`Averaging.dial` takes these steps with a stage peer, which answers each of them in `responder.py`. What both sides
share is in `side.py`, and an open exchange is a `Session`.

Every step is a request with an answer, so an exchange needs no stream of its own. The dialler sends its chunk and the
partner answers with its own; several are in flight on pooled streams. Training goes on meanwhile. A side commits once
it holds the partner's whole payload, verified and finite; otherwise nothing changes there.

It may happen that only one side commits: no protocol can exclude it, and it is legal. It shifts the mean over N
replicas by half the difference / N.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial

from torch import Tensor

from noloco_node import ambient
from noloco_node.aio import run_to_end
from noloco_node.averaging.responder import Responder
from noloco_node.averaging.session import (
    CHUNK,
    NOBODY,
    OPEN,
    PROPOSE,
    ChunkHeader,
    Proposal,
    Session,
    failure_of,
    opening_of,
    say_goodbye,
    streams_for,
    too_slow,
    why_alone,
)
from noloco_node.averaging.side import Change, Phase, Side
from noloco_node.directory.clocks import PeerClocks
from noloco_node.identity.peer_id import PeerId
from noloco_node.outer.replica import NotFinite
from noloco_node.participant import Participant, ReplicaContext
from noloco_node.peers.partners import Ending, ProbationStanding
from noloco_node.telemetry.events import ProbationEnded
from noloco_node.training.stage_worker import Snapshot
from noloco_node.transport.calls import ATTEMPTS, FIRST_PIECES, A, Answer, Method, Q, Width, ask, side_by_side
from noloco_node.transport.errors import DeadlinePassed, Refusal, Refused, TransportError
from noloco_node.transport.interface import Withdraw
from noloco_node.transport.messages import TensorSpec

logger = logging.getLogger(__name__)


class Averaging(Participant):
    """Takes outer steps when told to, and answers stage peers that ask for one; at most one exchange at a time.

    Every commit is an event, and so is every exchange that was agreed and came to nothing. `ReplicaContext.moved` fires
    when an exchange has ended or a catch-up is due."""

    def __init__(self, context: ReplicaContext, clocks: PeerClocks) -> None:
        def report_probation_ended(reason: Ending, steps: int) -> None:
            context.emit(ProbationEnded(reason=reason, steps=steps))

        inner_steps, book = context.spec.outer.inner_steps, context.transport.peer_stats.book
        self.standing = ProbationStanding(inner_steps, report_probation_ended, book)
        self.side = Side(context, clocks=clocks, standing=self.standing)
        self.responder = Responder(self.side)

    def serve(self) -> tuple[Withdraw, ...]:
        return self.responder.serve()

    def open(self) -> None:
        self.responder.open()

    def shut(self) -> None:
        """Accept no proposal from now on; what is under way goes on."""
        self.responder.shut()

    async def run(self) -> None:
        """Commit exchanges that others dialled, and give up those that make no progress, until cancelled. What is not
        complete is over then."""
        try:
            await self.responder.run()
        finally:
            self.responder.leave()
            await run_to_end(self.side.stop())

    @property
    def under_way(self) -> bool:
        """Whether an exchange is open or proposed, or a stage peer's state is being taken over."""
        return self.side.engagement.phase is not Phase.FREE

    @contextmanager
    def taking_state(self) -> Generator[None]:
        """While a stage peer's state is fetched and loaded in this block no exchange may open. Raises NotAllowed where
        this replica is engaged."""
        self.side.engagement.begin(Change.TAKE_STATE)
        try:
            yield
        finally:
            self.side.engagement.go_on(None, Change.STATE_TAKEN)

    async def dial(self, partner: PeerId) -> bool:
        """Average with `partner`; True when committed. It raises nothing that the partner could cause.

        An agreed exchange that came to nothing is an event. A proposal that was refused or not answered is none; a step
        alone tells how many there were.
        """
        side, session = self.side, await self._match(partner)
        if session is None:
            return False
        try:
            session.took(snapshot := await side.worker.snapshot())
            await self._exchange(session, snapshot)
            side.engagement.go_on(session, Change.COMPLETE)
            await side.commit(session)
        except (Refused, TransportError, NotFinite) as error:
            side.report_abort(session, failure_of(error))
            side.close(session)
            await say_goodbye(side.transport, session)
            return False
        except asyncio.CancelledError:  # as by a pause: else the partner would wait to its deadline
            if side.engagement.holds(session, Phase.LEADING):
                side.close(session)
                await run_to_end(say_goodbye(side.transport, session))
            raise
        finally:
            side.close(session)
        return True

    async def step_alone(self) -> None:
        """The outer step without a partner. Raises NotAllowed where this replica is engaged."""
        side, outer = self.side, self.side.worker.outer
        session = Session(ambient.token(16), NOBODY, "dialler", reason=why_alone(side.refusals))
        side.engagement.begin(Change.STEP_ALONE, session)
        try:
            session.took(await side.worker.snapshot())
            await side.arithmetic.do(lambda: outer.open(members=1, weight=1.0))
            side.engagement.go_on(session, Change.COMPLETE)
            await side.commit(session)
        finally:
            side.close(session)

    async def _match(self, partner: PeerId) -> Session | None:
        """The exchange that `partner` agrees to. None where it refuses, where its own proposal has arrived first and
        stands, or where this replica is engaged."""
        side, engagement = self.side, self.side.engagement
        if engagement.phase is not Phase.FREE:
            return None
        session = Session(ambient.token(16), partner, "dialler", opening_seconds=side.opening_seconds)
        accepted = False
        engagement.begin(Change.PROPOSE, session)
        try:
            accepted = await self._accepted(session)
        finally:
            crossed = not engagement.holds(session)
            if not crossed:
                engagement.go_on(session, Change.ACCEPTED if accepted else Change.REFUSED)
        if crossed and accepted:
            await say_goodbye(side.transport, session)
        return session if accepted and not crossed else None

    async def _accepted(self, session: Session) -> bool:
        """Propose run, contract, clock and tokens; True if the partner agrees, which fixes both shares in the mean."""
        side, progress = self.side, self.side.worker.progress
        proposal = Proposal(
            exchange=session.exchange,
            run=side.spec.run_id,
            stage=side.stage,
            contract=side.contract,
            clock=progress.clock,
            tokens=progress.tokens_since_outer,
            newcomer=side.standing.newcomer,
        )
        try:
            acceptance = (await self._ask(session.partner, PROPOSE, proposal)).header
        except (Refused, TransportError) as error:
            self._note_refusal(session.partner, error)
            return False
        session.accepted(proposal.tokens, acceptance)
        return True

    def _note_refusal(self, partner: PeerId, error: Refused | TransportError) -> None:
        side = self.side
        this_one_lags = isinstance(error, Refused) and error.reason is Refusal.LAGGING and error.detail == "yours"
        if this_one_lags and not side.standing.newcomer and side.clocks.own_lags():
            side.told_to_catch_up(partner)
        side.refusals[failure_of(error).partition(":")[0]] += 1
        logger.debug("proposal to %s came to nothing: %r", partner, error)

    async def _exchange(self, session: Session, snapshot: Snapshot) -> None:
        """Swap openings, then all chunks; the first chunk says how many may be in flight."""
        side, outer = self.side, self.side.worker.outer
        own = await side.arithmetic.do(lambda: side.open(session))
        request, both_ways = opening_of(session, snapshot), 2.0 * session.opening_seconds
        answer = await self._ask(session.partner, OPEN, request, own, side.opening_specs(), more_seconds=both_ways)
        opening = answer.header
        side.refuse_laggards(session.partner, opening.clock)
        await side.arithmetic.take_in(session.partner, lambda: outer.agree(answer.tensors[1:]))
        session.meet(side.clocks.met(opening.clock), own, answer.tensors, opening.bound)
        began = ambient.monotonic()
        await self._swap_chunk(session, 0)
        took, limit = ambient.monotonic() - began, side.spec.limits.exchange_progress_seconds
        width = Width(limit, streams_for(took, limit, FIRST_PIECES))
        await side_by_side(range(1, outer.chunks), width, partial(self._swap_chunk, session))

    async def _swap_chunk(self, session: Session, index: int) -> None:
        side, outer = self.side, self.side.worker.outer
        limit = side.spec.limits.exchange_progress_seconds
        late = too_slow(session, ambient.monotonic(), limit, side.floor)
        if late is not None:
            raise DeadlinePassed(late)
        header = ChunkHeader(exchange=session.exchange, index=index)
        own = await side.arithmetic.do(lambda: outer.encoded_chunk(index))
        answer = await self._ask(session.partner, CHUNK, header, (own,), (TensorSpec.of(own),), ATTEMPTS)
        taken = answer.tensors[0]
        await side.arithmetic.take_in(session.partner, lambda: outer.add_chunk(index, taken))
        session.moved((own,), (taken,))

    async def _ask(
        self,
        peer: PeerId,
        method: Method[Q, A],
        request: Q,
        tensors: tuple[Tensor, ...] = (),
        specs: tuple[TensorSpec, ...] = (),
        attempts: int = 1,
        more_seconds: float = 0.0,
    ) -> Answer[A]:
        """`more_seconds` than a progress deadline are for a large message that moves."""
        to, limit = self.side.transport, self.side.spec.limits.exchange_progress_seconds
        seconds = limit + more_seconds
        return await ask(
            to, peer, method, request, tensors=tensors, specs=specs, seconds=seconds, progress=limit, attempts=attempts
        )
