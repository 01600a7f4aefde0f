"""Log lines for a person: each one names its node (short peer id, stage, outer step). Nothing reads them back."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from math import inf
from typing import Literal

from noloco_node.telemetry.events import (
    TOLD_SECONDS,
    AnyEvent,
    Doing,
    Evaluation,
    InnerStep,
    NodeReassigned,
    NodeStarted,
    NodeStopped,
    OuterStep,
    ProbationEnded,
    StateDownload,
    StateSourceFailed,
    Warned,
)
from noloco_node.telemetry.node_state import LETTERS, LogLine, NodeState, NodeView
from noloco_node.telemetry.words import as_long, as_loss, shortened

LOGGER_NAME = "noloco_node"

ORIGINS = {
    "seed": "the run's first weights",
    "peer": "weights copied from a stage peer",
    "standby": "weights from a copy that a node of another stage kept",
    "checkpoint": "weights from its own checkpoint",
}

logger = logging.getLogger(LOGGER_NAME)


class NodeLog:
    """Turns a node's events into log lines, and knows from them the node's identity and progress."""

    def __init__(self) -> None:
        self.view = NodeView()
        self._seed = ""
        self._told_at = inf
        """Wall time of the last line from INFO up."""
        self._trains = False
        """It has taken an inner step in this life."""

    @property
    def label(self) -> str:
        """`…peer8id stage 0, outer step 12`, of a seed `…peer8id seed`, or `starting` before it is up."""
        now = self.view.last
        if now.stage is None:
            return f"…{self._seed[-6:]} seed" if self._seed else "starting"
        return f"…{(now.peer_id or '')[-6:]} stage {now.stage}, outer step {now.outer_steps_taken}"

    def observe_seed(self, peer_id: str) -> None:
        """It is a seed's log, which has no stage and tells no events."""
        self._seed = peer_id

    def observe(self, event: AnyEvent) -> None:
        """Log one event of this node: INFO for what a person follows, DEBUG for the rest."""
        self.view.observe(event)
        level, line = describe(event)
        if self._is_overdue(event):
            level = max(level, logging.INFO)
        if level > logging.DEBUG and isinstance(event, OuterStep | InnerStep):
            line += progress_words(self.view.state(event.time))
        if line:
            logger.log(level, line)
            self._told_at = event.time if level > logging.DEBUG else self._told_at

    def _is_overdue(self, event: AnyEvent) -> bool:
        """Whether an inner step is to be shown: the first of a life, and one after a while in which nothing was. At a
        low pace an outer step takes minutes, and a node that says nothing looks like one that hangs."""
        self._told_at = min(self._told_at, event.time)  # a clock may be set back
        if not isinstance(event, InnerStep):
            self._trains = self._trains and not isinstance(event, NodeStarted)
            return False
        first, self._trains = not self._trains, True
        return first or event.time - self._told_at >= TOLD_SECONDS


def describe(event: AnyEvent) -> tuple[int, str]:
    """An event as level and line; the line is empty where there is nothing to say."""
    match event:
        case NodeStarted():
            return logging.INFO, _started(event)
        case NodeReassigned():
            return logging.INFO, (
                f"reassigned from stage {event.from_stage} to stage {event.stage} in {event.seconds:.1f} s: "
                f"{event.parameters:,} parameters, {ORIGINS[event.origin]}"
            )
        case InnerStep(skipped=True):
            return logging.WARNING, f"inner step {event.step} skipped: its gradient was not finite"
        case InnerStep():
            return logging.DEBUG, (
                f"inner step {event.step}: loss {event.loss:.4f}, {event.tokens} tokens, swarm at {event.clock:,.0f}"
            )
        case OuterStep():
            return _outer(event)
        case Evaluation():
            kind = "final validation" if event.final else "validation"
            each = ", ".join(f"{one.source} {one.loss:.4f}" for one in event.sources)
            parts = f" ({each})" if each else ""
            return logging.INFO, f"{kind} loss {event.loss:.4f} nats/token at {event.clock:,.0f} tokens{parts}"
        case StateDownload():
            return _downloaded(event)
        case StateSourceFailed():
            return logging.WARNING, f"could not copy the state of {event.source}: {event.reason}"
        case ProbationEnded():
            why = "its loss and distance are in line" if event.reason == "in_line" else "it has been here long enough"
            return logging.INFO, f"this node counts in others' averages from now on: {why} ({event.steps} inner steps)"
        case Doing():
            if event.what.startswith("waiting"):
                return logging.WARNING, f"waiting for {event.detail}"
            alone = event.what == "training" != event.detail
            return logging.WARNING if alone else logging.DEBUG, event.detail
        case Warned():
            return logging.WARNING, event.detail
        case NodeStopped():
            level = logging.ERROR if event.reason == "failed" else logging.INFO
            # Why a node failed is the last thing that it prints, with the remedy: once is enough.
            detail = f": {event.detail}" if event.detail and event.reason != "failed" else ""
            rounds = f" after {event.outer_steps_taken} outer steps" if event.outer_steps_taken else ""
            return level, f"stopped ({event.reason.replace('_', ' ')}{detail}){rounds}"
        case _:
            return logging.DEBUG, ""


