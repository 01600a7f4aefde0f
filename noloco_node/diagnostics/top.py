"""A live view of one node in a terminal, asked from its pages: `noloco-node top`.

It imports nothing that loads torch or hivemind, so that a look takes no longer than its answer.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Callable
from dataclasses import dataclass

from pydantic import ValidationError
from rich.console import Console, RenderableType
from rich.live import Live

from noloco_node.errors import ExitCode, UserError
from noloco_node.telemetry.node_state import NodeState
from noloco_node.telemetry.terminal import LOOK_SECONDS, node_screen
from noloco_node.telemetry.web import Hangs, ask_page
from noloco_node.telemetry.words import as_clock_time

OF_A_SWARM = "nodes_answering"
"""This field of a swarm's state is in no node's."""
PAGES = "start the node with --metrics-port N, and name that port here; a node says where its pages are when it is up"
WATCH = "noloco-node watch ADDRESS shows a swarm, with the address that the seed printed; or open its page in a browser"

WAKE = "look at the process that has that port: let it go on (kill -CONT, fg), or end it and start the node again"


class NoState(Exception):
    """Nobody told a node's state; the text says why, `remedy` what to do."""

    def __init__(self, why: str, remedy: str = PAGES) -> None:
        super().__init__(why)
        self.remedy = remedy


def ask_state(host: str, port: int) -> NodeState:
    """The state of the node whose pages are there. Raises NoState."""
    try:
        status, body = ask_page(host, port, "/api/state", most_bytes=4 << 20)
    except Hangs as error:
        raise NoState(str(error), WAKE) from None
    except OSError as error:
        raise NoState(error.strerror or str(error)) from None
    except (http.client.HTTPException, ValueError) as error:
        raise NoState(str(error) or type(error).__name__) from None
    if status != http.client.OK:
        raise NoState(f"what answers there is no page of a node: status {status}")
    try:
        said: object = json.loads(body)
        if isinstance(said, dict) and OF_A_SWARM in said:
            raise NoState("a seed answers there, which shows a whole swarm and trains no stage", WATCH)
        return NodeState.model_validate(said)
    except (ValidationError, ValueError, RecursionError):
        raise NoState("what answers there is no state of a node") from None


@dataclass(slots=True)
class Follower:
    """Asks a node for its state again and again; the last one stands while it does not answer."""

    ask: Callable[[], NodeState]
    where: str
    state: NodeState | None = None
    trouble: str = ""

    def look(self) -> None:
        """Once. Raises UserError (CHECK_FAILED) where nobody has ever answered."""
        try:
            self.state, self.trouble = self.ask(), ""
        except NoState as error:
            if self.state is None:
                message = f"no node shows itself at {self.where}: {error}"
                raise UserError(ExitCode.CHECK_FAILED, message, error.remedy) from None
            self.trouble = f"no answer since {as_clock_time(self.state.time)}: {error}"


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
