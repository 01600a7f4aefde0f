"""Replicas and outer steps as the tests of this folder make them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from noloco_node.outer import CodecName
from noloco_node.outer.clipping import Judgement, PartnerBound
from noloco_node.outer.codec import BLOCK, CODECS
from noloco_node.outer.replica import OuterReplica
from noloco_node.outer.update import OuterRule

SIZE = 3 * BLOCK + 329
"""A ragged last block, and several chunks."""


@dataclass(frozen=True, slots=True)
class Error:
    """What a codec may add, at most."""

    of_a_weight: float
    """Where partners differ by about 1 in each."""
    of_a_difference: float
    """The norm, as a share of half the difference."""
    left: float
    """Share of the spread that plain averaging leaves."""


ERRORS: dict[CodecName, Error] = {
    "fp32": Error(1e-6, 1e-6, left=1e-6),
    "fp16": Error(3e-3, 0.1, left=1e-3),
    "int8": Error(0.3, 0.1, left=0.06),
    "int4": Error(3.0, 0.7, left=0.5),
    "dct": Error(6.0, 1.0, left=1.0),
    "sign": Error(6.0, 1.0, left=1.0),
}
"""A new codec says here what it may add. Tests of whole exchanges take it in."""


def vectors(count: int, dtype: torch.dtype = torch.float64, seed: int = 0, size: int = SIZE) -> list[Tensor]:
    """Independent normal vectors."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for _ in range(count)]


def replica_of(
    rule: OuterRule,
    slow: Tensor,
    *,
    fast: Tensor | None = None,
    momentum: Tensor | None = None,
    codec: CodecName = "fp32",
) -> OuterReplica:
    """A replica with copies of these weights; fast = slow and no momentum where they are not given."""
    chunk_bytes = BLOCK * CODECS[codec].bits // 8  # `dct` and `sign` make it 16 blocks
    replica = OuterReplica(rule, slow.clone(), codec=CODECS[codec], chunk_bytes=chunk_bytes)
    replica.snapshot.copy_(slow if fast is None else fast)
    if momentum is not None and replica.momentum is not None:
        replica.momentum.copy_(momentum)
    return replica


def replicas(
    count: int, rule: OuterRule, codec: CodecName = "fp32", dtype: torch.dtype = torch.float32, *, size: int = SIZE
) -> list[OuterReplica]:
    """Replicas whose weights, progress and momentum are independent."""
    parts = zip(*(vectors(count, dtype, seed, size) for seed in (1, 2, 3)), strict=True)
    return [
        replica_of(rule, slow, fast=slow + 0.1 * moved, momentum=0.05 * delta, codec=codec)
        for slow, moved, delta in parts
    ]


def meet(
    group: Sequence[OuterReplica], *, weights: Sequence[float] | None = None, exchange: str = "some exchange"
) -> None:
    """Everything of an outer step but its commit: sketches, and every chunk to every other member."""
    for replica, weight in zip(group, weights or [1.0] * len(group), strict=True):
        replica.open(members=len(group), weight=weight, exchange=exchange)
    sketches = [replica.sketch() for replica in group]
    for place, replica in enumerate(group):
        replica.agree(sketches[:place] + sketches[place + 1 :])
    for index in range(group[0].chunks):
        wires = [replica.encoded_chunk(index) for replica in group]
        for replica in group:
            for other, wire in zip(group, wires, strict=True):
                if other is not replica:
                    replica.add_chunk(index, wire)


def step(
    group: Sequence[OuterReplica], *, weights: Sequence[float] | None = None, exchange: str = "some exchange"
) -> None:
    """A whole outer step: all members commit and go on from φ."""
    meet(group, weights=weights, exchange=exchange)
    for replica in group:
        replica.commit()
        replica.snapshot.copy_(replica.slow)


def learn(replica: OuterReplica, generator: torch.Generator, speed: float = 0.02) -> None:
    """Inner steps towards zero, with noise, of bounded size as Adam's are."""
    gradient = replica.slow / (0.05 + replica.slow.abs().mean())
    moved = torch.randn(replica.size, generator=generator) - gradient.clamp(-1, 1)
    replica.snapshot.copy_(replica.slow + speed * moved)


def average(
    group: Sequence[OuterReplica], bounds: Sequence[PartnerBound], a: int, b: int, exchange: str
) -> list[Judgement]:
    """An honest pair's outer step under both bounds, as first `a` and then `b` saw it."""
    meet([group[a], group[b]], exchange=f"{exchange}/{a}")
    seen: list[Judgement] = []
    for own, other in ((a, b), (b, a)):
        judgement = bounds[own].judge(group[own], str(other), stage_peers=len(group) - 1)
        group[own].commit(judgement.scale)
        bounds[own].accept(str(other), judgement)
        seen.append(judgement)
    return seen
