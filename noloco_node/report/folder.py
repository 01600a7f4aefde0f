"""What a run folder tells: each node by its event files, and the run that they are of."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Literal, cast

from pydantic import BaseModel, ConfigDict, ValidationError

from noloco_node import __version__
from noloco_node.config.files import SMALL_BYTES
from noloco_node.diagnostics.status import node_folders, said_now
from noloco_node.errors import ExitCode, UserError
from noloco_node.storage.run_folder import RunFolder
from noloco_node.telemetry.events import (
    Account,
    AnyEvent,
    CheckpointTaken,
    Doing,
    EventReader,
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
from noloco_node.telemetry.summary import Summary, summarize_histories
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


_VERSION = re.compile(rb'"version": ?"([0-9A-Za-z.+-]{1,32})"')

DIVERGING = ("loss", "gradient_norm", "difference_norm", "replica_divergence")
MOST, MOST_BELOW = 1e18, 1e-60
"""A number in an event is at most the first and at least the second, or 0."""


class _Merged(BaseModel):
    """The part of `summary.json` that no event tells."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    validation_loss_merged: float | None = None


@dataclass(frozen=True, slots=True)
class ReportedRun:
    """What a run folder tells at one moment."""

    path: Path
    chronicles: tuple[Chronicle, ...]
    summary: Summary
    now: dict[str, str]
    """By node: what it does, or how it ended, as `noloco-node status` says it."""
    running: frozenset[str]
    """Nodes whose process holds their folder."""
    passed_over: int
    """Lines that are no events of this version, or hold numbers that no node writes."""
    read_at: float
    """Wall time, seconds since 1970."""


def read_folder(path: Path, now: float) -> ReportedRun:
    """Read the folder of a node, of a local swarm or of a machine's devices at wall time `now`. Raises UserError
    (RUN_FOLDER) if no node has run there, or none has been up yet. It does so too if another version wrote what lies
    there, and if it cannot be read."""
    chronicles: list[Chronicle] = []
    said: dict[str, str] = {}
    running: set[str] = set()
    passed_over = 0
    try:
        for member in node_folders(path):
            folder = RunFolder(member)
            reader, chronicle = EventReader(folder.events), Chronicle(printable(member.resolve().name))
            for event in reader.new_events():
                if is_plausible(event):
                    chronicle.observe(event)
                else:
                    passed_over += 1
            passed_over += reader.passed_over
            chronicles.append(chronicle)
            said[chronicle.name] = said_now(folder, now)
            if folder.in_use:
                running.add(chronicle.name)
    except OSError as error:
        raise UserError(
            ExitCode.RUN_FOLDER,
            f"'{error.filename or path}' cannot be read: {error.strerror or error}",
            "read it as the user whose node wrote it, or copy the folder",
        ) from None
    if not any(chronicle.history.started for chronicle in chronicles):
        raise _nothing_to_tell(path, passed_over)
    histories = [chronicle.history for chronicle in chronicles]
    _check_one_run(path, [history.started for history in histories if history.started is not None])
    summary = summarize_histories(histories, _merged_loss(path))
    return ReportedRun(path, tuple(chronicles), summary, said, frozenset(running), passed_over, now)


def _check_one_run(path: Path, starts: Sequence[NodeStarted]) -> None:
    runs = {started.run_id: started.run_name for started in starts}
    if len(runs) > 1:
        named = ", ".join(sorted({printable(name)[:40] for name in runs.values()}))
        raise UserError(
            ExitCode.RUN_FOLDER,
            f"the nodes in '{path}' are of {len(runs)} runs: {named}",
            "name the folder of one node, or move those of one run into a folder of their own",
        )


def is_plausible(event: AnyEvent) -> bool:
    """Tell whether all its numbers are such as a node may write: a folder may come from anybody. A time without end has
    no place on an axis. Losses and norms may be infinite, or no numbers."""
    return all(_of_a_node(value, may_diverge=name in DIVERGING) for name, value in event)


def _of_a_node(value: object, *, may_diverge: bool = False) -> bool:
    if isinstance(value, int | float):
        return MOST_BELOW <= abs(value) <= MOST or value == 0 or (may_diverge and not isfinite(value))
    if isinstance(value, BaseModel):
        return all(_of_a_node(inner, may_diverge=name in DIVERGING) for name, inner in value)
    if isinstance(value, dict):
        return all(_of_a_node(inner) for inner in cast("dict[str, object]", value).values())
    if isinstance(value, list | tuple):
        return all(_of_a_node(inner) for inner in cast("Sequence[object]", value))
    return True


def _merged_loss(path: Path) -> float | None:
    try:
        return _Merged.model_validate_json((path / "summary.json").read_bytes()).validation_loss_merged
    except (OSError, ValidationError):  # there is none yet, or another version's
        return None


def _nothing_to_tell(path: Path, passed_over: int) -> UserError:
    if not passed_over:
        return UserError(
            ExitCode.RUN_FOLDER,
            f"there is nothing to report of '{path}' yet: no node has been up there",
            f"try again when one is; noloco-node status {path} says what it does",
        )
    written = _version_of(path)
    return UserError(
        ExitCode.RUN_FOLDER,
        f"the events in '{path}' are of {f'noloco-node {written}' if written else 'another version of noloco-node'}: "
        f"this one ({__version__}) cannot read them",
        f"make the report with that version: pip install noloco-node=={written or 'VERSION'}",
    )


def _version_of(path: Path) -> str:
    for member in node_folders(path):
        with RunFolder(member).events.open("rb") as file:
            while line := file.readline(SMALL_BYTES):
                found = _VERSION.search(line)
                if found and found.group(1).decode() != __version__:
                    return found.group(1).decode()
    return ""
