"""The one way to ask a peer, and to answer one: each method is declared once, and both sides of it go through here.

A request is parsed once, before its body is read; a handler gets the model and gives one. Every request goes out here,
and every answer is held to what was asked for.

An answer has a model for its header, the specs of its tensors, and finite numbers in them. One that has not is an
offence of the peer that gave it, booked here and nowhere else, so that no caller can forget to. What only a caller can
judge (a digest, a signature) it judges inside `judging`, which books the same way.

What is large is asked for in pieces, as many at once as come quickly (`side_by_side`).
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

from pydantic import ValidationError
from torch import Tensor

from noloco_node import ambient
from noloco_node.aio import all_of
from noloco_node.config.run_spec import CHUNKS_A_DEADLINE, MOST_SECONDS
from noloco_node.finite import scale_of
from noloco_node.identity.peer_id import PeerId
from noloco_node.transport.errors import ProtocolViolation, Refusal, Refused, TransportError
from noloco_node.transport.interface import Admitted, Release, Transport, Withdraw
from noloco_node.transport.messages import JsonObject, Message, TensorSpec, WireModel, first_problem, parse

Q = TypeVar("Q", bound=WireModel)
A = TypeVar("A", bound=WireModel)
T = TypeVar("T")


QUESTION_SECONDS = 5.0
"""A small question has this deadline: a peer that is there answers within it, and a dead one holds nobody up for
longer."""
ASKED_AT_ONCE = 16
"""The number of peers that are asked one thing at once: each needs a link, and in a large swarm hundreds may be due
together."""
ATTEMPTS = 3
"""A microbatch at one hop, and a chunk of a state, a copy or an exchange, is asked for so many times: a stream may
break."""

FIRST_PIECES = 4
MOST_PIECES = 32
"""The most pieces under way: 1 Gbit/s holds so many of 1 MiB over a round trip of 250 ms."""
QUICK, SLOW = 1 / 32, 1 / 4
"""A round of pieces that each come within the first share of their deadline lets twice as many be under way. A piece
that takes more than the second share halves their number: a line may become slow under way."""


class BadAnswer(ValueError):
    """An answer breaks the protocol. Raised inside `judging` only, which books it and turns it into a
    `ProtocolViolation`."""


class Nothing(WireModel):
    """The header of an answer that only says yes, or says all with its tensors. A request that only asks has it too."""


NOTHING = Nothing()


def floor_of(size: int, chunk: int, limit: float) -> float:
    """Bytes per second that a transfer of `size` bytes moves at least, in chunks of at most `chunk` bytes.

    No chunk may take longer than `limit` seconds. A peer that moves less holds others up.
    """
    return max(CHUNKS_A_DEADLINE * chunk / limit, size / MOST_SECONDS)


@dataclass(frozen=True, slots=True)
class Method(Generic[Q, A]):
    """A method as both sides know it."""

    name: str
    request: type[Q]
    answer: type[A]
    at_once: int = 1
    """Requests of one peer under way; one more is `busy`."""
    text_bytes: int | None = None
    """The answer's only tensor is a text (u8) of at most so many bytes."""
    brief: bool = False
    """Answers leave out what has its default."""


@dataclass(frozen=True, slots=True)
class Reply(Generic[A]):
    """What a handler answers with where tensors go with it."""

    header: A
    tensors: tuple[Tensor, ...]


Handler = Callable[[PeerId, Q], Awaitable[A | Reply[A]]]
"""A function that answers a request without tensors; it raises `Refused` to say no."""
TensorHandler = Callable[[PeerId, Q, tuple[Tensor, ...]], Awaitable[A | Reply[A]]]
"""A function that answers a request with tensors; it raises `Refused` to say no."""
Judge = Callable[[PeerId, Q], None]
"""A function that may turn a request without tensors away before it is counted as one in hand; it raises `Refused`."""
TensorJudge = Callable[[PeerId, Q, tuple[TensorSpec, ...]], Release | None]
"""A function that may turn a request with tensors away before they are read. What it returns gives back what it has
reserved."""


@dataclass(frozen=True, slots=True)
class Answer(Generic[A]):
    """An answer that keeps the protocol."""

    header: A
    tensors: tuple[Tensor, ...]
    scales: tuple[float, ...]
    """Root mean square of each tensor of floating-point numbers, in their order; all finite."""


def on(transport: Transport, method: Method[Q, A], handle: Handler[Q, A], admit: Judge[Q] | None = None) -> Withdraw:
    """Answer `method`, which takes no tensors, from now on. What is none of its requests is refused as `malformed`."""

    def without_tensors(peer: PeerId, request: Q, specs: tuple[TensorSpec, ...]) -> None:
        if specs:
            raise Refused(Refusal.MALFORMED, "this method takes no tensors")
        if admit is not None:
            admit(peer, request)

    return on_tensors(transport, method, lambda peer, request, _: handle(peer, request), without_tensors)


