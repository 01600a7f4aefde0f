"""One open exchange: what travels in it, what a side knows of it, and the event that it ends in. The chunks themselves
are the codec's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor

from noloco_node import PROTOCOL_VERSION, ambient
from noloco_node.config.run_spec import RunSpec
from noloco_node.identity.peer_id import PeerId
from noloco_node.outer.clipping import Judgement
from noloco_node.outer.codec import Codec
from noloco_node.outer.replica import NotFinite, gauge_coordinates, spread
from noloco_node.outer.update import token_weights
from noloco_node.telemetry.events import OuterStep
from noloco_node.training.progress import Progress
from noloco_node.training.stage_worker import Commit, Snapshot
from noloco_node.transport.calls import Method, Nothing, call
from noloco_node.transport.errors import (
    BrokenStream,
    DeadlinePassed,
    PeerUnreachable,
    ProtocolViolation,
    Refusal,
    Refused,
    TransportError,
)
from noloco_node.transport.interface import Transport
from noloco_node.transport.messages import (
    ClockValue,
    ProtocolVersion,
    RandomId,
    RunName,
    StageIndex,
    TensorSpec,
    WireModel,
    check_addressed,
)

logger = logging.getLogger(__name__)

_Tokens = Annotated[int, Field(ge=0, le=1 << 53)]


class Proposal(WireModel):
    """The dialler's request to average. Answered by an `Acceptance` or a typed refusal."""

    exchange: RandomId
    run: RunName
    protocol: ProtocolVersion = PROTOCOL_VERSION
    stage: StageIndex
    contract: Annotated[str, Field(max_length=64)]
    clock: ClockValue
    tokens: _Tokens
    """Tokens behind the dialler's Δ."""
    newcomer: bool = False
    """The dialler is on probation: it asks to be pulled, and not to be counted."""


def check_proposal(proposal: Proposal, spec: RunSpec, stage: int, contract: str) -> None:
    """Raise Refused where it is for another run or stage, or the two sides' tensors would not fit together."""
    check_addressed(
        run=proposal.run, stage=proposal.stage, own_run=spec.run_id, own_stage=stage, protocol=proposal.protocol
    )
    if proposal.contract != contract:
        raise Refused(Refusal.WRONG_CONTRACT, "the stages differ in shapes, order, codec or chunk size")


class Acceptance(WireModel):
    """The partner's yes. Both sides take the token weights from the two counts of tokens named so far."""

    tokens: _Tokens
    """Tokens behind the partner's Δ."""
    weightless: bool = False
    """The partner gives its half and stays as it is (`peers.partners`): both sides take equal token weights."""
    loss: Annotated[float, Field(ge=0.0, le=1e12, allow_inf_nan=False)] | None = None
    """The partner's recent training loss, nats per token."""


class Opening(WireModel):
    """What each side says of its snapshot, before any chunk. With it travel the gauge, sampled fast weights, and for a
    codec that needs it the sketch, sampled values of s; both fp32."""

    exchange: RandomId
    clock: ClockValue
    bound: Annotated[float, Field(ge=0.0, le=1e30, allow_inf_nan=False)] | None = None
    """The answer to a newcomer names the largest difference that the answering side would accept whole."""


class ChunkHeader(WireModel):
    """Names a chunk of s."""

    exchange: RandomId
    index: Annotated[int, Field(ge=0, le=1 << 32)]


class LeaveExchange(WireModel):
    """The dialler gives an accepted exchange up."""

    exchange: RandomId


PROPOSE = Method("outer.propose", Proposal, Acceptance, at_once=2)
OPEN = Method("outer.open", Opening, Opening, at_once=2)
CHUNK = Method("outer.chunk", ChunkHeader, Nothing, at_once=64)
LEAVE = Method("outer.leave", LeaveExchange, Nothing, at_once=2)


DEADLINES_OF_GRACE = 2.0
"""An exchange has so many progress deadlines besides, for the wait for the device, its arithmetic, and a late start."""
STALE_SECONDS = 5.0
"""An opening is refused if it comes later after the agreement than so many seconds, and than H inner steps of this
replica. Such an opening is of weights from before. Both sides would move by half of what was trained since."""
NOBODY = PeerId("")
"""A step alone has this id as its partner."""


