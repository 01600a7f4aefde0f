"""A swarm of real daemons against the same swarm in virtual time, both read by the same figures.

    python -m benchmarks.calibration --out docs/results/calibration/real.json

Two stages × four replicas. Each forward and backward takes a set time and no processor (a paced device); links are
clear, or each node has one uplink of so many Mbit/s and so many milliseconds (`benchmarks.shaped_links`); in some
states nodes are killed. Everything is taken from what nodes told, between two moments.

Where other work shares the processor, daemons stand back only if they are measured by themselves, in a class of their
own, and simulated afterwards:

    chrt -r 1 python -m benchmarks.calibration --simulations 0 --out real.json
    python -m benchmarks.calibration --again real.json --out docs/results/calibration/real.json
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.command import command, not_negative, parser_of, positive, save, whole_or_none
from benchmarks.other_process import cpu_seconds
from benchmarks.shaped_links import Uplink, doors, owner_of
from benchmarks.virtual import VirtualSwarm
from noloco_node.config.load import load_config
from noloco_node.simulator.loop import WALL
from noloco_node.simulator.world import World
from noloco_node.telemetry.events import Account, AnyEvent, InnerStep, OuterStep
from tests.chaos.swarm import CONFIG, Swarm, behind
from tests.support import free_port

REPLICAS = 4
LAYOUT = (0, 1) * REPLICAS
OVERRIDES = (
    "run.model.config.hidden_size=128",
    "run.model.config.intermediate_size=256",
    "run.inner.microbatch_windows=8",
    "run.inner.global_batch_tokens=8192",
    "run.inner.target_tokens=1_000_000_000",
    "run.inner.optimizer=adamw",
    "run.pipeline.budget_seconds=60",
    "run.pipeline.progress_seconds=15",
    "run.limits.exchange_progress_seconds=15",
    "run.limits.record_seconds=20",
    f"local_swarm.replicas={REPLICAS}",
)
CLEAR_MBIT = 4000.0
"""What this machine's loopback is taken for."""
CALL_SECONDS = 0.002
"""There and back of a small call between daemons that have other work, beyond the line's: two p2pd and two event loops
have to wake up. Proposals of outer steps took 2.2 ms (median)."""


@dataclass(frozen=True)
class State:
    """Devices, links, and what befalls them."""

    name: str
    operation: float = 0.2
    """Seconds of a forward, and of a backward."""
    mbit: float | None = None
    """Of each uplink; None: nothing is shaped."""
    round_trip: float = 0.0
    in_flight: int | None = None
    """Microbatches under way of an origin; None: as many as it finds best."""
    deaths: tuple[tuple[float, int], ...] = ()
    """Seconds after the figures begin, and the stage of which the oldest replica is killed then."""


STATES = (
    State("clear"),
    State("20 Mbit/s, 100 ms", mbit=20.0, round_trip=0.1),
    State("20 Mbit/s, 100 ms, one under way", mbit=20.0, round_trip=0.1, in_flight=1),
    State("20 Mbit/s, 100 ms, one of the last stage dies", mbit=20.0, round_trip=0.1, deaths=((0.0, 1),)),
    State(
        "20 Mbit/s, 100 ms, three die, one each 25 s",
        mbit=20.0,
        round_trip=0.1,
        deaths=((0.0, 1), (25.0, 0), (50.0, 1)),
    ),
)


@dataclass(frozen=True)
class Told:
    """One node: its stage and all that it told."""

    stage: int
    events: Sequence[AnyEvent]
    until: float = math.inf
    """When it was killed, wall clock."""


