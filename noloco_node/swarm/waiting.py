"""What the swarm lacks: the stages that nobody serves, named while microbatches are held back for them."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

logger = logging.getLogger(__name__)


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
        now, self.looked = time.monotonic(), True
        for stage in set(unserved) - self._since.keys():
            self._since[stage] = now
            lost = "has lost its last replica" if stage in self._served else "has no replica yet"
            logger.warning("stage %d %s: microbatches are held back until one comes", stage, lost)
        for stage in self._since.keys() - set(unserved):
            logger.warning("stage %d is served again after %.0f s", stage, now - self._since.pop(stage))
        self._served |= set(range(stages)) - set(unserved)
