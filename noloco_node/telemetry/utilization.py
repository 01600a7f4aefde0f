"""What a node's device did with its time, from account to account: idle by reason, and work of the model."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from noloco_node.telemetry.events import Account
from noloco_node.telemetry.node_state import RATE_SECONDS


@dataclass(frozen=True, slots=True)
class Idle:
    """Seconds in which the compute thread had nothing to do."""

    seconds: float
    reason: str
    """`answers`: its microbatches were with others; `microbatches`: there was none; `no_replica`: a stage next to its
    own has none; `joining`, `ending`, `paused`."""


class Utilization:
    """Follows one node's accounts. Idle time is put down to what the node waited for at the account that ends it."""

    def __init__(self) -> None:
        self.peak: float | None = None
        """FLOP per second of the device; None where it is not known."""
        self.flop_per_token = 0.0
        self.doing = "training"
        self._flop = 0.0
        self._busy: tuple[float, float] | None = None
        self._work: deque[tuple[float, float]] = deque()

    def step(self, tokens: int) -> float:
        """An inner step on so many tokens; its work."""
        flop = tokens * self.flop_per_token
        self._flop += flop
        return flop

    def account(self, event: Account) -> Idle | None:
        """The idle time since the last account; None at the first."""
        before, self._busy = self._busy, (event.time, event.busy_seconds)
        self._work.append((event.time, self._flop))
        while len(self._work) > 2 and self._work[1][0] <= event.time - RATE_SECONDS:
            self._work.popleft()
        if before is None:
            return None
        idle = (event.time - before[0]) - (event.busy_seconds - before[1])
        return Idle(max(0.0, idle), self._reason(event))

    @property
    def ratio(self) -> float | None:
        """The model's FLOP per second over the peak, in about the last minute; None where the peak is not known."""
        (began, before), (ended, after) = (self._work[0], self._work[-1]) if self._work else ((0.0, 0.0), (0.0, 0.0))
        if self.peak is None or ended <= began:
            return None
        return (after - before) / (ended - began) / self.peak

    def _reason(self, event: Account) -> str:
        match self.doing:
            case "joining" | "downloading":
                return "joining"
            case "finishing" | "draining":
                return "ending"
            case "paused":
                return "paused"
            case "waiting_for_peers":
                return "no_replica"
            case _:
                return "answers" if event.in_hand else "microbatches"
