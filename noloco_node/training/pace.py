"""How fast a replica trains."""

from __future__ import annotations

from dataclasses import dataclass

SMOOTHING = 0.1


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
            weight = max(SMOOTHING, 1 / self._steps)
            self.step_seconds += weight * (took - self.step_seconds)
            self.step_tokens += weight * (tokens - self.step_tokens)
        self._last = now
