"""What a copy of a stage's slow weights proves of itself, and which of several is taken when the stage is lost.

The replica that a copy was taken from signs its manifest, so a peer that hands it on can change neither weights nor
clock. A key costs nothing, though: a stranger may sign what it likes. Sources that this node has seen work therefore
come first. Of strangers the one whose weights are like those of the others does.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field, ValidationError
from torch import Tensor

from noloco_node.config.settings import canonical_json
from noloco_node.identity.peer_id import PeerId
from noloco_node.storage.disk_memory import DiskMemory
from noloco_node.transport.calls import BadAnswer
from noloco_node.transport.interface import Transport
from noloco_node.transport.messages import ClockValue, PeerName, Rounds, RunName, StageIndex, WireModel

ALIKE = 0.5
"""Two copies are alike if the one further from the run's first weights has at least this share of the other's way
behind it."""
MOST_FURTHER = 4.0
"""Two copies are alike only if one has come no more than so many times as far as the other."""
LEAST_COSINE = 0.5
"""The least cosine between the ways of two copies, or between a node's own way and a copy that goes on from it. It is
0.77 and 0.83 between states of a run at an eighth of its course and at its end. Without this bound noise of four times
the way passes for the same way."""
PIECE = 1 << 20


CopyPrecision = Literal["fp16", "fp32"]
"""`fp16` is for standby copies; `fp32` is for exporters of the model."""
DTYPES: dict[CopyPrecision, torch.dtype] = {"fp16": torch.float16, "fp32": torch.float32}


class CopyManifest(WireModel):
    """Describes one copy of one replica's slow weights. That replica signs it."""

    source: PeerName
    run: RunName
    stage: StageIndex
    clock: ClockValue
    outer_rounds: Rounds
    size: Annotated[int, Field(gt=0, le=1 << 44)]
    """Weights."""
    precision: CopyPrecision = "fp16"
    root: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """Hash over all of them, as hex. By it a copy is asked for: what it names nobody can choose."""


class CopyOffer(WireModel):
    """A manifest as text, and its source's seal over that text as hex."""

    manifest: Annotated[str, Field(max_length=4096)]
    seal: Annotated[str, Field(max_length=8192, pattern=r"^([0-9a-f]{2})+$")]


@dataclass(slots=True)
class StageCopy:
    """Slow weights of one stage, [parameters], as their source has signed them."""

    manifest: CopyManifest
    offer: CopyOffer
    weights: Tensor
    memory: DiskMemory | None = None
    """Where on the disk the weights lie; None for those in the machine's memory."""

    def part(self, start: int, end: int) -> Tensor:
        """A copy of the weights [start, end)."""
        found, size = self.weights[start:end].clone(), self.weights.element_size()
        if self.memory is not None:
            self.memory.leave_memory(size * start, size * end)
        return found

    @property
    def stage(self) -> int:
        """The stage of these weights."""
        return self.manifest.stage

    @property
    def clock(self) -> float:
        """Clock of the source when the copy was taken, swarm tokens."""
        return self.manifest.clock


def root_of_weights(weights: Tensor) -> str:
    """The hash that a manifest names; takes a while, so off the event loop."""
    digest = root_digest()
    digest.update(weights.numpy().data)
    return digest.hexdigest()


def root_digest() -> hashlib.blake2b:
    """The beginning of that hash, for weights that come piece by piece."""
    return hashlib.blake2b(digest_size=32)


def sign_copy(
    transport: Transport, manifest: CopyManifest, weights: Tensor, memory: DiskMemory | None = None
) -> StageCopy:
    """This node's own copy, signed."""
    text = canonical_json(manifest.model_dump(mode="json"))
    offer = CopyOffer(manifest=text, seal=transport.sign(text.encode()).hex())
    return StageCopy(manifest, offer, weights, memory)


def read_offer(
    transport: Transport, offer: CopyOffer, *, run: str, stage: int, size: int, precision: CopyPrecision = "fp16"
) -> CopyManifest:
    """The manifest of an offer. Raises BadAnswer unless its source has signed it, for this run, stage, size and
    precision."""
    try:
        manifest = CopyManifest.model_validate_json(offer.manifest)
    except ValidationError as error:
        raise BadAnswer(f"bad manifest of a copy: {error.error_count()} errors") from None
    if not transport.signed_by(PeerId(manifest.source), bytes.fromhex(offer.seal), offer.manifest.encode()):
        raise BadAnswer("the copy's manifest is not signed by its source")
    if (manifest.run, manifest.stage, manifest.size, manifest.precision) != (run, stage, size, precision):
        raise BadAnswer("the copy is of another run, stage, size or precision")
    return manifest


def two_faced(manifests: Collection[CopyManifest]) -> set[str]:
    """The sources that have signed different weights as those of one round at one clock."""
    roots: dict[tuple[str, int, float], set[str]] = {}
    for manifest in manifests:
        roots.setdefault((manifest.source, manifest.outer_rounds, manifest.clock), set()).add(manifest.root)
    return {source for (source, _, _), signed in roots.items() if len(signed) > 1}


def alike(one: Tensor, other: Tensor, first: Tensor) -> bool:
    """Whether two copies have come the same way from the run's first weights (all flat, of whatever precision), be it
    one further than the other."""
    product, *squares = _ways(one, other, first)
    along = product >= max(ALIKE * min(squares), LEAST_COSINE * math.sqrt(math.prod(squares)))
    return along and max(squares) <= MOST_FURTHER**2 * min(squares)


def distance(one: Tensor, other: Tensor) -> float:
    """Euclidean, between two copies (flat)."""
    square = 0.0
    for start in range(0, one.numel(), PIECE):
        between = one[start : start + PIECE].double() - other[start : start + PIECE].double()
        square += float(torch.dot(between, between))
    return math.sqrt(square)


def goes_on(copy: Tensor, own: Tensor, first: Tensor, times: float) -> bool:
    """Tell whether a copy has gone on from what a node has itself, which was trained 1/`times` as long. Most of that
    way must be behind the copy. It must have come on in about that direction, no further than so long a training may
    bear."""
    product, copied, had = _ways(copy, own, first)
    along = product >= max(ALIKE * had, LEAST_COSINE * math.sqrt(copied * had))
    return along and copied <= (MOST_FURTHER * max(1.0, times)) ** 2 * had


def _ways(one: Tensor, other: Tensor, first: Tensor) -> tuple[float, float, float]:
    """The product of two ways from the first weights, and the square of each."""
    product, squares = 0.0, [0.0, 0.0]
    for start in range(0, first.numel(), PIECE):
        zero = first[start : start + PIECE].double()
        a, b = (whole[start : start + PIECE].double() - zero for whole in (one, other))
        product += float(torch.dot(a, b))
        squares = [total + float(torch.dot(way, way)) for total, way in zip(squares, (a, b), strict=True)]
    return product, squares[0], squares[1]


def choose_copy(
    strangers: Sequence[StageCopy],
    own: tuple[Tensor, float] | None,
    first: Tensor,
    reached: float,
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
