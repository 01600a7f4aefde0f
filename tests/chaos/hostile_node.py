"""A hostile peer: a real daemon that holds a place in the swarm and does what the environment tells it.

It answers with poison: gradients, weights. What it has done stands in `attacks.json` in its run folder: name of the
attack -> times carried out. What any stranger may send has tests of its own on real streams: `tests/swarm`.
Run as `python -m tests.chaos.hostile_node run ...`.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from noloco_node.config.run_spec import ActivationCodec
from noloco_node.node import journey as node
from noloco_node.node.replica import Replica
from noloco_node.outer.replica import OuterReplica
from noloco_node.pipeline.messages import MicrobatchAnswer, Trained
from noloco_node.pipeline.server import PipelineServer
from noloco_node.transport.calls import Reply
from tests.chaos import paced_node

HOSTILITY = "NOLOCO_CHAOS_HOSTILITY"
"""Names of attacks, separated by commas."""

GRADIENTS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "nan gradients": lambda gradient: torch.full_like(gradient, float("nan")),
    "flipped gradients": lambda gradient: -gradient,
    "huge gradients": lambda gradient: -1e6 * gradient,
}
WEIGHTS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "nan weights": lambda weights: torch.full_like(weights, float("nan")),
    "flipped weights": lambda weights: -weights,
    "huge weights": lambda weights: 1e4 * torch.randn_like(weights),
}


class Tally:
    """Counts what was done, in a file."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self._counts: Counter[str] = Counter()

    def count(self, name: str) -> None:
        """One more."""
        self._counts[name] += 1
        if self.path is not None:
            self.path.write_text(json.dumps(self._counts))


TALLY = Tally()
PLAN = frozenset(os.environ.get(HOSTILITY, "").split(","))


class HostileReplica(Replica):
    """Trains like any other."""

    async def run(self) -> None:
        """See `Replica.run`."""
        TALLY.path = self.context.settings.run_folder / "attacks.json"
        await super().run()


def poison() -> None:
    """Let this process's gradients and weights be what the plan says."""
    for name in PLAN & GRADIENTS.keys():
        _poison_gradients(name, GRADIENTS[name])
    for name in PLAN & WEIGHTS.keys():
        _poison_weights(name, WEIGHTS[name])


def _poison_gradients(name: str, change: Callable[[Tensor], Tensor]) -> None:
    answer = PipelineServer.answer

    async def poisoned(
        self: PipelineServer, trained: Trained, codec: ActivationCodec, began: float
    ) -> Reply[MicrobatchAnswer]:
        if trained.gradient is not None:
            TALLY.count(name)
            trained = Trained(trained.loss_sum, trained.tokens, change(trained.gradient))
        return await answer(self, trained, codec, began)

    PipelineServer.answer = poisoned


def _poison_weights(name: str, change: Callable[[Tensor], Tensor]) -> None:
    open_step = OuterReplica.open

    def poisoned(self: OuterReplica, *, members: int, weight: float, exchange: str = "") -> None:
        if members > 1:
            TALLY.count(name)
            self.snapshot.copy_(change(self.snapshot))
        open_step(self, members=members, weight=weight, exchange=exchange)

    OuterReplica.open = poisoned


if __name__ == "__main__":
    sys.argv[0] = "noloco-node"
    poison()
    node.Replica = HostileReplica
    paced_node.main()
