"""What travels in a weight exchange, besides the chunks themselves."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from noloco_node import PROTOCOL_VERSION
from noloco_node.swarm.wire import ClockValue, ProtocolVersion, RandomId, RunName, StageIndex, WireModel

PROPOSE = "outer.propose"
OPEN = "outer.open"
CHUNK = "outer.chunk"


class Proposal(WireModel):
    """The dialler's request to average. Answered by acceptance (an empty header) or a typed refusal."""

    exchange: RandomId
    run: RunName
    protocol: ProtocolVersion = PROTOCOL_VERSION
    stage: StageIndex
    contract: Annotated[str, Field(max_length=64)]
    clock: ClockValue


class Opening(WireModel):
    """What each side says of its snapshot, before any chunk. With it travels the gauge: sampled fast weights, fp32."""

    exchange: RandomId
    clock: ClockValue
    tokens: Annotated[int, Field(ge=0, le=1 << 53)]
    """Tokens behind Δ."""


class ChunkHeader(WireModel):
    """Names a chunk of s."""

    exchange: RandomId
    index: Annotated[int, Field(ge=0, le=1 << 32)]
