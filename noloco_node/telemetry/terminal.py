"""What a person sees in a terminal: one node, or a whole swarm, in so many lines."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from noloco_node.ambient import LOOK_SECONDS
from noloco_node.errors import SHOWN
from noloco_node.telemetry.events import AnyEvent, NodeStarted, StateDownload
from noloco_node.telemetry.node_state import NodeSeen, NodeState, NodeView
from noloco_node.telemetry.swarm_state import Departed, Happening, Middle, SwarmView
from noloco_node.telemetry.words import (
    an_hour,
    as_bytes,
    as_clock_time,
    as_lag,
    as_long,
    as_loss,
    as_many,
    as_node,
    as_nodes,
    as_rate,
    as_scientific,
    as_stages,
    printable,
)

OTHER_LINES = 20
"""The lines of a screen that are for other things than tables and log."""
WARNINGS_SHOWN = 3
WHAT = {"joined": "came to", "left": "left", "lost": "vanished from", "reassigned": "reassigned to"}

Figures = Iterable[tuple[str, str, str, str]]
"""Rows of two names, each with its value."""
_Row = tuple[Sequence[str], str]
"""Cells, and a style."""


def own_terminal() -> Console | None:
    """The terminal behind stderr, where this process alone draws on it: it is in the foreground there. None for a pipe,
    a file, a process in the background, and one of several that share a terminal."""
    console = Console(stderr=True)
    with contextlib.suppress(OSError, ValueError):
        if console.is_terminal and os.tcgetpgrp(sys.stderr.fileno()) == os.getpgrp():
            return console
    return None


class NodeDisplay:
    """Draws one node once a second, on a thread of its own, from its first sign of life on."""

    def __init__(self, view: NodeView, console: Console) -> None:
        self._view = view
        self._console = console
        self._live: Live | None = None

    def observe(self, event: AnyEvent) -> None:
        """Begin to draw at the first event with something to see."""
        if self._live is None and isinstance(event, NodeStarted | StateDownload):
            self._live = Live(
                console=self._console,
                refresh_per_second=1.0 / LOOK_SECONDS,
                get_renderable=lambda: node_screen(self._view.state(), "Ctrl-C leaves in order"),
                redirect_stdout=sys.stdout.isatty(),
            )
            with contextlib.suppress(OSError):
                self._live.start(refresh=True)

    def line(self, text: str) -> None:
        """Print a line above the screen; it is not broken, so that it can be copied."""
        self._console.print(Text(text), soft_wrap=True)

    def close(self) -> None:
        """Draw a last time, and leave that on the terminal, if it is still there. A terminal that was closed made a
        node that left in order say that it had failed."""
        if self._live is not None:
            with contextlib.suppress(OSError):
                self._live.stop()
            self._live = None


def node_screen(state: NodeState, foot: str, *, trouble: str = "", height: int = 0) -> RenderableType:
    """One node on a part of a terminal's screen. Peers and log lines get what `height` leaves."""
    parts: list[RenderableType] = [
        *_red(_troubles_of_node(state, trouble)),
        *_progress_of_node(state),
        _doing(state),
        Text(),
        _two_columns(_figures_of_node(state)),
    ]
    if state.peers:
        parts += [Text(), _peers(state, max(3, height - OTHER_LINES - SHOWN))]
        alone = [f"{as_node(peer.peer_id, peer.name)}: {peer.left_alone}" for peer in state.peers if peer.left_alone]
        parts += [Text(printable(line), "yellow", no_wrap=True, overflow="ellipsis") for line in alone[:WARNINGS_SHOWN]]
    if state.log:
        parts += [Text(), *(_log_line(line.time, line.level, line.text) for line in state.log[-SHOWN:])]
    # Names are others' words: as text they are drawn as they are, never read as markup.
    name = printable(state.run.name) if state.run else "starting"
    where = f" · stage {state.stage} of {state.stages} · node …{printable(state.peer_id or '')[-6:]}"
    return Panel(Group(*parts), title=Text(name + (where if state.stage is not None else "")), subtitle=Text(foot))


