"""What travels with a microbatch: its header, its answer, and the books that are kept of it."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from noloco_node import PROTOCOL_VERSION
from noloco_node.config.model_spec import MAX_PARTS, ModelSpec
from noloco_node.config.run_spec import ActivationCodec, RunSpec
from noloco_node.data.sampler import SamplerPosition
from noloco_node.data.samples import Position
from noloco_node.directory.clocks import DrawnBy
from noloco_node.document_marks import without_marks
from noloco_node.finite import scale_of
from noloco_node.identity.peer_id import PeerId
from noloco_node.model.router import Router
from noloco_node.pipeline.activations import DTYPES, from_wire, wire_length
from noloco_node.tallies import PeerTable
from noloco_node.telemetry.events import MICROBATCH_OUTCOMES, Distribution
from noloco_node.transport.calls import Answer, BadAnswer, Method
from noloco_node.transport.errors import Refusal, Refused
from noloco_node.transport.messages import (
    DTYPE_NAMES,
    ClockValue,
    PeerName,
    ProtocolVersion,
    RandomId,
    RunName,
    StageIndex,
    TensorSpec,
    WireModel,
)

Chosen = Annotated[tuple[Annotated[int, Field(ge=0, le=1 << 40)], ...], Field(max_length=MAX_PARTS)]
"""The number of times that each expert of a mixture was chosen for the tokens of a microbatch."""

Mode = Literal["train", "evaluate"]

NO_FAILURE = (Refusal.BUSY, Refusal.DRAINING)
"""After these refusals the sender asks again, and none counts for `ATTEMPTS`. `outcome_of` says what they cost."""
NOT_FOR_US = (Refusal.BANNED, Refusal.NOT_ADMITTED)
_ELSEWHERE = (Refusal.WRONG_RUN, Refusal.WRONG_STAGE, Refusal.WRONG_PROTOCOL, Refusal.UNKNOWN_METHOD)
OF_ANY_MICROBATCH = (*NO_FAILURE, *NOT_FOR_US, *_ELSEWHERE, Refusal.OUT_OF_REACH)
"""These refusals would meet any other microbatch as well: they say nothing against this one."""
PASSED_UPWARD = (Refusal.OUT_OF_REACH, Refusal.DOWNSTREAM_EXHAUSTED, Refusal.BUDGET_SPENT)
"""A later hop gave up. A sender beyond stage 0 passes this on and asks nobody else."""

NO_MEMORY = "there is no memory for this microbatch here now"


class MicrobatchHeader(WireModel):
    """Goes with the activations and tokens of a microbatch, from one stage to the next."""

    id: RandomId
    """Random; the same on every hop and attempt of one sending. A requeued sample and an audit draw a new one."""
    attempt: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Asks for this hop that came to nothing before; see `MicrobatchLimiter.take`."""
    budget_ms: Annotated[int, Field(ge=1, le=86_400_000)]
    """Milliseconds left; the receiver fails upward before they are over."""
    mode: Mode = "train"
    run: RunName
    stage: StageIndex
    """The stage it is meant for."""
    origin: PeerName
    """Peer id of the node that drew it; like its clock passed on unchanged by each hop, and the word of the sender."""
    origin_clock: ClockValue
    """The origin's clock (tokens) once it and all that the origin drew before it are trained."""
    chosen: Chosen = ()
    """By the stages before, where the run trains routers."""
    codec: ActivationCodec = "fp32"
    """How the activations travel, and their gradient back."""
    protocol: ProtocolVersion = PROTOCOL_VERSION

    @property
    def drawn(self) -> DrawnBy:
        """The origin that drew it, and the time by the origin's clock."""
        return DrawnBy(PeerId(self.origin), self.origin_clock)


