"""Which codec each link of a real swarm comes to: daemons with p2pd, one of them behind a slow uplink.

    python -m benchmarks.link_codecs --out benchmarks/results/link_codecs.json

Two stages × two replicas with paced devices, allowed fp32 and int8. One node of the last stage has a slow uplink
(`benchmarks.shaped_links`), so gradients come back slowly from it. What each last-stage node sent for a microbatch, by
its own account, says which codec its link took: the wire itself is the witness.

Wants a quiet machine: where daemons wait for a processor, carrying outweighs the work on either link, and both are
narrow (seen with a load of 19 on two cores and work of 0.15 s: int8 for 98.7 % on the quick link, 98.8 % on the slow).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.command import command, not_negative, positive, results_file
from benchmarks.shaped_links import Uplink, doors, owner_of
from noloco_node.config.load import load_config
from noloco_node.config.run_spec import ActivationCodec, token_bytes
from noloco_node.telemetry.events import Account
from tests.chaos.swarm import CONFIG, Node, Swarm, behind
from tests.support import free_port

LAYOUT = [0, 1, 0, 1]
SLOW = 3
"""Number of the node behind the slow uplink; a last stage's."""
OPERATION_SECONDS = 1.0
"""Long beside what a busy machine adds to a hop."""
QUICK_MBIT = 1000.0
CODECS: tuple[ActivationCodec, ActivationCodec] = ("fp32", "int8")
SETTINGS = (
    "run.model.config.hidden_size=128",
    "run.model.config.intermediate_size=256",
    "run.inner.microbatch_windows=8",
    "run.inner.global_batch_tokens=2048",
    "run.inner.target_tokens=1_000_000_000",
    "run.outer.inner_steps=1000",
    "run.pipeline.activations=[fp32, int8]",
    "run.pipeline.routing=uniform",
    "run.pipeline.budget_seconds=60",
    "run.pipeline.progress_seconds=20",
    "node.in_flight=2",
    "local_swarm.replicas=2",
)


async def measured(slow_mbit: float, settle: float, seconds: float) -> list[dict[str, Any]]:
    """For each last-stage node what it sent for a microbatch, after `settle` seconds and over `seconds`."""
    ports = [free_port() for _ in LAYOUT]
    uplinks = [Uplink((slow_mbit if n == SLOW else QUICK_MBIT) * 125e3, 0.0) for n in range(len(LAYOUT))]
    daemons: dict[int, Uplink] = {}
    unshaped = Uplink(1e12, 0.0)
    with tempfile.TemporaryDirectory() as folder:
        swarm = Swarm(Path(folder), SETTINGS, OPERATION_SECONDS)

        def caller(port: int) -> Uplink:
            daemons.update({node.pid: uplink for node, uplink in zip(swarm.nodes, uplinks, strict=False)})
            return owner_of(port, daemons, unshaped)

        async with doors(ports, uplinks, caller) as made:
            try:
                await swarm.start(LAYOUT, lambda number: behind(ports[number], made[number].port))
                await swarm.until_training(steps=2)
                await swarm.rest(settle, 60.0)
                before = [_account(node) for node in swarm.nodes]
                await swarm.rest(seconds, 60.0)
                after = [_account(node) for node in swarm.nodes]
            finally:
                await swarm.stop()
    run = load_config(CONFIG, SETTINGS).run
    wide, narrow = (run.microbatch_tokens * token_bytes(128, codec) for codec in CODECS)
    rows: list[dict[str, Any]] = []
    for number, (first, last) in enumerate(zip(before, after, strict=True)):
        if LAYOUT[number] == 1:
            served = last.served - first.served
            each = (last.bytes_sent["microbatches"] - first.bytes_sent["microbatches"]) / max(1, served)
            mbit = uplinks[number].bytes_per_second / 125e3
            rows.append({"mbit": mbit, "served": served, "bytes": each, "int8_share": (wide - each) / (wide - narrow)})
    return rows


def _account(node: Node) -> Account:
    return [event for event in node.events if isinstance(event, Account)][-1]


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slow", type=positive, default=0.5, help="Mbit a second of the slow uplink")
    parser.add_argument("--settle", type=not_negative, default=25.0, help="seconds before the measurement")
    parser.add_argument("--seconds", type=positive, default=40.0, help="of the measurement")
    parser.add_argument("--out", type=results_file)
    options = parser.parse_args()
    rows = asyncio.run(measured(options.slow, options.settle, options.seconds))
    for row in rows:
        print(json.dumps(row), flush=True)
    if options.out:
        text = json.dumps({"links": rows, "load": os.getloadavg()[0]}, indent=2)
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    command(main)
