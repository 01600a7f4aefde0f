"""What travels in a weight exchange, besides the chunks themselves."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from noloco_node import PROTOCOL_VERSION
from noloco_node.config.run_spec import RunSpec
from noloco_node.transport.calls import Method, Nothing
from noloco_node.transport.errors import Refusal, Refused
from noloco_node.transport.messages import (
    ClockValue,
    ProtocolVersion,
    RandomId,
    RunName,
    StageIndex,
    WireModel,
    check_addressed,
)

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
    fragment: Annotated[int, Field(ge=0, lt=1 << 16)] | None = None
    """Index of the fragment to be averaged; None is the whole stage."""
    newcomer: bool = False
    """The dialler is on probation: it asks to be pulled, and not to be counted."""


def check_proposal(proposal: Proposal, spec: RunSpec, stage: int, contract: str) -> None:
    """Raise Refused where it is for another run or stage, or the two sides' tensors would not fit together."""
    check_addressed(
        run=proposal.run,
        stage=proposal.stage,
        own_run=spec.run_id,
        own_stage=stage,
        protocol=proposal.protocol,
    )
    if proposal.contract != contract:
        raise Refused(Refusal.WRONG_CONTRACT, "the stages differ in shapes, order, codec, fragments or chunk size")
    fragments = spec.outer.fragments
    if proposal.fragment is not None and proposal.fragment >= fragments:
        raise Refused(Refusal.MALFORMED, f"fragment {proposal.fragment} of {fragments}")


class Acceptance(WireModel):
    """The partner's yes. Both sides take the token weights from the two counts of tokens named so far."""

    tokens: _Tokens
    """Tokens behind the partner's Δ."""
    weightless: bool = False
    """The partner gives its half and stays as it is (`peers.probation`): both sides take equal token weights."""
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
