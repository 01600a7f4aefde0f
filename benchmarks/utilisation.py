"""How much of the time a device works: real daemons on shaped links against what `config validate --device` says.

    python -m benchmarks.utilisation --out utilisation.json

Two stages × two replicas on this machine. Each forward and each backward takes a set time and no processor (a paced
device), and each node has one uplink for all of its connections (`benchmarks.shaped_links`). The share of the time that
the first stage's devices work is taken from the nodes' own accounts. Beside it stand the same swarm in virtual time
(`--simulated` alone does nothing else), and what the slower of device and link allows however many are under way. So
it holds planner and simulator to real daemons.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.command import command, parser_of, positive, save
from benchmarks.shaped_links import Uplink, doors, owner_of
from benchmarks.virtual import VirtualSwarm
from noloco_node.config.files import find_config
from noloco_node.config.load import load_config
from noloco_node.config.node_settings import AUTO_AIM, AUTO_MOST
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
NO_OUTER_STEP = 1000
"""H with which none comes within the time."""
SIMULATIONS = 3
"""Seeds, of which the mean is shown."""
WINDOWS, WINDOW_TOKENS = 8, 32
"""Windows of a microbatch, and tokens of a window."""
STEP_MICROBATCHES = 4
"""Of each replica behind an inner step."""
MODEL = (
    "run.model.config.hidden_size=128",
    "run.model.config.intermediate_size=256",
    f"run.inner.microbatch_windows={WINDOWS}",
    f"run.inner.global_batch_tokens={WINDOWS * WINDOW_TOKENS * STEP_MICROBATCHES * REPLICAS}",
    "run.pipeline.activations=fp32",
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
    h: int = NO_OUTER_STEP
    operation: float = 0.15
    """Seconds of a forward, and of a backward."""


POINTS = (
    Point("latency, one in flight", 1, 100.0, 0.4),
    Point("latency, three in flight", 3, 100.0, 0.4),
    Point("uplink, three in flight", 3, 2.5, 0.1),
    Point("uplink and outer steps", 3, 5.0, 0.1, h=2),
    Point("by itself", None, 100.0, 0.1),
    Point("by itself, four times the way", None, 100.0, 0.4),
)


def overrides_of(point: Point) -> list[str]:
    """The settings of such a swarm."""
    return [
        *MODEL,
        f"run.outer.inner_steps={point.h}",
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


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A row for each point: shares of the time that the first stage's devices work."""
    head = ["uplink, round trip, in flight", "planned", "measured", "measured / planned", "simulated", "bound"]
    return table_of([head, *(_cells(row) for row in rows)])


def _cells(row: dict[str, Any]) -> list[str]:
    """Of a point; what was not measured is a dash."""
    outer = "" if row["h"] == NO_OUTER_STEP else f", H {row['h']}"
    link = f"{row['mbit']:g} Mbit/s, {1e3 * row['round_trip']:g} ms, {row['in_flight'] or 'auto'}{outer}"
    real = [f"{row['device_share']:.3f}", f"{row['ratio']:.2f}"] if "device_share" in row else ["–", "–"]
    return [link, f"{row['planned']:.3f}", *real, f"{row['simulated']:.3f}", f"{row['bound']:.2f}"]


def main() -> None:
    """Measure, print and write the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=positive, default=40.0, help="of each measurement")
    parser.add_argument("--simulated", action="store_true", help="no daemons")
    parser.add_argument("--only", type=int, nargs="+", choices=range(len(POINTS)), help="points, by number from 0")
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
    if options.config is not None:
        at_home(options)
        return
    rows: list[dict[str, Any]] = []
    for number in options.only or range(len(POINTS)):
        rows.append(row_of(POINTS[number], options.seconds, not options.simulated))
        print(json.dumps(rows[-1]), flush=True)
    print(table(rows))
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


if __name__ == "__main__":
    command(main)
