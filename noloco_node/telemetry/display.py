"""What a person sees while a swarm trains: a live screen on a terminal, elsewhere one plain line every few seconds."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from noloco_node import ambient
from noloco_node.telemetry.events import (
    AnyEvent,
    Evaluation,
    InnerStep,
    NodeMoved,
    NodeStarted,
    NodeStopped,
    OuterStep,
    Warned,
)
from noloco_node.telemetry.history import NodeHistory
from noloco_node.telemetry.screens import figures_table, progress_row
from noloco_node.telemetry.words import as_duration, as_loss, as_nodes, as_scientific

RATE_WINDOW = 30.0
"""The shown tokens per second are counted over so many seconds."""
RECENT_STEPS = 5
"""The shown training loss is that of so many latest inner steps of each first-stage replica."""
MATRIX_REPLICAS = 8
"""The matrix of partners in averaging fits a screen for up to so many replicas."""
NOTABLE_EVENTS = 7
WARNINGS_SHOWN = 4
PLAIN_INTERVAL = 5.0
"""Two plain lines are so many seconds apart."""


@dataclass(frozen=True, slots=True)
class SwarmFigures:
    """The swarm at one moment."""

    clock: float
    target: int
    step: int
    """Inner steps of the first-stage replica that is ahead."""
    training_loss: float | None
    validation_loss: float | None
    tokens_per_second: float
    nodes_per_stage: tuple[int, ...]
    outer_rounds: int
    """Committed outer steps over all nodes."""
    alone: int
    aborted: int
    spread: float | None
    learning_rate: float | None
    seconds_left: float | None


class LocalSwarmView:
    """Follows the events of all nodes of a local swarm. Times are wall time, seconds since 1970."""

    def __init__(self, *, run_name: str, stages: int, target: int, nodes: Sequence[str]) -> None:
        self.run_name = run_name
        self.stages = stages
        self.target = target
        self.histories = {name: NodeHistory(name) for name in nodes}
        self.gone: set[str] = set()
        self.notes: list[tuple[float, str]] = []
        self.warnings: deque[str] = deque(maxlen=WARNINGS_SHOWN)
        """The last ones, shown as long as the screen is."""
        self.trouble = ""
        """What is wrong now and makes the figures old; shown until it is over."""
        self.last_pairs: deque[tuple[str, str]] = deque(maxlen=8)
        self._names: dict[str, str] = {}

    def observe(self, name: str, event: AnyEvent) -> None:
        """Take in one event of a node."""
        self.histories[name].observe(event)
        match event:
            case NodeStarted():
                self.gone.discard(name)
                self._names[event.peer_id] = name
                self.note(f"{name} is up (…{event.peer_id[-6:]})", event.time)
            case NodeMoved():
                self.note(f"{name} moved from stage {event.from_stage} to stage {event.stage}", event.time)
            case OuterStep(kind="paired", role="dialler"):
                self.last_pairs.append((name, self.name_of(event.partner)))
            case OuterStep(kind="caught_up"):
                self.note(f"{name} took over the state of {self.name_of(event.partner)}", event.time)
            case Evaluation():
                self.note(f"validation loss {event.loss:.4f} at {event.clock:,.0f} tokens ({name})", event.time)
            case Warned(what="checkpoints_unusable" | "stage_lost" | "state_elsewhere"):
                self.warnings.append(f"{name}: {event.detail}")
                self.note(f"{name} WARNS: {event.detail}", event.time)
            case NodeStopped():
                self.gone.add(name)
                self.note(f"{name} ended: {event.reason.replace('_', ' ')}", event.time)
            case _:
                pass

    def lost(self, name: str, what: str) -> None:
        """A node's process ended without its last event."""
        self.gone.add(name)
        self.note(f"{name} DIED: {what}")

    def note(self, line: str, when: float | None = None) -> None:
        """Show a line among the notable events."""
        self.notes.append((ambient.wall() if when is None else when, line))

    def name_of(self, peer: str | None) -> str:
        """A node's name for its peer id; the id's end where it is no node of this swarm."""
        return self._names.get(peer or "", f"…{(peer or '')[-6:]}")

    def pairs(self, stage: int) -> dict[str, Counter[str]]:
        """For each node of a stage: how often it averaged with each partner."""
        return {
            name: Counter(self.name_of(step.partner) for step in history.paired)
            for name, history in self.histories.items()
            if history.stage == stage
        }

    def figures(self, now: float) -> SwarmFigures:
        """The swarm at time `now`."""
        heads = [history for history in self.histories.values() if history.stage == 0]
        stepped = [history for history in heads if history.inner]
        recent = [step for h in stepped for step in h.inner[-RECENT_STEPS:] if step.tokens > 0]
        tokens = sum(step.tokens for step in recent)
        evaluations = [row for h in self.histories.values() for row in h.evaluations]
        paired = sorted((s for h in self.histories.values() for s in h.paired[-1:]), key=lambda step: step.time)
        spreads = [step.spread for step in paired if step.spread is not None]
        clock = fmean(h.inner[-1].clock for h in stepped) if stepped else 0.0
        rate = self._rate(heads, now)
        committed = [step for h in self.histories.values() for step in h.outer]
        live = Counter(h.stage for name, h in self.histories.items() if h.stage is not None and name not in self.gone)
        return SwarmFigures(
            clock=clock,
            target=self.target,
            step=max((h.inner[-1].step for h in stepped), default=0),
            training_loss=sum(step.loss * step.tokens for step in recent) / tokens if tokens else None,
            validation_loss=max(evaluations, key=lambda row: row.time).loss if evaluations else None,
            tokens_per_second=rate,
            nodes_per_stage=tuple(live[stage] for stage in range(self.stages)),
            outer_rounds=len(committed),
            alone=sum(step.kind == "alone" for step in committed),
            aborted=sum(h.aborted for h in self.histories.values()),
            spread=fmean(spreads) if spreads else None,
            learning_rate=recent[-1].learning_rate if recent else None,
            seconds_left=max(0.0, self.target - clock) / rate if rate > 0.0 else None,
        )

    def _rate(self, heads: Sequence[NodeHistory], now: float) -> float:
        steps = [step for history in heads for step in _after(history, now - RATE_WINDOW)]
        if not steps:
            return 0.0
        first = min(step.time for step in steps)
        before_window = any(history.inner[0].time < first for history in heads if history.inner)
        span = RATE_WINDOW if before_window else now - first
        return sum(step.tokens for step in steps) / span if span > 1.0 else 0.0


