"""One node at one moment: what its page, a terminal, a line of its log and its record show, from its own events."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import Annotated, Any, TypeVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from noloco_node import __version__, ambient
from noloco_node.tallies import QUIET_PAUSES, RECENT
from noloco_node.telemetry.events import (
    TOLD_SECONDS,
    Account,
    AnyEvent,
    CheckpointTaken,
    Doing,
    Evaluation,
    InnerStep,
    NodeReassigned,
    NodeStarted,
    NodeStopped,
    OuterStep,
    P2pdRestarted,
    Reachability,
    StateDownload,
    StateSourceFailed,
    Warned,
)
from noloco_node.telemetry.words import shortened

FEW_STEPS = 5
"""A single inner step says little: losses, paces and idleness are told over so many."""
RATE_STEPS = 2 * FEW_STEPS
"""Speeds are counted over `TOLD_SECONDS`, and over so many inner steps if these take longer."""
LETTERS = 2000
"""A warning and a line of the log are cut between two words after so many letters. A node names its addresses there."""
MOST_NODES = 256
"""The most nodes that are named; all are counted."""
TrainedTokensIfKnown = Annotated[
    float | None, Field(validation_alias=AliasChoices("trained_tokens", "clock"), serialization_alias="trained_tokens")
]
"""Tokens that the whole swarm has trained, as one node counts them; `trained_tokens` in JSON."""
POINTS = 200
"""A curve has at most so many points."""


class _Said(BaseModel):
    """Another process may read it of another version: unknown fields are passed over, most may be missing."""

    model_config = ConfigDict(frozen=True, extra="ignore")


_Part = TypeVar("_Part", bound=_Said)


class NodeSeen(_Said):
    """A node as another one, or an onlooker, sees it. What it does, its figures and its name are its own word."""

    peer_id: str
    stage: int
    state: str = ""
    version: str = ""
    answers: bool = False
    """It has answered lately, and said itself that it serves this stage."""
    clock: TrainedTokensIfKnown = None
    """Swarm tokens, moved on from its record by the record's age."""
    lag: float | None = None
    """Swarm tokens by which it is behind this node, or behind the swarm; negative where it is ahead."""
    tokens_per_second: float | None = None
    capacity: float | None = None
    outer_steps_taken: int = 0
    newcomer: bool = False
    """It has just joined, and is not averaged with yet."""
    name: str = ""
    """Its volunteer's name for it; printable ASCII, and another may bear the same."""
    tokens: int = 0
    """Behind its inner steps."""
    training_loss: float | None = None
    validation_loss: float | None = None
    replica_divergence: float | None = None
    together: int = 0
    """Tokens trained for this node or by it, so far."""
    under_way: int = 0
    """Own microbatches that it has now."""
    load: int | None = None
    """Others' microbatches that it held at its last answer; None where it has not said so lately, or is full."""
    left_alone: str = ""
    """Why this node leaves it alone now, or asks it last, and for how long. A banned peer is not shown at all."""
    seen_seconds: float = 0.0
    """For which an onlooker saw it train."""


class RunServed(_Said):
    """The run of a node."""

    id: str = ""
    name: str = ""


class HowReached(_Said):
    """How others reach a node."""

    way: str
    words: str


class LogLine(_Said):
    """A line of the log, or a warning."""

    time: float
    text: str
    level: str = ""


class Copying(_Said):
    """A stage peer's state that is copied: bytes, and seconds since the copy began."""

    received: int
    total: int
    source: str = ""
    seconds: float = 0.0


class Exchange(_Said):
    """An outer step that was committed."""

    time: float = 0.0
    kind: str = ""
    outer_steps_taken: int = 0
    partner: str | None = None
    """None where it had no partner."""
    role: str = ""
    replica_divergence: float | None = None
    clipped: bool = False
    seconds: float = 0.0


class Given(_Said):
    """What a node has done for the run, and what that took of its line, since it was started."""

    tokens: int = 0
    drawn: int = 0
    trained: int = 0
    held_at_end: int = 0
    served: int = 0
    busy_seconds: float = 0.0
    bytes_sent: dict[str, int] = {}
    """By kind."""
    bytes_received: dict[str, int] = {}
    bytes_nearby: int = 0
    """Of both, what stayed on this machine."""