def figures_of(nodes: Sequence[Told], begin: float, end: float, tokens: int) -> dict[str, float]:
    """What nodes told between two moments of the wall clock; a microbatch has so many tokens."""
    trained, served, inner, waits, hops = 0.0, 0.0, 0.0, 0.0, 0.0
    busy: dict[int, list[float]] = {}
    steps: list[OuterStep] = []
    for node in nodes:
        accounts = [event for event in node.events if isinstance(event, Account) and begin <= event.time <= end]
        inside = [event for event in node.events if begin <= event.time <= end]
        steps += [event for event in inside if isinstance(event, OuterStep)]
        inner += sum(isinstance(event, InnerStep) for event in inside)
        if len(accounts) < 2:
            continue
        first, last = accounts[0], accounts[-1]
        seconds = last.time - first.time
        lived = (min(node.until, end) - begin) / (end - begin)
        busy.setdefault(node.stage, []).append((last.busy_seconds - first.busy_seconds) / seconds)
        if node.stage == 0:
            trained += lived * (last.trained - first.trained) / seconds
        served += lived * (last.served - first.served) / seconds
        if first.hop_seconds is not None and last.hop_seconds is not None:
            waits += last.hop_seconds.sum - first.hop_seconds.sum
            hops += sum(last.hop_seconds.counts) - sum(first.hop_seconds.counts)
    kinds = {
        kind: sum(step.kind == kind for step in steps) for kind in ("paired", "no_partner", "aborted", "caught_up")
    }
    taken = kinds["paired"] + kinds["no_partner"]
    exchanges = [step.seconds for step in steps if step.kind == "paired"]
    minutes = (end - begin) / 60.0
    return {
        "tokens/s": trained * tokens,
        "answers for a trained microbatch": served / max(trained, 1e-9),
        "inner steps a replica and minute": inner / len(nodes) / minutes,
        "outer steps a replica and minute": taken / len(nodes) / minutes,
        "of those alone, %": 100.0 * kinds["no_partner"] / max(1, taken),
        "aborted a minute": kinds["aborted"] / minutes,
        "microbatch from stage 0 and back, s": waits / max(1.0, hops),
        "exchange, s": fmean(exchanges) if exchanges else 0.0,
        **{f"device of stage {stage} works, %": 100.0 * fmean(shares) for stage, shares in sorted(busy.items())},
    }


async def measured(state: State, warm_up: float, seconds: float) -> tuple[dict[str, float], dict[str, float]]:
    """The figures of real daemons, and what else says how they were measured."""
    run = load_config(CONFIG, OVERRIDES).run
    overrides = (*OVERRIDES, f"node.in_flight={state.in_flight or 'auto'}")
    shaped = state.mbit is not None
    ports = [free_port() for _ in LAYOUT]
    uplinks = [Uplink((state.mbit or 1e6) * 125e3, state.round_trip / 2) for _ in LAYOUT]
    unshaped = Uplink(1e12, 0.0)
    daemons: dict[int, Uplink] = {}
    with tempfile.TemporaryDirectory() as folder:
        swarm = Swarm(Path(folder), overrides, state.operation)

        def caller(port: int) -> Uplink:
            daemons.update({node.pid: uplink for node, uplink in zip(swarm.nodes, uplinks, strict=False)})
            return owner_of(port, daemons, unshaped)

        async with doors(ports, uplinks, caller) as made:
            try:
                if shaped:
                    await swarm.start(LAYOUT, lambda number: behind(ports[number], made[number].port))
                else:
                    await swarm.start(LAYOUT)
                await swarm.until_training(steps=2)
                await swarm.rest(warm_up, 60.0)
                begin, sent = time.time(), sum(uplink.sent for uplink in uplinks)
                spent = _cpu(swarm)
                for after, stage in state.deaths:
                    await swarm.rest(begin + after - time.time(), 60.0)
                    victim = swarm.of_stage(stage)[0]
                    before = _cpu(swarm)
                    swarm.kill(victim)
                    await swarm.until(lambda victim=victim: not victim.running, 10.0, "the killed node is gone")
                    spent -= before - _cpu(swarm)
                await swarm.rest(begin + seconds - time.time(), 60.0)
                end, spent = time.time(), _cpu(swarm) - spent
                sent = sum(uplink.sent for uplink in uplinks) - sent
            finally:
                await swarm.stop()
        told = [Told(node.stage, node.events, node.killed_at or math.inf) for node in swarm.nodes]
    figures = figures_of(told, begin, end, run.microbatch_tokens)
    beside = {
        "kB/s on a node's uplink": sent / (end - begin) / len(LAYOUT) / 1e3 if shaped else 0.0,
        "cores": spent / (end - begin),
        "load": os.getloadavg()[0],
        "passed unshaped": float(unshaped.sent),
        **_work(told, begin, end),
    }
    return figures, beside


def _cpu(swarm: Swarm) -> float:
    return sum(cpu_seconds(node.pid) for node in swarm.live)