def progress_words(state: NodeState) -> str:
    """How far the run is, how fast, and how long it will take, as the end of a line; empty where nothing is known."""
    parts: list[str] = []
    if state.share is not None:
        parts.append(f"{100.0 * state.share:.0f} % of {state.target:,} tokens")
    if state.swarm_tokens_per_second is not None:
        parts.append(f"{state.swarm_tokens_per_second:,.0f} tokens/s")
    if state.training_loss is not None:
        parts.append(f"loss {as_loss(state.training_loss)}")
    if state.seconds_left is not None:
        parts.append(f"{as_long(state.seconds_left)} left")
    return "".join(f" · {part}" for part in parts)


def configure_logging(
    level: str,
    log: NodeLog,
    write: Callable[[str], None] | None = None,
    *others: logging.Handler,
    style: Literal["text", "json"] = "text",
) -> None:
    """Send the log to stderr, each line with the identity that `log` knows, or to `write` if somebody draws there; and
    to `others`.

    `style` says whether a line is for a person or a JSON object. Call it after hivemind is imported. hivemind puts a
    handler of its own on its logger, which is removed here. Its lines pass from WARNING up only, since its everyday
    failures are ours to count.
    """
    handler = logging.StreamHandler(sys.stderr) if write is None else _Written(write)
    handler.setFormatter(_Formatter(log) if style == "text" else _JsonFormatter(log))
    root = logging.getLogger()
    root.handlers[:] = [handler, *others]
    root.setLevel(logging.WARNING)
    logger.setLevel(level)
    hivemind = logging.getLogger("hivemind")
    hivemind.handlers.clear()
    hivemind.propagate = True
    hivemind.setLevel(logging.DEBUG if level == "DEBUG" else logging.WARNING)


class LogTail(logging.Handler):
    """Keeps the last lines of the log, shortened."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[LogLine] = deque(maxlen=60)

    def emit(self, record: logging.LogRecord) -> None:
        """Called by logging, under this handler's lock."""
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text = f"{text}: {record.exc_info[1]!r}"
        line = LogLine(time=record.created, level=record.levelname, text=shortened(text, LETTERS))
        self._lines.append(line)

    def lines(self) -> tuple[LogLine, ...]:
        """From the oldest to the newest."""
        with self.lock or threading.RLock():
            return tuple(self._lines)


class _Written(logging.Handler):
    """Hands lines to a function."""

    def __init__(self, write: Callable[[str], None]) -> None:
        super().__init__()
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        """Hand one line on."""
        try:
            self._write(self.format(record))
        except Exception:  # noqa: BLE001 - as every handler of the standard library: a lost line ends no training
            self.handleError(record)


class _Formatter(logging.Formatter):
    def __init__(self, log: NodeLog) -> None:
        super().__init__("%(asctime)s.%(msecs)03d %(levelname).1s [%(who)s] %(message)s", "%H:%M:%S")
        self._log = log

    def format(self, record: logging.LogRecord) -> str:
        record.who = self._log.label
        return super().format(record)


class _JsonFormatter(logging.Formatter):
    """Each record as one line: `time` in UTC (ISO 8601), level, logger, message, and the node, if that is known."""

    def __init__(self, log: NodeLog) -> None:
        super().__init__()
        self._log = log

    def format(self, record: logging.LogRecord) -> str:
        log, when = self._log, datetime.fromtimestamp(record.created, UTC)
        told: dict[str, object] = {
            "time": when.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        now = log.view.last
        if now.stage is not None:
            told |= {"peer_id": now.peer_id, "stage": now.stage, "outer_steps_taken": now.outer_steps_taken}
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told)


def _started(event: NodeStarted) -> str:
    lines = [
        f"node {event.peer_id} is up: run {event.run_name} ({event.run_id}), stage {event.stage} of {event.stages}, "
        f"{event.parameters:,} parameters, {ORIGINS[event.origin]}"
    ]
    if event.metrics_address:
        lines.append(f"  its page: http://{event.metrics_address}/ (for Prometheus: /metrics)")
    invites = event.invites or [f"noloco-node join {address}" for address in event.addresses]
    lines += [f"  others join with: {invite}" for invite in invites]
    if event.founded and event.addresses:
        entering = f"--initial-peers {event.addresses[0]} --host 0.0.0.0 --port 31338 --run-folder runs/seed"
        lines.append(f"  a seed keeps the entrance open and the model safe: noloco-node seed CONFIG {entering}")
    return "\n".join(lines)


def _downloaded(event: StateDownload) -> tuple[int, str]:
    done = event.received == event.total
    amount = f"{event.received / 1e6:,.1f} of {event.total / 1e6:,.1f} MB, {event.seconds:.0f} s"
    level = logging.INFO if done or not event.received else logging.DEBUG
    return level, f"state of …{event.source[-6:]} {'copied' if done else 'is being copied'}: {amount}"


def _outer(event: OuterStep) -> tuple[int, str]:
    if event.kind == "aborted":
        return logging.DEBUG, f"outer step came to nothing: {event.reason}"
    partner = f" with …{event.partner[-6:]}" if event.partner else f" ({event.reason})" if event.reason else ""
    spread = f", replica divergence {event.replica_divergence:.3g}" if event.replica_divergence is not None else ""
    return logging.INFO, (
        f"outer step {event.outer_steps_taken} {event.kind.replace('_', ' ')}{partner}{spread}, {event.seconds:.2f} s, "
        f"{event.inner_steps_meanwhile} inner steps meanwhile"
    )
