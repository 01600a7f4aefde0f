"""Where a replica stands: its counts, its clock, and when each fragment was last averaged."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

from pydantic import Field

MOST_TAKEN_OVER = 1 << 31
"""The most outer rounds with which a state is taken over: far more than a run has. A state may be given away with twice
as many (`transport.headers.Rounds`), so a replica that has copied a liar can still give its own."""


class LastTrained(NamedTuple):
    """When a replica last trained."""

    tokens: int
    """Trained until then; only rises."""
    at: float
    """Monotonic seconds; 0 before the first time."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Where a replica stood at the snapshot of a fragment's last committed outer step."""

    steps: int = 0
    """Inner steps; below zero for a fragment that begins as if it had been exchanged before the start."""
    tokens: int = 0


def staggered(fragments: int, inner_steps: int, *, steps: int = 0, tokens: int = 0) -> tuple[Mark, ...]:
    """Marks of a replica that stands at `steps` and `tokens` and counts anew. Fragment f begins as if it had been
    exchanged f·H/F inner steps ago, so that one of them is due every H/F steps."""
    return tuple(Mark(steps - f * inner_steps // fragments, tokens) for f in range(fragments))


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a replica stands. Replaced as a whole, so any thread may read it.

    A fragment is named by its index; None is the whole stage.
    """

    steps: int = 0
    """Inner steps taken."""
    tokens: int = 0
    """Tokens behind them."""
    clock: float = 0.0
    """Swarm tokens: own tokens × live replicas, averaged with partners at outer steps."""
    outer_rounds: int = 0
    """Outer steps committed, of whatever fragment."""
    marks: tuple[Mark, ...] = (Mark(),)
    """One for each fragment."""
    taken_over: Annotated[int, Field(exclude=True)] = 0
    """Outer rounds that came with stage peers' states in this life, less own ones that were given up for them. No
    checkpoint has it: a checkpoint's seal covers what earlier releases wrote."""

    @property
    def own_rounds(self) -> int:
        """Outer steps that this replica itself has committed."""
        return self.outer_rounds - self.taken_over

    @property
    def steps_since_outer(self) -> tuple[int, ...]:
        """Inner steps of each fragment since its last committed snapshot."""
        return tuple(self.steps - mark.steps for mark in self.marks)

    def steps_since(self, fragment: int | None) -> int:
        """Inner steps since the last committed snapshot; of the whole: of the fragment exchanged last."""
        counts = self.steps_since_outer
        return min(counts) if fragment is None else counts[fragment]

    def tokens_since(self, fragment: int | None) -> int:
        """Tokens behind Δ; of the whole: their mean over the fragments."""
        marks = self.marks if fragment is None else (self.marks[fragment],)
        return self.tokens - sum(mark.tokens for mark in marks) // len(marks)

    def after_inner_step(self, tokens: int, live_replicas: int, pace: float = 1.0) -> Progress:
        """One more inner step, on `tokens` of its own, while that many replicas of its stage train; `pace` ties the
        clock to those of the origins (`schedule.tied_pace`)."""
        clock = self.clock + tokens * live_replicas * pace
        counts = (self.steps + 1, self.tokens + tokens, clock, self.outer_rounds)
        return Progress(*counts, self.marks, self.taken_over)

    def after_outer_step(self, fragment: int | None, snapshot: Progress, clock_shift: float) -> Progress:
        """An outer step of a fragment has been committed, `snapshot` being where its weights were copied."""
        mark = Mark(snapshot.steps, snapshot.tokens)
        return replace(
            self,
            clock=self.clock + clock_shift,
            outer_rounds=self.outer_rounds + 1,
            marks=tuple(mark if fragment in (None, f) else old for f, old in enumerate(self.marks)),
        )

    def as_copy_of(self, clock: float, outer_rounds: int, inner_steps: int) -> Progress:
        """A stage peer's state has been taken over: its clock and round. Own counts go on, those of the fragments
        staggered over `inner_steps` (H) as at the start."""
        marks = staggered(len(self.marks), inner_steps, steps=self.steps, tokens=self.tokens)
        rounds = min(outer_rounds, MOST_TAKEN_OVER)
        return replace(self, clock=clock, outer_rounds=rounds, marks=marks, taken_over=rounds - self.own_rounds)
