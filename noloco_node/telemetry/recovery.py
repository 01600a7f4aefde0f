"""How long a node is slower after it has lost a peer: until its tokens per second are 90 % of what they were."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import takewhile
from statistics import median

from noloco_node.telemetry.events import Account, Doing, InnerStep
from noloco_node.telemetry.node_state import RecentSteps

BACK = 0.9
"""A node is back at this share of its speed before."""
BEFORE_SECONDS = 180.0
"""The speed before is counted over so many seconds: long enough that a fault noticed late does not make most of it."""
LEAST_RATES = 5
"""Without so many figures nobody knows what the speed was."""
RATE_SECONDS = 10.0
"""A speed is counted over so many seconds, and over `RATE_STEPS` inner steps if these take longer."""
RATE_STEPS = 5
SETTLED_SECONDS = 20.0
"""Seconds after a loss before it is said that it cost nothing: what was under way still comes in."""
GIVEN_UP_SECONDS = 1800.0
"""After so many seconds a node is taken not to come back: with fewer peers that is its speed now."""
NEAR_THE_END = 0.95
"""From this share of the target on, nodes leave because the run is over."""

_Rate = tuple[float, float]
"""Wall time, and tokens per second then."""


def speed_before(rates: Sequence[_Rate], lost_at: float) -> float | None:
    """The median speed in the time before; None where too little of it was seen."""
    seen = [rate for when, rate in rates if lost_at - BEFORE_SECONDS <= when <= lost_at]
    return median(seen) if len(seen) >= LEAST_RATES else None


def slow_since(rates: Sequence[_Rate], lost_at: float, before: float) -> float:
    """When the speed fell below `BACK` of `before` and did not rise again until `lost_at`; that time itself where it
    had not fallen yet. A peer is seen to be lost up to a record's life after it died."""
    slow = list(takewhile(lambda rate: rate[1] < BACK * before, reversed([r for r in rates if r[0] <= lost_at])))
    return slow[-1][0] if slow else lost_at


def time_back(rates: Sequence[_Rate], lost_at: float, before: float) -> tuple[float, bool]:
    """The seconds for which the speed was below `BACK` of `before` after a peer was lost, and whether it is back. They
    count from the first such figure; they are 0 if the speed has not fallen."""
    since = slow_since(rates, lost_at, before)
    slow = [when for when, rate in rates if when >= since and rate < BACK * before]
    if not slow:
        return 0.0, True
    after = next((when for when, _ in rates if when > slow[-1]), None)
    return (rates[-1][0] if after is None else after) - slow[0], after is not None


class Recovery:
    """Follows the steps and accounts of one stay at a stage. `slow_for` is for how long it has been slower, seconds;
    0: it is not."""

    def __init__(self, stage: int) -> None:
        self.slow_for = 0.0
        self._stage = stage
        self._steps = RecentSteps(RATE_STEPS, RATE_SECONDS)
        self._rates: deque[_Rate] = deque()
        self._nodes: Sequence[int] = ()
        self._trains = True
        self._lost: tuple[float, float] | None = None
        """When a peer was seen to be lost, and the speed before."""

    def doing(self, event: Doing) -> None:
        """What it does now: a node that leaves comes back to no speed."""
        self._trains = event.what not in ("finishing", "draining", "paused")
        if not self._trains:
            self._lost, self.slow_for = None, 0.0

    def step(self, event: InnerStep) -> None:
        """One inner step."""
        self._steps.remember(event)

    def account(self, event: Account) -> float | None:
        """The books of this moment. Where it has come back, or is given up, since the last ones: after how many
        seconds."""
        now, rate = event.time, self._rate(event.time)
        if self._rates and now < self._rates[-1][0]:  # this machine's clock has been set back
            self._rates.clear()
            self._lost, self.slow_for = None, 0.0
        if rate is not None:
            self._rates.append((now, rate))
        while self._lost is None and self._rates and self._rates[0][0] < now - BEFORE_SECONDS:
            self._rates.popleft()
        if self._has_lost_one(event) and self._lost is None:
            before = speed_before(self._rates, now)
            self._lost = (now, before) if before else None
        return None if self._lost is None else self._until_back(now, *self._lost)

    def _until_back(self, now: float, lost_at: float, before: float) -> float | None:
        seconds, back = time_back(self._rates, lost_at, before)
        self.slow_for = 0.0 if back else seconds
        if seconds < GIVEN_UP_SECONDS and (not back or now < lost_at + SETTLED_SECONDS):
            return None
        self._lost, self.slow_for = None, 0.0
        return seconds

    def _has_lost_one(self, event: Account) -> bool:
        """Tell whether a stage peer was lost, or a peer that its microbatches go to."""
        before, self._nodes = self._nodes, event.nodes_per_stage
        if not self._trains or event.clock >= NEAR_THE_END * event.target or len(before) != len(self._nodes):
            return False
        return any(now < was for was, now in list(zip(before, self._nodes, strict=True))[self._stage : self._stage + 2])

    def _rate(self, now: float) -> float | None:
        """Over the last steps, until the last of them, or until now where the next one is overdue."""
        if len(self._steps) <= RATE_STEPS:
            return None
        first, last = self._steps[0].time, self._steps[-1].time
        usual = (last - first) / (len(self._steps) - 1)
        until = now if now - last > 2 * usual else last
        return sum(step.tokens for step in list(self._steps)[1:]) / (until - first) if until > first else None
