"""What the laboratory measured of the outer step's settings: tokens to a loss, by codec and H.

`loss_table.json` holds it, which `python -m deploy.loss_table` makes of docs/results/frontier.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from noloco_node.config.run_spec import RunSpec

TABLE = Path(__file__).parent / "loss_table.json"
TELLING = (
    "outer.codec",
    "outer.fragments",
    "outer.alpha",
    "outer.beta",
    "outer.gamma",
    "outer.momentum",
    "inner.beta1",
)
"""Settings of `run` that tell one family from another."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One family at one H."""

    inner_steps: int
    tokens: float | None
    """To the loss that all are compared at; None where it was not reached."""
    loss: float
    """Nats a token at the end of the training, of as many tokens for all."""


@dataclass(frozen=True, slots=True)
class Family:
    """Settings that were measured together at several H."""

    settings: Mapping[str, Any]
    """Of `TELLING`, each."""
    rate: float
    """The learning rate, as a multiple of the first family's."""
    points: tuple[Measured, ...]
    """By rising H."""

    def at(self, inner_steps: float) -> Measured | None:
        """As measured, or between two measured ones (in the logarithms of H); None outside of them."""
        for low, high in zip(self.points, self.points[1:] or self.points, strict=False):
            if low.inner_steps * 0.99 <= inner_steps <= high.inner_steps * 1.01:
                return _between(low, high, inner_steps)
        return None

    def is_of(self, run: RunSpec) -> bool:
        """Whether the run's settings are of this family. Of Adam's β1 only whether there is one matters."""
        return not self.differing(run)

    def differing(self, run: RunSpec) -> Mapping[str, Any]:
        """What a run of this family would have, and this one has not."""
        return {name: value for name, value in self.settings.items() if not _same(run, name, value)}


@dataclass(frozen=True, slots=True)
class LossTable:
    """Where the figures are from, and all of them."""

    source: str
    date: str
    parameters: int
    replicas: int
    tokens: int
    seeds: int
    target_loss: float
    families: tuple[Family, ...]

    def family_of(self, run: RunSpec) -> Family | None:
        """The run's own, where it was measured."""
        return next((family for family in self.families if family.is_of(run)), None)


@cache
def loss_table() -> LossTable:
    """The table that comes with the package."""
    held = json.loads(TABLE.read_text())
    families = tuple(
        Family(family["settings"], family["rate"], tuple(Measured(**point) for point in family["points"]))
        for family in held.pop("families")
    )
    return LossTable(families=families, **held)


def _same(run: RunSpec, name: str, value: Any) -> bool:
    group, _, field = name.partition(".")
    mine = getattr(getattr(run, group), field)
    if name == "inner.beta1":
        return (mine == 0.0) == (value == 0.0)
    if name == "outer.gamma":
        return run.outer.effective_gamma == (1.0 - run.outer.alpha if value is None else value)
    return mine == value


def _between(low: Measured, high: Measured, inner_steps: float) -> Measured:
    reach = math.log(high.inner_steps / low.inner_steps)
    share = 0.0 if reach == 0.0 else min(1.0, max(0.0, math.log(inner_steps / low.inner_steps) / reach))
    tokens = None
    if low.tokens is not None and (high.tokens is not None or share == 0.0):
        tokens = low.tokens * ((high.tokens or low.tokens) / low.tokens) ** share
    return Measured(round(inner_steps), tokens, low.loss + share * (high.loss - low.loss))
