"""What a replica brings to an exchange, whichever side dialled: what it is engaged in, and how an exchange ends.

A replica's outer steps are engaged in one thing at a time: an exchange on either side of it, a step alone, or the
taking of a stage peer's state. That is a phase; its allowed changes are a pure function, and it has one writer.

The arithmetic of an open outer step runs on a thread of its own. A number that is not finite is blamed on the side it
came from.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from enum import StrEnum
from types import MappingProxyType

from torch import Tensor

from noloco_node import ambient
from noloco_node.ambient import OneByOne
from noloco_node.averaging.matchmaking import Window
from noloco_node.averaging.session import Session, abort_event, commit_event, opening_specs
from noloco_node.directory.clocks import PeerClocks
from noloco_node.identity.peer_id import PeerId
from noloco_node.outer.clipping import Judgement, PartnerBound
from noloco_node.outer.replica import NotFinite, gauge_coordinates
from noloco_node.participant import ReplicaContext
from noloco_node.peers.partners import STRANGERS, Meeting, Partners, ProbationStanding, in_line
from noloco_node.telemetry.events import OuterStep
from noloco_node.training.stage_worker import StageWorker
from noloco_node.transport.calls import BadAnswer, floor_of, judging
from noloco_node.transport.errors import Refusal, Refused
from noloco_node.transport.interface import Transport
from noloco_node.transport.messages import TensorSpec

logger = logging.getLogger(__name__)


class Phase(StrEnum):
    """What this replica is in."""

    FREE = "free"
    PROPOSING = "proposing"
    """An own proposal is under way."""
    LEADING = "leading"
    """It was accepted: openings and chunks go to the partner."""
    AGREED = "agreed"
    """A partner's proposal was accepted; its opening is awaited."""
    OPENING = "opening"
    """The partner's opening is worked on."""
    ANSWERING = "answering"
    """Both openings are known: the partner's chunks are answered."""
    ALONE = "alone"
    """A step without a partner is prepared."""
    COMMITTING = "committing"
    """All is there. From here on it is carried to its end."""
    TAKING_STATE = "taking_state"
    """A stage peer's state is fetched and loaded: an exchange would mix the two."""


class Change(StrEnum):
    """What may happen to it."""

    PROPOSE = "propose"
    ACCEPTED = "accepted"
    REFUSED = "refused"
    """The partner's no, or no answer."""
    AGREE = "agree"
    """To a partner's proposal; an own one that is under way to it is void then."""
    OPEN = "open"
    OPENED = "opened"
    STEP_ALONE = "step_alone"
    COMPLETE = "complete"
    BREAK_OFF = "break_off"
    DONE = "done"
    TAKE_STATE = "take_state"
    STATE_TAKEN = "state_taken"
    """The taking of a state is over, with or without success."""


TRANSITIONS: Mapping[Phase, Mapping[Change, Phase]] = MappingProxyType(
    {
        Phase.FREE: {
            Change.PROPOSE: Phase.PROPOSING,
            Change.AGREE: Phase.AGREED,
            Change.STEP_ALONE: Phase.ALONE,
            Change.TAKE_STATE: Phase.TAKING_STATE,
        },
        Phase.PROPOSING: {Change.ACCEPTED: Phase.LEADING, Change.REFUSED: Phase.FREE, Change.AGREE: Phase.AGREED},
        Phase.LEADING: {Change.COMPLETE: Phase.COMMITTING, Change.BREAK_OFF: Phase.FREE},
        Phase.AGREED: {Change.OPEN: Phase.OPENING, Change.BREAK_OFF: Phase.FREE},
        Phase.OPENING: {Change.OPENED: Phase.ANSWERING, Change.BREAK_OFF: Phase.FREE},
        Phase.ANSWERING: {Change.COMPLETE: Phase.COMMITTING, Change.BREAK_OFF: Phase.FREE},
        Phase.ALONE: {Change.COMPLETE: Phase.COMMITTING, Change.BREAK_OFF: Phase.FREE},
        Phase.COMMITTING: {Change.DONE: Phase.FREE},
        Phase.TAKING_STATE: {Change.STATE_TAKEN: Phase.FREE},
    }
)
"""Each phase allows these changes and no others."""

