"""Whether nodes look longer at the directory after an attack than before it, beyond what chance gives."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

TRIES = 400
CHANCE = 0.05


@dataclass(frozen=True)
class Looks:
    """Seconds of each look of each node of an arm."""

    before: Sequence[Sequence[float]]
    after: Sequence[Sequence[float]]

    def times(self, nodes: Sequence[int]) -> float:
        """How many times as long looks of these nodes take after. Of either span what a quarter of them undercut: the
        others wait for what else this machine computes."""
        before, after = (sorted(look for node in nodes for look in looks[node]) for looks in (self.before, self.after))
        return after[len(after) // 4] / before[len(before) // 4] if before and after else float("inf")


def slower(attacked: Looks, clean: Looks) -> tuple[float, float]:
    """How many times as long the looks take, and how many times at the least. In one of twenty draws of as many nodes
    from those that there are it would be less. What the clean arm lost as well is the machine's doing."""
    rng, found = random.Random(0), list[float]()
    for number in range(TRIES + 1):
        drawn = [
            rng.choices(range(len(arm.before)), k=len(arm.before)) if number else range(len(arm.before))
            for arm in (attacked, clean)
        ]
        more, beside = (arm.times(nodes) for arm, nodes in zip((attacked, clean), drawn, strict=True))
        found.append(min(more, more / beside))
    return found[0], sorted(found[1:])[int(CHANCE * TRIES)]
