"""`noloco-node top`: a live view of one node in a terminal, asked from its pages."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from noloco_node.errors import ExitCode, UserError
from noloco_node.telemetry.told_state import NodeHangs, NoState, ShowsSwarm, ToldPeer, ToldState, ask_state
from noloco_node.telemetry.words import (
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

LOOK_SECONDS = 1.0
BAR_WIDTH = 40
LOG_LINES = 8
MOST_PEERS = 24
NAME_WIDTH = 24
OTHER_LINES = 18
"""So many lines of the screen are for other things than peers and log."""
PAGES = "start the node with --metrics-port N, and name that port here; a node says where its pages are when it is up"
WATCH = "noloco-node watch ADDRESS shows a swarm, with the address that the seed printed; or open its page in a browser"

WAKE = "look at the process that has that port: let it go on (kill -CONT, fg), or end it and start the node again"


@dataclass(slots=True)
class Follower:
    """Asks a node for its state again and again; the last one stands while it does not answer."""

    ask: Callable[[], ToldState]
    where: str
    state: ToldState | None = None
    trouble: str = ""

    def look(self) -> None:
        """Once. Raises UserError (CHECK_FAILED) where nobody has ever answered."""
        try:
            self.state, self.trouble = self.ask(), ""
        except NoState as error:
            if self.state is None:
                raise UserError(
                    ExitCode.CHECK_FAILED,
                    f"no node shows itself at {self.where}: {error}",
                    _remedy(error),
                ) from None
            self.trouble = f"no answer since {as_clock_time(self.state.time)}: {error}"


def _remedy(error: NoState) -> str:
    if isinstance(error, ShowsSwarm):
        return WATCH
    return WAKE if isinstance(error, NodeHangs) else PAGES


def follow(host: str, port: int, console: Console, *, once: bool) -> None:
    """Show the node with these pages until Ctrl-C, or until it has ended; once if there is no terminal. Raises
    UserError (CHECK_FAILED) if no node answers."""
    follower = Follower(lambda: ask_state(host, port), f"{host} port {port}")
    follower.look()
    if once or not console.is_terminal:
        console.print(screen(follower, console.height if console.is_terminal else 1000))
        return
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(screen(follower, console.height), refresh=True)
            time.sleep(LOOK_SECONDS)
            follower.look()
            if follower.state is not None and follower.state.state == "ended":
                break
    console.print(screen(follower, console.height))


def screen(follower: Follower, height: int) -> RenderableType:
    """A node in so many lines of a terminal; peers and log get what is left."""
    state = follower.state
    assert state is not None
    peers = [_peers(state, max(3, min(MOST_PEERS, height - OTHER_LINES - LOG_LINES)))] if state.peers else []
    parts: list[RenderableType] = [
        *(Text(printable(line), style="bold red") for line in _troubles(follower, state)),
        _doing(state),
        *_progress(state),
        Text(),
        _figures(state),
        *((Text(), peers[0]) if peers else ()),
        Text(),
        *(_log_line(line.time, line.level, line.text) for line in state.log[-LOG_LINES:]),
    ]
    name = printable(state.run.name) if state.run else "starting"
    where = f" · stage {state.stage} of {state.stages} · node …{printable(state.peer_id or '')[-6:]}"
    title = Text(name + (where if state.stage is not None else ""))
    return Panel(Group(*parts), title=title, subtitle=Text(f"{follower.where} · Ctrl-C ends this view only"))


def _troubles(follower: Follower, state: ToldState) -> Iterator[str]:
    if follower.trouble:
        yield follower.trouble
    yield from (line.text for line in state.warnings[-2:])
    if state.missing_stages:
        yield f"nobody serves {as_stages(state.missing_stages)}"


def _doing(state: ToldState) -> Text:
    style = "bold green" if state.state == "training" else "bold" if state.state == "ended" else "bold yellow"
    since = "" if state.state == "ended" else f", for {as_duration(max(0.0, state.time - state.since))}"
    return Text(f"{printable(state.detail)}{since}", style=style)


def _progress(state: ToldState) -> Iterator[RenderableType]:
    if not state.target:
        return
    done = min(state.clock or 0.0, state.target)
    row = Table.grid(padding=(0, 1))
    left = "done" if done >= state.target else f"{as_duration(state.seconds_left)} left"
    row.add_row(
        ProgressBar(total=state.target, completed=done, width=BAR_WIDTH),
        f"{done:,.0f} of {state.target:,} tokens",
        Text(left, style="bold"),
    )
    yield row


def _figures(state: ToldState) -> Table:
    table = Table.grid(padding=(0, 3))
    count = "–" if state.inner_steps is None else f"{state.inner_steps:,}"
    rounds = "–" if state.outer_rounds is None else f"{state.outer_rounds:,}"
    rows = [
        ("inner steps", count, "training loss", as_loss(state.training_loss)),
        ("swarm, tokens/s", as_rate(state.swarm_tokens_per_second), "validation loss", as_loss(state.validation_loss)),
        ("this node, tokens/s", as_rate(state.tokens_per_second), "learning rate", as_scientific(state.learning_rate)),
        ("outer steps", rounds, "spread of weights", as_scientific(state.spread)),
        ("nodes it sees", as_nodes(state.nodes_per_stage) or "–", "microbatches in hand", str(state.in_hand)),
    ]
    for left, value, right, other in rows:
        table.add_row(
            Text(left, style="dim"), Text(value, style="bold"), Text(right, style="dim"), Text(other, style="bold")
        )
    return table


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
