"""The transport: requests and answers between peers, with tensors. One interface, two worlds (libp2p, in memory).

A request goes to one method of one peer and gets one answer or one typed refusal. What travels is a header (a small
JSON object) and a list of tensors. The receiver sees header and tensor specs first and may refuse before a byte of the
body is allocated. Many requests may be under way to one peer; cancelling the call closes its stream, and the handler
on the other side is cancelled.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

import torch

from noloco_node.swarm.peer_id import PeerId

if TYPE_CHECKING:
    from noloco_node.swarm.acquaintance import Acquaintances
    from noloco_node.swarm.conduct import Conduct

JsonObject = Mapping[str, Any]

WIRE_DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "i64": torch.int64,
    "i32": torch.int32,
    "u8": torch.uint8,
}
"""Names of dtypes on the wire. Nothing else can be sent."""

DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in WIRE_DTYPES.items()}

MAX_HEADER_BYTES = 64 * 1024
MAX_TENSORS = 16
MAX_DIMENSIONS = 4


class Refusal(StrEnum):
    """Why a peer said no. None of these is a failure of the link."""

    BUSY = "busy"
    DRAINING = "draining"
    WRONG_RUN = "wrong_run"
    WRONG_STAGE = "wrong_stage"
    WRONG_PROTOCOL = "wrong_protocol"
    WRONG_CONTRACT = "wrong_contract"
    TOO_EARLY = "too_early"
    CROSSED = "crossed"
    LAGGING = "lagging"
    ON_PROBATION = "on_probation"
    UNKNOWN_EXCHANGE = "unknown_exchange"
    UNKNOWN_METHOD = "unknown_method"
    UNKNOWN_SNAPSHOT = "unknown_snapshot"
    MALFORMED = "malformed"
    TOO_LARGE = "too_large"
    NOT_FINITE = "not_finite"
    BUDGET_SPENT = "budget_spent"
    DOWNSTREAM_EXHAUSTED = "downstream_exhausted"
    OUT_OF_REACH = "out_of_reach"
    ALREADY_TRAINED = "already_trained"
    INTERNAL = "internal"
    DIVERGED = "diverged"
    OUT_OF_SCALE = "out_of_scale"
    FORGED = "forged"
    NOT_ADMITTED = "not_admitted"
    RELAYED = "relayed"
    NOT_COUNTED = "not_counted"
    BANNED = "banned"


REFUSAL_MEANINGS: dict[Refusal, str] = {
    Refusal.BUSY: "the peer is full now; ask another, or later. Never an offence",
    Refusal.DRAINING: "the peer is leaving or not yet serving",
    Refusal.WRONG_RUN: "the peer serves another run: its RunSpec differs",
    Refusal.WRONG_STAGE: "the peer serves another stage",
    Refusal.WRONG_PROTOCOL: "the peer speaks another protocol version",
    Refusal.WRONG_CONTRACT: "the peer's tensors have other shapes, order or precision",
    Refusal.TOO_EARLY: "the peer has taken too few inner steps since its last outer step",
    Refusal.CROSSED: "both dialled each other; the peer with the smaller id leads",
    Refusal.LAGGING: "one clock lags too far: the laggard must take the other's state",
    Refusal.ON_PROBATION: "the peer has just joined: it is not averaged with before it is in line",
    Refusal.UNKNOWN_EXCHANGE: "the peer knows no such exchange, or has given it up",
    Refusal.UNKNOWN_METHOD: "the peer has no such method",
    Refusal.UNKNOWN_SNAPSHOT: "the peer no longer holds that snapshot of its state",
    Refusal.MALFORMED: "the message does not parse, or contradicts itself",
    Refusal.TOO_LARGE: "the message exceeds a limit",
    Refusal.NOT_FINITE: "a tensor holds NaN or infinity",
    Refusal.BUDGET_SPENT: "too little of the microbatch's time is left",
    Refusal.DOWNSTREAM_EXHAUSTED: "no peer of the next stage finished the microbatch",
    Refusal.OUT_OF_REACH: "nobody of a later stage could be reached, which says nothing against the microbatch",
    Refusal.ALREADY_TRAINED: "this microbatch was trained here and its answer is gone",
    Refusal.INTERNAL: "the peer failed while it worked on the request",
    Refusal.DIVERGED: "with the peer's weights the microbatch has a loss or a gradient that is not finite",
    Refusal.OUT_OF_SCALE: "the activations are much larger than all that the peer has seen",
    Refusal.FORGED: "a signature does not hold",
    Refusal.NOT_ADMITTED: "the run admits only peers that its owner has listed or invited",
    Refusal.RELAYED: "what is asked for is not sent through a relay; no offence",
    Refusal.NOT_COUNTED: "a receipt for more work than the peer has counted since it started; no offence",
    Refusal.BANNED: "the peer has banned this node for offences, until the time that it names is over",
}


class Refused(Exception):
    """A typed no. Raised by handlers to refuse, and by `Transport.call` when the other side refused."""

    def __init__(self, reason: Refusal, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else str(reason))
        self.reason = reason
        self.detail = detail


class TransportError(Exception):
    """The request may or may not have been carried out: the link failed, or time ran out."""


class PeerUnreachable(TransportError):
    """No stream could be opened: the request was certainly not carried out."""


class BrokenStream(TransportError):
    """The stream ended before the answer did (the peer died, cancelled, or the link broke)."""


class DeadlinePassed(TransportError):
    """The call's time is up, or the stream moved no byte for its progress deadline."""


