"""The first word between two nodes: which run is served here, by which protocol version."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, ValidationError

from noloco_node import PROTOCOL_VERSION, __version__
from noloco_node.config.run_spec import RunSpec
from noloco_node.errors import ExitCode, UserError
from noloco_node.swarm.peer_addresses import parse_address
from noloco_node.swarm.transport import (
    Message,
    PeerId,
    Refused,
    Transport,
    TransportError,
)
from noloco_node.swarm.wire import ProtocolVersion, RunName, StageIndex, WireModel, no_tensors

logger = logging.getLogger(__name__)

METHOD = "hello"
TIMEOUT_SECONDS = 10.0


class Hello(WireModel):
    """What a node says of itself to anyone who asks."""

    run: RunName
    name: Annotated[str, Field(max_length=64)]
    protocol: ProtocolVersion
    version: Annotated[str, Field(max_length=32)]
    stage: StageIndex


def serve_hello(transport: Transport, spec: RunSpec, stage: int) -> None:
    """Answer `hello` from now on."""
    own = Hello(run=spec.run_id, name=spec.name, protocol=PROTOCOL_VERSION, version=__version__, stage=stage)

    async def handle(_peer: PeerId, _message: Message) -> Message:
        return Message(own.model_dump(mode="json"))

    transport.serve(METHOD, no_tensors, handle, max_concurrent_per_peer=4)


async def check_same_run(transport: Transport, spec: RunSpec, initial_peers: Sequence[str]) -> None:
    """Ask the initial peers which run they serve; raises UserError (WRONG_RUN) where all that answer serve another.

    An address that is malformed or does not answer is passed over: the directory finds the others.
    """
    peers: list[PeerId] = []
    for address in initial_peers:
        with contextlib.suppress(ValueError):
            peers.append(parse_address(address).peer)
    answers = [hello for hello in [await _ask(transport, peer) for peer in peers] if hello is not None]
    if not answers or any(a.run == spec.run_id and a.protocol == PROTOCOL_VERSION for a in answers):
        return
    other = answers[0]
    if other.protocol != PROTOCOL_VERSION:
        raise UserError(
            ExitCode.WRONG_RUN,
            f"the peer speaks protocol version {other.protocol} (noloco-node {other.version}), this node speaks "
            f"{PROTOCOL_VERSION} ({__version__})",
            "install the same version of noloco-node on both sides",
        )
    raise UserError(
        ExitCode.WRONG_RUN,
        f"the peer serves run '{other.name}' ({other.run}), this configuration is run '{spec.name}' ({spec.run_id})",
        "use the configuration file of the run that you want to join: every value under `run:` must be the same",
    )


async def _ask(transport: Transport, peer: PeerId) -> Hello | None:
    try:
        answer = await transport.call(
            peer, METHOD, Message(), timeout=TIMEOUT_SECONDS, progress=TIMEOUT_SECONDS, max_answer_bytes=0
        )
        return Hello.model_validate(answer.header)
    except (Refused, TransportError, ValidationError) as error:
        logger.debug("hello to %s came to nothing: %r", peer, error)
        return None