def _after(history: NodeHistory, since: float) -> Iterator[InnerStep]:
    for step in reversed(history.inner):
        if step.time < since:
            return
        yield step


def plain_line(view: LocalSwarmView, now: float) -> str:
    """The swarm in one line of plain text."""
    f = view.figures(now)
    up, nodes = sum(f.nodes_per_stage), len(view.histories)
    if not f.step and up < nodes and not view.gone:
        return f"starting: {up} of {nodes} nodes are up; each loads torch first, and the others follow the first one"
    return (
        f"step {f.step} · {f.clock:,.0f}/{f.target:,} tokens ({_percent(f):.0f} %)"
        f" · loss {as_loss(f.training_loss)} · validation {as_loss(f.validation_loss)}"
        f" · {f.tokens_per_second:,.0f} tokens/s"
        f" · nodes {as_nodes(f.nodes_per_stage)} · outer steps {f.outer_rounds} ({f.alone} alone)"
        f" · spread {as_scientific(f.spread)} · {as_duration(f.seconds_left)} left"
    )


def screen(view: LocalSwarmView, now: float) -> RenderableType:
    """The swarm on one screen of a terminal."""
    f = view.figures(now)
    progress = progress_row(f.clock, f.target, f"{as_duration(f.seconds_left)} left")
    warnings = [*view.warnings, *([view.trouble] if view.trouble else [])]
    trouble = [part for line in warnings for part in (Text(line, style="bold red"), Text())]
    return Panel(
        Group(*trouble, progress, Text(), _figures_table(f), Text(), _who_with_whom(view), Text(), _notable(view)),
        title=f"[bold]{view.run_name}[/] · {view.stages} stages · {len(view.histories)} nodes",
        subtitle="Ctrl-C ends the swarm",
    )


class Display:
    """Shows a view: live on a terminal, else as lines. Use as a context manager and call `refresh` often."""

    def __init__(self, view: LocalSwarmView, console: Console) -> None:
        self._view = view
        self._console = console
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._next_line = 0.0
        self._notes_shown = 0

    def __enter__(self) -> Display:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.refresh(last=True)
        if self._live:
            self._live.stop()

    def refresh(self, *, last: bool = False) -> None:
        """Redraw, or print a line if it is time for one."""
        now = ambient.wall()
        if self._live:
            self._live.update(screen(self._view, now), refresh=True)
            return
        for when, line in self._view.notes[self._notes_shown :]:
            self._line(f"{_clock_time(when)} {line}")
        self._notes_shown = len(self._view.notes)
        if last or now >= self._next_line:
            self._next_line = now + PLAIN_INTERVAL
            self._line(f"{_clock_time(now)} {plain_line(self._view, now)}")
            if self._view.trouble:
                self._line(f"{_clock_time(now)} {self._view.trouble}")

    def _line(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def _figures_table(f: SwarmFigures) -> Table:
    rows = [
        ("inner step", f"{f.step}", "training loss", as_loss(f.training_loss)),
        ("tokens/s", f"{f.tokens_per_second:,.0f}", "validation loss", as_loss(f.validation_loss)),
        ("nodes", as_nodes(f.nodes_per_stage), "learning rate", as_scientific(f.learning_rate)),
        (
            "outer steps",
            f"{f.outer_rounds} ({f.alone} alone, {f.aborted} aborted)",
            "spread of weights",
            as_scientific(f.spread),
        ),
    ]
    return figures_table(rows)


def _who_with_whom(view: LocalSwarmView) -> RenderableType:
    by_stage = [view.pairs(stage) for stage in range(view.stages)]
    if max((len(rows) for rows in by_stage), default=0) > MATRIX_REPLICAS or view.stages > 4:
        return Text("last averaged: " + (", ".join(f"{a} with {b}" for a, b in view.last_pairs) or "none yet"))
    matrices = Columns([_matrix(f"stage {stage}", rows) for stage, rows in enumerate(by_stage)], padding=(0, 4))
    return Group(Text("who averaged with whom, and how often", style="dim"), matrices)


def _matrix(title: str, rows: dict[str, Counter[str]]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(title)
    names = sorted(rows)
    for name in names:
        table.add_column(name.rpartition("-")[2], justify="right", min_width=3)
    for name in names:
        cells = ["·" if other == name else str(rows[name][other]) for other in names]
        table.add_row(Text(name, style="dim"), *cells)
    return table


def _notable(view: LocalSwarmView) -> Text:
    lines = [f"{_clock_time(when)} {line}" for when, line in view.notes[-NOTABLE_EVENTS:]]
    text = Text("\n".join(lines + [""] * (NOTABLE_EVENTS - len(lines))), no_wrap=True, overflow="ellipsis")
    text.highlight_regex(r".*(DIED|WARNS).*", "bold red")
    return text


def _percent(f: SwarmFigures) -> float:
    return 100.0 * min(1.0, f.clock / f.target)


def _clock_time(when: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(when))