class MicrobatchAnswer(WireModel):
    """Comes back with the gradient of the activations (train) or alone (evaluate)."""

    loss_sum: Annotated[float, Field(ge=0.0, le=1e12, allow_inf_nan=False)]
    """Nats, summed over the tokens."""
    tokens: Annotated[int, Field(gt=0, le=1 << 32)]
    load: Annotated[int, Field(ge=0, le=1 << 20)]
    """Microbatches that the answering node held when it answered, this one not counted."""
    chosen: Chosen = ()
    """By all stages, where the run trains routers."""
    work_ms: Annotated[float, Field(ge=0.0, le=1e9, allow_inf_nan=False)] | None = None
    """Milliseconds from the arrival of the whole request to this answer."""

    waited_ms: Annotated[float, Field(ge=0.0, le=1e9, allow_inf_nan=False)] = 0.0
    """For how many of them it waited for devices, here and further on."""

    @property
    def work_seconds(self) -> float | None:
        return None if self.work_ms is None else self.work_ms / 1000


MICROBATCH = Method("microbatch", MicrobatchHeader, MicrobatchAnswer, at_once=64, brief=True)


@dataclass(frozen=True, slots=True, eq=False)
class Outgoing:
    """A microbatch for the next stage: activations [b, T, width] and tokens as `tokens_to_send` gives them."""

    id: str
    mode: Mode
    drawn: DrawnBy
    activations: Tensor
    tokens: Tensor
    chosen: tuple[int, ...] = ()
    """How often the stages so far chose each expert."""
    codec: ActivationCodec | None = None
    """How they travel; None: as suits the link."""
    asks: int = 0
    """The number of asks that came to nothing before the one that was answered."""


@dataclass(frozen=True, slots=True)
class Trained:
    """What came back from the next stage for a microbatch that was trained there, or only evaluated."""

    loss_sum: float
    tokens: int
    gradient: Tensor | None
    scale: float = 0.0
    """Root mean square of the gradient."""
    peer: str = ""
    """The peer that answered."""
    chosen: tuple[int, ...] = ()
    """How often all stages chose each expert."""
    codec: ActivationCodec | None = None
    """How it travelled."""
    waited: float = 0.0
    """Seconds for which it waited for devices from there on, as the peer says."""
    link_wait: float = 0.0
    """Seconds for which it waited for the link to the peer, there and back, by the sender's own clock."""


