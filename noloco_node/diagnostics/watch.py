"""`noloco-node watch`: a whole swarm in a terminal, from the address of any of its nodes, without taking part in it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from noloco_node.bootstrap.hello import measure_hello, said_to_be_over
from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import RunSpec
from noloco_node.directory.first_look import FIRST_LOOK_SECONDS
from noloco_node.identity.addresses import parse_address
from noloco_node.node.interrupts import interruptible
from noloco_node.node.network import Entrance
from noloco_node.node.observing import looking_on
from noloco_node.observer.onlooker import Onlooker
from noloco_node.telemetry.logging import NodeLog, configure_logging
from noloco_node.telemetry.screens import figures_table, progress_row
from noloco_node.telemetry.state import LogTail
from noloco_node.telemetry.swarm_state import Departed, Happening, Middle, NodeSeen, SwarmView, document
from noloco_node.telemetry.words import (
    as_clock_time,
    as_duration,
    as_lag,
    as_long,
    as_loss,
    as_node,
    as_rate,
    as_scientific,
    as_stages,
    printable,
)

LOOK_SECONDS = 1.0
_Serve = Callable[[Coroutine[Any, Any, None]], Awaitable[None]]
"""A function that awaits something while the swarm is looked at."""
MOST_LISTED = 40
OTHER_LINES = 20
"""So many lines of the screen are for other things than stages and nodes."""
NAME_WIDTH = 22
HAPPENINGS_SHOWN = 5
WARNINGS_SHOWN = 2
WHAT = {"joined": "came to", "left": "left", "lost": "vanished from", "moved": "moved to"}


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


def screen(view: SwarmView, height: int, warnings: Sequence[str] = ()) -> RenderableType:
    """A swarm in so many lines of a terminal; its nodes get what is left. `warnings` concern the onlooker."""
    most = max(3, min(MOST_LISTED, height - OTHER_LINES - len(view.stages)))
    happened = view.happenings[-HAPPENINGS_SHOWN:]
    parts: list[RenderableType] = [
        *(Text(line, style="bold red") for line in _troubles(view)),
        *(Text(printable(line), style="yellow", no_wrap=True, overflow="ellipsis") for line in warnings),
        _progress(view),
        Text(),
        _figures(view),
        Text(),
        _stages(view, most),
        *((Text(), _nodes(view, most)) if view.nodes else ()),
        *((Text(), *map(_happening, happened)) if happened else ()),
    ]
    when = f" · {as_clock_time(view.time)}" if view.time else ""
    nodes, stages = _many(view.present, "node"), _many(len(view.stages), "stage")
    title = Text(f"{printable(view.run_name)} · {nodes} of {stages}")
    return Panel(Group(*parts), title=title, subtitle=Text(f"run {view.run_id}{when}"))


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
    return said_to_be_over([told.hello for told in asked if told is not None and told.hello.run == spec.run_id])


async def _live(onlooker: Onlooker, console: Console, log: LogTail) -> None:
    def drawn() -> RenderableType:
        return screen(onlooker.last, console.height, [str(line["text"]) for line in log.lines()[-WARNINGS_SHOWN:]])

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
        console.print(screen(view, console.height if console.is_terminal else 1000))


def _print_json(view: SwarmView) -> None:
    print(json.dumps(document(view), allow_nan=False), flush=True)


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def _troubles(view: SwarmView) -> Iterator[str]:
    if not view.time:
        yield "looking for the nodes of the run"
    elif view.introduced and not view.present:
        yield f"{_many(view.introduced, 'record')} found, and no node of them has answered yet"
    elif view.missing:
        yield f"no node that answers serves {as_stages(view.missing)}"


def _progress(view: SwarmView) -> RenderableType:
    left = "the run is over" if view.over else f"{as_duration(view.seconds_left)} left"
    return progress_row(float(view.target) if view.over else view.clock, view.target, left)


def _figures(view: SwarmView) -> Table:
    claimed = sum(stage.claimed for stage in view.stages)
    speed = as_rate(view.tokens_per_second)
    if view.speed_from is not None:
        speed += " (as they say)" if view.speed_from == "records" else " (by clocks)"
    versions = ", ".join(f"{printable(version)}: {count}" for version, count in view.versions.items() if count)
    rows = [
        ("median loss", _middle(view.training_loss, as_loss), "median spread", _middle(view.spread, as_scientific)),
        ("validation loss", _middle(view.validation_loss, as_loss), "versions", versions or "–"),
        ("tokens/s", speed, "nodes that answer", f"{view.present:,}"),
        ("came, moved", f"{view.joins:,}, {view.moves:,}", "claimed only", f"{claimed:,}"),
        ("left, vanished", f"{view.left:,}, {view.lost:,}", "", ""),
    ]
    return figures_table(rows, padding=1)


def _middle(middle: Middle | None, written: Callable[[float], str]) -> str:
    """A median, and of how many nodes' words."""
    if middle is None:
        return "–"
    return f"{written(middle.value)} ({_many(middle.nodes, 'node')})"


def _stages(view: SwarmView, most: int) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("stage")
    for name in (
        "train",
        "join",
        "finish",
        "leave",
        "claims",
        "capacity",
        "clock",
        "behind",
    ):
        table.add_column(name, justify="right")
    many = len(view.stages) > most
    shown = [(n, stage) for n, stage in enumerate(view.stages) if not many or n < most or stage.missing]
    for number, stage in shown[: 2 * most]:
        states = (str(stage.nodes[state]) for state in ("training", "joining", "finishing", "draining"))
        clock, lag = ("–" if value is None else f"{value:,.0f}" for value in (stage.clock, stage.lag))
        cells = (str(number), *states, str(stage.claimed), as_rate(stage.capacity), clock, lag)
        table.add_row(*cells, style="bold red" if stage.missing else "")
    left = len(view.stages) - min(len(shown), 2 * most)
    return Group(table, Text(f"and {_many(left, 'more stage')}", style="dim")) if left else table


def _nodes(view: SwarmView, most: int) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("node", max_width=NAME_WIDTH, no_wrap=True, overflow="ellipsis")
    for name in ("stage", "state", "tokens/s", "behind", "averaged", "trained", "seen"):
        table.add_column(name, justify="right")
    nodes = sorted(view.nodes, key=lambda node: (not node.answers, node.stage, node.peer_id))
    for node in nodes[:most]:
        table.add_row(*(Text(printable(cell), style="" if node.answers else "dim") for cell in _cells(node)))
    for one in view.departed[: max(0, most - len(nodes))]:
        table.add_row(*(Text(printable(cell), style="dim") for cell in _departed(one)))
    more = view.introduced - min(len(nodes), most)
    return Group(table, Text(f"and {more} more", style="dim")) if more > 0 else table


def _cells(node: NodeSeen) -> tuple[str, ...]:
    return (
        as_node(node.peer_id, node.name),
        str(node.stage),
        node.state if node.answers else "silent",
        as_rate(node.tokens_per_second),
        as_lag(node.lag if node.answers else None),
        f"{node.outer_rounds:,}",
        f"{node.tokens:,}",
        as_long(node.seen_seconds),
    )


def _departed(one: Departed) -> tuple[str, ...]:
    name = as_node(one.peer_id, one.name)
    return (name, str(one.stage), "gone", "–", "–", "–", f"{one.tokens:,}", as_long(one.seen_seconds))


def _happening(one: Happening) -> Text:
    text = f"{as_clock_time(one.time)} {printable(as_node(one.peer_id, one.name))} {WHAT[one.what]} stage {one.stage}"
    return Text(text, style="yellow" if one.what == "lost" else "dim")
