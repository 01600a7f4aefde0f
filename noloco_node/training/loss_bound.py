"""Which microbatches teach nothing: they lose what guessing costs, where others lose much less. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque

GUESSING = 0.85
"""Share of ln(vocabulary), the loss of a uniform guess, from which a loss may be a guesser's. A model that has learnt
no more than how frequent each token is loses less: 0.6 of it over bytes of English."""
BEYOND_USUAL = 1.25
"""A guesser's loss must also be so many times the usual one. While the model knows nothing, no text is nonsense."""
RECENT = 64
"""Microbatches that came last: their losses say what is usual."""
UNDERCUT = 1 / 16
"""Share of recent microbatches below the usual loss: a source that sends all others does not make nonsense usual."""
SHARE = 1 / 16
"""Share of the tokens taken in that may seem nonsense: enough to learn it by and by, should it be a text."""


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
        if len(self._recent) > RECENT:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        usual = self._sorted[int(UNDERCUT * len(self._sorted))]
        if not self.holds or loss <= max(self._guessing, BEYOND_USUAL * usual):
            self._room = min(self._room + SHARE * tokens, float(tokens))
            return True
        if self._room >= tokens:
            self._room -= tokens
            return True
        self.left_out += 1
        return False
