"""What travels between peers, and how it lies on a byte stream. Pure functions from values to bytes; no sockets here.

A message is a header, a small JSON object, and tensors of the few dtypes that have a name here. Each header is parsed
into a bounded model, which is tolerant of fields that it does not know.

On the stream a message is one HEADER frame, the BODY frames of its tensors in order, and one END frame. A refusal is
one REFUSE frame. Before either answer any number of AT_WORK frames may come; a request that asks first waits for one
before its BODY frames. Every frame starts with a fixed prefix: magic, version, kind, payload length, and a CRC-32 that
covers prefix and payload.

The header names all tensors, so both sides know the number and length of the BODY frames beforehand. Each tensor is cut
into pieces of `BODY_FRAME_BYTES`, the last one shorter, none for an empty tensor. A reader checks every bound before it
allocates anything.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Annotated, Any, NoReturn, TypeVar, cast

import numpy as np
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
        return math.prod(self.shape) * WIRE_DTYPES[self.dtype].itemsize

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
BirthId = Annotated[str, Field(pattern=r"^[0-9a-f]{24}$")]
"""One life of a run: seconds since 1970 in 8 hexadecimal digits, then 16 random ones. Of two births the elder sorts
first."""

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


MAGIC = b"NL"
FRAME_VERSION = 1
BODY_FRAME_BYTES = 128 * 1024
"""The most bytes of a BODY payload: short enough that one checksum never holds the event loop up, long enough to be
cheap."""
MAX_CHARACTERS = 300
"""The most characters of a method's name, and of a refusal's detail."""
MAX_JSON_DEPTH = 12
MAX_INTEGER = (1 << 63) - 1

_Dimension = Annotated[int, Field(ge=0, le=(1 << 31) - 1)]
_Shape = Annotated[tuple[_Dimension, ...], Field(max_length=MAX_DIMENSIONS, strict=False)]
_Dtype = Annotated[str, Field(pattern=f"^({'|'.join(WIRE_DTYPES)})$")]
_Spec = Annotated[tuple[_Dtype, _Shape], Field(strict=False)]

_FIELDS = struct.Struct(">2sBBI")
_CHECKSUM = struct.Struct(">I")
PREFIX_BYTES = _FIELDS.size + _CHECKSUM.size


class FrameError(Exception):
    """Bytes that are no valid frame, envelope or refusal. The stream they came from cannot be used any more."""


class OtherFrameVersion(FrameError):
    """A frame of another release. That is no offence: during an upgrade both are about."""


class FrameKind(IntEnum):
    """What a frame carries."""

    HEADER = 1
    BODY = 2
    END = 3
    REFUSE = 4
    AT_WORK = 5
    """Sent now and then between a request and its answer: the other side lives, and has the request in hand."""


MAX_PAYLOAD: dict[FrameKind, int] = {
    FrameKind.HEADER: MAX_HEADER_BYTES,
    FrameKind.BODY: BODY_FRAME_BYTES,
    FrameKind.END: 0,
    FrameKind.REFUSE: MAX_HEADER_BYTES,
    FrameKind.AT_WORK: 0,
}


@dataclass(frozen=True, slots=True)
class Prefix:
    """The start of a frame: kind, payload length in bytes, and the checksum that prefix and payload must have."""

    kind: FrameKind
    length: int
    checksum: int
    checksum_start: int
    """CRC-32 of the prefix's own fields, to be continued over the payload."""

    def check(self, payload_checksum: int) -> None:
        """Compare with a checksum continued from `checksum_start` over the payload; FrameError if they differ."""
        if payload_checksum != self.checksum:
            raise FrameError(f"checksum of a {self.kind.name} frame is wrong")


