"""One node at one moment, from its own events: how far its run is, how fast, and what it does."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from math import isfinite

from noloco_node.telemetry.events import (
    Account,
    AnyEvent,
    Doing,
    DonorFailed,
    Evaluation,
    InnerStep,
    NodeMoved,
    NodeStarted,
    NodeStopped,
    OuterStep,
    StateDownload,
    Warned,
)
from noloco_node.telemetry.recent_steps import RecentSteps

RATE_SECONDS = 60.0
"""Speeds are counted over so many seconds, and over `RATE_STEPS` inner steps if these take longer."""
RATE_STEPS = 10
LOSS_STEPS = 5
"""The shown training loss is the mean of so many inner steps."""
STALL_STEPS = 3.0
"""After so many times the usual time without an inner step a node is slower than it was, and the shown speed sinks."""
WARNINGS_SHOWN = 3


@dataclass(frozen=True, slots=True)
class NodeFigures:
    """One node at one moment. Times are wall time, seconds since 1970; speeds are tokens a second."""

    peer_id: str = ""
    run_name: str = ""
    stage: int | None = None
    """None before the node is up."""
    stages: int = 0
    clock: float = 0.0
    """In tokens trained by the swarm."""
    target: int | None = None
    """None before the first account."""
    step: int = 0
    """Inner steps of this replica."""
    training_loss: float | None = None
    validation_loss: float | None = None
    learning_rate: float | None = None
    swarm_rate: float | None = None
    """Tokens a second of the whole swarm, by this node's clock."""
    own_rate: float | None = None
    nodes_per_stage: tuple[int, ...] = ()
    """The number of nodes of each stage, as this node sees them; empty before the first account."""
    paired: int = 0
    alone: int = 0
    caught_up: int = 0
    aborted: int = 0
    last_outer: OuterStep | None = None
    """The last one that was committed."""
    spread: float | None = None
    """The spread of the last outer step of this stage that measured one."""
    doing: Doing | None = None
    download: StateDownload | None = None
    """While a stage peer's state is copied."""
    warnings: tuple[str, ...] = ()
    ended: bool = False

    @property
    def seconds_left(self) -> float | None:
        """Until the target at this speed; None where one of them is not known."""
        if self.target is None or not self.swarm_rate:
            return None
        return max(0.0, self.target - self.clock) / self.swarm_rate

    @property
    def share(self) -> float | None:
        """The share of the run that is done, 0 to 1; None if the target is not known."""
        return None if not self.target else min(1.0, self.clock / self.target)


class NodeView:
    """Follows the events of one node. Any thread may ask for the figures."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now: NodeFigures = NodeFigures()
        self._steps = RecentSteps(RATE_STEPS, RATE_SECONDS)
        """Those behind the speeds: no jump of the run's clock lies between them."""

    def observe(self, event: AnyEvent) -> None:
        """Take in one event of the node."""
        with self._lock:
            if isinstance(event, NodeStarted | NodeMoved | DonorFailed | OuterStep | NodeStopped):
                self._now = replace(self._now, download=None)
            self._take(event)

    def figures(self, now: float) -> NodeFigures:
        """The node at time `now`."""
        with self._lock:
            steps, figures = tuple(self._steps), self._now
        recent = [step for step in steps[-LOSS_STEPS:] if step.tokens > 0 and isfinite(step.loss)]
        tokens = sum(step.tokens for step in recent)
        seconds = _seconds_between(steps, now)
        return replace(
            figures,
            training_loss=sum(step.loss * step.tokens for step in recent) / tokens if tokens else None,
            swarm_rate=(steps[-1].clock - steps[0].clock) / seconds if seconds else None,
            own_rate=sum(step.tokens for step in steps[1:]) / seconds if seconds else None,
        )

    def _take(self, event: AnyEvent) -> None:
        was = self._now
        match event:
            case NodeStarted():
                self._steps.clear()
                self._now = replace(
                    was, peer_id=event.peer_id, run_name=event.run_name, stage=event.stage, stages=event.stages
                )
            case NodeMoved():
                self._steps.clear()
                self._now = replace(was, stage=event.stage, clock=event.clock, spread=None)
            case InnerStep():
                self._steps.remember(event)
                self._now = replace(was, clock=event.clock, step=event.step, learning_rate=event.learning_rate)
            case OuterStep():
                self._now = self._outer(event)
            case Evaluation():
                self._now = replace(was, validation_loss=event.loss)
            case Account():
                nodes = tuple(event.nodes_per_stage)
                self._now = replace(was, clock=event.clock, target=event.target, nodes_per_stage=nodes)
            case StateDownload():
                self._now = replace(was, download=event if event.received < event.total else None)
            case Doing():
                self._now = replace(was, doing=event)
            case Warned():
                self._now = replace(was, warnings=(*was.warnings, event.detail)[-WARNINGS_SHOWN:])
            case NodeStopped():
                self._now = replace(was, ended=True)
            case _:
                pass

    def _outer(self, event: OuterStep) -> NodeFigures:
        was = self._now
        match event.kind:
            case "aborted":
                return replace(was, aborted=was.aborted + 1)
            case "paired":
                spread = was.spread if event.spread is None else event.spread
                return replace(was, paired=was.paired + 1, last_outer=event, spread=spread)
            case "alone":
                return replace(was, alone=was.alone + 1, last_outer=event)
            case "caught_up":
                self._steps.clear()
                return replace(was, caught_up=was.caught_up + 1, clock=event.clock, last_outer=event)


def _seconds_between(steps: tuple[InnerStep, ...], now: float) -> float:
    """From the first to the last of these steps, or to now where the next one is long overdue; 0 for fewer than two."""
    if len(steps) < 2:
        return 0.0
    first, last = steps[0].time, steps[-1].time
    usual = (last - first) / (len(steps) - 1)
    return now - first if now - last > STALL_STEPS * usual + 1.0 else last - first