def _work(told: Sequence[Told], begin: float, end: float) -> dict[str, float]:
    """What the devices' work took: seconds of an operation, and of the steps beside them for each inner step."""
    steps, inner, busy, calls, lag = 0.0, 0, 0.0, 0, 0.0
    for node in told:
        accounts = [event for event in node.events if isinstance(event, Account) and begin <= event.time <= end]
        inner += sum(isinstance(event, InnerStep) and begin <= event.time <= end for event in node.events)
        for before, after in pairwise(accounts):
            lag = max(lag, after.loop_lag_seconds)
            steps += after.busy_by_work["step"] - before.busy_by_work["step"]
            for work in ("backward", "forward", "draw"):
                busy += after.busy_by_work[work] - before.busy_by_work[work]
            calls += 2 * (after.trained - before.trained) if node.stage == 0 else after.served - before.served
    return {
        "an operation, s": busy / max(1, calls),
        "steps for an inner step, s": steps / max(1, inner),
        "worst lag of a loop, s": lag,
    }


def simulated(state: State, warm_up: float, seconds: float, seed: int) -> dict[str, float]:
    """The same in virtual time."""
    in_flight = f"node.in_flight={state.in_flight or 'auto'}"
    swarm = VirtualSwarm(
        config=load_config(CONFIG, (*OVERRIDES, in_flight)),
        layout=LAYOUT,
        operation=lambda _stage, _work: state.operation,
        uplink=(state.mbit or CLEAR_MBIT) * 125e3,
        round_trip=state.round_trip + CALL_SECONDS,
        downlink=CLEAR_MBIT * 125e3,
    )

    async def watch(world: World) -> dict[str, float]:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(20.0 + warm_up)
        begin = loop.time()
        killed: dict[int, float] = {}
        for after, stage in state.deaths:
            await asyncio.sleep(begin + after - loop.time())
            victim = next(node for node in world.running if node.stage == stage)
            killed[victim.number] = WALL + loop.time()
            world.kill(victim)
        await asyncio.sleep(begin + seconds - loop.time())
        told = [Told(node.stage, world.events[node.number], killed.get(node.number, math.inf)) for node in world.nodes]
        return figures_of(told, WALL + begin, WALL + loop.time(), swarm.config.run.microbatch_tokens)

    return swarm.watched(watch, seed)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """For people: each figure of each state, real, simulated, and the one by the other."""
    lines: list[str] = []
    for row in rows:
        lines += ["", f"**{row['name']}**, {row['seconds']:g} s", "", "| figure | real | simulated | ratio |"]
        lines.append("|---|---|---|---|")
        for name, real in row["real"].items():
            made = fmean(each[name] for each in row["simulated"]) if row["simulated"] else math.nan
            ratio = f"{real / made:.2f}" if made else "-"
            lines.append(f"| {name} | {real:.4g} | {made:.4g} | {ratio} |")
    return "\n".join(lines[1:])


def main() -> None:
    """Measure, simulate, print the table and write all figures."""
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=positive, default=100.0, help="of each measurement")
    parser.add_argument("--warm-up", type=not_negative, default=30.0, help="seconds after all have begun to train")
    parser.add_argument("--only", type=int, nargs="+", default=range(len(STATES)), help="states, by number from 0")
    parser.add_argument("--simulations", type=whole_or_none, default=3, help="seeds, whose mean is shown; 0: none")
    parser.add_argument("--again", type=Path, help="simulate again beside the real figures of this file")
    options = parser.parse_args()
    before: list[dict[str, Any]] = json.loads(options.again.read_text()) if options.again else []
    rows: list[dict[str, Any]] = []
    for state in [STATES[number] for number in options.only]:
        known = next((row for row in before if row["name"] == state.name), None)
        if known is None:
            real, beside = asyncio.run(measured(state, options.warm_up, options.seconds))
            known = {**asdict(state), "seconds": options.seconds, "real": real, "beside": beside}
        made = [simulated(state, options.warm_up, options.seconds, seed) for seed in range(options.simulations)]
        rows.append({**known, "simulated": made})
        print(table(rows[-1:]), json.dumps(known["beside"]), flush=True)
        save(options.out, rows)


if __name__ == "__main__":
    command(main)