class HopFailed(Exception):
    """A hop gave a microbatch up; `reason` says why, and its sender may try elsewhere."""

    def __init__(self, reason: Refusal, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
        self.suspect = reason not in OF_ANY_MICROBATCH
        """Whether the microbatch itself may be at fault."""


@dataclass(slots=True, eq=False)
class Sample:
    """Windows that make one microbatch, int32 [b, T + 1], and how often they were requeued."""

    windows: Tensor
    requeues: int = 0


@dataclass(slots=True)
class Done:
    """Microbatches that one peer trained for another, and their tokens."""

    microbatches: int = 0
    tokens: int = 0


@dataclass(slots=True)
class Ledger:
    """Counts of microbatches at one node, through all of its stays. On stage 0, drawn = trained + dropped + held."""

    drawn: int = 0
    trained: int = 0
    dropped: int = 0
    requeued: int = 0
    retried: int = 0
    repeated: int = 0
    served: int = 0
    waiting: deque[Sample] = field(default_factory=deque[Sample])
    """Samples that were requeued. A node that leaves stage 0 keeps them, and trains them should it return."""
    walk: Position = field(default_factory=SamplerPosition)
    """Where the next sample of its text comes from, once it has left stage 0."""
    done_for: PeerTable[PeerId, Done] = field(default_factory=PeerTable[PeerId, Done])
    """What this node did for peers that have not receipted it yet."""
    done_by: PeerTable[PeerId, Done] = field(default_factory=PeerTable[PeerId, Done])
    """What peers did for this node, and it has not receipted yet."""

    @property
    def counts(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in MICROBATCH_OUTCOMES}

    def resume(self, counts: Mapping[str, int]) -> None:
        """Go on from these counts, of an earlier life of this node; one that is missing there is 0."""
        for name in MICROBATCH_OUTCOMES:
            setattr(self, name, counts.get(name, 0))

    def note_served(self, peer: PeerId, tokens: int) -> None:
        self.served += 1
        _note(self.done_for, peer, tokens)

    def note_received(self, peer: PeerId, tokens: int) -> None:
        _note(self.done_by, peer, tokens)


def _note(table: PeerTable[PeerId, Done], peer: PeerId, tokens: int) -> None:
    done = table[peer] = table.get(peer) or Done()
    done.microbatches += 1
    done.tokens += tokens


class Meter:
    """How often values fell between `bounds`, and their sum. Not for several threads at once."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def distribution(self) -> Distribution:
        return Distribution(bounds=self._bounds, counts=tuple(self._counts), sum=self._sum)


def tokens_to_send(model: ModelSpec, inputs: Tensor, labels: Tensor) -> Tensor:
    """The text of a microbatch as it travels: labels int32 [b, T], with marks where documents begin
    (`document_marks.BEGINS`).

    In a subspace each stage needs the inputs, ids [b, T], as well. All but the first of a row are labels, so that one
    goes before the labels: [b, T + 1].
    """
    sent = labels if model.subspace_rank is None else torch.cat((inputs[:, :1], labels), dim=1)
    return sent.to(torch.int32)


def labels_and_ids(model: ModelSpec, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
    """Labels [b, T] with their marks, and in a subspace the token ids [b, T], of what `tokens_to_send` gave."""
    if model.subspace_rank is None:
        return tokens, None
    return tokens[:, 1:], without_marks(tokens[:, :-1])


@cache
def activation_spec(rows: int, length: int, width: int, codec: ActivationCodec) -> TensorSpec:
    """Activations [rows, length, width] as they travel."""
    return TensorSpec(DTYPE_NAMES[DTYPES[codec]], (rows, length, wire_length(width, codec)))


def token_spec(run: RunSpec, rows: int) -> TensorSpec:
    """What `tokens_to_send` gives of so many windows."""
    first = 0 if run.model.subspace_rank is None else 1
    return TensorSpec("i32", (rows, run.data.sequence_length + first))


def check_specs(specs: tuple[TensorSpec, ...], run: RunSpec, *, codec: ActivationCodec, width: int) -> None:
    """Refuse tensors that are not activations [b, length, width], by this codec, and their tokens, with at most as many
    windows as a microbatch of the run has."""
    windows = run.inner.microbatch_windows
    if len(specs) != 2:
        raise Refused(Refusal.MALFORMED, f"a microbatch has 2 tensors, not {len(specs)}")
    activations, tokens = specs
    rows = activations.shape[0] if activations.shape else 0
    if not 1 <= rows <= windows:
        raise Refused(Refusal.TOO_LARGE, f"{rows} windows in a microbatch, 1 to {windows} are allowed")
    for got, wanted in (
        (activations, activation_spec(rows, run.data.sequence_length, width, codec)),
        (tokens, token_spec(run, rows)),
    ):
        if got != wanted:
            raise Refused(Refusal.MALFORMED, f"{got.dtype} {got.shape} where {wanted.dtype} {wanted.shape} belongs")


def read_answer(answer: Answer[MicrobatchAnswer], activations: Tensor, router: Router | None = None) -> Trained:
    """The result that came back for these activations.

    Raises BadAnswer if it counts other tokens than they have, or if a `router` is trained and the counts cannot be
    those of all stages.
    """
    header = answer.header
    if header.tokens != activations.shape[0] * activations.shape[1]:
        raise BadAnswer(f"the answer counts {header.tokens} tokens in activations {tuple(activations.shape)}")
    waited = header.waited_ms / 1000
    if not answer.tensors:
        return Trained(header.loss_sum, header.tokens, None, waited=waited)
    if router is not None and not router.whole(header.chosen, header.tokens):
        raise BadAnswer("the answer's counts of chosen experts are not those of a microbatch")
    gradient, scale = answer.tensors[0], sum(answer.scales)
    return Trained(header.loss_sum, header.tokens, gradient, scale, chosen=header.chosen, waited=waited)


async def decoded(trained: Trained, codec: ActivationCodec, activations: Tensor) -> Trained:
    """This result with its gradient as numbers, as many as these activations are and of their precision. Raises
    BadAnswer where codes stand for no numbers."""
    if trained.gradient is None or trained.gradient.dtype == activations.dtype:
        return trained
    gradient = await from_wire(trained.gradient, codec, activations.dtype, activations.shape[-1])
    scale = await scale_of(gradient)
    if not math.isfinite(scale):
        raise BadAnswer("its codes stand for NaN or infinity, or for what is beyond all scale")
    return replace(trained, gradient=gradient, scale=scale)
