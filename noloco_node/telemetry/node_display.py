"""What a person sees of one node in a terminal: the one that it runs in, and any other by `noloco-node top`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from noloco_node.telemetry.events import AnyEvent, NodeStarted, StateDownload
from noloco_node.telemetry.screens import figures_table, progress_row
from noloco_node.telemetry.state import NodeState
from noloco_node.telemetry.told_state import ToldPeer, ToldState
from noloco_node.telemetry.words import (
    an_hour,
    as_bytes,
    as_clock_time,
    as_duration,
    as_lag,
    as_loss,
    as_node,
    as_nodes,
    as_rate,
    as_scientific,
    as_stages,
    printable,
)

DRAWN_A_SECOND = 1.0
WARNINGS_SHOWN = 3
LOG_LINES = 8
MOST_PEERS = 24
NAME_WIDTH = 24
OTHER_LINES = 20
"""Lines of a screen for other things than peers and log."""


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

    def __init__(self, state: NodeState, console: Console) -> None:
        self._state = state
        self._console = console
        self._live: Live | None = None

    def observe(self, event: AnyEvent) -> None:
        """Begin to draw at the first event with something to see."""
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
        told = ToldState.model_validate(self._state.document(None) | {"log": ()})
        return node_screen(told, "Ctrl-C leaves in order")


def node_screen(state: ToldState, foot: str, *, trouble: str = "", height: int = 0) -> RenderableType:
    """One node on a part of a terminal's screen. Peers and log lines get what `height` leaves."""
    parts: list[RenderableType] = [
        *(Text(printable(line), style="bold red") for line in _troubles(state, trouble)),
        *_progress(state),
        _doing(state),
        Text(),
        figures_table(_figures(state)),
    ]
    if state.peers:
        parts += [Text(), _peers(state, max(3, min(MOST_PEERS, height - OTHER_LINES - LOG_LINES)))]
    if state.log:
        parts += [Text(), *(_log_line(line.time, line.level, line.text) for line in state.log[-LOG_LINES:])]
    # Names are others' words: as text they are drawn as they are, never read as markup.
    name = printable(state.run.name) if state.run else "starting"
    where = f" · stage {state.stage} of {state.stages} · node …{printable(state.peer_id or '')[-6:]}"
    return Panel(Group(*parts), title=Text(name + (where if state.stage is not None else "")), subtitle=Text(foot))


def _troubles(state: ToldState, trouble: str) -> Iterator[str]:
    if trouble:
        yield trouble
    yield from (line.text for line in state.warnings[-WARNINGS_SHOWN:])
    if state.missing_stages:
        yield f"nobody serves {as_stages(state.missing_stages)}"


def _doing(state: ToldState) -> Text:
    style = "bold green" if state.state == "training" else "bold" if state.state == "ended" else "bold yellow"
    since = "" if state.state == "ended" else f", for {as_duration(max(0.0, state.time - state.since))}"
    return Text(f"{printable(state.detail)}{since}", style=style)


def _progress(state: ToldState) -> Iterator[RenderableType]:
    if state.target:
        done = state.clock or 0.0
        left = "done" if done >= state.target else f"{as_duration(state.seconds_left)} left"
        yield progress_row(done, state.target, left)
    copying = state.download
    if copying is not None and copying.total:
        rest = copying.seconds * (copying.total - copying.received) / copying.received if copying.received else None
        words = f"{copying.received / 1e6:,.1f} of {copying.total / 1e6:,.1f} MB of …{printable(copying.donor)[-6:]}"
        yield progress_row(copying.received, copying.total, f"{as_duration(rest)} left", what=words)


def _figures(state: ToldState) -> Iterator[tuple[str, str, str, str]]:
    steps = "–" if state.inner_steps is None else f"{state.inner_steps:,}"
    swarm, own = as_rate(state.swarm_tokens_per_second), as_rate(state.tokens_per_second)
    yield "inner steps", steps, "training loss", as_loss(state.training_loss)
    yield "swarm, tokens/s", swarm, "validation loss", as_loss(state.validation_loss)
    yield "this node, tokens/s", own, "learning rate", as_scientific(state.learning_rate)
    yield "outer steps", _outer_steps(state), "spread of weights", as_scientific(state.spread)
    yield (
        "nodes it sees",
        as_nodes(state.nodes_per_stage) if state.nodes_per_stage else "–",
        "last averaged",
        _last(state),
    )
    if state.peers:
        yield "microbatches in hand", str(state.in_hand), "", ""
    yield from _traffic(state)


def _traffic(state: ToldState) -> Iterator[tuple[str, str, str, str]]:
    """Bytes each way since the start and in an hour: all, and those of each kind."""
    if state.contribution is None:
        return
    sent, received = state.contribution.bytes_sent, state.contribution.bytes_received

    def of(count: int) -> str:
        return f"{as_bytes(count)}, {an_hour(count, state.uptime_seconds)}" if count else "–"

    yield "sent", of(sum(sent.values())), "received", of(sum(received.values()))
    for kind in sorted(kind for kind in {*sent, *received} if sent.get(kind, 0) or received.get(kind, 0)):
        yield f"  {printable(kind)}", of(sent.get(kind, 0)), f"  {printable(kind)}", of(received.get(kind, 0))


def _outer_steps(state: ToldState) -> str:
    counts = state.outer_steps
    if not counts:
        return "–" if state.outer_rounds is None else f"{state.outer_rounds:,}"
    rare = ((name, counts.get(name, 0)) for name in ("alone", "caught_up", "aborted"))
    said = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in rare if count)
    committed = sum(counts.values()) - counts.get("aborted", 0)
    return f"{committed:,}{f' ({said})' if said else ''}"


def _last(state: ToldState) -> str:
    if not state.exchanges:
        return "not yet"
    partner = state.exchanges[-1].partner
    return f"with …{printable(partner)[-6:]}" if partner else "alone"


def _peers(state: ToldState, most: int) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("peer", max_width=NAME_WIDTH, no_wrap=True, overflow="ellipsis")
    for name in ("stage", "state", "tokens/s", "behind by", "holds", "under way", "trained together"):
        table.add_column(name, justify="right")
    own = state.stage or 0
    near = sorted(state.peers, key=lambda peer: (not peer.answers, abs(peer.stage - own), peer.stage, peer.peer_id))
    for peer in near[:most]:
        style = "" if peer.answers else "dim"
        table.add_row(*(Text(printable(cell), style=style) for cell in _cells(peer)))
    more = [Text(f"and {len(near) - most} more", style="dim")] if len(near) > most else []
    return Group(table, *more)


def _cells(peer: ToldPeer) -> tuple[str, ...]:
    return (
        as_node(peer.peer_id, peer.name),
        str(peer.stage),
        peer.state if peer.answers else "silent",
        as_rate(peer.tokens_per_second),
        as_lag(peer.lag),
        "–" if peer.load is None else str(peer.load),
        str(peer.under_way),
        f"{peer.tokens:,}",
    )


def _log_line(when: float, level: str, text: str) -> Text:
    style = "red" if level in ("ERROR", "CRITICAL") else "yellow" if level == "WARNING" else "dim"
    return Text(f"{as_clock_time(when)} {printable(text)}", style=style, no_wrap=True, overflow="ellipsis")