class ProtocolViolation(TransportError):
    """The answer breaks the protocol: bad frame, checksum, size or spec."""


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

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Specs of the tensors in order."""
        return tuple(TensorSpec.of(tensor) for tensor in self.tensors)


Release = Callable[[], None]
"""Gives back what an admission reserved."""

Admit = Callable[[PeerId, JsonObject, tuple[TensorSpec, ...]], Release | None]
"""Looks at a request before its body is read; raises `Refused` to turn it away. Must not block. What it returns is
called once, when the handler has answered or the request has come to nothing."""

Gate = Callable[[PeerId], bool]
"""Whether a peer may ask for anything but the `hello` methods."""

Handle = Callable[[PeerId, Message], Awaitable[Message]]
"""Answers a request; raises `Refused` to say no. Cancelled when the caller goes away."""


@dataclass(slots=True)
class TrafficCount:
    """Bytes of bodies and headers by method, both directions, requests and answers together."""

    sent: dict[str, int] = field(default_factory=dict[str, int])
    received: dict[str, int] = field(default_factory=dict[str, int])

    def add_sent(self, method: str, count: int) -> None:
        """Count bytes sent for a method."""
        self.sent[method] = self.sent.get(method, 0) + count

    def add_received(self, method: str, count: int) -> None:
        """Count bytes received for a method."""
        self.received[method] = self.received.get(method, 0) + count


class Transport(Protocol):
    """What the swarm needs of a network. Implementations: `Libp2pTransport`, `MemoryTransport`."""

    @property
    def peer_id(self) -> PeerId:
        """This node's own id."""
        ...

    @property
    def traffic(self) -> TrafficCount:
        """Bytes so far, by method."""
        ...

    @property
    def refusals_given(self) -> Mapping[Refusal, int]:
        """Refusals this node gave so far, by reason."""
        ...

    @property
    def conduct(self) -> Conduct:
        """What peers have done wrong here."""
        ...

    @property
    def acquaintances(self) -> Acquaintances:
        """Who has answered this node, and of whom it has seen work."""
        ...

    def guard(self, gate: Gate) -> None:
        """From now on refuse (`not_admitted`) all methods but those named `hello...` to peers that `gate` denies."""
        ...

    def serve(self, method: str, admit: Admit, handle: Handle, *, max_concurrent_per_peer: int) -> None:
        """Answer `method` from now on. More than `max_concurrent_per_peer` requests of one peer get `busy`."""
        ...

    def withdraw(self, *families: str) -> None:
        """No longer answer methods of these families (`outer` is that of `outer.open`): their handlers are let go of,
        requests under way go on to their end."""
        ...

    async def call(
        self,
        peer: PeerId,
        method: str,
        request: Message,
        *,
        timeout: float,
        progress: float,
        max_answer_bytes: int,
    ) -> Message:
        """Send a request and wait for its answer.

        `timeout` (seconds) bounds the whole call, `progress` each wait in which bytes ought to move (opening, writing,
        and reading the body once the answer has begun). `max_answer_bytes` is checked before the answer's body is
        allocated.

        Raises `Refused` (a typed no), `PeerUnreachable` (certainly not carried out), or another `TransportError`
        (perhaps carried out).
        """
        ...

    def sign(self, statement: bytes) -> bytes:
        """This node's seal over a statement: what `signed_by` accepts for its peer id, on any node, at any time."""
        ...

    def signed_by(self, peer: PeerId, seal: bytes, statement: bytes) -> bool:
        """Whether `peer` made this seal over exactly this statement. Never raises."""
        ...

    async def close(self) -> None:
        """Cancel every call and handler, close every stream, and wait until all are gone."""
        ...
