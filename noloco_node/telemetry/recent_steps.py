"""The latest inner steps of a node, over which a speed is counted."""

from __future__ import annotations

from collections import deque

from noloco_node.telemetry.events import InnerStep


class RecentSteps(deque[InnerStep]):
    """The latest steps, the oldest first: those of the last `seconds`, but at least `least` and the one before them.

    Steps from before this machine's clock was set back are left out.
    """

    def __init__(self, least: int, seconds: float) -> None:
        super().__init__()
        self._least = least
        self._seconds = seconds

    def remember(self, step: InnerStep) -> None:
        """One more."""
        if self and step.time < self[-1].time:
            self.clear()
        self.append(step)
        while len(self) > self._least + 1 and self[1].time < step.time - self._seconds:
            self.popleft()
