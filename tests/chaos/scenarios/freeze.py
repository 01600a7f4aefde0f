"""One node, or its p2pd, is stopped for a while: nobody waits for it, and it catches up."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import psutil

from tests.chaos.lab import Lab
from tests.chaos.observe import account_gap, clock_of, last_account, outer_steps, rate
from tests.chaos.report import Verdict
from tests.chaos.swarm import Node, Swarm, running_swarm

ENDLESS = "run.inner.target_tokens=1_000_000_000"
BEFORE_SECONDS = 5.0
CATCH_UP_SECONDS = 60.0
LAG_SHARE = 0.1
"""A node has caught up when its clock is this near its stage peers'."""


async def frozen_node(lab: Lab) -> Verdict:
    """SIGSTOP of the process, and of its p2pd separately, of a node of the last stage and of the first."""
    verdict = Verdict("freeze")
    layout = [0, 1] * (4 if lab.long else 2)
    seconds = 60.0 if lab.long else 8.0
    operation_seconds = 0.05 if lab.long else 0.03
    async with running_swarm(lab.folder, layout, ENDLESS, operation_seconds=operation_seconds) as swarm:
        victims = [(1, "the process"), (0, "p2pd"), (0, "the process"), (1, "p2pd")]
        for stage, what in victims if lab.long else victims[:1]:
            candidates = swarm.of_stage(stage)
            await _freeze(swarm, lab.rng(f"{stage}{what}").choice(candidates), what, seconds, verdict)
    for node in swarm.nodes:
        account = last_account(node)
        if node.stage == 0 and account:
            gap = account_gap(account)
            verdict.demand(f"the books of {node.name} close", gap == 0 and account.dropped == 0, f"{gap} lost")
    return verdict


async def _freeze(swarm: Swarm, node: Node, what: str, seconds: float, verdict: Verdict) -> None:
    pid = node.pid if what == "the process" else node.p2pd().pid
    await swarm.rest(BEFORE_SECONDS)
    others = [other for other in swarm.of_stage(0) if other is not node]
    stopped = time.time()
    os.kill(pid, signal.SIGSTOP)
    stood = await holds(swarm, lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, 2.0)
    await swarm.rest(seconds)
    stood = stood and psutil.Process(pid).status() == psutil.STATUS_STOPPED
    os.kill(pid, signal.SIGCONT)
    thawed = time.time()
    name = f"{what} of {node.name}"
    await swarm.rest(0.3)
    steps_meanwhile = rate([node], stopped + 1, thawed) if what == "the process" else 0.0
    evidence = "the system says that it stood still until the SIGCONT, and no step of it came" if stood else ""
    verdict.fault(stopped, f"SIGSTOP of {name} for {seconds:g} s", evidence if steps_meanwhile == 0.0 else "")
    before, during = rate(others, stopped - BEFORE_SECONDS, stopped), rate(others, stopped, thawed)
    verdict.figures[f"{name}: others' throughput meanwhile, share of before"] = during / before
    settled = rate(others, thawed - seconds / 2, thawed) / before
    verdict.figures[f"{name}: the same in the second half"] = settled
    replicas = len(swarm.of_stage(node.stage))
    share = 1 - 1 / replicas
    verdict.demand(
        f"{name}: the others keep at least their share, {share:.2f} of before less a tenth",
        during / before >= share - 0.1,
        f"{during / before:.2f}, {settled:.2f} in the second half",
    )
    caught = await _until_caught_up(swarm, node, thawed)
    verdict.figures[f"{name}: seconds from SIGCONT until its clock is with the others and it averages"] = caught
    verdict.demand(f"{name}: it is running and catches up", node.running and caught is not None, f"{caught} s")


async def _until_caught_up(swarm: Swarm, node: Node, thawed: float) -> float | None:
    stage_peers = [other for other in swarm.of_stage(node.stage) if other is not node]

    def caught_up() -> bool:
        front = max(clock_of(other) for other in stage_peers)
        near = clock_of(node) > (1 - LAG_SHARE) * front
        averaged = bool(outer_steps(node, "paired", since=thawed))
        return not node.running or (near and averaged)

    if not await holds(swarm, caught_up, CATCH_UP_SECONDS):
        return None
    return time.time() - thawed


async def holds(swarm: Swarm, check: Callable[[], bool], within: float) -> bool:
    try:
        await swarm.until(check, within, "")
    except AssertionError:
        return False
    return True
