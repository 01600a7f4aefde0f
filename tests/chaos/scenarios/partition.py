"""The network falls into two halves, each with all stages, and is healed after a while."""

from __future__ import annotations

import time
from statistics import fmean

from noloco_node.telemetry.events import Account, OuterStep
from tests.chaos.lab import Lab
from tests.chaos.namespaces import Halves, two_halves, why_impossible
from tests.chaos.observe import account_gap, last_account, outer_steps, rate, spread
from tests.chaos.report import Verdict
from tests.chaos.swarm import ENDLESS, Node, Swarm

BEFORE_SECONDS = 8.0
MERGE_SECONDS = 90.0
SPREAD_BACK = 3.0
"""Afterwards the spread may be this many times what it was before: it varies, and the learning rate does not rise."""
LATEST = 4
"""Averages of each node over which the spread is taken while it falls."""
MOST_ROUNDS = 30
"""A difference must have fallen after so many averages of each node. The bound on one partner's pull brings one that a
long partition made nearer in each meeting (`outer/clipping.py`). After some ten of them it falls by halves."""


async def partition(lab: Lab) -> Verdict:
    """Both halves train through it; afterwards everyone sees everyone, averages across, and the spread falls back."""
    verdict = Verdict("partition", skipped=why_impossible())
    if verdict.skipped:
        return verdict
    each = [0, 1] * (2 if lab.long else 1)
    swarm = Swarm(lab.folder, [ENDLESS], 0.05)
    try:
        async with two_halves() as halves:
            try:
                await swarm.start([*each, *each], lambda number: halves.place(number // len(each)))
                await swarm.until_training()
                sides = swarm.nodes[: len(each)], swarm.nodes[len(each) :]
                await _cut_and_heal(swarm, halves, sides, 150.0 if lab.long else 15.0, verdict)
            finally:
                await swarm.stop()
    except OSError as error:
        verdict.skipped = f"the system does not let us make network namespaces ({error})"
    return verdict


async def _cut_and_heal(
    swarm: Swarm, halves: Halves, sides: tuple[list[Node], list[Node]], seconds: float, verdict: Verdict
) -> None:
    await swarm.rest(BEFORE_SECONDS)
    cut = time.time()
    await halves.cut()
    apart = not await halves.reaches()
    await swarm.rest(seconds)
    await halves.heal()
    healed = time.time()
    crossings = [
        step for a, b in (sides, sides[::-1]) for step in _across(a, b, cut + seconds / 2) if step.time < healed
    ]
    evidence = "no packet came through, and no average was taken across in its second half"
    verdict.fault(cut, f"partition for {seconds:g} s", evidence if apart and not crossings else "")
    before = spread(swarm.nodes, cut - BEFORE_SECONDS, cut)
    for number, side in enumerate(sides):
        heads = [node for node in side if node.stage == 0]
        share = rate(heads, cut + seconds / 2, healed) / rate(heads, cut - BEFORE_SECONDS, cut)
        verdict.figures[f"half {number}: throughput in the second half of the partition, share of before"] = share
        verdict.demand(f"half {number} trains on", share > 0.5, f"{share:.2f} of before")
    await _merge(swarm, sides, healed, before, verdict)
    for node in swarm.of_stage(0):
        account = last_account(node)
        assert account is not None
        gap = account_gap(account)
        verdict.demand(f"the books of {node.name} close", gap == 0 and account.dropped == 0, f"{gap} lost")


async def _merge(
    swarm: Swarm, sides: tuple[list[Node], list[Node]], healed: float, before: float | None, verdict: Verdict
) -> None:
    full = [len(swarm.of_stage(0)), len(swarm.of_stage(1))]

    def whole() -> bool:
        return all(
            any(isinstance(e, Account) and e.time > healed and e.nodes_per_stage == full for e in node.events[-40:])
            for node in swarm.nodes
        )

    seen = await swarm.holds(whole, MERGE_SECONDS)
    verdict.figures["seconds until every node sees all others"] = time.time() - healed if seen else None
    verdict.demand("every node sees all others again", seen, f"within {MERGE_SECONDS:g} s: {seen}")
    across = await swarm.holds(lambda: all(_across(a, b, healed) for a, b in (sides, sides[::-1])), MERGE_SECONDS)
    found = [step for step in _across(*sides, healed) if step.replica_divergence is not None]
    verdict.demand("the halves average with each other", across, f"{len(found)} times on one side")
    if not across or before is None:
        return
    verdict.figures["spread before, and at the first average across"] = [before, found[0].replica_divergence or 0.0]
    rounds = await _rounds_until_near(swarm, found[0].time, SPREAD_BACK * before)
    verdict.figures["averages of each node until the spread is back"] = rounds
    verdict.figures["seconds until then"] = time.time() - healed
    verdict.demand(
        "the spread falls back", rounds is not None, f"to {SPREAD_BACK:g} times {before:.2g}: after {rounds} averages"
    )


async def _rounds_until_near(swarm: Swarm, since: float, near: float) -> int | None:
    """Averages that the slowest node took from `since` on until the spread over everybody's latest ones was at most
    `near`. None if `MOST_ROUNDS` of them did not bring it there."""

    def taken() -> list[list[float]]:
        return [
            [
                step.replica_divergence
                for step in outer_steps(node, "paired", since=since)
                if step.replica_divergence is not None
            ]
            for node in swarm.nodes
        ]

    def near_now() -> bool:
        return all(len(one) >= LATEST for one in taken()) and near >= fmean(s for one in taken() for s in one[-LATEST:])

    def done() -> bool:
        return near_now() or min(map(len, taken())) >= MOST_ROUNDS

    await swarm.holds(done, MERGE_SECONDS)
    return min(map(len, taken())) if near_now() else None


def _across(side: list[Node], other: list[Node], since: float) -> list[OuterStep]:
    """Averages that nodes of one side took with nodes of the other."""
    ids = {node.started.peer_id for node in other if node.started}
    return [step for node in side for step in outer_steps(node, "paired", since=since) if step.partner in ids]
