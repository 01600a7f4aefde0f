"""The one way to ask a peer: every request goes out here, and every answer is held to what was asked for.

An answer has a model for its header, the specs of its tensors, and finite numbers in them. One that has not is an
offence of the peer that gave it, booked here and nowhere else, so that no caller can forget to. What only a caller can
judge (a digest, a signature) it judges inside `judging`, which books the same way.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from pydantic import ValidationError
from torch import Tensor

from noloco_node.identity.peer_id import PeerId
from noloco_node.transport.errors import ProtocolViolation
from noloco_node.transport.headers import WireModel, first_problem
from noloco_node.transport.interface import Transport
from noloco_node.transport.messages import Message, TensorSpec
from noloco_node.transport.tensor_checks import scale_of

A = TypeVar("A", bound=WireModel)


class BadAnswer(ValueError):
    """An answer breaks the protocol. Raised inside `judging` only, which books it and turns it into a
    `ProtocolViolation`."""


class Nothing(WireModel):
    """The header of an answer that only says yes, or whose tensors say all."""


@dataclass(frozen=True, slots=True)
class Answer(Generic[A]):
    """An answer that keeps the protocol."""

    header: A
    tensors: tuple[Tensor, ...]
    scales: tuple[float, ...]
    """Root mean square of each tensor of floating-point numbers, in their order; all finite."""


async def ask(
    transport: Transport,
    peer: PeerId,
    method: str,
    request: WireModel | None,
    kind: type[A],
    *,
    tensors: tuple[Tensor, ...] = (),
    specs: tuple[TensorSpec, ...] = (),
    text_bytes: int | None = None,
    timeout: float,
    progress: float,
) -> Answer[A]:
    """Ask `method` of `peer`, sending `request` and `tensors`; `timeout` and `progress` in seconds as `Transport.call`.

    The answer's header must be a `kind` and its tensors exactly `specs`, or one text of at most `text_bytes` bytes
    (u8). Raises as `Transport.call`; ProtocolViolation, which is booked against the peer, where the answer is another.
    """
    header = {} if request is None else request.model_dump(mode="json", exclude_none=True)
    most = sum(spec.nbytes for spec in specs) if text_bytes is None else text_bytes
    try:
        answer = await transport.call(
            peer, method, Message(header, tensors), timeout=timeout, progress=progress, max_answer_bytes=most
        )
    except ProtocolViolation as error:
        transport.conduct.judge(peer, error)
        raise
    with judging(transport, peer, method):
        parsed = _parsed(kind, answer)
        _check_specs(answer.specs, specs if text_bytes is None else None)
        scales = [await scale_of(tensor) for tensor in answer.tensors if tensor.is_floating_point()]
        if not all(map(math.isfinite, scales)):
            raise BadAnswer("it holds NaN or infinity, or is beyond all scale")
    return Answer(parsed, answer.tensors, tuple(scales))


@contextmanager
def judging(transport: Transport, peer: PeerId, what: str) -> Generator[None]:
    """Book a `BadAnswer` of the block against `peer`, and raise it as a ProtocolViolation that names `what` it was."""
    try:
        yield
    except BadAnswer as error:
        violation = ProtocolViolation(f"{what} of {peer}: {error}")
        transport.conduct.judge(peer, violation)
        raise violation from None


def _parsed(kind: type[A], answer: Message) -> A:
    try:
        return kind.model_validate(answer.header)
    except ValidationError as error:
        raise BadAnswer(f"bad {kind.__name__}: {first_problem(error)}") from None


def _check_specs(got: tuple[TensorSpec, ...], wanted: tuple[TensorSpec, ...] | None) -> None:
    """`wanted` is None for one text."""
    if wanted is None:
        if len(got) != 1 or got[0] != TensorSpec("u8", (got[0].nbytes,)):
            raise BadAnswer("it is no text")
    elif got != wanted:
        raise BadAnswer(f"its tensors are {_shown(got)} where {_shown(wanted)} belong")


def _shown(specs: tuple[TensorSpec, ...]) -> str:
    return ", ".join(f"{spec.dtype} {list(spec.shape)}" for spec in specs) or "none"
