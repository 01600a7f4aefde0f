"""Where a replica stands, how fast it trains, and what its clock decides: the learning rate, and when a step is due."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

from pydantic import Field

from noloco_node.tallies import LATEST, moved

MOST_COUNTED = 1 << 53
"""No count, and no number of tokens, is larger: a float holds them all."""
_Count = Annotated[int, Field(ge=0, le=MOST_COUNTED)]
MOST_TAKEN_OVER = 1 << 31
"""The most outer steps with which a state is taken over: far more than a run has. A state may be given away with twice
as many (`transport.headers.Rounds`), so a replica that has copied a liar can still give its own."""


class LastTrained(NamedTuple):
    """When a replica last trained."""

    tokens: int
    """Trained until then; only rises."""
    at: float
    """Monotonic seconds; 0 before the first time."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Where a replica stood at the snapshot of its last committed outer step."""

    steps: _Count = 0
    tokens: _Count = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a replica stands. Replaced as a whole, so any thread may read it."""

    steps: _Count = 0
    """Inner steps taken."""
    tokens: _Count = 0
    """Tokens behind them."""
    clock: Annotated[float, Field(ge=0.0, le=MOST_COUNTED)] = 0.0
    """Swarm tokens: own tokens × live replicas, averaged with partners at outer steps."""
    outer_rounds: _Count = 0
    """Outer steps committed."""
    marks: tuple[Mark] = (Mark(),)
    """A checkpoint has it as a row of one, as earlier releases wrote it."""
    taken_over: Annotated[int, Field(exclude=True)] = 0
    """Outer rounds that came with stage peers' states in this life, less own ones that were given up for them. No
    checkpoint has it."""

    @property
    def own_rounds(self) -> int:
        """Outer steps that this replica itself has committed."""
        return self.outer_rounds - self.taken_over

    @property
    def steps_since_outer(self) -> int:
        """Inner steps since the last committed snapshot."""
        return self.steps - self.marks[0].steps

    @property
    def tokens_since_outer(self) -> int:
        return self.tokens - self.marks[0].tokens

    def after_inner_step(self, tokens: int, live_replicas: int, pace: float = 1.0) -> Progress:
        """One more inner step, on `tokens` of its own, while that many replicas of its stage train; `pace` ties the
        clock to those of the origins (`schedule.tied_pace`)."""
        clock = self.clock + tokens * live_replicas * pace
        counts = (self.steps + 1, self.tokens + tokens, clock, self.outer_rounds)
        return Progress(*counts, self.marks, self.taken_over)

    def after_outer_step(self, snapshot: Progress, clock_shift: float) -> Progress:
        """An outer step has been committed, `snapshot` being where its weights were copied."""
        mark = Mark(snapshot.steps, snapshot.tokens)
        return replace(self, clock=self.clock + clock_shift, outer_rounds=self.outer_rounds + 1, marks=(mark,))

    def as_copy_of(self, clock: float, outer_rounds: int) -> Progress:
        """A stage peer's state has been taken over: its clock and round. Own counts go on."""
        marks = (Mark(self.steps, self.tokens),)
        rounds = min(outer_rounds, MOST_TAKEN_OVER)
        return replace(self, clock=clock, outer_rounds=rounds, marks=marks, taken_over=rounds - self.own_rounds)


FREE_LAG = 0.05
"""Share of the lag that is allowed between replicas within which a stage's clock is not tied."""
PACE_A_LAG = 2.0
"""The factor by which a clock runs faster or slower for each such lag beyond it. With more the clocks of short windows
swing: what is heard of the origins is some microbatches old."""
SLOWEST_PACE = 0.5
FASTEST_PACE = 2.0 - SLOWEST_PACE
"""Bounds of `tied_pace`: what a stage is told of its origins may be a lie."""


def learning_rate(clock: float, *, peak: float, minimum_ratio: float, warmup: int, target: int) -> float:
    """Linear warm-up, then a cosine from `peak` to `peak · minimum_ratio` at `target`; all times in swarm tokens."""
    if clock < warmup:
        return peak * clock / warmup
    progress = min(1.0, (clock - warmup) / max(1, target - warmup))
    return peak * (minimum_ratio + (1 - minimum_ratio) * 0.5 * (1 + math.cos(math.pi * progress)))


def tied_pace(lead: float | None, lag: float) -> float:
    """By how much faster or slower a later stage counts its own tokens.

    So its clock stays with the clocks of the origins whose microbatches it trains. They are ahead of it by `lead` swarm
    tokens; None if that is not known. `lag` is in swarm tokens as well. Within `FREE_LAG` of `lag` the stage keeps its
    own time: clocks of replicas differ between two outer steps. A clock that is ahead by a tenth of `lag` more runs a
    fifth slower. So no miscount of replicas or of work moves a clock further than a part of `lag` from the others.
    """
    if lead is None:
        return 1.0
    behind = lead / lag
    beyond = PACE_A_LAG * max(0.0, abs(behind) - FREE_LAG)
    return min(FASTEST_PACE, max(SLOWEST_PACE, 1.0 + math.copysign(beyond, behind)))


def share_of_batch(global_batch_tokens: int, live_replicas: int) -> float:
    """Tokens after which a replica takes an inner step; where that is less than a microbatch, each microbatch is a
    step."""
    return global_batch_tokens / max(1, live_replicas)


def credit_after_step(gathered: int, credit: float, share: float) -> float | None:
    """Whether an inner step is due on `gathered` tokens: None if not, else the tokens that count towards the next one.

    Those are the tokens beyond `share`, at most one share: a burst is not followed by steps on hardly any tokens."""
    if gathered + credit < share:
        return None
    return min(gathered + credit - share, share)


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
