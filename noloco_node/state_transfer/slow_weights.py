"""The receiving side of a copy in full precision: who takes the model home asks each replica for its slow weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from torch import Tensor

from noloco_node.config.run_spec import RunSpec
from noloco_node.identity.peer_id import PeerId
from noloco_node.state_transfer.copy_fetch import OPEN_COPY, ask_for_copy, chunks_of_copy
from noloco_node.state_transfer.copy_manifest import CopyManifest, alike
from noloco_node.transport.calls import BadAnswer, judging
from noloco_node.transport.interface import Transport

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
    """Which of some replicas' weights (all flat) have come the same way from the run's `first` ones as at least half of
    the others; all of them where they are two or fewer, since one voice is none. Takes a while: off the event loop."""
    if len(copies) < 3:
        return list(range(len(copies)))
    voices = [sum(alike(own, other, first) for other in _others(copies, own)) for own in copies]
    return [index for index, count in enumerate(voices) if 2 * count >= len(copies) - 1]


def _others(copies: Collection[Tensor], own: Tensor) -> list[Tensor]:
    return [other for other in copies if other is not own]