class NodeState(_Said):
    """A node. Times are wall times of its machine, speeds tokens per second, losses nats per token."""

    time: float
    state: str
    """What it does, in a word: that of `Doing`, or `starting`, `ending`, `ended`."""
    detail: str
    since: float
    ready: bool = False
    """It trains, and waits for nobody."""
    uptime_seconds: float = 0.0
    event_loop_age_seconds: float | None = 0.0
    """Since its event loop last came round."""
    version: str = ""
    peer_id: str | None = None
    run: RunServed | None = None
    stage: int | None = None
    """None before it is up."""
    stages: int | None = None
    parameters: int = 0
    reachability: HowReached | None = None
    download: Copying | None = None
    """While a stage peer's state is copied."""
    clock: TrainedTokensIfKnown = 0.0
    """In tokens trained by the swarm."""
    target: int | None = None
    """None before the first account."""
    seconds_left: float | None = None
    tokens_per_second: float | None = None
    swarm_tokens_per_second: float | None = None
    """By this node's clock."""
    nodes_per_stage: tuple[int, ...] = ()
    """Nodes as it sees them; empty before the first account."""
    missing_stages: tuple[int, ...] = ()
    inner_steps: int = 0
    training_loss: float | None = None
    validation_loss: float | None = None
    learning_rate: float | None = None
    replica_divergence: float | None = None
    """Of the last outer step of this stage that measured one."""
    outer_steps_taken: int = 0
    outer_steps: dict[str, int] = {}
    """By kind, aborted ones among them."""
    exchanges: tuple[Exchange, ...] = ()
    contribution: Given | None = None
    faults: dict[str, int | dict[str, int]] = {}
    warnings: tuple[LogLine, ...] = ()
    introduced: int = 0
    """The number of peers with a live record; more than `peers` in a large swarm."""
    in_hand: int = 0
    """Microbatches that it holds."""
    queued: int = 0
    """Calls that wait for the device."""
    peers: tuple[NodeSeen, ...] = ()
    """`MOST_NODES` at most, those that answer first."""
    log: tuple[LogLine, ...] = ()

    @property
    def share(self) -> float | None:
        """The share of the run that is done, 0 to 1; None if the target is not known."""
        return None if not self.target else min(1.0, (self.clock or 0.0) / self.target)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a node holds, and the peers that it sees at one moment: these fields of its `NodeState`."""

    peers: tuple[NodeSeen, ...]
    introduced: int
    in_hand: int
    queued: int


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


class NodeView:
    """Follows the events of one node. Any thread may ask for its state."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since = ambient.wall()
        self._last = NodeState(time=self._since, since=self._since, state="", detail="", version=__version__)
        self._steps = RecentSteps(RATE_STEPS, TOLD_SECONDS)
        """Those behind the speeds: no jump of the run's clock lies between them."""
        self._doing: Doing | None = None
        self._stopped: NodeStopped | None = None
        self._rested = False
        """It was paused after the last of these steps."""
        self._outer = Counter[str](paired=0, no_partner=0, caught_up=0, aborted=0)
        self._faults = Counter[str](skipped_steps=0, failed_checkpoints=0, failed_state_sources=0, p2pd_restarts=0)
        self.leaving = False
        """A signal has told the node to end."""

    @property
    def last(self) -> NodeState:
        """What the events said last, without speeds, and without what it does."""
        return self._last

    def observe(self, event: AnyEvent) -> None:
        """Take in one event of the node."""
        with self._lock:
            if isinstance(event, NodeStarted | NodeReassigned | StateSourceFailed | OuterStep | NodeStopped):
                self._say(download=None)
            self._take(event)

    def state(self, now: float | None = None, around: Surroundings | None = None, *, lag: float = 0.0) -> NodeState:
        """The node at wall time `now`. `lag`: seconds since its event loop last came round."""
        now = ambient.wall() if now is None else now
        with self._lock:
            steps, last = tuple(self._steps), self._last
            what, detail = self._present()
            made: dict[str, Any] = {"outer_steps": dict(self._outer), "faults": dict(self._faults) | last.faults}
            if self._doing is not None:
                made["since"] = self._doing.since
        seconds = 0.0 if self._rested else _seconds_between(steps, now)
        ahead = steps[-1].clock - steps[0].clock if seconds else 0.0
        swarm = ahead / seconds if ahead > 0.0 else None  # a partner that is behind takes the swarm's tokens back
        if around is not None:
            names = ("peers", "introduced", "in_hand", "queued")
            made |= {name: getattr(around, name) for name in names}
        return last.model_copy(
            update={
                **made,
                "time": now,
                "state": what,
                "detail": detail,
                "ready": what == "training",
                "uptime_seconds": now - self._since,
                "event_loop_age_seconds": lag,
                "training_loss": _mean_loss(steps[-FEW_STEPS:]),
                "swarm_tokens_per_second": swarm,
                "tokens_per_second": sum(step.tokens for step in steps[1:]) / seconds if seconds else None,
                "seconds_left": seconds_to(last.target, last.clock or 0.0, swarm) if last.target else None,
            }
        )

    def _present(self) -> tuple[str, str]:
        """What it does, in a word and in a line."""
        stopped, doing = self._stopped, self._doing
        if stopped is not None:
            why = stopped.reason.replace("_", " ")
            return "ended", f"ended: {why}" + (f", {stopped.detail}" if stopped.detail else "")
        if self.leaving:
            return "ending", "leaving: finishing what is under way, and saving"
        if doing is None or (doing.what == "training" and self._last.stage is None):
            return "starting", "starting: not in the swarm yet"
        if doing.what.startswith("waiting"):
            return doing.what, f"waiting for {doing.detail}"
        return ("ending" if doing.what == "draining" else doing.what), doing.detail

    def _say(self, **changes: object) -> None:
        self._last = self._last.model_copy(update=changes)

    def _take(self, event: AnyEvent) -> None:
        match event:
            case NodeStarted():
                self._steps.clear()
                self._stopped = None  # of an earlier life
                names = ("peer_id", "stage", "stages", "parameters", "outer_steps_taken")
                run = RunServed(id=event.run_id, name=event.run_name)
                self._say(run=run, **{name: getattr(event, name) for name in names})
            case NodeReassigned():
                self._steps.clear()
                names = ("stage", "parameters", "clock", "outer_steps_taken")
                self._say(replica_divergence=None, **{name: getattr(event, name) for name in names})
            case InnerStep():
                if self._rested:
                    self._steps.clear()
                    self._rested = False
                self._steps.remember(event)
                self._faults["skipped_steps"] += event.skipped
                self._say(clock=event.clock, inner_steps=event.step, learning_rate=event.learning_rate)
            case OuterStep():
                self._outer[event.kind] += 1
                self._exchanged(event)
            case Evaluation():
                self._say(validation_loss=event.loss)
            case Account():
                self._account(event)
            case StateDownload():
                self._say(download=_part(Copying, event) if event.received < event.total else None)
            case Doing():
                self._doing = event
                self._rested |= event.what == "paused"
            case Warned():
                line = LogLine(time=event.time, text=shortened(event.detail, LETTERS))
                self._say(warnings=(*self._last.warnings, line)[-RECENT:])
            case Reachability():
                self._say(reachability=_part(HowReached, event))
            case CheckpointTaken():
                self._faults["failed_checkpoints"] += bool(event.error)
            case StateSourceFailed():
                self._faults["failed_state_sources"] += 1
            case P2pdRestarted():
                self._faults["p2pd_restarts"] = event.restarts
            case NodeStopped():
                self._stopped = event
            case _:
                pass

    def _exchanged(self, event: OuterStep) -> None:
        if event.kind == "aborted":
            return
        self._say(
            exchanges=(*self._last.exchanges, _part(Exchange, event))[-RECENT:],
            outer_steps_taken=event.outer_steps_taken,
        )
        if event.kind == "caught_up":
            self._steps.clear()
            self._say(clock=event.clock)
        elif event.kind == "paired" and event.replica_divergence is not None:
            self._say(replica_divergence=event.replica_divergence)

    def _account(self, event: Account) -> None:
        counted = ("dropped", "requeued", "retried", "repeated", "refused")
        faults = {name: getattr(event, name) for name in counted}
        self._say(
            clock=event.clock,
            target=event.target,
            nodes_per_stage=tuple(event.nodes_per_stage),
            missing_stages=tuple(event.missing_stages),
            contribution=_part(Given, event),
            faults=faults | {"offences": event.strangers.offences, "bans": event.strangers.bans},
        )


