"""`noloco-node top`: a live view of one node in a terminal, asked from its pages."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console, RenderableType
from rich.live import Live

from noloco_node.errors import ExitCode, UserError
from noloco_node.telemetry.node_display import node_screen
from noloco_node.telemetry.told_state import NodeHangs, NoState, ShowsSwarm, ToldState, ask_state
from noloco_node.telemetry.words import as_clock_time

LOOK_SECONDS = 1.0
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
    """A node in so many lines of a terminal."""
    assert follower.state is not None
    foot = f"{follower.where} · Ctrl-C ends this view only"
    return node_screen(follower.state, foot, trouble=follower.trouble, height=height)
