"""Links with latency, little bandwidth and loss: how much of the device is still used, and that nothing times out that
should not."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from noloco_node.telemetry.events import Account
from tests.chaos.lab import Lab
from tests.chaos.observe import account_gap, last_account, outer_steps, stage_rate
from tests.chaos.proxy import CLEAR, Shape, ShapingProxy, shaping_proxies
from tests.chaos.report import Verdict
from tests.chaos.swarm import Swarm, behind
from tests.support import free_port

ROUND_TRIP = Shape(delay=0.1)
HOME = Shape(delay=0.1, bits_per_second=20e6, loss=0.001)
"""200 ms round trip, 20 Mb/s, a lost packet in a thousand."""


@dataclass(frozen=True)
class Phase:
    """A state of all links, held for a while."""

    name: str
    shape: Shape
    enough: bool = True
    """The links can carry what the devices ask for: then nothing may time out."""


LONG = (
    Phase("clear", CLEAR),
    Phase("200 ms", ROUND_TRIP),
    Phase("200 ms, 20 Mb/s, loss 0.1 %", HOME),
    Phase("200 ms, 20 Mb/s, loss 2 %", Shape(0.1, 20e6, 0.02)),
    Phase("400 ms, 1 Mb/s, loss 2 %", Shape(0.2, 1e6, 0.02), enough=False),
    Phase("100 ms, 0.3 Mb/s", Shape(0.05, 0.3e6), enough=False),
    Phase("clear again", CLEAR),
)
SHORT = (Phase("clear", CLEAR), Phase("200 ms, 20 Mb/s, loss 0.1 %", HOME))


@dataclass(frozen=True)
class NodeStats:
    """Sums over the nodes' last accounts."""

    time: float
    busy: float
    repeated: int
    requeued: int
    dropped: int
    aborted: int


async def shaped_links(lab: Lab) -> Verdict:
    """One swarm, every connection through a shaping proxy, one state of the links after another."""
    verdict = Verdict("shaping")
    phases, seconds = (LONG, 30.0) if lab.long else (SHORT, 8.0)
    layout = [0, 1] * (3 if lab.long else 2)
    ports = [free_port() for _ in layout]
    swarm = Swarm(lab.folder, [ENDLESS, "node.in_flight=6"], 0.05)
    async with shaping_proxies(ports, lab.rng("loss")) as proxies:
        try:
            await swarm.start(layout, lambda number: behind(ports[number], proxies[number].port))
            await swarm.until_training()
            baseline: float | None = None
            for phase in phases:
                rate = await _hold(swarm, proxies, phase, seconds, verdict, baseline)
                baseline = baseline or rate
        finally:
            await swarm.stop()
    for node in swarm.nodes:
        account = last_account(node)
        assert account is not None
        if node.stage == 0:
            gap = account_gap(account)
            verdict.demand(f"the books of {node.name} close and nothing is dropped", gap == 0, f"{gap} lost")
    ended = [node.name for node in swarm.nodes if node.died]
    verdict.demand("no node died", not ended, ", ".join(ended) or "none")
    return verdict


async def _hold(
    swarm: Swarm,
    proxies: Sequence[ShapingProxy],
    phase: Phase,
    seconds: float,
    verdict: Verdict,
    baseline: float | None,
) -> float:
    """Put all links into a state, let it settle, then measure; tokens per second."""
    for proxy in proxies:
        proxy.shape = phase.shape
    began, delayed = time.time(), sum(proxy.delayed_pieces for proxy in proxies)
    await swarm.rest(seconds / 4)
    first, passed = _books(swarm), sum(proxy.bytes_passed for proxy in proxies)
    start = time.time()
    await swarm.rest(seconds)
    last, passed = _books(swarm), sum(proxy.bytes_passed for proxy in proxies) - passed
    delayed = sum(proxy.delayed_pieces for proxy in proxies) - delayed
    rate = stage_rate(swarm.nodes, start, time.time())
    if phase.shape != CLEAR:
        lost = sum(proxy.lost for proxy in proxies)
        evidence = f"{delayed} pieces were held back, {lost} lost so far" if delayed > 10 else ""
        verdict.fault(began, f"links with {phase.name} for {seconds:g} s", evidence)
    elapsed = max(1e-9, last.time - first.time) * len(swarm.of_stage(0))
    verdict.figures[phase.name] = {
        "tokens/s": rate,
        "of clear": rate / baseline if baseline else 1.0,
        "device used": (last.busy - first.busy) / elapsed,
        "Mb/s in all": passed * 8e-6 / seconds,
        "timed out": float(last.repeated - first.repeated),
        "requeued": float(last.requeued - first.requeued),
        "exchanges aborted": float(last.aborted - first.aborted),
    }
    lost = last.repeated - first.repeated + last.aborted - first.aborted
    if phase.enough:
        verdict.demand(f"{phase.name}: nothing times out", lost == 0, f"{lost} microbatches or exchanges")
    verdict.demand(f"{phase.name}: training goes on", rate > 0, f"{rate:.0f} tokens/s")
    return rate


def _books(swarm: Swarm) -> NodeStats:
    accounts = [account for node in swarm.nodes if (account := last_account(node))]
    heads = [[e for e in node.events if isinstance(e, Account)][-1] for node in swarm.of_stage(0)]
    return NodeStats(
        time=sum(account.time for account in heads) / len(heads),
        busy=sum(account.busy_seconds for account in heads),
        repeated=sum(account.repeated for account in accounts),
        requeued=sum(account.requeued for account in accounts),
        dropped=sum(account.dropped for account in accounts),
        aborted=sum(len(outer_steps(node, "aborted")) for node in swarm.nodes),
    )
