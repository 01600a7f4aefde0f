"""Minutes of random faults: memory, descriptors, tasks and threads stay flat, and the swarm trains throughout."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import statistics
import time
from collections import defaultdict

import psutil

from tests.chaos.lab import Lab
from tests.chaos.observe import account_gap, clock_of, last_account, outer_steps, stage_rate
from tests.chaos.report import Verdict
from tests.chaos.swarm import ENDLESS, Node, Swarm, running_swarm
from tests.chaos.vitals import Vitals, growths, look
from tests.support import alongside

LOOK_EVERY = 5.0
MINUTES = float(os.environ.get("NOLOCO_CHAOS_SOAK_MINUTES", "30"))
PAUSE = (6.0, 20.0)
"""Seconds between faults in the long form."""
OLD_ENOUGH = 0.5
"""Share of the soak that a node must have lived to be judged."""
CATCH_UP_SECONDS = 60.0
LAG_SHARE = 0.1
"""A node has caught up when its clock is this near its stage peers'."""
LEAST_SHARE = 0.25
"""No minute may bring less than this share of the median minute's tokens."""


async def soak(lab: Lab) -> Verdict:
    """Kills, orderly ends and frozen processes at random times, each made good. Two nodes are spared, so that somebody
    grows old."""
    verdict = Verdict("soak")
    seconds = MINUTES * 60 if lab.long else 20.0
    layout = [0, 1] * (3 if lab.long else 2)
    rng = lab.rng("soak")
    samples: dict[str, list[Vitals]] = defaultdict(list)
    async with running_swarm(lab.folder, layout, ENDLESS, operation_seconds=0.08) as swarm:
        spared = {swarm.nodes[0], swarm.nodes[1]}
        began = time.time()
        async with alongside(_watch(swarm, samples)):
            while time.time() < began + seconds:
                await _one_fault(swarm, spared, rng, verdict)
                pause = rng.uniform(*PAUSE) if lab.long else 3.0
                await swarm.rest(pause)
        ended = time.time()
        unwell = [node.name for node in swarm.nodes if node.died and node.killed_at is None]
    verdict.demand("no node ended that was not ended", not unwell, ", ".join(unwell) or "none")
    _judge_vitals(samples, ended - began, lab.long, verdict)
    _judge_training(swarm, began, ended, lab.long, verdict)
    return verdict


async def _watch(swarm: Swarm, samples: dict[str, list[Vitals]]) -> None:
    while True:
        for node in swarm.live:
            vitals = await look(node)
            if vitals is not None:
                samples[node.name].append(vitals)
        await asyncio.sleep(LOOK_EVERY)


async def _one_fault(swarm: Swarm, spared: set[Node], rng: random.Random, verdict: Verdict) -> None:
    kind = rng.choice(("kill", "leave", "freeze", "freeze p2pd"))
    candidates = [node for node in swarm.live if node not in spared]
    if not candidates:
        return
    node = rng.choice(candidates)
    if kind in ("kill", "leave"):
        await _replace(swarm, node, kind, verdict)
        return
    pid = node.pid if kind == "freeze" else node.p2pd().pid
    at, seconds = time.time(), rng.uniform(2.0, 12.0)
    os.kill(pid, signal.SIGSTOP)
    await swarm.rest(seconds)
    stood = psutil.Process(pid).status() == psutil.STATUS_STOPPED
    os.kill(pid, signal.SIGCONT)
    verdict.fault(at, f"{kind} {node.name} for {seconds:.0f} s", "it stood still" if stood else "")
    await _catch_up(swarm, node, f"{kind} {node.name}", verdict)


async def _catch_up(swarm: Swarm, node: Node, what: str, verdict: Verdict) -> None:
    """It has the clock of its stage peers again, and averages with them."""
    thawed = time.time()

    def caught_up() -> bool:
        front = max(clock_of(other) for other in swarm.of_stage(node.stage) if other is not node)
        near = clock_of(node) > (1 - LAG_SHARE) * front
        return not node.running or (near and bool(outer_steps(node, "paired", since=thawed)))

    held = await swarm.holds(caught_up, CATCH_UP_SECONDS)
    found = f"{time.time() - thawed:.1f} s"
    verdict.demand(f"{what}: it catches up within {CATCH_UP_SECONDS:g} s", held and node.running, found)


async def _replace(swarm: Swarm, node: Node, kind: str, verdict: Verdict) -> None:
    at = time.time()
    if kind == "kill":
        swarm.kill(node)
    else:
        os.kill(node.pid, signal.SIGTERM)
    await swarm.until(lambda: not node.running, 60, f"{node.name} has ended")
    orderly = node.stopped is not None and node.stopped.reason == "interrupted"
    fired = orderly if kind == "leave" else node.exit_code == -signal.SIGKILL
    verdict.fault(at, f"{kind} {node.name}", node.describe_exit() if fired else "")
    await swarm.until_up(await swarm.launch(node.stage))


def _judge_vitals(samples: dict[str, list[Vitals]], seconds: float, long: bool, verdict: Verdict) -> None:
    old = {name: vitals for name, vitals in samples.items() if vitals[-1].time - vitals[0].time > OLD_ENOUGH * seconds}
    verdict.demand("somebody has grown old enough to tell", bool(old), f"{len(old)} nodes")
    for name, vitals in old.items():
        if len(vitals) < 10:
            continue
        found = growths(vitals)
        verdict.figures[f"{name}: early → late"] = ", ".join(map(str, found))
        if long:
            crept = [growth for growth in found if not growth.flat]
            verdict.demand(f"{name} stays flat", not crept, ", ".join(map(str, crept)) or "all within bounds")


def _judge_training(swarm: Swarm, began: float, ended: float, long: bool, verdict: Verdict) -> None:
    minute = 60.0 if long else 5.0
    spans = [began + minute * number for number in range(int((ended - began) / minute))]
    rates = [stage_rate(swarm.nodes, start, start + minute) for start in spans]
    middle = statistics.median(rates)
    verdict.figures["tokens/s by minute"] = rates
    verdict.demand(
        "the swarm trains in every minute", min(rates) > LEAST_SHARE * middle, f"{min(rates):.0f} of {middle:.0f}"
    )
    gaps = dropped = 0
    for node in swarm.nodes:
        account = last_account(node)
        if node.stage == 0 and node.stopped and account:
            gaps, dropped = gaps + account_gap(account), dropped + account.dropped
    verdict.demand("the books of all that ended in order close", gaps == 0, f"{gaps} unaccounted for")
    verdict.demand("no sample is dropped", dropped == 0, f"{dropped} dropped")