@dataclass(slots=True, eq=False)
class Session:
    """One open exchange, or a step alone."""

    exchange: str
    partner: PeerId
    role: Literal["dialler", "dialled"]
    weight: float = 1.0
    """n·w of this replica."""
    started: float = field(default_factory=ambient.monotonic)
    agreed_at: int = 0
    """Inner steps of the dialled replica when it agreed."""
    last_progress: float = field(default_factory=ambient.monotonic)
    snapshot: Snapshot | None = None
    partner_clock: float = 0.0
    spread: float | None = None
    gives_only: bool = False
    """The dialled side of a weightless exchange: nothing changes here."""
    given_to: bool = False
    """The dialling side of one: nothing changes there."""
    bound: float | None = None
    """The largest difference that the giving side would accept whole: measured there, told here."""
    stage_peer_loss: float | None = None
    """The partner's training loss, as it says."""
    sent: int = 0
    received: int = 0
    reason: str = ""
    """Why the step is taken alone."""
    opening_seconds: float = 0.0
    """For which an opening may be on its way, one message of as much as it takes, at the least pace of an exchange."""
    _added: set[int] = field(default_factory=set[int])

    @property
    def paired(self) -> bool:
        """Whether it has a partner, as all have but steps alone."""
        return self.partner != NOBODY

    @property
    def added(self) -> int:
        """The number of chunks with their arithmetic done; the commit waits for all."""
        return len(self._added)

    def accepted(self, tokens: int, acceptance: Acceptance) -> None:
        """The partner agrees; `tokens` are this replica's since its last step."""
        self.stage_peer_loss = acceptance.loss
        self.given_to = acceptance.weightless
        if not acceptance.weightless:
            self.weight, _ = token_weights((tokens, acceptance.tokens))

    def agreed(self, steps: int, tokens: int, others: int, *, gives_only: bool) -> None:
        """This replica agrees, after so many inner steps; tokens of both since their last steps."""
        self.agreed_at, self.gives_only = steps, gives_only
        if not gives_only:
            self.weight, _ = token_weights((tokens, others))

    def took(self, snapshot: Snapshot) -> None:
        """The state that it is about."""
        self.snapshot = snapshot

    def meet(self, partner_clock: float, own: Sequence[Tensor], others: Sequence[Tensor], bound: float | None) -> None:
        """Both openings are known: the partner's clock as it is believed, the spread, the giving side's bound, and the
        bytes so far."""
        self.partner_clock = partner_clock
        self.spread = spread(own[0], others[0])
        self.bound = bound
        self.moved(own, others)

    def add_once(self, index: int, work: Callable[[], None]) -> bool:
        """On the arithmetic's thread: take in the partner's chunk, unless that was done. True where it was new."""
        if index in self._added:
            return False
        work()
        self._added.add(index)
        return True

    def moved(self, own: Sequence[Tensor], others: Sequence[Tensor]) -> None:
        """These tensors of each side have gone over."""
        self.sent += sum(tensor.nbytes for tensor in own)
        self.received += sum(tensor.nbytes for tensor in others)
        self.last_progress = ambient.monotonic()


def opening_specs(codec: Codec, size: int) -> tuple[TensorSpec, ...]:
    """What must travel at the opening of an exchange of `size` weights: what `Side.open` gives."""
    gauge, sketch = gauge_coordinates("", size).numel(), codec.sketch_elements(size)
    return tuple(TensorSpec("fp32", (elements,)) for elements in (gauge, sketch) if elements)


def opening_of(session: Session, snapshot: Snapshot) -> Opening:
    """What a side says of its snapshot before any chunk."""
    return Opening(exchange=session.exchange, clock=snapshot.progress.clock, bound=session.bound)


def streams_for(chunk_seconds: float, limit: float, most: int) -> int:
    """Chunks to have in flight, 1 to `most`, where the first one alone took `chunk_seconds`.

    On a slow link they share its bandwidth, and each must be there within `limit` seconds: half of that is used.
    """
    return max(1, min(most, int(limit / 2 / max(chunk_seconds, 1e-3))))


def too_slow(session: Session, now: float, limit: float, floor: float) -> str | None:
    """Why an exchange must be given up that has moved less than `floor` bytes per second each way; None where it has
    not. It is judged all the way, and not at its end only."""
    whole = DEADLINES_OF_GRACE * limit + session.opening_seconds + (session.sent + session.received) / 2.0 / floor
    seconds = now - session.started
    return f"slow: below {floor / 1e3:.3g} kB/s each way for {seconds:.0f} s" if seconds > whole else None


