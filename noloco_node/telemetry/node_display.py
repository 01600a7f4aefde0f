"""What a person sees of one node: a live screen on the terminal that it runs in; elsewhere the log tells it."""

from __future__ import annotations

import contextlib
import os
import sys

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from noloco_node import ambient
from noloco_node.telemetry.events import AnyEvent, NodeStarted, OuterStep, StateDownload
from noloco_node.telemetry.node_view import NodeFigures, NodeView
from noloco_node.telemetry.words import as_duration, as_loss, as_nodes, as_rate, as_scientific

DRAWN_A_SECOND = 1.0
BAR_WIDTH = 40


def own_terminal() -> Console | None:
    """The terminal behind stderr, where this process alone draws on it: it is in the foreground there. None for a pipe,
    a file, a process in the background, and one of several that share a terminal."""
    console = Console(stderr=True)
    with contextlib.suppress(OSError, ValueError):
        if console.is_terminal and os.tcgetpgrp(sys.stderr.fileno()) == os.getpgrp():
            return console
    return None


class NodeDisplay:
    """Draws a view of one node once a second, on a thread of its own, from its first sign of life on."""

    def __init__(self, view: NodeView, console: Console) -> None:
        self._view = view
        self._console = console
        self._live: Live | None = None

    def observe(self, event: AnyEvent) -> None:
        """Begin to draw where this event is the first that there is something to see of."""
        if self._live is None and isinstance(event, NodeStarted | StateDownload):
            self._live = Live(
                console=self._console,
                refresh_per_second=DRAWN_A_SECOND,
                get_renderable=self._screen,
                redirect_stdout=sys.stdout.isatty(),
            )
            self._live.start(refresh=True)

    def line(self, text: str) -> None:
        """Print a line above the screen; it is not broken, so that it can be copied."""
        self._console.print(Text(text), soft_wrap=True)

    def close(self) -> None:
        """Draw a last time, and leave that on the terminal."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _screen(self) -> RenderableType:
        return node_screen(self._view.figures(ambient.wall()), ambient.wall())


def node_screen(f: NodeFigures, now: float) -> RenderableType:
    """One node on a part of a terminal's screen."""
    parts: list[RenderableType] = [Text(warning, style="bold red") for warning in f.warnings]
    if f.target is not None:
        parts.append(_progress(f))
    if f.download is not None:
        parts.append(download_row(f.download))
    parts += [Text(_doing(f, now), style="bold yellow" if _waits(f) else ""), Text(), _table(f)]
    where = f" · stage {f.stage} of {f.stages} · node …{f.peer_id[-6:]}" if f.stage is not None else ""
    # Names are others' words: as text they are drawn as they are, never read as markup.
    return Panel(
        Group(*parts), title=Text(f"{f.run_name or 'starting'}{where}"), subtitle=Text("Ctrl-C leaves in order")
    )


def download_row(event: StateDownload) -> RenderableType:
    """A bar, the megabytes, and the time that is left at this speed."""
    left = event.seconds * (event.total - event.received) / event.received if event.received else None
    row = Table.grid(padding=(0, 1))
    row.add_row(
        f"state of …{event.donor[-6:]}",
        ProgressBar(total=event.total, completed=event.received, width=BAR_WIDTH),
        f"{event.received / 1e6:,.1f} of {event.total / 1e6:,.1f} MB",
        Text(f"{as_duration(left)} left", style="bold"),
    )
    return row


def _progress(f: NodeFigures) -> Table:
    target = f.target or 0
    row = Table.grid(padding=(0, 1))
    row.add_row(
        ProgressBar(total=target, completed=min(f.clock, target), width=BAR_WIDTH),
        f"{f.clock:,.0f} of {target:,} tokens",
        Text("done" if f.clock >= target else f"{as_duration(f.seconds_left)} left", style="bold"),
    )
    return row


def _waits(f: NodeFigures) -> bool:
    return f.doing is not None and f.doing.what.startswith("waiting")


def _doing(f: NodeFigures, now: float) -> str:
    if f.ended or f.doing is None:
        return "ended" if f.ended else "starting"
    since = as_duration(max(0.0, now - f.doing.since))
    return f"waiting for {f.doing.detail}, for {since}" if _waits(f) else f"{f.doing.detail}, for {since}"


def _table(f: NodeFigures) -> Table:
    table = Table.grid(padding=(0, 3))
    rows = [
        ("inner step", f"{f.step:,}", "training loss", as_loss(f.training_loss)),
        ("swarm, tokens/s", as_rate(f.swarm_rate), "validation loss", as_loss(f.validation_loss)),
        ("this node, tokens/s", as_rate(f.own_rate), "learning rate", as_scientific(f.learning_rate)),
        ("outer steps", _outer_steps(f), "spread of weights", as_scientific(f.spread)),
        ("nodes it sees", as_nodes(f.nodes_per_stage) if f.nodes_per_stage else "–", "last averaged", _last(f)),
    ]
    for left, value, right, other in rows:
        table.add_row(
            Text(left, style="dim"), Text(value, style="bold"), Text(right, style="dim"), Text(other, style="bold")
        )
    return table


def _outer_steps(f: NodeFigures) -> str:
    rare = {"alone": f.alone, "caught up": f.caught_up, "aborted": f.aborted}
    said = ", ".join(f"{count} {name}" for name, count in rare.items() if count)
    return f"{f.paired + f.alone + f.caught_up}{f' ({said})' if said else ''}"


def _last(f: NodeFigures) -> str:
    last: OuterStep | None = f.last_outer
    if last is None:
        return "not yet"
    return f"with …{last.partner[-6:]}" if last.partner else "alone"
