"""How a request fails: refused by the peer for a reason that has a name, or failed on the link."""

from __future__ import annotations

from enum import StrEnum


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
