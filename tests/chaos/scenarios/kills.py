"""A quarter of the nodes is killed in waves, and replacements join."""

from __future__ import annotations

import asyncio
import math
import random
import signal
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from noloco_node.telemetry.events import InnerStep
from tests.chaos.lab import Lab
from tests.chaos.observe import account_gap, clock_of, last_account, merged_loss, outer_steps, rate, seconds_to_recover
from tests.chaos.report import Verdict
from tests.chaos.swarm import ENDLESS, START_SECONDS, Node, Swarm, running_swarm

RECOVERY_SECONDS = 30.0
RECOVERED = 0.9
LOSS_RATIO = 1.02
BEFORE_SECONDS = 6.0
SETTLED_SECONDS = 1.0
"""So many seconds of a node's life are no measure of what it did before a wave."""
LAST_WAVE_AT = 0.75
"""Share of the run after which no wave comes, so that recovery can be seen."""


@dataclass(frozen=True)
class Plan:
    """Size of the scenario."""

    replicas: int
    target: int | None
    """Tokens of a run; None: until the replacements have averaged, so that a slow machine changes nothing."""
    pause: float
    """Seconds of training before each wave."""
    seeds: int
    operation_seconds: float = 0.05


SHORT = Plan(replicas=2, target=None, pause=3.0, seeds=1, operation_seconds=0.03)
LONG = Plan(replicas=4, target=400_000, pause=12.0, seeds=3)


@dataclass
class Wave:
    """One wave: the nodes that died, and when."""

    at: float
    victims: list[Node]
    replacements: list[Node]


async def kills_in_waves(lab: Lab) -> Verdict:
    """The target is reached, the loss is that of an undisturbed run, survivors' throughput comes back, and their books
    close."""
    verdict = Verdict("kills")
    plan = LONG if lab.long else SHORT
    clean: list[float] = []
    disturbed: list[float] = []
    for seed in range(lab.seed, lab.seed + plan.seeds):
        if lab.long:
            clean.append(await _undisturbed(lab.within(f"clean-{seed}"), plan, seed))
        disturbed.append(await _disturbed(lab.within(f"kills-{seed}"), plan, seed, verdict))
    verdict.figures["validation loss with kills"] = disturbed
    if lab.long:
        ratio = statistics.mean(disturbed) / statistics.mean(clean)
        verdict.figures["validation loss, undisturbed"] = clean
        verdict.figures["spread of the undisturbed runs (standard deviation)"] = statistics.stdev(clean)
        verdict.demand(f"validation loss at most {LOSS_RATIO} of the undisturbed runs'", ratio <= LOSS_RATIO, ratio)
    return verdict


def _overrides(plan: Plan, seed: int) -> tuple[str, ...]:
    target = ENDLESS if plan.target is None else f"run.inner.target_tokens={plan.target}"
    return target, f"run.model.seed={seed}", f"run.data.seed={seed}"


async def _undisturbed(lab: Lab, plan: Plan, seed: int) -> float:
    layout = [0, 1] * plan.replicas
    options = _overrides(plan, seed)
    async with running_swarm(lab.folder, layout, *options, operation_seconds=plan.operation_seconds) as swarm:
        await swarm.until_ended(within=900)
    return await merged_loss(options, swarm.nodes, lab.folder)


