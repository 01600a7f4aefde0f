"""The first word between two nodes: which run is served here, by which protocol version."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Annotated

from pydantic import Field, ValidationError

from noloco_node import PROTOCOL_VERSION, __version__
from noloco_node.config.run_spec import RunSpec
from noloco_node.errors import ExitCode, UserError
from noloco_node.swarm.peer_addresses import parse_address
from noloco_node.swarm.transport import Message, PeerId, ProtocolViolation, Refused, Transport, TransportError
from noloco_node.swarm.wire import ProtocolVersion, StageIndex, WireModel, first_problem, no_tensors

logger = logging.getLogger(__name__)

METHOD = "hello"
TIMEOUT_SECONDS = 10.0

Plain = Annotated[str, Field(max_length=64, pattern=r"^[ -~]*$")]
"""Text of a stranger that can be shown on a terminal: printable ASCII, without control characters."""


class Hello(WireModel):
    """What a node says of itself to anyone who asks."""

    run: Plain
    name: Plain
    protocol: ProtocolVersion
    version: Annotated[Plain, Field(max_length=32)]
    stage: StageIndex


def serve_hello(transport: Transport, spec: RunSpec, stage: Callable[[], int]) -> None:
    """Answer `hello` from now on; `stage` gives the one that this node serves when it is asked."""

    async def handle(_peer: PeerId, _message: Message) -> Message:
        own = Hello(run=spec.run_id, name=spec.name, protocol=PROTOCOL_VERSION, version=__version__, stage=stage())
        return Message(own.model_dump(mode="json"))

    transport.serve(METHOD, no_tensors, handle, max_concurrent_per_peer=4)


async def ask_hello(transport: Transport, peer: PeerId) -> Hello:
    """What a peer says of itself. Raises Refused or TransportError where it says nothing of use."""
    answer = await transport.call(
        peer, METHOD, Message(), timeout=TIMEOUT_SECONDS, progress=TIMEOUT_SECONDS, max_answer_bytes=0
    )
    try:
        return Hello.model_validate(answer.header)
    except ValidationError as error:
        raise ProtocolViolation(f"bad hello: {first_problem(error)}") from None


async def check_same_run(transport: Transport, spec: RunSpec, joined: Sequence[str]) -> None:
    """Ask the peers at these addresses which run they serve; UserError (WRONG_RUN) where all that answer serve another.

    A peer that does not answer is passed over: the directory finds the others.
    """
    asked = await asyncio.gather(*(_ask(transport, parse_address(address).peer) for address in joined))
    answers = [hello for hello in asked if hello is not None]
    if not answers or any(a.run == spec.run_id and a.protocol == PROTOCOL_VERSION for a in answers):
        return
    other = answers[0]
    if other.protocol != PROTOCOL_VERSION:
        raise other_protocol(other)
    raise UserError(
        ExitCode.WRONG_RUN,
        f"the peer serves run '{other.name}' ({other.run}), this configuration is run '{spec.name}' ({spec.run_id})",
        "use the configuration file of the run that you want to join: every value under `run:` must be the same",
    )


def other_protocol(hello: Hello) -> UserError:
    """The error for a peer that speaks another version of the protocol."""
    return UserError(
        ExitCode.WRONG_RUN,
        f"the peer speaks protocol version {hello.protocol} (noloco-node {hello.version}), this node speaks "
        f"{PROTOCOL_VERSION} ({__version__})",
        "install the same version of noloco-node on both sides",
    )


async def _ask(transport: Transport, peer: PeerId) -> Hello | None:
    try:
        return await ask_hello(transport, peer)
    except (Refused, TransportError) as error:
        logger.debug("hello to %s came to nothing: %r", peer, error)
        return None
