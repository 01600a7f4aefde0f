"""How a copy of a stage's slow weights is asked for and read.

The keeper of a standby copy and a node that brings a lost stage back do so. An exporter asks each replica, in full
precision.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable, Sequence
from statistics import median_low
from typing import Annotated

from pydantic import Field
from torch import Tensor

from noloco_node import ambient
from noloco_node.config.run_spec import RunSpec
from noloco_node.identity.peer_id import PeerId
from noloco_node.state_transfer.copy_manifest import (
    CopyManifest,
    CopyOffer,
    CopyPrecision,
    distance,
    read_offer,
    root_of_weights,
)
from noloco_node.state_transfer.rate import longest_reading
from noloco_node.transport.calls import CHUNK_ATTEMPTS, BadAnswer, Method, Nothing, ask, call, judging
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


PATIENCE = 4.0
"""A chunk has so many progress deadlines, since the donor's own training and the taking of the copy come before it."""
TIMES_FURTHER = 2.0
"""One of one moment's replicas may be so many times as far from the others as these usually are from each other. Noise
of that length adds to the mean of four half of what the replicas differ by."""
NEAR = 1 / 4
"""Replicas may always differ by this part of the way from the first weights."""


async def fetch_slow(
    spec: RunSpec, stage: int, transport: Transport, donor: PeerId, into: Tensor, told: Callable[[int], None]
) -> CopyManifest:
    """Bring the slow weights of one replica into `into`, fp32 [parameters]; `told` hears how many came since last.

    Raises Refused or TransportError; ProtocolViolation, booked against the donor, where they are not its own, not those
    that it has signed, or no numbers. `into` is then worth nothing.
    """
    seconds, size = PATIENCE * spec.limits.exchange_progress_seconds, into.numel()
    manifest, _ = await ask_for_copy(spec, stage, transport, donor, size, precision="fp32", seconds=seconds)
    with judging(transport, donor, OPEN_COPY.name):
        if manifest.source != donor:
            raise BadAnswer("the copy is not the state source's own")
    chunks = chunks_of_copy(spec, transport, donor, manifest, into, seconds=seconds, attempts=CHUNK_ATTEMPTS)
    async for count in chunks:
        told(count)
    return manifest


def of_one_mind(copies: Sequence[Tensor], first: Tensor) -> list[int]:
    """The replicas whose weights (all flat, of one moment) are as near to the others as these are to each other.

    All count if they are two or fewer, since one voice is none. It takes a while: call it off the event loop.

    Each one's median distance to the others decides, beside the median of all such distances. Less than half of them
    then move it no further than to an honest one's. Replicas that hardly differ may differ by `NEAR` of the way that
    they have come from the run's `first` weights.
    """
    count = len(copies)
    if count < 3:
        return list(range(count))
    apart = [[0.0] * count for _ in copies]
    for one in range(count):
        for other in range(one):
            apart[one][other] = apart[other][one] = distance(copies[one], copies[other])
    usual = [median_low([apart[one][other] for other in range(count) if other != one]) for one in range(count)]
    way = median_low([distance(copy, first) for copy in copies])
    most = max(TIMES_FURTHER * median_low(usual), NEAR * way)
    return [one for one in range(count) if usual[one] <= most]
