"""What a swarm waits for before microbatches flow: stages that nobody serves, and a start together."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from noloco_node import ambient

logger = logging.getLogger(__name__)

START_SECONDS = 60.0


class CommonStart:
    """A run begins when so many replicas of every stage are up.

    Those that begin alone would train the first steps on whole batches, and the others would begin from a copy or lag
    behind.
    """

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self._since: float | None = None
        self._over = replicas <= 1

    def over(self, up: Sequence[int], trained: bool, now: float) -> bool:
        """Tell whether the first sample may be drawn at `now` (seconds). Once over, it stays over. `up` are the live
        replicas of each stage, `trained` says whether this node, or half of the others, have trained."""
        self._since = now if self._since is None else self._since
        if not self._over:
            late = now - self._since >= START_SECONDS
            self._over = trained or min(up) >= self._replicas or late
            if late and min(up) < self._replicas:
                logger.warning("begins with %s replicas of the stages: %d of each are not up", up, self._replicas)
        return self._over


class MissingStages:
    """Remembers since when stages have no replica, and says so once each, when it begins and when it ends."""

    def __init__(self) -> None:
        self.looked = False
        """Whether anything is known yet."""
        self._since: dict[int, float] = {}
        self._served: set[int] = set()

    @property
    def stages(self) -> list[int]:
        """Those that had no replica at the last look."""
        return sorted(self._since)

    def look(self, unserved: Sequence[int], stages: int) -> None:
        """Take in what the directory says: which of the run's `stages` nobody serves now."""
        now, self.looked = ambient.monotonic(), True
        for stage in set(unserved) - self._since.keys():
            self._since[stage] = now
            lost = "has lost its last replica" if stage in self._served else "has no replica yet"
            then = "microbatches are held back" if stage > 0 else "no microbatch is drawn"
            logger.warning("stage %d %s: %s until one comes", stage, lost, then)
        self.look_back(unserved)
        self._served |= set(range(stages)) - set(unserved)

    def look_back(self, unserved: Sequence[int]) -> None:
        """Take in only which of the stages that had no replica are served again. At the run's end a stage that empties
        is not lost. A node that still has something to train must learn that one is back."""
        for stage in self._since.keys() - set(unserved):
            again = " again" if stage in self._served else ""
            waited = ambient.monotonic() - self._since.pop(stage)
            logger.warning("stage %d is served%s after %.0f s", stage, again, waited)
