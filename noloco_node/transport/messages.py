"""What travels between peers: a header, a small JSON object, and tensors of the few dtypes that have a name here.

Each header is parsed into a bounded model, which is tolerant of fields that it does not know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Annotated, Any, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from noloco_node import PROTOCOL_VERSION
from noloco_node.identity.addresses import shown
from noloco_node.transport.errors import Refusal, Refused

JsonObject = Mapping[str, Any]

WIRE_DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "i64": torch.int64,
    "i32": torch.int32,
    "u8": torch.uint8,
}
"""The dtypes by their names on the wire. Nothing else can be sent."""

DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in WIRE_DTYPES.items()}

MAX_HEADER_BYTES = 64 * 1024
MAX_TENSORS = 16
MAX_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Dtype name and shape of a tensor on the wire."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the tensor's data in bytes."""
        return prod(self.shape) * WIRE_DTYPES[self.dtype].itemsize

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """The spec of a tensor; KeyError for a dtype that has no name on the wire."""
        return cls(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))


@dataclass(frozen=True, slots=True)
class Message:
    """A header and its tensors (contiguous, on the CPU, of a wire dtype)."""

    header: JsonObject = field(default_factory=dict[str, Any])
    tensors: tuple[torch.Tensor, ...] = ()
    parsed: object = None
    """What the admission has parsed a request's header into. It does not travel."""
    asks_first: bool = False
    """The tensors of this request go only once the other side has admitted it. A refusal then costs none of their
    bytes, and an answer a round trip more."""

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Specs of the tensors in order."""
        return specs_of(self.tensors)


def specs_of(tensors: Sequence[torch.Tensor]) -> tuple[TensorSpec, ...]:
    """The spec of each tensor, in order."""
    return tuple(map(TensorSpec.of, tensors))


@dataclass(slots=True)
class TrafficCount:
    """Bytes of bodies and headers by method, both directions, requests and answers together."""

    sent: dict[str, int] = field(default_factory=dict[str, int])
    received: dict[str, int] = field(default_factory=dict[str, int])
    nearby: int = 0
    """Bytes of both that stayed on this machine: they crossed no line."""

    def add_sent(self, method: str, count: int) -> None:
        """Count bytes sent for a method."""
        self.sent[method] = self.sent.get(method, 0) + count

    def add_received(self, method: str, count: int) -> None:
        """Count bytes received for a method."""
        self.received[method] = self.received.get(method, 0) + count


ClockValue = Annotated[float, Field(ge=0.0, le=1e18, allow_inf_nan=False)]
Rounds = Annotated[int, Field(ge=0, le=1 << 32)]
"""The number of outer steps of a state that a node takes over. The bound is far more than a run has. It is far below
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
