"""How much of the time a device works: real daemons on shaped links against what `config validate --device` says.

    python -m benchmarks.utilisation --out benchmarks/results/utilisation.json

Two stages × two replicas on this machine. Each forward and each backward takes a set time and no processor (a paced
device), and each node has one uplink for all of its connections (`benchmarks.shaped_links`). The share of the time that
the first stage's devices work is taken from the nodes' own accounts. Beside it stand the same swarm in virtual time
(`--simulated` alone does nothing else), and what the slower of device and link allows however many are under way.

    python -m benchmarks.utilisation --grid --jobs 2 --seconds 20 --out benchmarks/results/utilisation-grid.json
    python -m benchmarks.utilisation --dozen --seconds 30 --out benchmarks/results/utilisation-dozen.json

The grid is that of links, codecs of activations, microbatches under way, H and F, in virtual time alone; the dozen are
points of it by real daemons.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import logging
import multiprocessing
import os
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.command import command, parser_of, positive, save, whole
from benchmarks.shaped_links import Uplink, doors, owner_of
from benchmarks.virtual import VirtualSwarm
from noloco_node.config.load import load_config
from noloco_node.config.node_settings import AUTO_AIM, AUTO_MOST
from noloco_node.config.shipped import find_config
from noloco_node.simulator.report import table_of
from noloco_node.simulator.world import World
from noloco_node.sizing.devices import bytes_a_second, device_by_name
from noloco_node.sizing.devices import seconds as seconds_of
from noloco_node.sizing.footprint import footprint_of
from noloco_node.sizing.traffic import traffic_of
from noloco_node.sizing.utilisation import Link, StageLoad, UtilisationOutlook, outlook_of
from noloco_node.telemetry.events import Account, AnyEvent
from tests.chaos.paced_node import OPERATION_SECONDS, STRETCH
from tests.chaos.swarm import CONFIG, Place, Swarm, behind
from tests.support import free_port

REPLICAS = 2
LAYOUT = (0, 1) * REPLICAS
UNBOUNDED = 64
"""Microbatches under way that no link here could ask for."""
SETTLING_SECONDS, AUTO_SETTLING_SECONDS = 10.0, 60.0
"""Virtual ones before anything is counted: `auto` has found its number by then."""
SIMULATIONS = 3
"""Seeds, of which the mean is shown."""
WINDOW_TOKENS = 32
STEP_MICROBATCHES = 4
"""Of each replica behind an inner step."""
MODEL = (
    "run.model.config.intermediate_size=256",
    "run.inner.target_tokens=1_000_000_000",
    "run.outer.codec=fp32",
    "run.pipeline.budget_seconds=60",
    "run.pipeline.progress_seconds=20",
    "run.limits.exchange_progress_seconds=20",
    f"local_swarm.replicas={REPLICAS}",
)


@dataclass(frozen=True)
class Point:
    """One state of devices and links."""

    name: str
    in_flight: int | None
    """Microbatches under way of an origin; None: as many as it finds best."""
    mbit: float
    round_trip: float
    h: int = 1000
    operation: float = 0.15
    """Seconds of a forward, and of a backward."""
    activations: str = "fp32"
    f: int = 1
    """Fragments of a stage's weights."""
    hidden: int = 128
    windows: int = 8
    """Of a microbatch."""


POINTS = (
    Point("latency, one in flight", 1, 100.0, 0.4),
    Point("latency, three in flight", 3, 100.0, 0.4),
    Point("uplink, three in flight", 3, 2.5, 0.1),
    Point("uplink and outer steps", 3, 5.0, 0.1, h=2),
    Point("by itself", None, 100.0, 0.1),
    Point("by itself, four times the way", None, 100.0, 0.4),
)

MBITS, ROUND_TRIPS = (20.0, 100.0, 1000.0), (0.02, 0.1, 0.2)
CODECS = ("fp32", "fp16", "int8")
"""bf16 has as many bytes as fp16."""
UNDER_WAY: tuple[int | None, ...] = (*range(1, 9), None)
OUTER = ((1000, 1), (8, 1), (8, 4), (2, 1), (2, 2))
"""H and F; the first has no outer step within the time."""
AUTO_TIMES = 5.0
"""As long is measured where an origin looks for its number: a look of its own takes some ten seconds."""
OUTER_TIMES = 2.0
"""As long is measured where there are outer steps, of which few come within the time."""


def _heavy(mbit: float, round_trip: float, in_flight: int | None, activations: str, h: int = 1000, f: int = 1) -> Point:
    """Activations of a mebibyte in fp32, so that a full device sends 28 Mbit/s of them, and outer steps of 21 Mbit."""
    name = f"{mbit:g} Mbit/s, {1e3 * round_trip:g} ms, {activations}, {in_flight or 'auto'} in flight, H {h}, F {f}"
    return Point(name, in_flight, mbit, round_trip, h, activations=activations, f=f, hidden=256, windows=32)