BEGINNING_CHANGES = frozenset(TRANSITIONS[Phase.FREE])
"""These changes begin something new."""
DIALLED = (Phase.AGREED, Phase.OPENING, Phase.ANSWERING)
"""In these phases an exchange that a partner has dialled can still be given up."""


class NotAllowed(RuntimeError):
    """The phase does not allow this change, or the session is no longer the present one. It is a mistake of this
    program, never of a peer."""


def after(phase: Phase, change: Change) -> Phase:
    """The phase after `change`. Raises NotAllowed."""
    try:
        return TRANSITIONS[phase][change]
    except KeyError:
        raise NotAllowed(f"{change} while {phase}") from None


class Engagement:
    """The phase and the session that it is about. Nobody else changes them."""

    def __init__(self) -> None:
        self._phase = Phase.FREE
        self._session: Session | None = None

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def session(self) -> Session | None:
        """What the phase is about; None where that is no outer step."""
        return self._session

    def begin(self, change: Change, session: Session | None = None) -> None:
        """Engage in something new, in place of an own proposal if that was crossed. Raises NotAllowed."""
        if change not in BEGINNING_CHANGES:
            raise NotAllowed(f"{change} begins nothing")
        self._phase, self._session = after(self._phase, change), session

    def go_on(self, session: Session | None, change: Change) -> None:
        """A change of what this replica is engaged in. Raises NotAllowed, also where that is not `session`."""
        if session is not self._session or change in BEGINNING_CHANGES:
            raise NotAllowed(f"{change} of an outer step that is over")
        self._phase = after(self._phase, change)
        if self._phase is Phase.FREE:
            self._session = None

    def holds(self, session: Session, *phases: Phase) -> bool:
        """Tell whether `session` is the present one, and in one of `phases` if any are named.

        During any await it may have ended and another have begun, even of the same name.
        """
        return session is self._session and (not phases or self._phase in phases)


THREAD = "outer"


class Arithmetic(OneByOne):
    """One piece after another: what a closed session left there is done before the next session clears the buffers."""

    def __init__(self, transport: Transport, worker: StageWorker) -> None:
        super().__init__(THREAD)
        self._transport = transport
        self._worker = worker

    async def take_in(self, partner: PeerId, work: Callable[[], None]) -> None:
        """Arithmetic on what the partner has answered. Raises ProtocolViolation, booked against the partner, where that
        is not finite; NotFinite where this replica's own weights are not, for which it must blame nobody."""
        with judging(self._transport, partner, "exchange"):
            try:
                await self.do(work)
            except NotFinite as error:
                if not await self.own_is_finite():
                    raise
                raise BadAnswer(str(error)) from None

    async def own_is_finite(self) -> bool:
        """Whether this replica's own weights of the open step are."""
        return math.isfinite(await self.do(self._worker.outer.own_motion))


