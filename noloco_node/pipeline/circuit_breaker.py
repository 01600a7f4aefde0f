"""Whether anything gets through to the next stage: by what came of the microbatches that this node sent there.

A stage may be filled by peers that answer, and train nothing. Those that send to it see this by themselves, and nobody
else need believe them: one of them can go there itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from noloco_node import ambient
from noloco_node.peers.stats import ANSWER_SECONDS

TRIES = 8
"""A stage is judged only after so many attempts in a row have come to nothing."""
LIVES = 5.0
"""Nothing must have come through for so many lives of a directory record."""
BUDGETS = 2.0
"""The wait is at least so many budgets of a microbatch."""


def patience(record_seconds: float, budget_seconds: float, stages_behind: int) -> float:
    """Seconds without any answer to a microbatch after which a stage counts as lost, even if peers answer there.

    `stages_behind` is the number of stages after it. A sender near the end of the pipeline loses patience first: what
    does not get through there fails at all stages before.
    """
    return (1 + stages_behind) * max(LIVES * record_seconds, BUDGETS * budget_seconds)


class CircuitBreaker:
    """The account of one node with its next stage. Times are seconds on a clock that never goes back."""

    def __init__(self, clock: Callable[[], float] = ambient.monotonic) -> None:
        self._clock = clock
        self._tries = 0
        self._since = math.inf
        self._last = -math.inf

    def through(self) -> None:
        """A microbatch was answered."""
        self._tries, self._since = 0, math.inf

    def failed(self) -> None:
        """An attempt came to nothing, whatever the reason that was given."""
        now = self._clock()
        self._tries += 1
        self._since, self._last = min(self._since, now), now

    def lasts(self, seconds: float) -> bool:
        """Whether nothing has got through for so long although it was tried again and again until now."""
        now = self._clock()
        return self._tries >= TRIES and now - self._since >= seconds and now - self._last <= ANSWER_SECONDS