def grid() -> list[Point]:
    """Every link with every codec and number under way; then, with four of them, every H and F."""
    links = list(itertools.product(MBITS, ROUND_TRIPS))
    points = [_heavy(*link, count, codec) for link in links for codec in CODECS for count in UNDER_WAY]
    return points + [_heavy(*link, 4, codec, *outer) for link in links for codec in CODECS for outer in OUTER[1:]]


DOZEN = (
    _heavy(20.0, 0.02, 2, "fp32"),
    _heavy(20.0, 0.1, 8, "fp32"),
    _heavy(20.0, 0.1, 2, "int8"),
    _heavy(20.0, 0.2, 4, "fp16"),
    _heavy(20.0, 0.1, 4, "fp32", 2),
    _heavy(20.0, 0.1, 4, "fp32", 2, 2),
    _heavy(20.0, 0.1, None, "int8"),
    _heavy(100.0, 0.1, 1, "fp32"),
    _heavy(100.0, 0.1, 3, "int8"),
    _heavy(100.0, 0.2, 4, "fp16"),
    _heavy(1000.0, 0.02, 2, "fp32"),
    _heavy(1000.0, 0.2, None, "fp16"),
)


def overrides_of(point: Point) -> list[str]:
    """The settings of such a swarm."""
    return [
        *MODEL,
        f"run.model.config.hidden_size={point.hidden}",
        f"run.inner.microbatch_windows={point.windows}",
        f"run.inner.global_batch_tokens={point.windows * WINDOW_TOKENS * STEP_MICROBATCHES * REPLICAS}",
        f"run.pipeline.activations={point.activations}",
        f"run.outer.inner_steps={point.h}",
        f"run.outer.fragments={point.f}",
        f"node.in_flight={point.in_flight or 'auto'}",
    ]


def planned(point: Point) -> UtilisationOutlook:
    """What the model says of it; where an origin finds its number itself, with the least that brings nearly as much as
    the most does."""
    if point.in_flight is not None:
        return outlook(point, point.in_flight)
    most = outlook(point, min(AUTO_MOST, load_config(CONFIG, overrides_of(point)).run.microbatches_a_step(REPLICAS)))
    found = (outlook(point, count) for count in range(1, AUTO_MOST + 1))
    return next(each for each in found if each.microbatches_a_second >= AUTO_AIM * most.microbatches_a_second)


def outlook(point: Point, in_flight: int) -> UtilisationOutlook:
    """What the model says of so many under way. The first stage's device works twice on a microbatch, the last one's
    once."""
    run = load_config(CONFIG, overrides_of(point)).run
    footprint = footprint_of(run)
    traffic = traffic_of(run, footprint)
    loads = [
        StageLoad(seconds * point.operation, (each.forward, each.backward), float(each.outer_step))
        for seconds, each in zip((2.0, 1.0), traffic, strict=True)
    ]
    link = Link(point.mbit * 125e3, point.round_trip)
    steps = run.microbatches_a_step(REPLICAS)
    return outlook_of(loads, link, in_flight=in_flight, h=point.h, step_microbatches=steps)


async def measured(point: Point, seconds: float) -> dict[str, float]:
    """The share of the first stage's devices, and what went over its uplinks in Mbit a second."""
    uplinks = [Uplink(point.mbit * 125e3, point.round_trip / 2) for _ in LAYOUT]
    async with shaped_swarm(LAYOUT, overrides_of(point), uplinks, [str(point.operation)] * 2) as (swarm, unshaped):
        await swarm.until_training(steps=2)
        await swarm.rest(seconds / 4, 60.0)
        first, sent = _accounts(swarm), sum(uplink.sent for uplink in uplinks)
        began = time.monotonic()
        await swarm.rest(seconds, 60.0)
        last, took = _accounts(swarm), time.monotonic() - began
        sent = sum(uplink.sent for uplink in uplinks) - sent
    return {
        "device_share": _share(first, last),
        "mbit_a_node": 8e-6 * sent / took / len(LAYOUT),
        "passed_unshaped": float(unshaped.sent),
        "load": os.getloadavg()[0],
    }