def overdue(session: Session, now: float, limit: float, floor: float) -> str | None:
    """Why an exchange must be given up, of which `floor` bytes per second are asked; None where it makes progress, and
    enough of it."""
    patience = limit if session.added else limit + session.opening_seconds
    if now - session.last_progress > patience:
        return f"stalled: no chunk for {patience:.3g} s"
    return too_slow(session, now, limit, floor)


def opened_late(session: Session, now: float, steps: int, inner_steps: int) -> str | None:
    """Why the dialled replica must refuse an opening that comes `now`; None if it comes soon enough after the
    agreement.

    The replica has taken so many `steps`; `inner_steps` is H.
    """
    seconds, since = now - session.started, steps - session.agreed_at
    if seconds <= STALE_SECONDS or since <= inner_steps:
        return None
    return f"stale: opened {seconds:.0f} s and {since} inner steps after the agreement"


_WORDS: tuple[tuple[type[Exception], str], ...] = (
    (PeerUnreachable, "unreachable"),
    (BrokenStream, "broken_stream"),
    (DeadlinePassed, "deadline_passed"),
    (ProtocolViolation, "protocol_violation"),
    (TransportError, "link"),
    (NotFinite, "not_finite"),
)


def why_alone(refusals: Mapping[str, int]) -> str:
    """The `reason` of a step alone, after so many proposals that came to nothing, by word."""
    counts = ", ".join(f"{word} {times}" for word, times in sorted(refusals.items()))
    return f"refused: {counts}" if counts else "nobody: no other replica of the stage could be asked"


def failure_of(error: Refused | TransportError | NotFinite) -> str:
    """An aborted outer step's `reason`: a word for the kind of failure, which becomes a label, and what was said."""
    if isinstance(error, Refused):
        return str(error)
    word = next(word for kind, word in _WORDS if isinstance(error, kind))
    return f"{word}: {error}"


async def say_goodbye(transport: Transport, session: Session) -> None:
    """Tell the partner that the exchange is over, so that it is free at once and not after its deadline."""
    try:
        # Without it the partner finds out by itself, only later.
        await call(transport, session.partner, LEAVE, LeaveExchange(exchange=session.exchange), seconds=2.0)
    except (Refused, TransportError) as error:
        logger.debug("%s was not told that the exchange is over: %r", session.partner, error)


def commit_event(session: Session, snapshot: Snapshot, commit: Commit, judgement: Judgement) -> OuterStep:
    """What is reported of a committed step; `judgement` is on the difference to the partner, if there was one."""
    paired = session.paired
    return OuterStep(
        kind="paired" if paired else "no_partner",
        outer_steps_taken=commit.progress.outer_rounds,
        step=snapshot.progress.steps,
        clock=commit.progress.clock,
        learning_rate=snapshot.learning_rate,
        partner=session.partner if paired else None,
        role=session.role if paired else "none",
        reason=session.reason,
        replica_divergence=session.spread,
        difference_norm=judgement.norm if paired else None,
        clipped=judgement.scale < 1.0,
        one_sided=session.given_to,
        bytes_sent=session.sent,
        bytes_received=session.received,
        seconds=ambient.monotonic() - session.started,
        held_seconds=snapshot.held_seconds + commit.held_seconds,
        inner_steps_meanwhile=commit.inner_steps_meanwhile,
    )


def abort_event(session: Session, progress: Progress, learning_rate: float, reason: str) -> OuterStep:
    """What is reported of an exchange that came to nothing."""
    return OuterStep(
        kind="aborted",
        outer_steps_taken=progress.outer_rounds,
        step=progress.steps,
        clock=progress.clock,
        learning_rate=learning_rate,
        partner=session.partner,
        role=session.role,
        reason=reason,
        replica_divergence=session.spread,
        difference_norm=None,
        clipped=False,
        bytes_sent=session.sent,
        bytes_received=session.received,
        seconds=ambient.monotonic() - session.started,
        held_seconds=session.snapshot.held_seconds if session.snapshot else 0.0,
        inner_steps_meanwhile=0,
    )
