"""How a request fails: refused by the peer for a reason that has a name, or failed on the link."""

from __future__ import annotations

from enum import StrEnum


class Refusal(StrEnum):
    """Why a peer said no, and what that means. None of these is a failure of the link."""

    meaning: str

    def __new__(cls, value: str, meaning: str) -> Refusal:
        """A member whose value is the word on the wire."""
        member = str.__new__(cls, value)
        member._value_, member.meaning = value, meaning
        return member

    BUSY = "busy", "the peer is full now; ask another, or later. Never an offence"
    DRAINING = "draining", "the peer is leaving or not yet serving"
    WRONG_RUN = "wrong_run", "the peer serves another run: its RunSpec differs"
    WRONG_STAGE = "wrong_stage", "the peer serves another stage"
    WRONG_PROTOCOL = "wrong_protocol", "the peer speaks another protocol version"
    WRONG_CONTRACT = "wrong_contract", "the peer's tensors have other shapes, order or precision"
    TOO_EARLY = "too_early", "the peer has taken too few inner steps since its last outer step"
    CROSSED = "crossed", "both dialled each other; the peer with the smaller id leads"
    LAGGING = "lagging", "one clock lags too far: the laggard must take the other's state"
    ON_PROBATION = "on_probation", "the peer has just joined: it is not averaged with before it is in line"
    UNKNOWN_EXCHANGE = "unknown_exchange", "the peer knows no such exchange, or has given it up"
    UNKNOWN_METHOD = "unknown_method", "the peer has no such method"
    UNKNOWN_SNAPSHOT = "unknown_snapshot", "the peer no longer holds that snapshot of its state"
    MALFORMED = "malformed", "the message does not parse, or contradicts itself"
    TOO_LARGE = "too_large", "the message exceeds a limit"
    NOT_FINITE = "not_finite", "a tensor holds NaN or infinity"
    BUDGET_SPENT = "budget_spent", "too little of the microbatch's time is left"
    DOWNSTREAM_EXHAUSTED = "downstream_exhausted", "no peer of the next stage finished the microbatch"
    OUT_OF_REACH = "out_of_reach", "nobody of a later stage could take the microbatch, which says nothing against it"
    ALREADY_TRAINED = "already_trained", "this microbatch was trained here and its answer is gone"
    INTERNAL = "internal", "the peer failed while it worked on the request"
    DIVERGED = "diverged", "with the peer's weights the microbatch has a loss or a gradient that is not finite"
    OUT_OF_SCALE = "out_of_scale", "the activations are much larger than all that the peer has seen"
    FORGED = "forged", "a signature does not hold"
    NOT_ADMITTED = "not_admitted", "the run admits only peers that its owner has listed or invited"
    RELAYED = "relayed", "what is asked for is not sent through a relay; no offence"
    NOT_COUNTED = "not_counted", "a receipt for more work than the peer has counted since it started; no offence"
    BANNED = "banned", "the peer has banned this node for offences, until the time that it names is over"


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