@contextlib.asynccontextmanager
async def shaped_swarm(
    layout: Sequence[int],
    overrides: Sequence[str],
    uplinks: list[Uplink],
    operations: Sequence[str],
    config: Path = CONFIG,
    stretch: float = 1.0,
) -> AsyncIterator[tuple[Swarm, Uplink]]:
    """Daemons that are up, each behind its own uplink, and what went past all of them. `operations` says for each stage
    how long its device works, and `stretch` what of the routing's seconds (`tests.chaos.paced_node`)."""
    ports = [free_port() for _ in layout]
    daemons: dict[int, Uplink] = {}
    unshaped = Uplink(1e12, 0.0)
    with tempfile.TemporaryDirectory() as folder:
        swarm = Swarm(Path(folder), overrides, 0.0, config)

        def caller(port: int) -> Uplink:
            daemons.update({node.pid: uplink for node, uplink in zip(swarm.nodes, uplinks, strict=False)})
            return owner_of(port, daemons, unshaped)

        async with doors(ports, uplinks, caller) as made:

            def place(number: int) -> Place:
                behind_door = behind(ports[number], made[number].port)
                pace = {OPERATION_SECONDS: operations[layout[number]], STRETCH: str(stretch)}
                return replace(behind_door, environment=pace)

            try:
                await swarm.start(layout, place)
                yield swarm, unshaped
            finally:
                await swarm.stop()


def _accounts(swarm: Swarm) -> list[Account]:
    return [last_account(node.events) for node in swarm.of_stage(0)]


def last_account(events: Sequence[AnyEvent]) -> Account:
    return next(event for event in reversed(events) if isinstance(event, Account))


def _share(first: Sequence[Account], last: Sequence[Account]) -> float:
    """Of the time between, that devices worked on average."""
    return fmean(
        (after.busy_seconds - before.busy_seconds) / (after.time - before.time)
        for before, after in zip(first, last, strict=True)
    )


def simulated(point: Point, seconds: float, seed: int) -> float:
    """The share of the first stage's devices in virtual time."""
    swarm = VirtualSwarm(
        config=load_config(CONFIG, overrides_of(point)),
        layout=LAYOUT,
        operation=lambda _stage, _work: point.operation,
        uplink=point.mbit * 125e3,
        round_trip=point.round_trip,
    )
    settling = AUTO_SETTLING_SECONDS if point.in_flight is None else SETTLING_SECONDS
    first, last = swarm.watched(partial(first_stage, settle=settling, seconds=seconds), seed)
    return _share(first, last)


async def first_stage(world: World, settle: float, seconds: float) -> tuple[list[Account], list[Account]]:
    """The books of the nodes of the first stage after `settle` seconds, and as much later as is said."""

    def accounts() -> list[Account]:
        return [last_account(world.events[node.number]) for node in world.nodes if node.stage == 0]

    await asyncio.sleep(settle)
    first = accounts()
    await asyncio.sleep(seconds)
    return first, accounts()


def row_of(point: Point, seconds: float, real: bool) -> dict[str, Any]:
    """One point, planned, simulated and, where wanted, measured; and what is the most that anybody could expect."""
    plan = planned(point)
    bound = outlook(point, UNBOUNDED).device_share[0]
    made = fmean(simulated(point, seconds, seed) for seed in range(SIMULATIONS))
    row = {**asdict(point), "planned": plan.device_share[0], "limit": plan.limit, "bound": bound, "simulated": made}
    if not real:
        return row
    found = asyncio.run(measured(point, seconds))
    share = found["device_share"]
    return {**row, **found, "ratio": share / plan.device_share[0], "of_bound": share / bound}


def grid_row(point: Point, seconds: float) -> dict[str, Any]:
    """One point in virtual time, one seed, beside what the slower of device and link allows."""
    bound = outlook(point, UNBOUNDED).device_share[0]
    times = AUTO_TIMES if point.in_flight is None else OUTER_TIMES if point.h < OUTER[0][0] else 1.0
    share = simulated(point, seconds * times, 0)
    return {**asdict(point), "bound": bound, "simulated": share, "of_bound": share / bound}


def grid_tables(rows: Sequence[dict[str, Any]]) -> str:
    """Shares of the time that devices work: by link, codec and number under way; then by H and F."""
    plain = [row for row in rows if row["h"] == OUTER[0][0]]
    lines = [
        "| Mbit/s, ms | activations | bound | " + " | ".join(str(count or "auto") for count in UNDER_WAY) + " |",
        "|---" * (3 + len(UNDER_WAY)) + "|",
    ]
    lines += [_line(cell, [row["simulated"] for row in found]) for cell, found in _by_link(plain)]
    outer = [row for row in rows if row["in_flight"] == 4]
    lines += ["", "| Mbit/s, ms | activations | bound | " + " | ".join(f"H {h}, F {f}" for h, f in OUTER) + " |"]
    lines += ["|---" * (3 + len(OUTER)) + "|"]
    lines += [_line(cell, [row["simulated"] for row in found]) for cell, found in _by_link(outer)]
    return "\n".join(lines)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A row for each point: shares of the time that the first stage's devices work."""
    head = ["uplink, round trip, in flight", "planned", "measured", "measured / planned", "simulated", "bound"]
    return table_of([head, *(_cells(row) for row in rows)])


