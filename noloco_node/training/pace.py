"""How fast a replica trains."""

from __future__ import annotations

from dataclasses import dataclass

from noloco_node.pauses import LATEST, moved

WINDOW_SECONDS = 1.0
"""Work of the device that is measured together: single operations are too uneven."""


@dataclass(slots=True)
class Pace:
    """How fast this replica trains: seconds and tokens of its recent inner steps, older ones fading."""

    step_seconds: float = 1.0
    step_tokens: float = 0.0
    _last: float | None = None
    _steps: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Tokens over seconds, each smoothed first: the mean of the steps' own speeds would be too high where steps
        come in bursts."""
        return self.step_tokens / self.step_seconds

    def step(self, tokens: int, now: float) -> None:
        """An inner step ended at monotonic time `now`. The first has no beginning and only starts the watch."""
        if self._last is not None:
            took = max(now - self._last, 1e-6)
            self._steps += 1
            weight = max(LATEST, 1 / self._steps)
            self.step_seconds = moved(self.step_seconds, took, weight)
            self.step_tokens = moved(self.step_tokens, tokens, weight)
        self._last = now


@dataclass(slots=True)
class Capacity:
    """How fast this replica could train if it never had to wait: tokens over the seconds that the device worked."""

    _busy_before: float = 0.0
    _tokens_before: int | None = None
    """None before the first look: a checkpoint that is gone on from has the tokens of earlier lives."""
    _tokens: float = 0.0
    _seconds: float = 0.0

    def look(self, tokens: int, busy_seconds: float) -> float:
        """Tokens per second, of about the last eight seconds of work; 0 before the first.

        Both arguments are totals, and count from the first look on.
        """
        if self._tokens_before is None:
            self._tokens_before, self._busy_before = tokens, busy_seconds
        gained, worked = tokens - self._tokens_before, busy_seconds - self._busy_before
        if worked >= WINDOW_SECONDS and gained > 0:
            fading = 0.0 if self._seconds == 0.0 else 1.0 - LATEST
            self._tokens = fading * self._tokens + gained
            self._seconds = fading * self._seconds + worked
            self._tokens_before, self._busy_before = tokens, busy_seconds
        return self._tokens / self._seconds if self._seconds else 0.0
