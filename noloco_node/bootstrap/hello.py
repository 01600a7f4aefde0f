"""The first word between two nodes: which run is served here, by which protocol version."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from noloco_node import PROTOCOL_VERSION, __version__, ambient
from noloco_node.config.run_spec import RunSpec
from noloco_node.errors import ExitCode, UserError, version_remedy
from noloco_node.identity.addresses import REACH_SECONDS, parse_address
from noloco_node.identity.peer_id import PeerId
from noloco_node.telemetry.events import Evaluation
from noloco_node.transport.calls import NOTHING, Method, Nothing, call, on
from noloco_node.transport.errors import Refused, TransportError
from noloco_node.transport.interface import Transport, Withdraw
from noloco_node.transport.messages import BirthId, ClockValue, ProtocolVersion, StageIndex, WireModel

logger = logging.getLogger(__name__)


Plain = Annotated[str, Field(max_length=64, pattern=r"^[ -~]*$")]
"""Text of a stranger that can be shown on a terminal: printable ASCII, without control characters."""


class HeldOutLoss(WireModel):
    """What a node of stage 0 has measured last on the run's held-out text."""

    loss: Annotated[float, Field(ge=0.0, le=1e12, allow_inf_nan=False)]
    """Nats per token."""
    clock: ClockValue
    """Swarm tokens."""


class Hello(WireModel):
    """What a node says of itself to any peer that asks."""

    run: Plain
    """Run id; empty for a seed that holds the directory of any run."""
    name: Plain
    protocol: ProtocolVersion
    version: Annotated[Plain, Field(max_length=32)]
    stage: StageIndex | None
    """None for a seed."""
    time: Annotated[float, Field(ge=0.0, le=1e12, allow_inf_nan=False)] | None = None
    """The peer's clock as it answers, seconds since 1970."""
    over: bool | None = None
    """Whether the run has come to its end; None where the peer cannot know. That is a seed that has seen no node at
    work yet, or a node that does not train."""
    held_out: HeldOutLoss | None = None
    """None where this node has measured none."""
    birth: BirthId | None = None
    """The life of the run in which it takes part; None for a seed of any run, and for older releases."""


HELLO = Method("hello", Nothing, Hello, at_once=4)


def serve_hello(
    transport: Transport,
    spec: RunSpec | None,
    stage: Callable[[], int | None],
    over: Callable[[], bool | None] = lambda: False,
    held_out: Callable[[], HeldOutLoss | None] = lambda: None,
    birth: Callable[[], str | None] = lambda: None,
) -> Withdraw:
    """Answer `hello` from now on; `stage` gives the one that this node serves when it is asked. A seed has no stage,
    and need not know of any run. `over` says whether the run has come to its end, None where this node cannot know.
    `held_out` gives what a node of stage 0 has measured last, `birth` the life of the run that it is in."""
    run, name = ("", "") if spec is None else (spec.run_id, spec.name)

    async def handle(_peer: PeerId, _request: Nothing) -> Hello:
        return Hello(
            run=run,
            name=name,
            protocol=PROTOCOL_VERSION,
            version=__version__,
            stage=stage(),
            time=ambient.wall(),
            over=over(),
            held_out=held_out(),
            birth=birth(),
        )

    return on(transport, HELLO, handle)


def held_out_loss(last: Evaluation | None) -> HeldOutLoss | None:
    """What `hello` says of the evaluation that this node took last; None where that gave no number."""
    if last is None or not math.isfinite(last.loss):
        return None
    return HeldOutLoss(loss=last.loss, clock=last.clock)


async def ask_hello(transport: Transport, peer: PeerId, limit: float = REACH_SECONDS) -> Hello:
    """What a peer says of itself, within `limit` seconds. Raises Refused or TransportError where it says nothing of
    use."""
    return await call(transport, peer, HELLO, NOTHING, seconds=limit)


@dataclass(frozen=True, slots=True)
class MeasuredClock:
    """A peer's hello, and its clock against ours."""

    hello: Hello
    skew: float | None
    """Seconds that the peer's clock is ahead of ours; None where it does not tell its time."""
    doubt: float
    """How far off that may be: half of the time that the answer took."""


async def measure_hello(transport: Transport, peer: PeerId) -> MeasuredClock | None:
    """What a peer says of itself, and its clock by the quickest of a few answers; None where it says nothing of use."""
    best: MeasuredClock | None = None
    for _ in range(3):
        asked = ambient.wall()
        hello = await hello_or_none(transport, peer)
        if hello is None:
            break
        answered = ambient.wall()
        middle, doubt = (asked + answered) / 2, (answered - asked) / 2
        if best is None or doubt < best.doubt:
            best = MeasuredClock(hello, None if hello.time is None else hello.time - middle, doubt)
    return best


async def check_same_run(transport: Transport, spec: RunSpec, joined: Sequence[str]) -> None:
    """Ask the peers at these addresses which run they serve; UserError (WRONG_RUN) where all that answer serve another
    or speak another protocol version.

    A peer that does not answer is passed over: the directory finds the others.
    """
    asked = await asyncio.gather(*(hello_or_none(transport, parse_address(address).peer) for address in joined))
    answers = [hello for hello in asked if hello is not None and hello.run]
    same = [a for a in answers if a.run == spec.run_id and a.protocol == PROTOCOL_VERSION]
    if same or not answers:
        return
    other = answers[0]
    if other.protocol != PROTOCOL_VERSION:
        raise other_protocol(other)
    release = f", and noloco-node {other.version} as the peer (here {__version__})"
    raise UserError(
        ExitCode.WRONG_RUN,
        f"the peer serves run '{other.name}' ({other.run}), this configuration is run '{spec.name}' ({spec.run_id})",
        "use the configuration file of the run that you want to join: every value under `run:` must be the same, also "
        "those of --set run.…; noloco-node join ADDRESS needs none, for it asks the peer"
        + (release if other.version != __version__ else ""),
    )


def said_to_be_over(words: Iterable[bool | None]) -> bool:
    """Tell whether most of these peers say that the run has come to its end, by `Hello.over`, of those that can
    know."""
    known = [word for word in words if word is not None]
    return 2 * sum(known) > len(known)


def other_protocol(hello: Hello) -> UserError:
    """The error for a peer that speaks another version of the protocol."""
    return UserError(
        ExitCode.WRONG_RUN,
        f"the peer speaks protocol version {hello.protocol} (noloco-node {hello.version}), this node speaks "
        f"{PROTOCOL_VERSION} ({__version__})",
        version_remedy(PROTOCOL_VERSION, hello.protocol, hello.version),
    )


async def hello_or_none(transport: Transport, peer: PeerId) -> Hello | None:
    """What a peer says of itself; None where it says nothing of use."""
    try:
        return await ask_hello(transport, peer)
    except (Refused, TransportError) as error:
        logger.debug("hello to %s came to nothing: %r", peer, error)
        return None