def swarm_screen(
    view: SwarmView,
    height: int,
    warnings: Sequence[str] = (),
    *,
    troubles: Iterable[str] = (),
    foot: str = "",
    more: Figures = (),
    happened: Iterable[Text] = (),
) -> RenderableType:
    """A swarm in so many lines of a terminal; its nodes get what is left. `warnings` concern the process that looks on,
    a line each. Where that knows more `troubles`, `more` figures, or better what `happened`, it gives them."""
    lines = list(happened or map(_happening, view.happenings))[-SHOWN:]
    most = max(3, height - OTHER_LINES - len(view.stages) - len(lines))
    parts: list[RenderableType] = [
        *_red([*_troubles_of_swarm(view), *troubles]),
        *(Text(printable(line), style="yellow", no_wrap=True, overflow="ellipsis") for line in warnings),
        _progress_of_swarm(view),
        Text(),
        _two_columns([*_figures_of_swarm(view), *more]),
        Text(),
        _stages(view, most),
        *((Text(), _nodes(view, most)) if view.nodes else ()),
        *((Text(), *lines) if lines else ()),
    ]
    when = f" · {as_clock_time(view.time)}" if view.time else ""
    nodes, stages = as_many(view.present, "node"), as_many(len(view.stages), "stage")
    title = Text(f"{printable(view.run_name)} · {nodes} of {stages}")
    return Panel(Group(*parts), title=title, subtitle=Text(foot or f"run {view.run_id}{when}"))


def _red(lines: Iterable[str]) -> Iterator[Text]:
    yield from (Text(printable(line), style="bold red") for line in lines)


def _progress(done: float, target: int, left: str, *, what: str = "") -> Table:
    """A bar, tokens of the run's tokens, and what is `left`; `what` replaces the tokens."""
    row = Table.grid(padding=(0, 1))
    bar = ProgressBar(total=target, completed=min(done, target), width=40)
    row.add_row(bar, what or f"{min(done, target):,.0f} of {target:,} tokens", Text(left, style="bold"))
    return row


def _two_columns(rows: Figures) -> Table:
    table = Table.grid(padding=(0, 2))
    for left, value, right, other in rows:
        cells = ((left, "dim"), (value, "bold"), (right, "dim"), (other, "bold"))
        table.add_row(*(Text(text, style=style) for text, style in cells))
    return table


