"""A copy of a stage's slow weights: what it proves of itself, how it is asked for, and which of several is taken.

The keeper of a standby copy and a node that brings a lost stage back ask for one. An exporter asks each replica, in
full precision. The replica that a copy was taken from signs its manifest, so a peer that hands it on can change neither
weights nor clock. A key costs nothing, though: a stranger may sign what it likes. Sources that this node has seen work
therefore come first. Of strangers the one whose weights are like those of the others does.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from noloco_node import ambient
from noloco_node.config.run_spec import RunSpec
from noloco_node.finite import ALIKE, products
from noloco_node.identity.peer_id import PeerId
from noloco_node.state_transfer.fetch import DiskMemory, ReplicaManifest, SignedManifest, opened, sealed
from noloco_node.state_transfer.rate import longest_reading
from noloco_node.tallies import MUCH_MORE
from noloco_node.transport.calls import ATTEMPTS, BadAnswer, Method, Nothing, ask, call, judging
from noloco_node.transport.errors import DeadlinePassed
from noloco_node.transport.interface import Transport
from noloco_node.transport.messages import RunName, StageIndex, TensorSpec, WireModel

MOST_FURTHER = 4.0
"""Two copies are alike only if one has come no more than so many times as far as the other."""

CopyPrecision = Literal["fp16", "fp32"]
"""`fp16` is for standby copies; `fp32` is for exporters of the model."""
DTYPES: dict[CopyPrecision, torch.dtype] = {"fp16": torch.float16, "fp32": torch.float32}


class CopyManifest(ReplicaManifest):
    """Describes one copy of a replica's slow weights, which are `size` numbers. `root` is the hash over all of them. By
    it a copy is asked for: what it names nobody can choose."""

    precision: CopyPrecision = "fp16"


@dataclass(slots=True)
class StageCopy:
    """Slow weights of one stage, [parameters], as their source has signed them."""

    manifest: CopyManifest
    offer: SignedManifest
    weights: Tensor
    memory: DiskMemory | None = None
    """Where on the disk the weights lie; None for those in the machine's memory."""

    def part(self, start: int, end: int) -> Tensor:
        found, size = self.weights[start:end].clone(), self.weights.element_size()
        if self.memory is not None:
            self.memory.leave_memory(size * start, size * end)
        return found

    @property
    def stage(self) -> int:
        return self.manifest.stage

    @property
    def clock(self) -> float:
        """Clock of the source when the copy was taken, swarm tokens."""
        return self.manifest.clock


def root_of_weights(weights: Tensor) -> str:
    """The hash that a manifest names; takes a while, so off the event loop."""
    return hashlib.blake2b(weights.numpy().data, digest_size=32).hexdigest()


def sign_copy(
    transport: Transport, manifest: CopyManifest, weights: Tensor, memory: DiskMemory | None = None
) -> StageCopy:
    """This node's own copy, signed."""
    return StageCopy(manifest, sealed(transport, manifest), weights, memory)


def two_faced(manifests: Collection[CopyManifest]) -> set[str]:
    """The sources that have signed different weights as those of one round at one clock."""
    roots: dict[tuple[str, int, float], set[str]] = {}
    for manifest in manifests:
        roots.setdefault((manifest.source, manifest.outer_rounds, manifest.clock), set()).add(manifest.root)
    return {source for (source, _, _), signed in roots.items() if len(signed) > 1}


def alike(one: Tensor, other: Tensor, first: Tensor) -> bool:
    """Whether two copies have come the same way from the run's first weights (all flat, of whatever precision), be it
    one further than the other.

    The further one has most of the other's way behind it, and the cosine between both ways is large. It is 0.77 and
    0.83 between states of a run at an eighth of its course and at its end. Without that bound noise of four times the
    way passes for the same way.
    """
    product, *squares = products(one, other, first)
    along = product >= ALIKE * max(min(squares), math.sqrt(math.prod(squares)))
    return along and max(squares) <= MOST_FURTHER**2 * min(squares)


def distance(one: Tensor, other: Tensor) -> float:
    """Euclidean, between two copies (flat)."""
    return math.sqrt(products(one, one, other)[1])


def goes_on(copy: Tensor, own: Tensor, first: Tensor, times: float) -> bool:
    """Tell whether a copy has gone on from what a node has itself, which was trained 1/`times` as long. Most of that
    way must be behind the copy. It must have come on in about that direction, no further than so long a training may
    bear."""
    product, copied, had = products(copy, own, first)
    along = product >= ALIKE * max(had, math.sqrt(copied * had))
    return along and copied <= (MOST_FURTHER * max(1.0, times)) ** 2 * had


def choose_copy(
    strangers: Sequence[StageCopy], own: tuple[Tensor, float] | None, first: Tensor, reached: float
) -> tuple[StageCopy | None, bool]:
    """The one of some strangers' copies to take, and whether anything speaks for it.

    The other copies speak for it, and what this node has of the stage (`own`: weights and clock). The result is None if
    this node has something of its own and no copy goes on from that. A claim to be further than `reached`, where the
    swarm is, counts no more than to be there.
    """
    if own is not None:
        weights, clock = own
        strangers = [copy for copy in strangers if goes_on(copy.weights, weights, first, copy.clock / clock)]
    voices = {
        index: sum(alike(copy.weights, other.weights, first) for other in strangers if other is not copy)
        for index, copy in enumerate(strangers)
    }
    best = max(voices, key=lambda index: (voices[index], min(reached, strangers[index].clock)), default=None)
    if best is None:
        return None, own is not None
    return strangers[best], own is not None or voices[best] > 0


class CopyRequest(WireModel):
    """Asks for a copy of a stage (no root named), or for a chunk of the one with that root."""

    run: RunName
    stage: StageIndex
    root: Annotated[str, Field(max_length=64)] = ""
    index: Annotated[int, Field(ge=0, le=1 << 32)] = 0
    precision: CopyPrecision = "fp16"


OPEN_COPY = Method("copy.open", CopyRequest, SignedManifest)
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
) -> tuple[CopyManifest, SignedManifest]:
    """What `peer` gives of a stage of so many weights, asked for `attempts` times where the link fails. Raises Refused
    or TransportError; ProtocolViolation, booked against it, where it is none."""
    request = CopyRequest(run=spec.run_id, stage=stage, precision=precision)
    offer = await call(transport, peer, OPEN_COPY, request, seconds=seconds, attempts=attempts)
    with judging(transport, peer, OPEN_COPY.name):
        manifest = opened(transport, CopyManifest, offer)
        said = manifest.run, manifest.stage, manifest.size, manifest.precision
        if said != (spec.run_id, stage, size, precision):
            raise BadAnswer("the copy is of another run, stage, size or precision")
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
    chunks = chunks_of_copy(spec, transport, donor, manifest, into, seconds=seconds, attempts=ATTEMPTS)
    async for count in chunks:
        told(count)
    return manifest


def of_one_mind(copies: Sequence[Tensor], first: Tensor) -> list[int]:
    """The replicas whose weights (all flat, of one moment) are as near to the others as these are to each other.

    All count if they are two or fewer, since one voice is none. It takes a while: call it off the event loop.

    Each one's median distance to the others decides, beside the median of all such distances. Less than half of them
    then move it no further than to an honest one's. Noise of `MUCH_MORE` times that length adds to the mean of four
    half of what the replicas differ by. Replicas that hardly differ may differ by `NEAR` of the way that they have come
    from the run's `first` weights.
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
    most = max(MUCH_MORE * median_low(usual), NEAR * way)
    return [one for one in range(count) if usual[one] <= most]
