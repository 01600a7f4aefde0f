"""What every header on the wire has in common: parsed into a bounded model, tolerant of fields it does not know."""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from noloco_node import PROTOCOL_VERSION
from noloco_node.identity.addresses import shown
from noloco_node.transport.errors import Refusal, Refused
from noloco_node.transport.messages import JsonObject

ClockValue = Annotated[float, Field(ge=0.0, le=1e18, allow_inf_nan=False)]
Rounds = Annotated[int, Field(ge=0, le=1 << 32)]
"""The number of outer rounds of a state that a node takes over. The bound is far more than a run has. It is far below
what the node's own record may say, or that record could count no further after the next round."""
RunName = Annotated[str, Field(max_length=64)]
StageIndex = Annotated[int, Field(ge=0, lt=256)]
ProtocolVersion = Annotated[int, Field(ge=0, le=1 << 16)]
PeerName = Annotated[str, Field(min_length=10, max_length=128)]
RandomId = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]

H = TypeVar("H", bound="WireModel")


class WireModel(BaseModel):
    """Base of all headers: frozen; a newer version's fields are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


def parse(kind: type[H], header: JsonObject) -> H:
    """The header as a `kind`; Refused (`malformed`, naming the first mistake) where it is none."""
    try:
        return kind.model_validate(header)
    except ValidationError as error:
        raise Refused(Refusal.MALFORMED, first_problem(error)) from None


def check_addressed(*, run: str, stage: int, own_run: str, own_stage: int, protocol: int) -> None:
    """Refuse a message that is meant for another run, stage or protocol version than this node's own."""
    check_run(run, own_run, protocol)
    if stage != own_stage:
        raise Refused(Refusal.WRONG_STAGE, f"this node serves stage {own_stage}, not {stage}")


def check_run(run: str, own_run: str, protocol: int) -> None:
    """Refuse a message that is meant for another run or protocol version than this node's own."""
    if protocol != PROTOCOL_VERSION:
        raise Refused(Refusal.WRONG_PROTOCOL, f"this node speaks version {PROTOCOL_VERSION}, not {protocol}")
    if run != own_run:
        raise Refused(Refusal.WRONG_RUN, f"this node serves run {own_run[:8]}")


def first_problem(error: ValidationError) -> str:
    """The first mistake in a message, as one short printable line for its sender and for a log.

    The place of a mistake may have a name that the sender chose.
    """
    problem = error.errors(include_url=False, include_input=False)[0]
    return shown(f"{'.'.join(str(part) for part in problem['loc'])}: {problem['msg']}")