def _part(kind: type[_Part], event: AnyEvent) -> _Part:
    """Those fields of an event that a state shows."""
    return kind.model_construct(**{name: getattr(event, name) for name in kind.model_fields})


def seconds_to(target: float, clock: float, speed: float | None) -> float | None:
    """To the target (swarm tokens) at this speed (tokens/s); None where nothing is known, or where it would take for
    ever. A speed may be a stranger's word, and no JSON can say infinity: one word of 5e-324 took a seed's page away."""
    seconds = max(0.0, target - clock) / speed if speed else inf
    return seconds if isfinite(seconds) else None


def _mean_loss(steps: Sequence[InnerStep]) -> float | None:
    recent = [step for step in steps if step.tokens > 0 and isfinite(step.loss)]
    tokens = sum(step.tokens for step in recent)
    return sum(step.loss * step.tokens for step in recent) / tokens if tokens else None


def _seconds_between(steps: Sequence[InnerStep], now: float) -> float:
    """From the first to the last of these steps, or to now where the next one is long overdue; 0 for fewer than two."""
    if len(steps) < 2:
        return 0.0
    first, last = steps[0].time, steps[-1].time
    usual = (last - first) / (len(steps) - 1)
    return now - first if now - last > QUIET_PAUSES * usual + 1.0 else last - first
