"""Whose answers lean one way where others' do not: what is small in each answer and the same in all adds up in a model.

A sender's microbatches go to its next-stage peers by chance. So the mean of what their answers do to the sender's
weights is the same for all honest ones, but for chance, which shrinks with their number. A lean does not shrink. It is
looked for in the sender's own gradients and not in the answers, since it does harm there only, however it is hidden. A
few signs of the gradients are enough for that.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

import torch
from torch import Tensor

from noloco_node import ambient
from noloco_node.peer_table import FEW_PEERS, PeerTable
from noloco_node.training.layout import FlatLayout

PLACES = 256
"""Weights whose gradients are looked at. Their size does not count: one in a thousand may exceed all others."""


class GradientSigns:
    """Looks at the same places of every gradient.

    Chance draws them for each node, and nobody can foretell them: a peer that knew them could do its harm elsewhere.
    """

    def __init__(self, layout: FlatLayout, device: torch.device) -> None:
        """The indices lie on the `device`, or each look would wait for them."""
        chance = ambient.chance()
        drawn = sorted(chance.randrange(layout.size) for _ in range(PLACES))
        self._places: list[tuple[int, tuple[Tensor, ...]]] = []
        """Parameters by their number in the layout, and indices into each."""
        for number, entry in enumerate(layout.entries):
            own = drawn[bisect_left(drawn, entry.offset) : bisect_left(drawn, entry.end)]
            if own:
                places = torch.unravel_index(torch.tensor(own) - entry.offset, entry.shape)
                self._places.append((number, tuple(at.to(device) for at in places)))

    def of(self, gradients: Sequence[Tensor]) -> Tensor:
        """The signs, int8 [PLACES] on the device, of one gradient for each parameter in the layout's order."""
        return torch.cat([gradients[number][place] for number, place in self._places]).sign().to(torch.int8)


LOOKED_AT_EVERY = 4
"""Answers of a peer after which it is compared with others that gave at least that many."""
WINDOW = 64
"""Answers a peer, in the mean, after which all begin anew: what the gradients have in common changes as they learn."""
USUAL = 0.1
"""Squared distance between means that honest peers may have: their weights differ. Measured: 0.06 at most."""
TIMES_CHANCE = 2.5
"""And so many times what chance brings on top of it. Measured between honest peers: 1.2 times, beside a liar."""


class Leanings:
    """The mean direction of what each peer's answers did, and whose lies apart from most others'."""

    def __init__(self) -> None:
        self._sums = PeerTable[str, tuple[Tensor, int]](FEW_PEERS)
        """Of each peer's directions, fp32 [n], and how many."""
        self._answers = 0

    def leans(self, peer: str, signs: Tensor) -> bool:
        """Whether an answer of `peer` shows that its answers lean; then they are forgotten, and it begins anew.

        `signs`: of some of the gradients that the answer brought about, int8 [n], always of the same weights. More than
        half of all that are compared must be apart from the peer: of two camps as large as each other neither leans.
        """
        direction = signs.to(torch.float32) / math.sqrt(max(1, int(signs.count_nonzero())))
        before, count = self._sums.get(peer) or (torch.zeros_like(direction), 0)
        self._sums[peer] = before + direction, count + 1
        found = (count + 1) % LOOKED_AT_EVERY == 0 and self._lies_apart(peer)
        if found:
            self.forget(peer)
        self._answers += 1
        if self._answers >= WINDOW * len(self._sums):
            self._sums.clear()
            self._answers = 0
        return found

    def forget(self, peer: str) -> None:
        """Let a peer begin anew: it is set aside, and may come back with other weights."""
        self._sums.pop(peer, None)

    def _lies_apart(self, peer: str) -> bool:
        total, count = self._sums[peer]
        others = [known for name, known in self._sums.items() if name != peer and known[1] >= LOOKED_AT_EVERY]
        apart = 0
        for other, answers in others:
            distance = float((total / count - other / answers).square().sum())
            apart += distance > USUAL + TIMES_CHANCE * (1 / count + 1 / answers)
        return 2 * apart > len(others) + 1
