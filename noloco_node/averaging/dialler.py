"""The side of an exchange that dials: propose, openings, chunks, commit; and the step without a partner."""

from __future__ import annotations

import logging
from functools import partial

from torch import Tensor

from noloco_node import ambient
from noloco_node.averaging.engagement import Change, Phase
from noloco_node.averaging.messages import CHUNK, OPEN, PROPOSE, ChunkHeader, Proposal
from noloco_node.averaging.session import (
    NOBODY,
    Session,
    failure_of,
    opening_of,
    say_goodbye,
    streams_for,
    too_slow,
)
from noloco_node.averaging.side import Side
from noloco_node.identity.peer_id import PeerId
from noloco_node.outer.replica import NotFinite
from noloco_node.transport.calls import A, Answer, Method, Q, ask
from noloco_node.transport.errors import DeadlinePassed, Refusal, Refused, TransportError
from noloco_node.transport.messages import TensorSpec
from noloco_node.transport.pieces import Width, side_by_side

logger = logging.getLogger(__name__)

CHUNK_ATTEMPTS = 2
"""A chunk is sent at most so many times: a broken stream need not cost the exchange, and the partner adds a chunk only
once."""


class Dialler:
    """Dials for one side, with as many chunks in flight as the link needs."""

    def __init__(self, side: Side) -> None:
        self._side = side

    async def dial(self, partner: PeerId, fragment: int | None) -> bool:
        """See `Exchanger.dial`."""
        side, engagement = self._side, self._side.engagement
        if engagement.phase is not Phase.FREE:
            return False
        session, accepted = side.new_session(ambient.token(16), partner, "dialler", fragment), False
        engagement.begin(Change.PROPOSE, session)
        try:
            accepted = await self._accepted(session)
        finally:
            crossed = not engagement.holds(session)  # the partner's own proposal arrived first and stands
            if not crossed:
                engagement.go_on(session, Change.ACCEPTED if accepted else Change.REFUSED)
        if crossed and accepted:
            await say_goodbye(side.transport, session)
        if crossed or not accepted:
            return False
        try:
            await self._lead(session)
        except (Refused, TransportError, NotFinite) as error:
            side.report_abort(session, failure_of(error))
            side.close(session)
            await say_goodbye(side.transport, session)
            return False
        finally:
            side.close(session)
        return True

    async def step_alone(self, fragment: int | None) -> None:
        """See `Exchanger.step_alone`."""
        side, outer = self._side, self._side.worker.outer
        session = side.new_session(ambient.token(16), NOBODY, "dialler", fragment)
        side.engagement.begin(Change.STEP_ALONE, session)
        try:
            session.took(await side.worker.snapshot(session.fragment))
            await side.arithmetic.do(lambda: outer.open(session.part, members=1, weight=1.0))
            side.engagement.go_on(session, Change.COMPLETE)
            await side.commit(session)
        finally:
            side.close(session)

    async def _accepted(self, session: Session) -> bool:
        """Propose run, contract, fragment, clock and tokens; whether the partner agrees, which fixes the weights."""
        side, progress = self._side, self._side.worker.progress
        proposal = Proposal(
            exchange=session.exchange,
            run=side.spec.run_id,
            stage=side.stage,
            contract=side.contract,
            clock=progress.clock,
            tokens=progress.tokens_since(session.fragment),
            fragment=session.fragment,
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
        side = self._side
        told_to_catch_up = isinstance(error, Refused) and error.reason is Refusal.LAGGING and error.detail == "yours"
        if told_to_catch_up and not side.standing.newcomer and side.clocks.own_lags():
            side.told_to_catch_up(partner)
        logger.debug("proposal to %s came to nothing: %r", partner, error)

    async def _lead(self, session: Session) -> None:
        """What follows an acceptance: openings, then all chunks, then the commit."""
        side, outer = self._side, self._side.worker.outer
        session.took(snapshot := await side.worker.snapshot(session.fragment))
        own = await side.arithmetic.do(lambda: side.begin(session))
        specs = side.opening_specs(session.part)
        answer = await self._ask(session.partner, OPEN, opening_of(session, snapshot), own, specs)
        opening = answer.header
        side.refuse_laggards(session.partner, opening.clock)
        await side.arithmetic.take_in(session.partner, lambda: outer.agree(answer.tensors[1:]))
        session.meet(side.clocks.met(opening.clock), own, answer.tensors, opening.bound)
        began = ambient.monotonic()
        await self._swap_chunk(session, 0)
        took, limit = ambient.monotonic() - began, side.spec.limits.exchange_progress_seconds
        width = Width(None, limit)
        width.begin_with(streams_for(took, limit, width.pieces))
        await side_by_side(range(1, outer.chunks), width, partial(self._swap_chunk, session))
        side.engagement.go_on(session, Change.COMPLETE)
        await side.commit(session)

    async def _swap_chunk(self, session: Session, index: int) -> None:
        side, outer = self._side, self._side.worker.outer
        limit = side.spec.limits.exchange_progress_seconds
        late = too_slow(session, ambient.monotonic(), limit, side.floor_for(session.part))
        if late is not None:
            raise DeadlinePassed(late)
        header = ChunkHeader(exchange=session.exchange, index=index)
        own = await side.arithmetic.do(lambda: outer.encoded_chunk(index))
        answer = await self._ask(session.partner, CHUNK, header, (own,), (TensorSpec.of(own),), CHUNK_ATTEMPTS)
        taken = answer.tensors[0]
        await side.arithmetic.take_in(session.partner, lambda: outer.add_chunk(index, taken))
        session.swapped(own, taken)

    async def _ask(
        self,
        peer: PeerId,
        method: Method[Q, A],
        request: Q,
        tensors: tuple[Tensor, ...] = (),
        specs: tuple[TensorSpec, ...] = (),
        attempts: int = 1,
    ) -> Answer[A]:
        side, limit = self._side, self._side.spec.limits.exchange_progress_seconds
        return await ask(
            side.transport, peer, method, request, tensors=tensors, specs=specs, seconds=limit, attempts=attempts
        )
