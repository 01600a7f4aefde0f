"""What of strangers' microbatches is taken in, measured against what this node has seen: pure, adaptive bounds.

Norms that are far beyond the usual are scaled down (`NormBound`). A microbatch that loses what guessing costs, where
others lose much less, teaches nothing (`LossBound`).

Answers may lean one way where others' do not (`Leanings`): what is small in each and the same in all adds up in a
model. A sender's microbatches go to its next-stage peers by chance. So the mean of what their answers do to the
sender's weights is the same for all honest ones, but for chance, which shrinks with their number. A lean does not
shrink. It is looked for in the sender's own gradients and not in the answers, since it does harm there only, however it
is hidden. A few signs of the gradients are enough for that.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from statistics import median_low

import torch
from torch import Tensor

from noloco_node import ambient
from noloco_node.tallies import FEW_PEERS, PeerTable
from noloco_node.training.layout import FlatLayout

WINDOW = 64
"""The latest microbatches say what is usual, so many of each peer where peers are told apart: what the gradients have
in common changes as weights learn."""
MULTIPLE = 8.0
"""A stranger's number may be so many times the usual one. Beyond that it counts less, or is refused."""
LARGEST_RISE = 1.05
"""The factor by which a norm of a source that is known may raise what counts as usual. Honest norms change slowly; a
jump waits some dozens of them."""


class NormBound:
    """A norm beyond `multiple` × the usual one is scaled down, the more the larger it is.

    The usual norm is the low median over sources (peers) of the low median of each one's last few norms. So a source is
    one voice however much it sends, and one of three or more cannot move it far. It falls at once, and rises slowly but
    by a source that is new. The first norm of all sets it, and is bounded by nothing. Zeros say nothing.
    """

    def __init__(self, multiple: float, floor: float = 0.0) -> None:
        """`floor`: the least that is taken for usual, so that small norms of a few sources shut out no other."""
        assert multiple > 1.0
        self._multiple = multiple
        self._floor = floor
        self._norms = PeerTable[str, tuple[deque[float], int]](FEW_PEERS)
        """Each source's last norms, and how many norms of all sources there were with its latest one."""
        self._count = 0
        self.usual = 0.0
        """0 before the first norm."""
        self.exceeded = 0
        """Norms so far that were beyond the bound."""

    def factor(self, source: str, norm: float) -> float:
        """What to multiply by: 1 within the bound, (bound / norm)³ beyond it, so that a gross outlier counts for less
        than an ordinary one. Once for each norm: it is remembered. `norm` must be finite."""
        if norm <= 0.0:
            return 1.0
        bound = self._multiple * max(self.usual, self._floor) if self.usual > 0.0 else norm
        self._remember(source, norm)
        if norm <= bound:
            return 1.0
        self.exceeded += 1
        return (bound / norm) ** 3

    def _remember(self, source: str, norm: float) -> None:
        self._count += 1
        known = source in self._norms and self.usual > 0.0
        norms, _ = self._norms.get(source) or (deque[float](maxlen=9), 0)
        norms.append(norm)
        self._norms[source] = norms, self._count
        _, heard = next(iter(self._norms.values()))
        if self._count - heard > WINDOW * len(self._norms):  # it has no say any more
            self._norms.popitem(last=False)
        middle = median_low(median_low(norms) for norms, _ in self._norms.values())
        self.usual = min(middle, LARGEST_RISE * self.usual) if known else middle


GUESSING = 0.85
"""Share of ln(vocabulary), the loss of a uniform guess, from which a loss may be a guesser's. A model that has learnt
no more than how frequent each token is loses less: 0.6 of it over bytes of English."""
BEYOND_USUAL = 1.25
"""A guesser's loss must also be so many times the usual one. While the model knows nothing, no text is nonsense."""
SHARE = 1 / 16
"""This share of recent microbatches lies below the usual loss: a source that sends all others does not make nonsense
usual. This share of the tokens taken in may seem nonsense: enough to learn it by and by, should it be a text."""


class LossBound:
    """Says of each microbatch whether its gradient is taken in.

    It knows no names, so many keys and false words about sources change nothing. The usual loss is the one that a
    sixteenth of the last microbatches undercut. So a source ten times as fast as all others together does not make
    nonsense usual. A model that is out of its depth with every text is taught as before. Text that is learnt with ease
    makes no other text nonsense: the bound is never below `GUESSING` of what guessing costs.
    """

    def __init__(self, vocabulary: int) -> None:
        self._guessing = GUESSING * math.log(max(2, vocabulary))
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []
        self._room = 0.0
        """Tokens of nonsense that may still be taken in."""
        self.holds = False
        """Set once the warm-up is over. Before it all is taken in: a model that knows nothing yet cannot tell hard text
        from nonsense. One that was first taught something easy would take all else for nonsense."""
        self.left_out = 0
        """Microbatches so far whose gradient was not taken in."""

    def takes_in(self, loss: float, tokens: int) -> bool:
        """Whether to take in the gradient of a microbatch of so many tokens, which lost `loss` nats a token (finite).
        Once for each: it is remembered."""
        self._recent.append(loss)
        insort(self._sorted, loss)
        if len(self._recent) > WINDOW:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        usual = self._sorted[int(SHARE * len(self._sorted))]
        if not self.holds or loss <= max(self._guessing, BEYOND_USUAL * usual):
            self._room = min(self._room + SHARE * tokens, float(tokens))
            return True
        if self._room >= tokens:
            self._room -= tokens
            return True
        self.left_out += 1
        return False


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