class _Fields(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class _EnvelopeFields(_Fields):
    """A HEADER payload."""

    m: Annotated[str, Field(max_length=MAX_CHARACTERS)]
    h: dict[str, Any]
    t: Annotated[tuple[_Spec, ...], Field(max_length=MAX_TENSORS, strict=False)]
    w: bool = False


class _RefusalFields(_Fields):
    """A REFUSE payload."""

    reason: str
    detail: str = ""


F = TypeVar("F", bound=_Fields)


@dataclass(frozen=True, slots=True)
class Envelope:
    """What a HEADER frame says: the method (empty in answers), the header, and the specs of the tensors to come."""

    method: str
    header: JsonObject
    specs: tuple[TensorSpec, ...]
    asks_first: bool = False
    """The BODY frames come once an AT_WORK frame has said that the request is admitted."""

    @property
    def body_bytes(self) -> int:
        """Size of all tensors together."""
        return sum(spec.nbytes for spec in self.specs)


def encode_prefix(kind: FrameKind, payload: bytes | memoryview) -> bytes:
    """The prefix of a frame with this payload."""
    assert len(payload) <= MAX_PAYLOAD[kind], f"{kind.name} payload of {len(payload)} bytes"
    fields = _FIELDS.pack(MAGIC, FRAME_VERSION, kind, len(payload))
    return fields + _CHECKSUM.pack(zlib.crc32(payload, zlib.crc32(fields)))


def encode_frame(kind: FrameKind, payload: bytes) -> bytes:
    """A whole small frame."""
    return encode_prefix(kind, payload) + payload


END_FRAME = encode_frame(FrameKind.END, b"")
AT_WORK_FRAME = encode_frame(FrameKind.AT_WORK, b"")


def decode_prefix(data: bytes) -> Prefix:
    """Parse `PREFIX_BYTES` bytes. FrameError for a wrong magic, kind or length, OtherFrameVersion for another
    version."""
    magic, version, kind_number, length = cast("tuple[bytes, int, int, int]", _FIELDS.unpack_from(data))
    (checksum,) = cast("tuple[int]", _CHECKSUM.unpack_from(data, _FIELDS.size))
    if magic != MAGIC:
        raise FrameError("no frame starts here")
    if version != FRAME_VERSION:
        raise OtherFrameVersion(f"frame version {version}, not {FRAME_VERSION}")
    try:
        kind = FrameKind(kind_number)
    except ValueError:
        raise FrameError(f"unknown frame kind {kind_number}") from None
    if length > MAX_PAYLOAD[kind]:
        raise FrameError(f"{kind.name} frame of {length} bytes exceeds {MAX_PAYLOAD[kind]}")
    return Prefix(kind, length, checksum, zlib.crc32(data[: _FIELDS.size]))


def encode_envelope(method: str, header: JsonObject, specs: Sequence[TensorSpec], *, asks_first: bool = False) -> bytes:
    """The HEADER payload. ValueError where the header is no JSON or a limit is exceeded: the sender's mistake."""
    if len(specs) > MAX_TENSORS:
        raise ValueError(f"{len(specs)} tensors exceed {MAX_TENSORS}")
    tensors = [[spec.dtype, list(spec.shape)] for spec in specs]
    envelope: JsonObject = {"m": method, "h": dict(header), "t": tensors, **({"w": True} if asks_first else {})}
    payload = _TO_JSON.encode(envelope).encode()
    if len(payload) > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {len(payload)} bytes exceeds {MAX_HEADER_BYTES}")
    return payload


def decode_envelope(payload: bytes) -> Envelope:
    """Parse a HEADER payload. Unknown fields are ignored, for newer senders. FrameError if it breaks a rule."""
    fields = _decode(_EnvelopeFields, payload)
    for _, shape in fields.t:
        if math.prod(max(size, 1) for size in shape) > MAX_INTEGER:
            raise FrameError("a tensor has too many elements")
    return Envelope(fields.m, fields.h, tuple(TensorSpec(dtype, shape) for dtype, shape in fields.t), fields.w)


def encode_refusal(refused: Refused) -> bytes:
    """A whole REFUSE frame."""
    detail = refused.detail[:MAX_CHARACTERS].encode("utf-8", "replace").decode()
    payload = json.dumps({"reason": refused.reason.value, "detail": detail}, separators=(",", ":")).encode()
    return encode_frame(FrameKind.REFUSE, payload)


def decode_refusal(payload: bytes) -> Refused:
    """Parse a REFUSE payload. A reason this version does not know becomes `internal`, its name kept in the detail.

    The detail is one printable line: it ends in logs and events."""
    fields = _decode(_RefusalFields, payload)
    detail = fields.detail[:MAX_CHARACTERS]
    try:
        return Refused(Refusal(fields.reason), shown(detail))
    except ValueError:
        return Refused(Refusal.INTERNAL, shown(f"{fields.reason[:MAX_CHARACTERS]}: {detail}"))


def frame_lengths(nbytes: int) -> Iterator[tuple[int, int]]:
    """Start and end of each BODY piece of a tensor of `nbytes` bytes."""
    for start in range(0, nbytes, BODY_FRAME_BYTES):
        yield start, min(start + BODY_FRAME_BYTES, nbytes)


def check_sendable(tensors: Sequence[torch.Tensor]) -> None:
    """ValueError for a tensor that is not dense on the CPU."""
    for tensor in tensors:
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise ValueError("only contiguous tensors on the CPU can be sent")


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's memory itself, not a copy: it must stay unchanged while it is read.

    ValueError for a tensor that is not dense on the CPU.
    """
    check_sendable((tensor,))
    if tensor.numel() == 0:
        return memoryview(b"")
    flat = tensor.detach()
    if flat.dtype is torch.bfloat16:  # which numpy does not know
        flat = flat.view(torch.uint8) if flat.dim() else flat.reshape(1).view(torch.uint8)
    array: np.ndarray[Any, np.dtype[Any]] = flat.numpy()
    return array.data.cast("B")


def _decode(kind: type[F], payload: bytes) -> F:
    try:
        value: object = _FROM_JSON.decode(payload.decode("utf-8"))
        if payload.count(b"{") + payload.count(b"[") > MAX_JSON_DEPTH or b"\\u" in payload:
            _check_values(value, MAX_JSON_DEPTH)
        return kind.model_validate(value)
    except ValidationError as error:
        raise FrameError(first_problem(error)) from None
    except (ValueError, RecursionError) as error:
        raise FrameError(f"not acceptable JSON: {str(error)[:100]}") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key appears twice")
    return result


def _bounded_integer(text: str) -> int:
    if len(text) > 20 or abs(value := int(text)) > MAX_INTEGER:
        raise ValueError("an integer is too large")
    return value


def _finite_float(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError("a number is not finite")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


_TO_JSON = json.JSONEncoder(allow_nan=False, separators=(",", ":"))
_FROM_JSON = json.JSONDecoder(
    object_pairs_hook=_unique_keys,
    parse_int=_bounded_integer,
    parse_float=_finite_float,
    parse_constant=_no_constant,
)


def _check_values(value: object, depth: int) -> None:
    """Refuse deep nesting and strings that no UTF-8 can hold (lone surrogates, which come by escapes only): both would
    fail much later."""
    if isinstance(value, str):
        value.encode("utf-8")
    elif isinstance(value, dict | list):
        if depth == 0:
            raise ValueError("nested too deep")
        if isinstance(value, dict):
            for key, item in cast("dict[str, object]", value).items():
                key.encode("utf-8")
                _check_values(item, depth - 1)
        else:
            for item in cast("list[object]", value):
                _check_values(item, depth - 1)