class Side:
    """One replica in its outer steps: what it is engaged in, what it knows of its partners, and its bounds on them."""

    def __init__(self, context: ReplicaContext, *, clocks: PeerClocks, standing: ProbationStanding) -> None:
        self.spec = spec = context.spec
        self.stage = context.stage
        self.transport = transport = context.transport
        self.worker = worker = context.worker
        self.clocks = clocks
        self.standing = standing
        self.bound = PartnerBound()
        self.contract = worker.contract
        self.arithmetic = Arithmetic(transport, worker)
        self.engagement = Engagement()
        self._applying: asyncio.Task[None] | None = None
        self.partners = Partners(transport.peer_stats.book)
        self.window = Window(spec.outer.inner_steps, spec.outer.effective_min_inner_steps)
        self.last_round = False
        """This replica has trained to the run's end, and takes its last outer step."""
        self.last_taken = False
        """The last outer step is done."""
        self.catch_up_from: PeerId | None = None
        """This replica is to take that peer's state, since it lags too far behind to be averaged with."""
        self.refusals = Counter[str]()
        """Own proposals that came to nothing since the last outer step, by what the partner or the link said."""
        self.free_since_step = 0
        """Inner steps of this replica when its last exchange ended; a step alone is none."""
        self._moved = context.moved
        self._emit = context.emit

    @property
    def stage_peers(self) -> int:
        """Replicas of this stage that live beside this one."""
        return self.worker.live_replicas - 1

    @property
    def floor(self) -> float:
        """Bytes per second that an exchange moves each way at least."""
        limits, codec = self.spec.limits, self.worker.outer.codec
        size = codec.wire_elements(self.worker.outer.size) * codec.wire_dtype.itemsize
        return floor_of(size, limits.chunk_bytes, limits.exchange_progress_seconds)

    @property
    def opening_seconds(self) -> float:
        return sum(spec.nbytes for spec in self.opening_specs()) / self.floor

    def open(self, session: Session) -> tuple[Tensor, ...]:
        """On the arithmetic's thread: open the outer step on the snapshot. What travels at the opening: the gauge and,
        if the codec needs one, the sketch."""
        outer = self.worker.outer
        outer.open(members=2, weight=session.weight, exchange=session.exchange)
        gauge = outer.snapshot[gauge_coordinates(session.exchange, outer.size)]
        sketch = outer.sketch()
        return (gauge, sketch) if sketch.numel() else (gauge,)

    def opening_specs(self) -> tuple[TensorSpec, ...]:
        """The shapes and types of the tensors that travel at the opening."""
        return opening_specs(self.worker.outer.codec, self.worker.outer.size)

    def refuse_laggards(self, peer: PeerId, claimed: float, *, newcomer: bool = False) -> None:
        """Raise Refused if one of the two lags.

        A newcomer does not lag. Its copy grew old on the way, and another copy would again. It moves nobody, while each
        exchange draws it nearer.
        """
        if newcomer or self.standing.newcomer:
            return
        lagging = self.clocks.laggard(claimed)
        if lagging == "own":
            self.told_to_catch_up(peer)
            raise Refused(Refusal.LAGGING, "mine")
        if lagging == "other":
            raise Refused(Refusal.LAGGING, "yours")

    def told_to_catch_up(self, partner: PeerId) -> None:
        """This replica is too far behind `partner` and is to take its state."""
        self.catch_up_from = partner
        self._moved.fire()

    def take_catch_up(self) -> PeerId | None:
        """The peer to take state from now; None if there is none or something else is under way. The peer is forgotten
        here."""
        if self.engagement.phase is not Phase.FREE:
            return None
        partner, self.catch_up_from = self.catch_up_from, None
        return partner

    def begin_last_round(self) -> None:
        """From now on this replica takes its last outer step, and answers all stage peers that take theirs."""
        if not self.last_round:
            self.partners.begin_last_round()
        self.last_round = True

    async def commit(self, session: Session) -> None:
        """Clip, apply between two device operations, report, and close the session. Once begun it is carried to its
        end, also where nobody waits for it any more: the partner commits, too."""
        self._applying = asyncio.ensure_future(self._apply(session))
        await asyncio.shield(self._applying)

    async def _apply(self, session: Session) -> None:
        snapshot = session.snapshot
        assert snapshot is not None
        outer, bound = self.worker.outer, self.bound
        # A newcomer knows that it may itself be the one that is far. With only two replicas nobody knows which one is.
        stage_peers = 0 if self.standing.newcomer else self.stage_peers
        judgement = Judgement(0.0, 0.0, 1.0)
        if session.paired:
            judgement = await self.arithmetic.do(lambda: bound.judge(outer, session.partner, stage_peers=stage_peers))
        # A newcomer's clock is that of its copy, however long that was on its way; what time it is, the stage peer
        # knows.
        share = 1.0 if self.standing.newcomer else 0.5
        shift = share * (session.partner_clock - snapshot.progress.clock) if session.paired else 0.0
        commit = await self.worker.commit(
            snapshot, scale=judgement.scale, clock_shift=shift, on_host=self.arithmetic.do
        )
        if session.paired:
            bound.accept(session.partner, judgement)
            largest = judgement.bound if session.bound is None else min(judgement.bound, session.bound)
            meeting = Meeting(judgement.norm, largest, self.standing.loss.mean, session.stage_peer_loss)
            self.standing.met(meeting, commit.progress.steps)
        self.refusals.clear()
        self._report(commit_event(session, snapshot, commit, judgement))
        self.close(session)

    async def measure(self, session: Session) -> None:
        """The end of a weightless exchange on the side that gave: it only looks how far the newcomer is away, and
        closes the session."""
        norm, largest = await self.arithmetic.do(self.worker.outer.difference_norm), session.bound
        assert largest is not None, "measured when the exchange was opened"
        meeting = Meeting(norm, largest)
        self.standing.measured(session.partner, meeting)
        if in_line(meeting):
            self.transport.peer_stats.worked(session.partner)
        logger.debug("newcomer %s is %.3g away, %.3g would be whole", session.partner, norm, largest)
        self.close(session)

    def report_abort(self, session: Session, reason: str) -> None:
        progress, rate = self.worker.progress, self.worker.current_learning_rate()
        self._report(abort_event(session, progress, rate, reason))

    def _report(self, event: OuterStep) -> None:
        if self.last_round and event.kind != "aborted":
            self.last_taken = True
        if event.kind == "paired" and event.partner is not None:
            carried, now = event.bytes_sent + event.bytes_received, ambient.monotonic()
            self.partners.exchanged(PeerId(event.partner), event.seconds, carried, now)
        self._emit(event)

    def close(self, session: Session) -> None:
        """What `session` was is over; harmless when repeated."""
        if not self.engagement.holds(session):
            return
        committed = self.engagement.phase is Phase.COMMITTING
        self.engagement.go_on(session, Change.DONE if committed else Change.BREAK_OFF)
        self._remember(session, committed=committed)
        if session.paired:
            self.free_since_step = self.worker.progress.steps
        self._moved.fire()

    def account_of(self, dialler: PeerId) -> tuple[PeerId, int]:
        """The name under which exchanges of `dialler` are booked, and the number of parts that this name has one of."""
        return (dialler, self.stage_peers) if self.transport.peer_stats.has_worked(dialler) else (STRANGERS, 1)

    def _remember(self, session: Session, *, committed: bool) -> None:
        """What the end of an exchange or of a step alone says of the partner."""
        partners, stage_peers, now = self.partners, self.stage_peers, ambient.monotonic()
        seconds = now - session.started
        if session.gives_only:
            partners.gave(seconds, now)
        elif session.role == "dialled":
            for account, parts in {self.account_of(session.partner), (session.partner, stage_peers)}:
                partners.made(account, parts, seconds, committed=committed)
        if committed and not session.gives_only:
            partners.stepped(now)
        if not session.paired:
            return
        if not committed:
            partners.lost(session.partner, seconds, now)
            self.transport.peer_stats.idle(session.partner)
            return
        partners.committed(session.partner)
        if not session.gives_only:  # what was given shows work only of a newcomer in line: see `measure`
            self.transport.peer_stats.worked(session.partner)

    async def stop(self) -> None:
        """Wait for a commit that is being applied, and end the thread of the arithmetic."""
        if self._applying is not None:
            await asyncio.wait((self._applying,))
            if not self._applying.cancelled() and (failure := self._applying.exception()) is not None:
                logger.error("an outer step could not be applied: %r", failure)
        self.arithmetic.stop()