def on_tensors(
    transport: Transport, method: Method[Q, A], handle: TensorHandler[Q, A], admit: TensorJudge[Q]
) -> Withdraw:
    """Answer `method` from now on; `admit` must judge its tensors.

    A message that is none of its requests is refused as `malformed`.
    """

    def admitted(peer: PeerId, header: JsonObject, specs: tuple[TensorSpec, ...]) -> Admitted:
        request = parse(method.request, header)
        return Admitted(request, admit(peer, request, specs))

    async def answered(peer: PeerId, message: Message) -> Message:
        reply = await handle(peer, cast("Q", message.parsed), message.tensors)
        header, tensors = (reply.header, reply.tensors) if isinstance(reply, Reply) else (reply, ())
        return Message(header.model_dump(mode="json", exclude_defaults=method.brief), tensors)

    return transport.serve(method.name, admitted, answered, max_concurrent_per_peer=method.at_once)


async def call(
    transport: Transport,
    peer: PeerId,
    method: Method[Q, A],
    request: Q,
    *,
    seconds: float,
    progress: float | None = None,
    attempts: int = 1,
) -> A:
    """What `peer` answers to `request`, where no tensors travel. Times, attempts, and what is raised, as in `ask`."""
    return (await ask(transport, peer, method, request, seconds=seconds, progress=progress, attempts=attempts)).header


async def ask(
    transport: Transport,
    peer: PeerId,
    method: Method[Q, A],
    request: Q,
    *,
    tensors: tuple[Tensor, ...] = (),
    specs: tuple[TensorSpec, ...] = (),
    seconds: float,
    progress: float | None = None,
    attempts: int = 1,
    asks_first: bool = False,
) -> Answer[A]:
    """Ask `method` of `peer`, sending `request` and `tensors`. `seconds` is the `timeout` of `Transport.call`, and its
    `progress` (seconds) where none is named. Where the link fails it is asked so many times in all: each must be the
    same to the peer as one. With `asks_first` the tensors go once the request is admitted (`Message.asks_first`).

    The answer's header must be the method's and its tensors exactly `specs`, or one text. Raises as `Transport.call`;
    ProtocolViolation, which is booked against the peer, where the answer is another.
    """
    message = Message(request.model_dump(mode="json", exclude_none=True), tensors, asks_first=asks_first)
    most = sum(spec.nbytes for spec in specs) if method.text_bytes is None else method.text_bytes
    limit = seconds if progress is None else progress
    while True:
        try:
            answer = await transport.call(
                peer, method.name, message, timeout=seconds, progress=limit, max_answer_bytes=most
            )
            break
        except ProtocolViolation as error:
            transport.judge(peer, error)
            raise
        except TransportError:
            attempts -= 1
            if attempts == 0:
                raise
    with judging(transport, peer, method.name):
        parsed = _parsed(method.answer, answer)
        _check_specs(answer.specs, specs if method.text_bytes is None else None)
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
        transport.judge(peer, violation)
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


class Width:
    """How many pieces to have under way.

    More and more of them, as long as each comes quickly. Beyond that they would only wait for the line, and other
    traffic on it would wait behind them.
    """

    def __init__(self, limit: float, pieces: int = FIRST_PIECES, most: int | None = None) -> None:
        """`limit`: seconds within which a piece must be there. `pieces` are under way at first, later at most
        `most`, or `MOST_PIECES`."""
        self._limit = limit
        self.most = MOST_PIECES if most is None else most
        self.pieces: int = pieces
        """Under way from now on."""
        self._since, self._quick = -math.inf, 0
        """When the number changed last, and the quick pieces in a row that were asked for since."""

    def came(self, began: float, now: float) -> None:
        """One more piece is here; it was asked for when it `began`, both in monotonic seconds."""
        if began < self._since:
            return  # it went beside as many as there were before
        took = now - began
        self._quick = self._quick + 1 if took <= QUICK * self._limit else 0
        if self._quick == self.pieces:
            self._change(min(self.most, 2 * self.pieces), now)
        elif took > SLOW * self._limit:
            self._change(max(1, self.pieces // 2), now)

    def _change(self, pieces: int, now: float) -> None:
        self.pieces, self._since, self._quick = pieces, now, 0


async def side_by_side(items: Iterable[T], width: Width, work: Callable[[T], Awaitable[None]]) -> None:
    """Do `work` on each item, in their order, on `width.pieces` at once. Raises the first failure, and does no more
    then."""
    waiting, working, tasks = deque(items), 0, list[asyncio.Task[None]]()

    async def go_on() -> None:
        nonlocal working
        while waiting and working <= width.pieces:
            began = ambient.monotonic()
            try:
                await work(waiting.popleft())
            except BaseException:
                waiting.clear()
                raise
            width.came(began, ambient.monotonic())
            begin()
        working -= 1

    def begin() -> None:
        nonlocal working
        for _ in range(min(width.pieces - working, len(waiting))):
            working += 1
            tasks.append(asyncio.create_task(go_on()))

    begin()
    await all_of(tasks)