def _cells(row: dict[str, Any]) -> list[str]:
    """Of a point; what was not measured is a dash."""
    outer = "" if row["h"] == OUTER[0][0] else f", H {row['h']}, F {row['f']}"
    codec = "" if row["activations"] == "fp32" else f", {row['activations']}"
    link = f"{row['mbit']:g} Mbit/s, {1e3 * row['round_trip']:g} ms, {row['in_flight'] or 'auto'}{codec}{outer}"
    real = [f"{row['device_share']:.3f}", f"{row['ratio']:.2f}"] if "device_share" in row else ["–", "–"]
    return [link, f"{row['planned']:.3f}", *real, f"{row['simulated']:.3f}", f"{row['bound']:.2f}"]


def _by_link(rows: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """The first row of each link and codec, and all of them."""
    found: dict[tuple[float, float, str], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["mbit"], row["round_trip"], row["activations"]), []).append(row)
    return [(same[0], same) for same in found.values()]


def _line(cell: dict[str, Any], shares: Sequence[float]) -> str:
    told = f"| {cell['mbit']:g}, {1e3 * cell['round_trip']:g} | {cell['activations']} | {cell['bound']:.2f} | "
    return told + " | ".join(f"{share:.2f}" for share in shares) + " |"


def main() -> None:
    """Measure, print and write the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=positive, default=40.0, help="of each measurement")
    parser.add_argument("--simulated", action="store_true", help="no daemons")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--only", type=int, nargs="+", choices=range(len(POINTS)), help="points, by number from 0")
    which.add_argument("--grid", action="store_true", help="the whole grid, no daemons")
    which.add_argument("--dozen", action="store_true", help="of the grid, by daemons")
    parser.add_argument("--jobs", type=whole, default=1, help="processes that simulate the grid")
    home = parser.add_argument_group("a run at home (`benchmarks.home_line`)")
    home.add_argument("--config", type=Path, help="such as consumer-24gb: its settings on a scale for this machine")
    home.add_argument("--device", default="RTX 4090", help="that each node has")
    home.add_argument("--uplink", default="20Mbit")
    home.add_argument("--round-trip", default="100ms")
    home.add_argument("--plain", nargs="*", default=["bf16", "int8", "int4"], help="codecs without the file's subspace")
    home.add_argument("--without-file", action="store_true", help="only those")
    home.add_argument("--stretch", type=positive, default=5.0, help="seconds here for a second there")
    home.add_argument("--settle", type=positive, default=60.0, help="seconds before anything is counted")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if options.config is not None:
        at_home(options)
        return
    for row in grid_rows(options.seconds, options.jobs) if options.grid else chosen_rows(options):
        rows.append(row)
        print(json.dumps(row), flush=True)
    print(grid_tables(rows) if options.grid else table(rows))
    save(options.out, rows)


def at_home(options: argparse.Namespace) -> None:
    """A consumer file as it stands, and without its subspace, each measured, printed and written."""
    from benchmarks import home_line

    config = find_config(options.config)
    device = device_by_name(options.device, load_config(config).run.inner.precision)
    link = Link(bytes_a_second(options.uplink), seconds_of(options.round_trip))
    rows: list[dict[str, Any]] = []
    for plain in (*(() if options.without_file else (None,)), *options.plain):
        home = home_line.Home(config, plain, link, device.flop_per_second, options.stretch)
        if options.simulated:
            made = [home_line.simulated(home, options.settle, options.seconds, seed) for seed in range(SIMULATIONS)]
            found: dict[str, Any] = {"simulated": made, "device_share": fmean(made)}
        else:
            found = asyncio.run(home_line.measured(home, options.settle, options.seconds))
        rows.append(home_line.row_of(home, found))
        print(json.dumps(rows[-1]), flush=True)
        save(options.out, rows)
    print(home_line.table(rows))


def chosen_rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Of the points that were asked for, one after the other."""
    numbers: Sequence[int] = options.only or range(len(POINTS))
    for point in DOZEN if options.dozen else [POINTS[number] for number in numbers]:
        yield row_of(point, options.seconds, not options.simulated)


def grid_rows(seconds: float, jobs: int) -> Iterator[dict[str, Any]]:
    """Of the whole grid, in its order, by so many processes."""
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=quiet) as pool:
        yield from pool.map(partial(grid_row, seconds=seconds), grid())


def quiet() -> None:
    """Nodes that come one after another say each time that a stage waits for its first."""
    logging.disable(logging.WARNING)


if __name__ == "__main__":
    command(main)
