"""What one node does, as one bounded document: fed by its events, read by its pages from another thread."""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar, cast

from noloco_node import ambient
from noloco_node.telemetry.events import (
    Account,
    AnyEvent,
    CheckpointTaken,
    DonorFailed,
    Evaluation,
    Event,
    InnerStep,
    NodeMoved,
    NodeStarted,
    NodeStopped,
    OuterStep,
    P2pdRestarted,
    Reachability,
    Warned,
)
from noloco_node.telemetry.node_view import NodeFigures, NodeView
from noloco_node.telemetry.words import shortened

POINTS = 200
"""Each curve has at most so many points, however long the node has lived."""
EXCHANGES_KEPT = 16
LOG_LINES = 60
LOG_LETTERS = 2000
"""A line of the log is cut between two words after so many letters: a running node names the addresses for joining
it."""
MOST_PEERS = 256
WARNINGS_KEPT = 8
FAULTS = ("skipped_steps", "failed_checkpoints", "failed_donors")

E = TypeVar("E", bound=Event)

_Document = dict[str, Any]
"""JSON can say this: numbers are finite or null."""


@dataclass(frozen=True, slots=True)
class PeerSeen:
    """A peer as this node sees it. All but `answers`, `tokens`, `under_way` and `passed_over` is its own word."""

    peer_id: str
    stage: int
    state: str
    version: str
    clock: float
    """Swarm tokens, moved on from its record by the record's age."""
    lag: float
    """Swarm tokens by which it is behind this node; negative where it is ahead."""
    tokens_per_second: float
    capacity: float
    outer_rounds: int
    newcomer: bool
    """It has just joined, and is not averaged with yet."""
    answers: bool
    """It has answered this node lately, and said itself that it serves this stage."""
    tokens: int
    """Trained for this node or by it, so far."""
    under_way: int
    """Own microbatches that it has now."""
    load: int | None
    """Others' microbatches that it held at its last answer; None where it has not said so lately."""
    passed_over: bool
    """It gets no microbatch for a while, since it failed or was slow."""
    name: str = ""
    """Its volunteer's name for it; another may bear the same."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a node holds, and the peers that it sees at one moment."""

    peers: tuple[PeerSeen, ...]
    """`MOST_PEERS` at most, those that answer first."""
    introduced: int
    """The number of peers with a live record; more than `peers` in a large swarm."""
    in_hand: int
    """Microbatches that this node holds."""
    queued: int
    """Calls that wait for the device."""


class Curve:
    """Values over wall time, thinned as time goes on: `POINTS` at most, evenly spread over the whole life."""

    def __init__(self) -> None:
        self._points: list[tuple[float, float]] = []
        self._apart = 0.0
        self._last: tuple[float, float] | None = None

    def add(self, when: float, value: float) -> None:
        """One more value; what is not finite is left out."""
        if not math.isfinite(value):
            return
        self._last = when, value
        if self._points and when - self._points[-1][0] < self._apart:
            return
        self._points.append(self._last)
        if len(self._points) >= POINTS:
            self._points = self._points[::2]
            self._apart = (when - self._points[0][0]) / (POINTS / 2)

    def points(self) -> list[tuple[float, float]]:
        """From the oldest to the newest."""
        last = [self._last] if self._last and self._points[-1] != self._last else []
        return [(round(when, 1), float(f"{value:.5g}")) for when, value in (*self._points, *last)]


class LogTail(logging.Handler):
    """Keeps the last lines of the log, shortened."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[tuple[float, str, str]] = deque(maxlen=LOG_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        """Called by logging, under this handler's lock."""
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text = f"{text}: {record.exc_info[1]!r}"
        self._lines.append((record.created, record.levelname, shortened(text, LOG_LETTERS)))

    def lines(self) -> list[_Document]:
        """From the oldest to the newest."""
        with self.lock or threading.RLock():
            rows = list(self._lines)
        return [{"time": when, "level": level, "text": text} for when, level, text in rows]


@dataclass(slots=True)
class _Curves:
    loss: Curve = field(default_factory=Curve)
    validation_loss: Curve = field(default_factory=Curve)
    spread: Curve = field(default_factory=Curve)
    learning_rate: Curve = field(default_factory=Curve)
    tokens_per_second: Curve = field(default_factory=Curve)
    swarm_tokens_per_second: Curve = field(default_factory=Curve)


