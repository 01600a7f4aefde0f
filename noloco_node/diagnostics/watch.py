"""A live view in a terminal: `noloco-node watch` of a whole swarm, from the address of any of its nodes; `noloco-node
top` of one node, asked from its pages."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from rich.console import Console, RenderableType
from rich.live import Live

from noloco_node.bootstrap.hello import measure_hello, said_to_be_over
from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import RunSpec
from noloco_node.directory.records import FIRST_LOOK_SECONDS
from noloco_node.errors import ExitCode, UserError
from noloco_node.identity.addresses import parse_address
from noloco_node.node.interrupts import interruptible
from noloco_node.node.network import Entrance, looking_on
from noloco_node.observer import Onlooker
from noloco_node.telemetry.logging import LogTail, NodeLog, configure_logging
from noloco_node.telemetry.node_state import NodeState
from noloco_node.telemetry.swarm_state import SwarmView, document
from noloco_node.telemetry.terminal import LOOK_SECONDS, WARNINGS_SHOWN, node_screen, swarm_screen
from noloco_node.telemetry.web import Hangs, ask_page
from noloco_node.telemetry.words import as_clock_time

_Serve = Callable[[Coroutine[Any, Any, None]], Awaitable[None]]
"""A function that awaits something while the swarm is looked at."""


async def watch(settings: NodeSettings, console: Console, *, as_json: bool, follows: bool) -> None:
    """Show the run that the peers at `settings.initial_peers` serve: once, or until Ctrl-C if it `follows`. It shows
    one screen, or one line of JSON for each look. It publishes nothing, and leaves nothing behind. Raises UserError as
    a node that joins does, if no peer answers, or none gives a RunSpec."""
    log, draws = LogTail(), follows and not as_json
    configure_logging("WARNING", NodeLog(), (lambda _: None) if draws else None, log)
    with interruptible() as interrupts:
        try:
            async with _onlooking(settings) as (onlooker, serve):
                if not follows:
                    _show_once(await onlooker.first_look(FIRST_LOOK_SECONDS), console, as_json=as_json)
                elif as_json:
                    await serve(_print_lines(onlooker))
                else:
                    await serve(_live(onlooker, console, log))
        except asyncio.CancelledError:
            if not interrupts.cancelled_by_signal:
                raise


@contextlib.asynccontextmanager
async def _onlooking(settings: NodeSettings) -> AsyncGenerator[tuple[Onlooker, _Serve]]:
    """An onlooker under a peer id made for the purpose; all is gone at the end of the block."""
    async with looking_on(settings) as outside:
        over = await _is_over(outside.door, outside.spec)
        onlooker = Onlooker(outside.door.transport, outside.directory, outside.spec, over=over)
        yield onlooker, lambda work: outside.supervisor.beside(work, onlooker.run())


async def _is_over(door: Entrance, spec: RunSpec) -> bool:
    """Whether most of the peers that were named remember the run's end, when its nodes have long left."""
    peers = [parse_address(address).peer for address in door.daemon.joined_peers]
    asked = await asyncio.gather(*(measure_hello(door.transport, peer) for peer in peers))
    return said_to_be_over(told.hello.over for told in asked if told is not None and told.hello.run == spec.run_id)


async def _live(onlooker: Onlooker, console: Console, log: LogTail) -> None:
    def drawn() -> RenderableType:
        return swarm_screen(onlooker.last, console.height, [line.text for line in log.lines()[-WARNINGS_SHOWN:]])

    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(drawn(), refresh=True)
                await asyncio.sleep(LOOK_SECONDS)
    finally:
        console.print(drawn())


async def _print_lines(onlooker: Onlooker) -> None:
    while True:
        _print_json(onlooker.last)
        await asyncio.sleep(LOOK_SECONDS)


def _show_once(view: SwarmView, console: Console, *, as_json: bool) -> None:
    if as_json:
        _print_json(view)
    else:
        console.print(swarm_screen(view, console.height if console.is_terminal else 1000))


def _print_json(view: SwarmView) -> None:
    print(json.dumps(document(view), allow_nan=False), flush=True)


ANSWER_SECONDS = 4.0
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
        status, body = ask_page(host, port, "/api/state", seconds=ANSWER_SECONDS, most_bytes=4 << 20)
    except Hangs as error:
        raise NoState(str(error), WAKE) from None
    except TimeoutError:
        raise NoState("no answer in time") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
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