def _table(columns: str, rows: Iterable[_Row], left: str = "") -> RenderableType:
    """The names of the columns stand between commas; all but the first are figures. `left`: what had no room."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    first, *others = columns.split(", ")
    table.add_column(first, max_width=24, no_wrap=True, overflow="ellipsis")
    for name in others:
        table.add_column(name, justify="right")
    for cells, style in rows:
        table.add_row(*(Text(printable(cell), style=style) for cell in cells))
    return Group(table, Text(f"and {left}", style="dim")) if left else table


def _troubles_of_node(state: NodeState, trouble: str) -> Iterator[str]:
    if trouble:
        yield trouble
    yield from (line.text for line in state.warnings[-WARNINGS_SHOWN:])
    paused = {peer.stage for peer in state.peers if peer.state == "paused"}
    yield from _missing(state.missing_stages, paused, "nobody serves")


def _missing(stages: Collection[int], paused: Collection[int], nobody: str) -> Iterator[str]:
    """The stages without a replica: first those that `paused` nodes have, then the others, behind `nobody`."""
    if resting := sorted({*stages} & {*paused}):
        yield f"only paused nodes have {as_stages(resting)}"
    if empty := sorted({*stages} - {*paused}):
        yield f"{nobody} {as_stages(empty)}"


def _doing(state: NodeState) -> Text:
    style = "bold green" if state.state == "training" else "bold" if state.state == "ended" else "bold yellow"
    since = "" if state.state == "ended" else f", for {as_long(max(0.0, state.time - state.since))}"
    return Text(f"{printable(state.detail)}{since}", style=style)


def _progress_of_node(state: NodeState) -> Iterator[RenderableType]:
    if state.target:
        done = state.clock or 0.0
        left = "done" if done >= state.target else f"{as_long(state.seconds_left)} left"
        yield _progress(done, state.target, left)
    copying = state.download
    if copying is not None and copying.total:
        rest = copying.seconds * (copying.total - copying.received) / copying.received if copying.received else None
        words = f"{copying.received / 1e6:,.1f} of {copying.total / 1e6:,.1f} MB of …{printable(copying.source)[-6:]}"
        yield _progress(copying.received, copying.total, f"{as_long(rest)} left", what=words)


def _figures_of_node(state: NodeState) -> Figures:
    swarm, own = as_rate(state.swarm_tokens_per_second), as_rate(state.tokens_per_second)
    nodes = as_nodes(state.nodes_per_stage) if state.nodes_per_stage else "–"
    yield "inner steps", f"{state.inner_steps:,}", "training loss", as_loss(state.training_loss)
    yield "swarm, tokens/s", swarm, "validation loss", as_loss(state.validation_loss)
    yield "this node, tokens/s", own, "learning rate", as_scientific(state.learning_rate)
    yield "outer steps", outer_steps(state.outer_steps), "replica divergence", as_scientific(state.replica_divergence)
    yield "nodes it sees", nodes, "last averaged", _last(state)
    if state.peers:
        yield "microbatches in hand", str(state.in_hand), "", ""
    yield from _traffic(state)


def _traffic(state: NodeState) -> Figures:
    """Bytes each way since the start and in an hour: all, and those of each kind."""
    if state.contribution is None:
        return
    sent, received = state.contribution.bytes_sent, state.contribution.bytes_received

    def of(count: int) -> str:
        return f"{as_bytes(count)}, {an_hour(count, state.uptime_seconds)}" if count else "–"

    yield "sent", of(sum(sent.values())), "received", of(sum(received.values()))
    for kind in sorted(kind for kind in {*sent, *received} if sent.get(kind, 0) or received.get(kind, 0)):
        yield f"  {printable(kind)}", of(sent.get(kind, 0)), f"  {printable(kind)}", of(received.get(kind, 0))
    if nearby := state.contribution.bytes_nearby:
        yield "of both, on this machine", of(nearby), "", ""


def outer_steps(counts: Mapping[str, int]) -> str:
    """Outer steps by kind: `12 (2 no partner, 1 aborted)`, where those that were aborted are not among the 12."""
    rare = ((name, counts.get(name, 0)) for name in ("no_partner", "caught_up", "aborted"))
    said = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in rare if count)
    committed = sum(counts.values()) - counts.get("aborted", 0)
    return f"{committed:,}{f' ({said})' if said else ''}"


def _last(state: NodeState) -> str:
    if not state.exchanges:
        return "not yet"
    partner = state.exchanges[-1].partner
    return f"with …{printable(partner)[-6:]}" if partner else "no partner"


def _peers(state: NodeState, most: int) -> RenderableType:
    own = state.stage or 0
    near = sorted(state.peers, key=lambda peer: (not peer.answers, abs(peer.stage - own), peer.stage, peer.peer_id))
    columns = "peer, stage, state, tokens/s, behind by, holds, under way, trained together"
    left = f"{len(near) - most} more" if len(near) > most else ""
    return _table(columns, map(_peer, near[:most]), left)


def _peer(peer: NodeSeen) -> _Row:
    load = "–" if peer.load is None else str(peer.load)
    return _seen(peer, load, str(peer.under_way), f"{peer.together:,}")


def _seen(node: NodeSeen, *more: str) -> _Row:
    cells = (
        as_node(node.peer_id, node.name),
        str(node.stage),
        node.state if node.answers or node.state == "paused" else "silent",
        as_rate(node.tokens_per_second),
        as_lag(node.lag if node.answers else None),
        *more,
    )
    return cells, "" if node.answers else "dim"


def _log_line(when: float, level: str, text: str) -> Text:
    style = "red" if level in ("ERROR", "CRITICAL") else "yellow" if level == "WARNING" else "dim"
    return Text(f"{as_clock_time(when)} {printable(text)}", style=style, no_wrap=True, overflow="ellipsis")


def _troubles_of_swarm(view: SwarmView) -> Iterator[str]:
    if not view.time:
        yield "looking for the nodes of the run"
    elif view.introduced and not view.present:
        yield f"{as_many(view.introduced, 'record')} found, and no node of them has answered yet"
    elif view.missing:
        paused = {node.stage for node in view.nodes if node.answers and node.state == "paused"}
        yield from _missing(view.missing, paused, "no node that answers serves")


def _progress_of_swarm(view: SwarmView) -> RenderableType:
    left = "the run is over" if view.over else f"{as_long(view.seconds_left)} left"
    return _progress(float(view.target) if view.over else view.clock, view.target, left)


def _figures_of_swarm(view: SwarmView) -> Figures:
    unreachable = sum(stage.unreachable for stage in view.stages)
    speed = as_rate(view.tokens_per_second)
    if view.speed_from is not None:
        speed += " (as they say)" if view.speed_from == "records" else " (measured)"
    versions = ", ".join(f"{printable(version)}: {count}" for version, count in view.versions.items() if count)
    yield (
        "median loss",
        _middle(view.training_loss, as_loss),
        "median divergence",
        _middle(view.replica_divergence, as_scientific),
    )
    yield "validation loss", _middle(view.validation_loss, as_loss), "versions", versions or "–"
    yield "tokens/s", speed, "nodes that answer", f"{view.present:,}"
    yield "came, reassigned", f"{view.joins:,}, {view.reassignments:,}", "unreachable", f"{unreachable:,}"
    yield "left, vanished", f"{view.left:,}, {view.lost:,}", "", ""


def _middle(middle: Middle | None, written: Callable[[float], str]) -> str:
    """A median, and of how many nodes' words."""
    return "–" if middle is None else f"{written(middle.value)} ({as_many(middle.nodes, 'node')})"