class NodeState:
    """Follows one node's events, each after `view` has seen it. Any thread may ask for the document."""

    def __init__(self, version: str, view: NodeView, log: LogTail) -> None:
        self._lock = threading.Lock()
        self._version = version
        self._view = view
        self._log = log
        self._since = ambient.wall()
        self._last: dict[type[Event], Event] = {}
        self._parameters = 0
        self._missing: list[int] = []
        self._curves = _Curves()
        self._exchanges: deque[OuterStep] = deque(maxlen=EXCHANGES_KEPT)
        self._warnings: deque[Warned] = deque(maxlen=WARNINGS_KEPT)
        self._faults: dict[str, int] = dict.fromkeys(FAULTS, 0)
        self.leaving = False
        """A signal has told the node to end."""

    def observe(self, event: AnyEvent) -> None:
        """Take one event of this node in."""
        with self._lock:
            self._last[type(event)] = event
            self._take(event)

    def _take(self, event: AnyEvent) -> None:
        curves, faults = self._curves, self._faults
        match event:
            case NodeStarted() | NodeMoved():
                self._parameters = event.parameters
            case InnerStep():
                faults["skipped_steps"] += event.skipped
                curves.loss.add(event.time, event.loss)
                curves.learning_rate.add(event.time, event.learning_rate)
            case Account():
                self._missing = event.missing_stages
                figures = self._view.figures(event.time)
                curves.tokens_per_second.add(event.time, figures.own_rate or 0.0)
                curves.swarm_tokens_per_second.add(event.time, figures.swarm_rate or 0.0)
            case OuterStep(kind="paired" | "alone" | "caught_up"):
                self._exchanges.append(event)
                if event.spread is not None:
                    curves.spread.add(event.time, event.spread)
            case Evaluation():
                curves.validation_loss.add(event.time, event.loss)
            case CheckpointTaken():
                faults["failed_checkpoints"] += bool(event.error)
            case DonorFailed():
                faults["failed_donors"] += 1
            case Warned():
                self._warnings.append(event)
            case _:
                pass

    def _latest(self, kind: type[E]) -> E | None:
        last = self._last.get(kind)
        return last if isinstance(last, kind) else None

    def readiness(self) -> tuple[bool, str]:
        """Whether the node trains and waits for nobody; else why not, in one line."""
        with self._lock:
            what, detail = self._doing(self._view.figures(ambient.wall()))
        return what == "training", detail

    def _doing(self, figures: NodeFigures) -> tuple[str, str]:
        stopped, doing = self._latest(NodeStopped), figures.doing
        if stopped is not None:
            why = stopped.reason.replace("_", " ")
            return "ended", f"ended: {why}" + (f", {stopped.detail}" if stopped.detail else "")
        if self.leaving:
            return "ending", "leaving: finishing what is under way, and saving"
        if doing is None or (doing.what == "training" and figures.stage is None):
            return "starting", "starting: not in the swarm yet"
        if doing.what.startswith("waiting"):
            return doing.what, f"waiting for {doing.detail}"
        return ("ending" if doing.what == "draining" else doing.what), doing.detail

    def document(self, around: Surroundings | None, *, lag: float = 0.0) -> _Document:
        """Everything as it is now, as JSON can say it. `lag`: seconds since the event loop last came round."""
        now = ambient.wall()
        figures = self._view.figures(now)
        with self._lock:
            made = {
                "time": now,
                "uptime_seconds": now - self._since,
                "event_loop_age_seconds": lag,
                **self._who(figures),
                **self._does(figures),
                **self._stands(figures),
                "exchanges": [_exchange(step) for step in self._exchanges],
                "contribution": self._contribution(),
                "faults": self._counted_faults(),
                "warnings": [{"time": w.time, "text": shortened(w.detail, LOG_LETTERS)} for w in self._warnings],
                "curves": {name: getattr(self._curves, name).points() for name in _Curves.__dataclass_fields__},
            }
        made |= {
            "introduced": around.introduced if around else 0,
            "in_hand": around.in_hand if around else 0,
            "queued": around.queued if around else 0,
            "peers": [asdict(peer) for peer in around.peers] if around else [],
            "log": self._log.lines(),
        }
        return _finite(made)

    def _who(self, figures: NodeFigures) -> _Document:
        known, reached = self._latest(NodeStarted), self._latest(Reachability)
        return {
            "version": self._version,
            "peer_id": known and known.peer_id,
            "run": known and {"id": known.run_id, "name": known.run_name},
            "stage": figures.stage,
            "stages": known and known.stages,
            "parameters": self._parameters,
            "reachability": reached and {"way": reached.way, "words": reached.words},
        }

    def _does(self, figures: NodeFigures) -> _Document:
        what, detail = self._doing(figures)
        doing, copying = figures.doing, figures.download
        return {
            "state": what,
            "detail": detail,
            "since": doing.since if doing else self._since,
            "ready": what == "training",
            "download": copying
            and {name: getattr(copying, name) for name in ("received", "total", "donor", "seconds")},
        }

    def _stands(self, figures: NodeFigures) -> _Document:
        last = figures.last_outer
        return {
            "clock": figures.clock,
            "target": figures.target,
            "seconds_left": figures.seconds_left,
            "tokens_per_second": figures.own_rate,
            "swarm_tokens_per_second": figures.swarm_rate,
            "nodes_per_stage": figures.nodes_per_stage,
            "missing_stages": self._missing,
            "inner_steps": figures.step,
            "training_loss": figures.training_loss,
            "validation_loss": figures.validation_loss,
            "learning_rate": figures.learning_rate,
            "spread": figures.spread,
            "outer_rounds": last.round if last else 0,
            "outer_steps": {name: getattr(figures, name) for name in ("paired", "alone", "caught_up", "aborted")},
        }

    def _contribution(self) -> _Document | None:
        books = self._latest(Account)
        if books is None:
            return None
        names = ("tokens", "drawn", "trained", "held_at_end", "served", "bytes_sent", "bytes_received")
        return {name: getattr(books, name) for name in names} | {"busy_seconds": books.busy_seconds}

    def _counted_faults(self) -> _Document:
        books, restarted = self._latest(Account), self._latest(P2pdRestarted)
        made: _Document = {**self._faults}
        made["p2pd_restarts"] = restarted.restarts if restarted else 0
        if books is not None:
            made |= {name: getattr(books, name) for name in ("dropped", "put_back", "retried", "repeated")}
            made |= {"refused": books.refused, "offences": books.strangers.offences, "bans": books.strangers.bans}
            made |= {"loop_lag_seconds": books.loop_lag_seconds}
        return made


def _exchange(step: OuterStep) -> _Document:
    names = ("time", "kind", "round", "fragment", "partner", "role", "spread", "clipped", "seconds")
    return {name: getattr(step, name) for name in names}


def _finite(value: Any) -> Any:
    """The value without numbers that JSON does not know."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in cast(_Document, value).items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in cast(Sequence[Any], value)]
    return value
