"""How a copy of a stage's slow weights is asked for and read.

A guard, a node that brings a lost stage back, and an exporter of the model do so.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from typing import Annotated

from pydantic import Field
from torch import Tensor

from noloco_node import ambient
from noloco_node.config.run_spec import RunSpec
from noloco_node.identity.peer_id import PeerId
from noloco_node.state_transfer.copy_manifest import CopyManifest, CopyOffer, CopyPrecision, read_offer, root_of_weights
from noloco_node.state_transfer.rate import longest_reading
from noloco_node.transport.calls import BadAnswer, Method, Nothing, ask, call, judging
from noloco_node.transport.errors import DeadlinePassed
from noloco_node.transport.interface import Transport
from noloco_node.transport.messages import RunName, StageIndex, TensorSpec, WireModel


class CopyRequest(WireModel):
    """Asks for a copy of a stage (no root named), or for a chunk of the one with that root."""

    run: RunName
    stage: StageIndex
    root: Annotated[str, Field(max_length=64)] = ""
    index: Annotated[int, Field(ge=0, le=1 << 32)] = 0
    precision: CopyPrecision = "fp16"


OPEN_COPY = Method("copy.open", CopyRequest, CopyOffer)
COPY_CHUNK = Method("copy.chunk", CopyRequest, Nothing, at_once=2)


async def ask_for_copy(
    spec: RunSpec,
    stage: int,
    transport: Transport,
    peer: PeerId,
    size: int,
    *,
    precision: CopyPrecision = "fp16",
    seconds: float,
    attempts: int = 1,
) -> tuple[CopyManifest, CopyOffer]:
    """What `peer` gives of a stage of so many weights, asked for `attempts` times where the link fails. Raises Refused
    or TransportError; ProtocolViolation, booked against it, where it is none."""
    request = CopyRequest(run=spec.run_id, stage=stage, precision=precision)
    offer = await call(transport, peer, OPEN_COPY, request, seconds=seconds, attempts=attempts)
    with judging(transport, peer, OPEN_COPY.name):
        manifest = read_offer(transport, offer, run=spec.run_id, stage=stage, size=size, precision=precision)
    return manifest, offer


async def chunks_of_copy(
    spec: RunSpec,
    transport: Transport,
    peer: PeerId,
    manifest: CopyManifest,
    into: Tensor,
    *,
    seconds: float,
    attempts: int = 1,
) -> AsyncGenerator[int]:
    """Bring the weights of `manifest` into `into`, one chunk after another, each within `seconds`. Each is asked for
    `attempts` times if the link fails. It yields how many came since last. Raises as `ask_for_copy`: what has come is
    worth nothing unless it goes on to its end. So does it where the whole takes longer than its donor would hold it
    (`longest_reading`): else one that lets chunks drip would hold its reader for days."""
    step = spec.limits.chunk_bytes // into.element_size()
    until = ambient.monotonic() + longest_reading(spec.limits, into.nbytes)
    named = CopyRequest(run=manifest.run, stage=manifest.stage, root=manifest.root, precision=manifest.precision)
    for index in range(math.ceil(into.numel() / step)):
        part = into[index * step : (index + 1) * step]
        chunk = named.model_copy(update={"index": index})
        specs = (TensorSpec.of(part),)
        if ambient.monotonic() > until:
            raise DeadlinePassed("the copy came too slowly")
        answer = await ask(transport, peer, COPY_CHUNK, chunk, specs=specs, seconds=seconds, attempts=attempts)
        part.copy_(answer.tensors[0])
        yield part.numel()
    with judging(transport, peer, COPY_CHUNK.name):
        if await ambient.elsewhere(root_of_weights, into) != manifest.root:
            raise BadAnswer("the copy's weights are not those that its source has signed")