def _stages(view: SwarmView, most: int) -> RenderableType:
    many = len(view.stages) > most
    shown = [(n, stage) for n, stage in enumerate(view.stages) if not many or n < most or stage.missing][: 2 * most]
    rows: list[_Row] = []
    for number, stage in shown:
        states = (str(stage.nodes[state]) for state in ("training", "joining", "finishing", "draining"))
        clock, lag = ("–" if value is None else f"{value:,.0f}" for value in (stage.clock, stage.lag))
        cells = (str(number), *states, str(stage.unreachable), as_rate(stage.capacity), clock, lag)
        rows.append((cells, "bold red" if stage.missing else ""))
    left = len(view.stages) - len(shown)
    columns = "stage, train, join, finish, leave, unreachable, capacity, trained, behind"
    return _table(columns, rows, as_many(left, "more stage") if left else "")


def _nodes(view: SwarmView, most: int) -> RenderableType:
    nodes = sorted(view.nodes, key=lambda node: (not node.answers, node.stage, node.peer_id))
    gone = view.departed[: max(0, most - len(nodes))]
    left = view.introduced - min(len(nodes), most)
    columns = "node, stage, state, tokens/s, behind, outer steps, trained, seen"
    return _table(columns, [*map(_node, nodes[:most]), *map(_departed, gone)], f"{left} more" if left > 0 else "")


def _node(node: NodeSeen) -> _Row:
    return _seen(node, f"{node.outer_steps_taken:,}", f"{node.tokens:,}", as_long(node.seen_seconds))


def _departed(one: Departed) -> _Row:
    name = as_node(one.peer_id, one.name)
    return (name, str(one.stage), "gone", "–", "–", "–", f"{one.tokens:,}", as_long(one.seen_seconds)), "dim"


def _happening(one: Happening) -> Text:
    text = f"{as_clock_time(one.time)} {printable(as_node(one.peer_id, one.name))} {WHAT[one.what]} stage {one.stage}"
    return Text(text, style="yellow" if one.what == "lost" else "dim")
