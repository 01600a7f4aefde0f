"""A live view of a whole swarm in a terminal, from the address of any of its nodes: `noloco-node watch`."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live

from noloco_node.aio import first_alone
from noloco_node.bootstrap.hello import measure_hello, said_to_be_over
from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import RunSpec
from noloco_node.directory.records import FIRST_LOOK_SECONDS
from noloco_node.identity.addresses import parse_address
from noloco_node.node.interrupts import interruptible
from noloco_node.node.network import Entrance, looking_on
from noloco_node.observer import Onlooker
from noloco_node.telemetry.logging import LogTail, NodeLog, configure_logging
from noloco_node.telemetry.swarm_state import SwarmView, document
from noloco_node.telemetry.terminal import LOOK_SECONDS, WARNINGS_SHOWN, swarm_screen

_Serve = Callable[[Coroutine[Any, Any, None]], Awaitable[None]]
"""A function that awaits something while the swarm is looked at."""


async def watch(settings: NodeSettings, console: Console, *, as_json: bool, follows: bool) -> None:
    """Show the run that the peers at `settings.initial_peers` serve: once, or until Ctrl-C if it `follows`. It shows
    one screen, or one line of JSON for each look. It publishes nothing, and leaves nothing behind. Raises UserError as
    a node that joins does, if no peer answers, or none gives a RunSpec."""
    log, draws = LogTail(), follows and not as_json
    configure_logging("WARNING", NodeLog(), (lambda _: None) if draws else None, log)
    with interruptible() as interrupts, first_alone(OSError):  # a reader that has gone is no defect
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
