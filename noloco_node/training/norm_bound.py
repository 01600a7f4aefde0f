"""How large what a stranger sends may be, measured against what this node has seen: a pure, adaptive bound."""

from __future__ import annotations

from collections import deque
from statistics import median_low

from noloco_node.peer_table import FEW_PEERS, PeerTable

NORMS_OF_A_SOURCE = 9
FORGOTTEN_AFTER = 512
"""Norms after which a source that gave none of them has no say any more."""
LARGEST_RISE = 1.05
"""By how much one norm may raise what counts as usual. Honest norms change slowly; a jump waits some dozens of them."""


class NormBound:
    """A norm beyond `multiple` × the usual one is scaled down, the more the larger it is.

    The usual norm is the low median over sources (peers) of the low median of each one's last few norms. So a source is
    one voice however much it sends, and one of three or more cannot raise it. A norm beyond the bound counts as the
    bound. The usual norm falls at once and rises slowly. The first norm of all sets it, and is bounded by nothing, as
    there is no measure yet. Zeros say nothing.
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
        self._remember(source, min(norm, bound))
        if norm <= bound:
            return 1.0
        self.exceeded += 1
        return (bound / norm) ** 3

    def _remember(self, source: str, norm: float) -> None:
        self._count += 1
        norms, _ = self._norms.get(source) or (deque[float](maxlen=NORMS_OF_A_SOURCE), 0)
        norms.append(norm)
        self._norms[source] = norms, self._count
        _, heard = next(iter(self._norms.values()))
        if self._count - heard > FORGOTTEN_AFTER:
            self._norms.popitem(last=False)
        middle = median_low(median_low(norms) for norms, _ in self._norms.values())
        self.usual = min(middle, LARGEST_RISE * self.usual) if self.usual > 0.0 else middle
