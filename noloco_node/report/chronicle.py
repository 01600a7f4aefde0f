"""One node's whole story from its events: its history, and what the run's figures leave out of it."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from noloco_node.telemetry.events import (
    Account,
    AnyEvent,
    CheckpointTaken,
    Doing,
    InnerStep,
    NodeReassigned,
    NodeStarted,
    NodeStopped,
    OuterStep,
    P2pdRestarted,
    StateSourceFailed,
    Warned,
)
from noloco_node.telemetry.history import NodeHistory, Utilization
from noloco_node.telemetry.words import printable

MOST_MOMENTS = 500
"""The most moments of one node that are remembered: the last ones, when it had more."""

_Kind = Literal["start", "end", "death", "fault", "warning"]


@dataclass(frozen=True, slots=True)
class Moment:
    """Something notable at a wall time, seconds since 1970."""

    time: float
    kind: _Kind
    text: str


@dataclass(slots=True)
class Life:
    """One process of the node, from its start to its last event: wall times, seconds since 1970."""

    began: float
    last: float


@dataclass(slots=True)
class TimeSpent:
    """Seconds of a node's device over all its lives, by what they went into."""

    busy: dict[str, float] = field(default_factory=dict[str, float])
    """By what the compute thread worked on."""
    idle: dict[str, float] = field(default_factory=dict[str, float])
    """By what was waited for (`Idle.reason`)."""
    data_wait: float = 0.0
    """For windows of the text; part of the idle time."""


class Chronicle:
    """Follows one node's events, of all its lives."""

    def __init__(self, name: str) -> None:
        self.history = NodeHistory(name)
        self.lives: list[Life] = []
        self._between = False
        """Whether the last process has ended, or may have: one that begins tells what it does before it is up."""
        self.aborted: Counter[str] = Counter()
        """Outer steps that came to nothing, by the reason without its figures."""
        self.counts: Counter[str] = Counter()
        """Faults that no book of the node counts."""
        self.meetings: Counter[tuple[int, str]] = Counter()
        """Outer steps with a partner, by the stage that it served then and the partner's peer id."""
        self.nodes: list[tuple[float, int]] = []
        """Live nodes as this one saw them: wall time and count, at the first look of each life and at each change."""
        self.moments: deque[Moment] = deque(maxlen=MOST_MOMENTS)
        self.spent = TimeSpent()
        self.versions: set[str] = set()
        self._meter = _Meter(self.spent)
        self._looked = False
        """Whether this life has seen the swarm."""

    @classmethod
    def of(cls, name: str, events: Iterable[AnyEvent]) -> Chronicle:
        """What these events tell."""
        made = cls(name)
        for event in events:
            made.observe(event)
        return made

    @property
    def name(self) -> str:
        """The name of the node: that of its folder."""
        return self.history.name

    def observe(self, event: AnyEvent) -> None:
        """Take one more event in."""
        if isinstance(event, NodeStarted):
            self._begin(event)
        self.history.observe(event)
        if isinstance(event, NodeReassigned | Account) or (isinstance(event, Doing) and event.what == "joining"):
            self._between = isinstance(event, Doing)
        if self.lives and not self._between:
            self.lives[-1].last = max(self.lives[-1].last, event.time)
        self._between = self._between or isinstance(event, NodeStopped)
        self._meter.observe(event)
        self._note(event)

    def _begin(self, event: NodeStarted) -> None:
        if self.history.started is not None and self.history.stopped is None:
            self._say(self.lives[-1].last, "death", "gone without a last word")
            self.counts["ended without a last word"] += 1
        self.lives.append(Life(event.time, event.time))
        self._between = False
        self.versions.add(event.version)
        self._looked = False
        self._say(event.time, "start", f"up at stage {event.stage}, its state from: {event.origin}")

    def _note(self, event: AnyEvent) -> None:
        match event:
            case NodeReassigned():
                self._say(event.time, "start", f"reassigned from stage {event.from_stage} to stage {event.stage}")
            case Doing(what="paused"):
                self._say(event.time, "end", event.detail.partition(": ")[0])
            case InnerStep(skipped=True):
                self._fault(
                    event.time, "inner steps left out (gradient not finite)", f"inner step {event.step} skipped"
                )
            case OuterStep(kind="paired") if self.history.stage is not None and event.partner is not None:
                self.meetings[self.history.stage, event.partner] += 1
            case OuterStep(kind="aborted"):
                self.aborted[_kind_of(event.reason)] += 1
                self._say(event.time, "fault", f"an outer step came to nothing: {event.reason}")
            case OuterStep(kind="caught_up"):
                self._say(event.time, "fault", "lagged, and took a stage peer's state over")
            case Account():
                self._see(event)
            case CheckpointTaken() if event.error:
                self._fault(event.time, "checkpoints not written", f"no checkpoint: {event.error}")
            case StateSourceFailed():
                self._fault(event.time, "stage peers that gave no state", f"a stage peer gave no state: {event.reason}")
            case P2pdRestarted():
                self._fault(event.time, "p2pd started again", f"p2pd was started again: it {event.cause}")
            case Warned():
                self.counts["shards of the text passed over" if event.what == "text_damaged" else "warnings"] += 1
                self._say(event.time, "warning", event.detail)
            case NodeStopped():
                why = event.reason.replace("_", " ")
                self._say(event.time, "end", f"ended: {why}" + (f", {event.detail}" if event.detail else ""))
            case _:
                pass

    def _see(self, event: Account) -> None:
        now = sum(event.nodes_per_stage)
        if not self._looked or self.nodes[-1][1] != now:
            self.nodes.append((event.time, now))
        self._looked = True

    def _fault(self, when: float, what: str, text: str) -> None:
        self.counts[what] += 1
        self._say(when, "fault", text)

    def _say(self, when: float, kind: _Kind, text: str) -> None:
        self.moments.append(Moment(when, kind, text))


class _Meter:
    """Where the time of a node's device goes, from account to account."""

    def __init__(self, spent: TimeSpent) -> None:
        self._spent = spent
        self._device = Utilization()
        self._told: dict[str, float] = {}

    def observe(self, event: AnyEvent) -> None:
        """Take one more event in."""
        match event:
            case NodeStarted():  # another process: its device's clock begins at 0
                doing = self._device.doing
                self._device, self._told = Utilization(), {}
                self._device.doing = doing
            case Doing():
                self._device.doing = event.what
            case Account():
                self._account(event)
            case _:
                pass

    def _account(self, event: Account) -> None:
        for work, seconds in event.busy_by_work.items():
            _add(self._spent.busy, work, self._rise(f"busy {work}", seconds))
        self._spent.data_wait += self._rise("data", event.data_wait_seconds)
        idle = self._device.account(event)
        if idle is not None:
            _add(self._spent.idle, idle.reason, idle.seconds)

    def _rise(self, what: str, total: float) -> float:
        before = self._told.get(what, 0.0)
        self._told[what] = total
        return max(0.0, total - before)


def _kind_of(reason: str) -> str:
    """One reason for all that differ in a number or in a name behind a colon."""
    return re.sub(r"[\d.,]*\d", "…", printable(reason.partition(":")[0]))[:60] or "no reason given"


def _add(totals: dict[str, float], what: str, seconds: float) -> None:
    totals[what] = totals.get(what, 0.0) + seconds
