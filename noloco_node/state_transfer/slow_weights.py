"""The receiving side of a copy in full precision: who takes the model home asks each replica for its slow weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

from torch import Tensor

from noloco_node import ambient
from noloco_node.config.run_spec import RunSpec
from noloco_node.identity.peer_id import PeerId
from noloco_node.state_transfer.backups import CHUNK, OPEN, CopyRequest
from noloco_node.state_transfer.copy_manifest import CopyManifest, alike, read_offer, root_of_weights
from noloco_node.transport.calls import BadAnswer, ask, call, judging
from noloco_node.transport.interface import Transport
from noloco_node.transport.messages import TensorSpec

CHUNK_ATTEMPTS = 3
PATIENCE = 4.0
"""Progress deadlines that a chunk has, which the donor's own training comes before; and the taking of the copy."""


async def fetch_slow(
    spec: RunSpec, stage: int, transport: Transport, donor: PeerId, into: Tensor, told: Callable[[int], None]
) -> CopyManifest:
    """Bring the slow weights of one replica into `into`, fp32 [parameters]; `told` hears how many came since last.

    Raises Refused or TransportError; ProtocolViolation, booked against the donor, where they are not its own, not those
    that it has signed, or no numbers. `into` is then worth nothing.
    """
    limit, step = spec.limits.exchange_progress_seconds, spec.limits.chunk_bytes // into.element_size()
    request = CopyRequest(run=spec.run_id, stage=stage, precision="fp32")
    offer = await call(transport, donor, OPEN, request, seconds=PATIENCE * limit)
    with judging(transport, donor, OPEN.name):
        manifest = read_offer(transport, offer, run=spec.run_id, stage=stage, size=into.numel(), precision="fp32")
        if manifest.source != donor:
            raise BadAnswer("the copy is not the donor's own")
    named = request.model_copy(update={"root": manifest.root})
    for index in range(math.ceil(into.numel() / step)):
        part = into[index * step : (index + 1) * step]
        chunk = named.model_copy(update={"index": index})
        specs, seconds = (TensorSpec.of(part),), PATIENCE * limit
        answer = await ask(transport, donor, CHUNK, chunk, specs=specs, seconds=seconds, attempts=CHUNK_ATTEMPTS)
        part.copy_(answer.tensors[0])
        told(part.numel())
    with judging(transport, donor, CHUNK.name):
        if await ambient.elsewhere(root_of_weights, into) != manifest.root:
            raise BadAnswer("the copy's weights are not those that it has signed")
    return manifest


def of_one_mind(copies: Sequence[Tensor], first: Tensor) -> list[int]:
    """Which of some replicas' weights (all flat) have come the same way from the run's `first` ones as at least half of
    the others; all of them where they are two or fewer, since one voice is none. Takes a while: off the event loop."""
    if len(copies) < 3:
        return list(range(len(copies)))
    voices = [sum(alike(own, other, first) for other in _others(copies, own)) for own in copies]
    return [index for index, count in enumerate(voices) if 2 * count >= len(copies) - 1]


def _others(copies: Collection[Tensor], own: Tensor) -> list[Tensor]:
    return [other for other in copies if other is not own]
