"""How much of the time a device works: real daemons on shaped links against what `config validate --device` says.

    python -m benchmarks.utilisation --out benchmarks/results/utilisation.json

Two stages × two replicas on this machine. Each forward and each backward takes a set time and no processor (a paced
device), and each node has one uplink for all of its connections (`benchmarks.shaped_links`). The share of the time that
the first stage's devices work is taken from the nodes' own accounts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.shaped_links import Uplink, doors, owner_of
from noloco_node.config.load import load_config
from noloco_node.sizing.footprint import footprint_of
from noloco_node.sizing.traffic import traffic_of
from noloco_node.sizing.utilisation import Link, StageLoad, UtilisationOutlook, outlook_of
from noloco_node.telemetry.events import Account
from tests.chaos.swarm import CONFIG, Swarm, behind
from tests.support import free_port

REPLICAS = 2
MODEL = (
    "run.model.config.hidden_size=128",
    "run.model.config.intermediate_size=256",
    "run.inner.microbatch_windows=8",
    "run.inner.global_batch_tokens=2048",
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
    in_flight: int
    mbit: float
    round_trip: float
    h: int = 1000
    operation: float = 0.15
    """Seconds of a forward, and of a backward."""


POINTS = (
    Point("latency, one in flight", 1, 100.0, 0.4),
    Point("latency, three in flight", 3, 100.0, 0.4),
    Point("uplink, three in flight", 3, 2.5, 0.1),
    Point("uplink and outer steps", 3, 5.0, 0.1, h=2),
)


def planned(point: Point, overrides: list[str]) -> UtilisationOutlook:
    """What the model says. The first stage's device works twice on a microbatch, the last one's once."""
    run = load_config(CONFIG, overrides).run
    footprint = footprint_of(run)
    traffic = traffic_of(run, footprint)
    loads = [
        StageLoad(seconds * point.operation, (each.forward, each.backward), float(each.outer_step))
        for seconds, each in zip((2.0, 1.0), traffic, strict=True)
    ]
    link = Link(point.mbit * 125e3, point.round_trip)
    steps = run.microbatches_a_step(REPLICAS)
    return outlook_of(loads, link, in_flight=point.in_flight, h=point.h, step_microbatches=steps)


async def measured(point: Point, overrides: list[str], seconds: float) -> dict[str, float]:
    """The share of the first stage's devices, and what went over its uplinks in Mbit a second."""
    layout = [0, 1] * REPLICAS
    ports = [free_port() for _ in layout]
    uplinks = [Uplink(point.mbit * 125e3, point.round_trip / 2) for _ in layout]
    daemons: dict[int, Uplink] = {}
    unshaped = Uplink(1e12, 0.0)
    with tempfile.TemporaryDirectory() as folder:
        swarm = Swarm(Path(folder), overrides, point.operation)

        def caller(port: int) -> Uplink:
            daemons.update({node.pid: uplink for node, uplink in zip(swarm.nodes, uplinks, strict=False)})
            return owner_of(port, daemons, unshaped)

        async with doors(ports, uplinks, caller) as made:
            try:
                await swarm.start(layout, lambda number: behind(ports[number], made[number].port))
                await swarm.until_training(steps=2)
                await swarm.rest(seconds / 4, 60.0)
                first, sent = _accounts(swarm), sum(uplink.sent for uplink in uplinks)
                began = time.monotonic()
                await swarm.rest(seconds, 60.0)
                last, took = _accounts(swarm), time.monotonic() - began
                sent = sum(uplink.sent for uplink in uplinks) - sent
            finally:
                await swarm.stop()
    shares = [
        (after.busy_seconds - before.busy_seconds) / (after.time - before.time)
        for before, after in zip(first, last, strict=True)
    ]
    return {
        "device_share": sum(shares) / len(shares),
        "mbit_a_node": 8e-6 * sent / took / len(layout),
        "passed_unshaped": float(unshaped.sent),
    }


def _accounts(swarm: Swarm) -> list[Account]:
    return [[event for event in node.events if isinstance(event, Account)][-1] for node in swarm.of_stage(0)]


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=40.0, help="of each measurement")
    parser.add_argument("--only", type=int, nargs="+", default=range(len(POINTS)), help="points, by number from 0")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for point in [POINTS[number] for number in options.only]:
        overrides = [*MODEL, f"node.in_flight={point.in_flight}", f"run.outer.inner_steps={point.h}"]
        outlook = planned(point, overrides)
        found = asyncio.run(measured(point, overrides, options.seconds))
        ratio = found["device_share"] / outlook.device_share[0]
        load = os.getloadavg()[0]
        rows.append(
            {**asdict(point), **found, "planned": outlook.device_share[0], "limit": outlook.limit, "ratio": ratio}
            | {"load": load}
        )
        print(json.dumps(rows[-1]), flush=True)
    if options.out:
        options.out.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
