"""What every outer step of a simulation did to φ and δ, written down beside it, and held against the published rule.

The rule is worked out here once more, in fp64 and from what both sides held when they opened the step. It may not lean
on the code that it judges (`outer.update`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from noloco_node.config.run_spec import RunSpec
from noloco_node.outer.replica import OuterReplica
from noloco_node.outer.update import OuterRule
from noloco_node.simulator.quadratic import Quadratic
from noloco_node.training.compute_thread import Compute
from noloco_node.training.placing import PlacedStage

ROUNDING = 1e-5
"""Rounding may be off by this part of the numbers' own size."""
CODEC_ERROR = 2.0
"""A codec may be off by this part of what the partner moves a replica by: on one side, and the other the other way. It
is off by a hundredth in a whole block. But 64 numbers alone in one of 1024 are there sixteen times once they are
rotated, and the sketch may say too little of them."""


@dataclass(slots=True)
class OuterEntry:
    """One side of one outer step; tensors in fp64."""

    exchange: str
    """Empty for a step alone."""
    rule: OuterRule
    weight: float
    """n·w."""
    fast: Tensor
    slow: Tensor
    momentum: Tensor
    scale: float = 1.0
    """The factor of what the partner moves it by; below 1 if that was clipped."""
    after: tuple[Tensor, Tensor] | None = None
    """φ and δ once it was committed."""
    replaced: bool = False
    """Other weights were loaded while it was open, and it counted all the same."""

    def offered(self) -> Tensor:
        """s = β·n·w·Δ + γφ, with αδ where momentum is averaged."""
        kept = self.rule.alpha * self.momentum if self.rule.momentum == "averaged" else 0.0
        return self.rule.beta * self.weight * (self.fast - self.slow) + self.rule.gamma * self.slow + kept

    def stepped(self, mean: Tensor) -> tuple[Tensor, Tensor]:
        """φ and δ by the rule, where the group's mean is this."""
        kept = 0.0 if self.rule.momentum == "averaged" else self.rule.alpha * self.momentum
        momentum = kept + mean - self.rule.gamma * self.slow
        return self.slow + momentum, momentum


class WatchedOuter(OuterReplica):
    """An `OuterReplica` that writes down each step that it opens."""

    def __init__(self, ledger: list[OuterEntry], outer: OuterReplica, chunk_bytes: int) -> None:
        super().__init__(outer.rule, outer.slow, codec=outer.codec, chunk_bytes=chunk_bytes)
        self._ledger = ledger
        self._entry: OuterEntry | None = None
        self._loaded: OuterEntry | None = None
        """Open when other weights were loaded, or before."""

    def open(self, *, members: int, weight: float, exchange: str = "") -> None:
        """See `OuterReplica.open`."""
        super().open(members=members, weight=weight, exchange=exchange)
        fast, slow = (held.double() for held in (self.snapshot, self.slow))
        momentum = torch.zeros_like(slow) if self.momentum is None else self.momentum.double()
        self._entry = OuterEntry(exchange, self.rule, weight, fast, slow, momentum)
        self._ledger.append(self._entry)

    def load(self, slow: Tensor, momentum: Tensor | None = None, trail: Tensor | None = None) -> None:
        """See `OuterReplica.load`."""
        super().load(slow, momentum, trail)
        self._loaded = self._entry

    def limit_values(self, most: float) -> bool:
        """See `OuterReplica.limit_values`."""
        beyond = super().limit_values(most)
        if self._entry is not None and beyond:
            self._entry.scale = 0.0
        return beyond

    def commit(self, scale: float = 1.0) -> Tensor:
        """See `OuterReplica.commit`."""
        if self._entry is not None:
            self._entry.scale = min(self._entry.scale, scale)
        correction = super().commit(scale)
        if self._entry is not None:
            slow = self.slow.double()
            moved = slow - self._entry.slow if self.momentum is None else self.momentum.double()
            self._entry.after = (slow, moved)
            self._entry.replaced = self._entry is self._loaded
        return correction


class Watched(Quadratic):
    """A `Quadratic` that writes down what outer steps do."""

    def __init__(self, seed: int = 0, noise: float = 1.0) -> None:
        super().__init__(seed, noise)
        self.ledger: list[OuterEntry] = []

    async def place(self, spec: RunSpec, stage: int, thread: Compute) -> PlacedStage:
        """See `Quadratic.place`."""
        placed = await super().place(spec, stage, thread)
        watched = WatchedOuter(self.ledger, placed.outer, spec.limits.chunk_bytes)
        return PlacedStage(placed.stage, placed.trainer, watched)


def strays(ledger: Iterable[OuterEntry], *, hostile: bool = False) -> Iterator[str]:
    """Steps that did something else than the rule says, and pairs whose mean was not kept, for a person. Only a
    `hostile` node ruins its weights while a step is open. A pair's codec may be off on each side, but the sum over both
    may not. It may if one of them clipped what the other moves it by, or if only one has committed."""
    pairs: defaultdict[str, list[OuterEntry]] = defaultdict(list)
    for entry in ledger:
        if entry.replaced and not hostile:
            yield f"exchange {entry.exchange[:8]}: other weights were loaded while it was open"
        if entry.exchange:
            pairs[entry.exchange].append(entry)
        elif entry.after is not None and not entry.replaced and (found := _off(entry, entry.offered(), 0.0)):
            yield f"a step alone is off by {found:.2g}"
    for name, sides in pairs.items():
        if any(side.replaced for side in sides):
            continue
        if len(sides) == 2:
            yield from (f"exchange {name[:8]}: {line}" for line in _strays_of_a_pair(*sides))
        elif any(side.after is not None for side in sides):
            yield f"exchange {name[:8]}: {len(sides)} sides have opened it, and one has committed"


def _strays_of_a_pair(one: OuterEntry, other: OuterEntry) -> Iterator[str]:
    mean = (one.offered() + other.offered()) / 2
    apart = _norm(one.offered() - other.offered()) / 2
    for side in (one, other):
        if side.after is not None and side.scale == 1.0 and (found := _off(side, mean, CODEC_ERROR * apart)):
            yield f"a side is off by {found:.2g}, and its partner {apart:.2g} away"
    if one.after is None or other.after is None:
        return
    if abs(one.weight + other.weight - 2.0) > ROUNDING:
        yield f"the two weigh {one.weight:g} and {other.weight:g}, which is not two together"
    if one.scale == other.scale == 1.0:
        by_rule = one.stepped(mean)[0] + other.stepped(mean)[0]
        moved = _norm(one.after[0] + other.after[0] - by_rule)
        if not moved <= ROUNDING * (1.0 + _norm(by_rule)):
            yield f"the mean of two replicas was moved by {moved / 2:.2g}"


def _off(entry: OuterEntry, mean: Tensor, bound: float) -> float:
    """How far φ and δ are from what the rule says, where that is more than `bound` and rounding; else 0."""
    assert entry.after is not None
    off = max(_norm(found - ruled) for found, ruled in zip(entry.after, entry.stepped(mean), strict=True))
    size = _norm(torch.cat([entry.slow, entry.fast, entry.momentum]))
    return off if not off <= bound + ROUNDING * (1.0 + size) else 0.0


def _norm(vector: Tensor) -> float:
    return math.sqrt(float(vector.square().sum()))