async def _disturbed(lab: Lab, plan: Plan, seed: int, verdict: Verdict) -> float:
    layout = [0, 1] * plan.replicas
    options = _overrides(plan, seed)
    rng = random.Random(f"{seed}/victims")
    waves: list[Wave] = []
    async with running_swarm(lab.folder, layout, *options, operation_seconds=plan.operation_seconds) as swarm:
        while await _trained_for(swarm, plan.pause, LAST_WAVE_AT * (plan.target or math.inf)):
            waves.append(await _wave(swarm, max(1, len(layout) // 4), rng))
            if plan.target is None:
                await swarm.until(lambda: all(map(_works, waves[0].replacements)), 240, "the replacements average")
                within = 2 * RECOVERY_SECONDS
                await swarm.until(lambda: _recovery(swarm, waves[0]) is not None, within, "the pace after it shows")
                break
        if plan.target is not None:
            await swarm.until(lambda: _over(swarm, len(layout)), 900, "the end of all that trained")
    _judge(swarm, waves, plan, verdict)
    return await merged_loss(options, [n for n in swarm.nodes if n.stopped], lab.folder)


async def _trained_for(swarm: Swarm, seconds: float, last_clock: float) -> bool:
    """Wait until the replacements of the last wave are up, or have ended, and then so many seconds. True while a
    further wave leaves time to recover. Joiners need a living peer that they know."""
    await swarm.until(lambda: all(n.started or not n.running for n in swarm.nodes), START_SECONDS, "all are up")
    until = time.monotonic() + max(seconds, BEFORE_SECONDS + SETTLED_SECONDS)
    await swarm.until(lambda: time.monotonic() > until, seconds + 60, "the pause before a wave")
    going_on = not any(node.stopped and node.killed_at is None for node in swarm.nodes)
    return going_on and max((clock_of(node) for node in swarm.of_stage(0)), default=math.inf) < last_clock


def _over(swarm: Swarm, first: int) -> bool:
    """Tell whether a node has reached the target, and all that had a part in the run have ended. A replacement that
    came when the others had left does not belong to it."""
    part = [node for number, node in enumerate(swarm.nodes) if number < first or _works(node)]
    reached = any(node.stopped and node.stopped.reason == "target_reached" for node in part)
    return reached and not any(node.running for node in part)


async def _wave(swarm: Swarm, count: int, rng: random.Random) -> Wave:
    """Kill `count` nodes, but never more of a stage than leaves one; start as many in their place."""
    victims: list[Node] = []
    for node in rng.sample(swarm.live, len(swarm.live)):
        left = [n for n in swarm.of_stage(node.stage) if n not in victims]
        if len(victims) < count and len(left) > 1 and _trains(node):
            victims.append(node)
    wave = Wave(time.time(), victims, [])
    for node in victims:
        swarm.kill(node)
    await swarm.until(lambda: not any(node.running for node in victims), 10, "the victims are dead")
    for node in victims:
        wave.replacements.append(await swarm.launch(node.stage))
        await asyncio.sleep(0)
    return wave


def _trains(node: Node) -> bool:
    return any(isinstance(event, InnerStep) for event in node.events)


def _judge(swarm: Swarm, waves: Sequence[Wave], plan: Plan, verdict: Verdict) -> None:
    for wave in waves:
        for node in wave.victims:
            silent = not any(event.time > wave.at + 0.5 for event in node.events)
            evidence = f"its exit was {node.describe_exit()}, no event of it came after"
            died = node.exit_code == -signal.SIGKILL and silent
            verdict.fault(wave.at, f"kill -9 of {node.name}", evidence if died else "")
    victims = [node for wave in waves for node in wave.victims]
    survivors = [node for node in swarm.nodes if node not in victims]
    joined = [node for wave in waves for node in wave.replacements if node not in victims]
    ended = (node.stopped for node in survivors if node.stopped and _trains(node))
    over = min((stopped.time for stopped in ended if stopped.reason != "failed"), default=math.inf)
    late = [node for node in joined if _came_too_late(node, over)]
    ends = [n.stopped.reason if n.stopped else n.describe_exit() for n in survivors if n not in late]
    wanted = "interrupted" if plan.target is None else "target_reached"
    verdict.demand(f"survivors and replacements end with {wanted}", set(ends) == {wanted}, _tally(ends))
    _judge_books(survivors, verdict)
    _judge_recovery(swarm, waves, verdict)
    working = [node for node in joined if _works(node)]
    found = f"{len(working)} of {len(joined)}; {len(late)} came when the run was over"
    held = len(working) + len(late) == len(joined) and bool(working)
    verdict.demand("replacements copy a stage peer's state, train and average", held, found)


def _works(node: Node) -> bool:
    """It started from a stage peer's state, has taken inner steps and averaged."""
    copied = node.started is not None and node.started.origin == "peer"
    return copied and _trains(node) and bool(outer_steps(node, "paired"))


def _came_too_late(node: Node, over: float) -> bool:
    """Whether the run was over when it came up: it found the others gone or going, or there was no step left for it."""
    if node.stopped is None or node.stopped.time < over:
        return False
    return node.started is None or not _works(node)


def _judge_books(survivors: Sequence[Node], verdict: Verdict) -> None:
    books = {node.name: account for node in survivors if node.stage == 0 and (account := last_account(node))}
    gaps = sum(account_gap(account) for account in books.values())
    verdict.demand("the books of all survivors close", bool(books) and gaps == 0, f"{gaps} samples unaccounted for")
    dropped = sum(account.dropped for account in books.values())
    held = sum(account.held_at_end for account in books.values())
    verdict.demand("no sample is dropped", dropped == 0, f"{dropped} dropped")
    drawn = max(1, sum(account.drawn for account in books.values()))
    verdict.figures["held at the end, of drawn"] = f"{held} of {drawn}"
    repeated = sum(account.repeated for node in survivors if (account := last_account(node)))
    verdict.figures["repeated, share of drawn"] = repeated / drawn


def _judge_recovery(swarm: Swarm, waves: Sequence[Wave], verdict: Verdict) -> None:
    """Survivors' throughput after each wave against the same nodes' before it."""
    times = [took for wave in waves if (took := _recovery(swarm, wave)) is not None]
    unmeasured = len(waves) - len(times)
    verdict.figures.setdefault("seconds to 90 % of the survivors' throughput, by wave", [])
    known = verdict.figures["seconds to 90 % of the survivors' throughput, by wave"]
    assert isinstance(known, list)
    known += times
    held = bool(times) and max(times) <= RECOVERY_SECONDS
    found = f"worst {max(times, default=float('nan')):.1f} s over {len(times)} waves, {unmeasured} too late to tell"
    verdict.demand(f"survivors are back at 90 % within {RECOVERY_SECONDS:g} s of each wave", held, found)


def _recovery(swarm: Swarm, wave: Wave) -> float | None:
    """Seconds until the survivors had their pace again, infinite where they had not; None where none can tell yet."""
    heads = [n for n in swarm.nodes if n.stage == 0 and n not in wave.victims and n.launched_at < wave.at]
    heads = [n for n in heads if _trains(n) and (n.killed_at is None or n.killed_at > wave.at + 1)]
    heads = [n for n in heads if n.joined_at < wave.at - BEFORE_SECONDS - SETTLED_SECONDS]
    end = min([_last_step(n) for n in heads] or [wave.at])
    before = rate(heads, wave.at - BEFORE_SECONDS, wave.at)
    took = seconds_to_recover(heads, wave.at, min(end, wave.at + RECOVERY_SECONDS + 3), RECOVERED * before)
    return float("inf") if took is None and end >= wave.at + RECOVERY_SECONDS else took


def _last_step(node: Node) -> float:
    return max(event.time for event in node.events if isinstance(event, InnerStep))


def _tally(reasons: Iterable[str]) -> str:
    counts: dict[str, int] = {}
    for reason in reasons:
        counts[reason] = counts.get(reason, 0) + 1
    return ", ".join(f"{count} {reason}" for reason, count in counts.items())
