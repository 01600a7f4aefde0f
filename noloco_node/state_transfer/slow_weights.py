"""The receiving side of a copy in full precision: an exporter of the model asks each replica for its slow weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median_low

from torch import Tensor

from noloco_node.config.run_spec import RunSpec
from noloco_node.identity.peer_id import PeerId
from noloco_node.state_transfer.copy_fetch import OPEN_COPY, ask_for_copy, chunks_of_copy
from noloco_node.state_transfer.copy_manifest import CopyManifest, distance
from noloco_node.transport.calls import CHUNK_ATTEMPTS, BadAnswer, judging
from noloco_node.transport.interface import Transport

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
            raise BadAnswer("the copy is not the donor's own")
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
