"""One stranger with throw-away keys does all that it can at once; the same swarm without it runs beside.

Each arm has its timeline: everybody trains, a while before, the attack, a while after, the target. What the machine
itself costs (it carries both arms) is told from what the stranger costs by the clean arm's figures of the same spans.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import statistics
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from noloco_node.averaging import session as exchange_messages
from noloco_node.identity.peer_id import PeerId
from noloco_node.state_transfer import copies as copy_messages
from noloco_node.state_transfer import fetch as state_messages
from noloco_node.telemetry.events import Account, InnerStep, OuterStep, StateDownload, StateSourceFailed
from tests.chaos.attacks import ATTACKS
from tests.chaos.attacks.life import BROKEN, LOST, Victim, write_victims
from tests.chaos.lab import Lab
from tests.chaos.observe import last_account, merged_loss, stage_rate, tokens_between
from tests.chaos.paced_node import DOOR, READY, open_door
from tests.chaos.report import Verdict
from tests.chaos.stranger import KEYS, LIVES
from tests.chaos.swarm import CONFIG, Node, Place, Swarm
from tests.chaos.watched_node import HONEST, LAG_SECONDS, WATCHED

LOSS_RATIO = 1.03
MOST_MEMORY = 100 * 2**20 / 1e6
"""MB that a node and its p2pd may take more than at the same time in the clean arm."""
LAG_SHARE = 0.99
AFTER_SHARE = 0.05
AVERAGING_SHARE = 0.9
TELLING_SECONDS = 60.0
"""An attack must last so many seconds: in less there are some twelve exchanges, and chance alone takes a fifth of
them."""
LOOK_EVERY = 5.0
LEAVE_SECONDS = 30.0
READY_SECONDS = 240.0
NO_SIGN = frozenset({LOST, "rounds", BROKEN})
"""Outcomes that do not show that an attack arrived."""
ANSWERS = {
    "bad answers to exchanges": exchange_messages.PROPOSE.name,
    "dripping donor": state_messages.OFFER.name,
    "hostile copies of a stage": copy_messages.OPEN_COPY.name,
}
"""Attacks by answers alone, and what an honest node must ask for it; it chooses itself which peer it asks."""
MICROBATCH_TOKENS = 128


@dataclass(frozen=True)
class Plan:
    """Times in seconds."""

    replicas: int
    operation: float
    before: float
    attack: float
    after: float
    """From the stranger's end; what is compared with before begins here and lasts as long as `before`."""
    joiners: int
    """Late joiners, one after another during the attack."""
    without: frozenset[str] = frozenset()
    """Attacks for which there is no time."""

    @property
    def attacks(self) -> list[str]:
        """All others, or those that the environment names."""
        chosen = os.environ.get("NOLOCO_CHAOS_STRANGER_ATTACKS", "")
        return chosen.split(",") if chosen else [name for name in ATTACKS if name not in self.without]

    @property
    def whole(self) -> float:
        """From the start of training to the last figure."""
        return self.before + self.attack + self.after + self.before

    @property
    def target(self) -> int:
        """Tokens that a swarm whose devices never wait trains in a tenth more than that time."""
        return int(1.1 * (self.whole + LEAVE_SECONDS) * self.replicas * MICROBATCH_TOKENS / (2 * self.operation))


JOINER_EVERY = 200.0
LIFE_SECONDS = 40.0
"""One key lives so many seconds: half of it passes before anybody dials an unknown peer."""
ATTACK_SECONDS = float(os.environ.get("NOLOCO_CHAOS_STRANGER_SECONDS", "600"))
SLOW = frozenset(
    {"dripping donor", "hostile copies of a stage", "bad answers to exchanges", "replayed records", "lying clocks"}
)
SHORT = Plan(replicas=2, operation=0.1, before=8.0, attack=30.0, after=10.0, joiners=0, without=SLOW)


def long_plan() -> Plan:
    """Ten minutes of attack, unless the environment says otherwise."""
    span = min(60.0, ATTACK_SECONDS / 2)
    return Plan(
        replicas=4,
        operation=0.4,
        before=span,
        attack=ATTACK_SECONDS,
        after=60.0,
        joiners=max(1, int(ATTACK_SECONDS // JOINER_EVERY)),
    )


@dataclass
class Arm:
    """One swarm and what was seen of it."""

    name: str
    swarm: Swarm
    plan: Plan
    overrides: list[str]
    memory: dict[str, list[tuple[float, float]]] = field(default_factory=dict[str, list[tuple[float, float]]])
    """Wall time and MB of each node with its p2pd."""
    spans: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    """`before`, `attack` and `after`, wall times."""
    joined: list[str] = field(default_factory=list[str])
    """What became of the late joiners."""
    loss: float = float("nan")

    @property
    def core(self) -> list[Node]:
        """All but the joiner."""
        return self.swarm.nodes[: 2 * self.plan.replicas]

    def watched(self, node: Node, span: str) -> list[Mapping[str, Any]]:
        """What a node wrote down in a span."""
        path, (start, end) = self.swarm.folder / node.name / "watched.jsonl", self.spans[span]
        if not path.exists():
            return []
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        return [line for line in lines if start <= line["time"] < end]

    def accounts(self, span: str) -> list[Account]:
        """All core nodes' books in a span."""
        start, end = self.spans[span]
        return [e for n in self.core for e in n.events if isinstance(e, Account) and start <= e.time < end]


async def stranger(lab: Lab) -> Verdict:
    """2 x 4 daemons and ten minutes in the long form; 2 x 2 and half a minute in the short one."""
    verdict, plan = Verdict("stranger"), long_plan() if lab.long else SHORT
    clean, attacked = _arm(lab, "clean", plan), _arm(lab, "attacked", plan)
    together = asyncio.Barrier(2)
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(_run(clean, together, None))
            group.create_task(_run(attacked, together, lab))
    except* AssertionError as failures:
        verdict.demand("both arms run to their end", held=False, found=str(failures.exceptions[0])[:500])
    finally:
        await asyncio.gather(clean.swarm.stop(), attacked.swarm.stop())
    _judge_attacks(attacked, verdict)
    if set(attacked.spans) == set(clean.spans) == {"before", "attack", "after"}:
        await _judge_end(clean, attacked, verdict)
        _judge_bans(attacked, verdict)
        _judge_averaging(clean, attacked, verdict)
        _judge_burden(clean, attacked, verdict)
        _judge_after(clean, attacked, verdict)
    return verdict


def _arm(lab: Lab, name: str, plan: Plan) -> Arm:
    overrides = [
        f"run.inner.target_tokens={plan.target}",
        f"run.model.seed={lab.seed}",
        f"run.data.seed={lab.seed}",
        "run.standby_copies=1",
        "run.limits.standby_seconds=10",
        "run.limits.chunk_bytes=16384",
    ]
    return Arm(name, Swarm(lab.folder / name, overrides, plan.operation), plan, overrides)


async def _run(arm: Arm, together: asyncio.Barrier, attacker: Lab | None) -> None:
    plan, swarm = arm.plan, arm.swarm
    await swarm.start([0, 1] * plan.replicas, lambda number: _place(arm, number, number % 2))
    await swarm.until_training()
    (swarm.folder / HONEST).write_text(json.dumps([node.started.peer_id for node in swarm.nodes if node.started]))
    process = None if attacker is None else await _prepare_stranger(arm, attacker)
    joiners = [await _prepare_joiner(arm) for _ in range(plan.joiners)]
    await together.wait()
    began = time.time()
    attack, left = began + plan.before, began + plan.before + plan.attack
    watching = asyncio.create_task(_weigh(arm))
    try:
        try:
            await _until(swarm, attack)
            if process is not None:
                await _unleash(process)
            turn = plan.attack / max(1, plan.joiners)
            for number, node in enumerate(joiners):
                await _late_joiner(arm, node, attack + (number + 1 / 6) * turn, attack + (number + 5 / 6) * turn)
            await _until(swarm, left)
        finally:
            if process is not None:
                await _call_off(process)
        await together.wait()
        left = time.time()
        await _until(swarm, left + plan.after + plan.before)
    finally:
        watching.cancel()
        await asyncio.wait((watching,))
    after = left + plan.after
    arm.spans = {"before": (began, attack), "attack": (attack, left), "after": (after, after + plan.before)}
    with contextlib.suppress(AssertionError):  # a node that has not ended is judged with the others
        await swarm.until(lambda: not any(node.running for node in arm.core), plan.whole, "all nodes end")


def _place(arm: Arm, number: int, stage: int, door: Path | None = None) -> Place:
    """A node that is watched. Its file lies in its run folder. With a `door` it waits there."""
    name = f"s{stage}-n{number}"
    environment = {WATCHED: str(arm.swarm.folder / name / "watched.jsonl"), "OMP_NUM_THREADS": "1"}
    waits = {} if door is None else {DOOR: str(door)}
    return Place(command=(sys.executable, "-m", "tests.chaos.watched_node"), environment=environment | waits)


def _make_door(arm: Arm, name: str) -> Path:
    door = arm.swarm.folder / f"{name}.door"
    os.mkfifo(door)
    return door


async def _until_ready(arm: Arm, log: Path) -> None:
    await arm.swarm.until(lambda: READY in log.read_text(), READY_SECONDS, f"{log} says that it is ready")


async def _until(swarm: Swarm, when: float) -> None:
    await swarm.until(lambda: time.time() >= when, max(1.0, when - time.time() + 30), "time passes")


async def _weigh(arm: Arm) -> None:
    while True:
        for node in arm.core:
            try:
                weight = psutil.Process(node.pid).memory_info().rss + node.p2pd().memory_info().rss
                arm.memory.setdefault(node.name, []).append((time.time(), weight / 1e6))
            except (psutil.Error, LookupError):
                continue
        await asyncio.sleep(LOOK_EVERY)


async def _prepare_stranger(arm: Arm, lab: Lab) -> Process:
    """Start the stranger's process, which waits. It knows the run and its nodes, as everybody may."""
    started = [(node, node.started) for node in arm.core if node.started]
    victims = [Victim(PeerId(s.peer_id), n.stage, s.addresses[0]) for n, s in started]
    folder = arm.swarm.folder / "stranger"
    folder.mkdir()
    write_victims(folder / "victims.json", victims)
    with (folder / "log.txt").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.chaos.stranger", "--config", str(CONFIG)),
            *(part for override in arm.overrides for part in ("--set", override)),
            *("--victims", str(folder / "victims.json"), "--folder", str(folder), "--seed", str(lab.seed)),
            *("--attacks", ",".join(arm.plan.attacks), "--life-seconds", str(min(LIFE_SECONDS, arm.plan.attack / 2))),
            stdin=PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    await _until_ready(arm, folder / "log.txt")
    return process


async def _unleash(process: Process) -> None:
    assert process.stdin is not None
    process.stdin.write(b"go\n")
    await process.stdin.drain()


async def _call_off(process: Process) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(LEAVE_SECONDS):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


async def _prepare_joiner(arm: Arm) -> Node:
    """One more node of the last stage; it waits at its door."""
    number = len(arm.swarm.nodes)
    node = await arm.swarm.launch(1, _place(arm, number, 1, _make_door(arm, f"n{number}")))
    await _until_ready(arm, node.log)
    return node


async def _late_joiner(arm: Arm, node: Node, comes: float, leaves: float) -> None:
    """It must find an honest donor among those that offer."""
    await _until(arm.swarm, comes)
    node.launched_at = time.time()
    open_door(arm.swarm.folder / f"{node.name[3:]}.door")
    try:
        started = await arm.swarm.until_up(node, max(1.0, leaves - time.time()))
    except AssertionError as failure:
        arm.joined.append(str(failure)[:300])
    else:
        downloads = [event for event in node.events if isinstance(event, StateDownload)]
        failed = [event.reason[:120] for event in node.events if isinstance(event, StateSourceFailed)]
        took = started.time - node.launched_at
        honest = {other.started.peer_id for other in arm.core if other.started}
        origin = "honest" if {e.source for e in downloads if e.received == e.total} & honest else started.origin
        arm.joined.append(f"{origin}, up after {took:.1f} s, {len(downloads)} looks at the download, failed: {failed}")
        await _until(arm.swarm, leaves)
    if node.running:
        os.kill(node.pid, signal.SIGTERM)


def _judge_attacks(arm: Arm, verdict: Verdict) -> None:
    """Every attack must have arrived: its outcomes, beyond links that failed, are the evidence."""
    path = arm.swarm.folder / "stranger" / "attacks.json"
    counts: dict[str, dict[str, int]] = json.loads(path.read_text()) if path.exists() else {}
    when = arm.spans.get("attack", (time.time(), 0.0))[0]
    for name in arm.plan.attacks:
        outcomes = counts.get(name, {})
        shown = {outcome: times for outcome, times in outcomes.items() if times and outcome not in NO_SIGN}
        evidence = ", ".join(f"{outcome} {times}" for outcome, times in sorted(shown.items()))
        if not evidence and name in ANSWERS and "attack" in arm.spans:
            keys = counts.get(KEYS + name, {}).keys()
            evidence = passed_over(_attack_lines(arm), keys, _peers(arm), ANSWERS[name])
            verdict.demand(
                f"{name}: honest nodes ask others", held=bool(evidence), found=evidence or "nothing shows it"
            )
        verdict.fault(when, name, evidence)
        broken = outcomes.get(BROKEN, 0)
        if broken:
            verdict.demand(f"{name} is carried out without a mistake of its own", held=False, found=f"{broken} times")
    verdict.figures["lives of the stranger"] = {name: float(n) for name, n in counts.get(LIVES, {}).items()}


def passed_over(lines: Sequence[Mapping[str, Any]], keys: Collection[str], honest: Collection[str], method: str) -> str:
    """What shows that a stranger with one of these keys was there to be asked for `method`, and that honest nodes asked
    each other: that is how an attack by answers is met. Empty where they asked such a stranger, so that its own code
    must have failed, or where nothing shows it."""
    there = sum(not set(keys).isdisjoint(line["strangers"]) for line in lines if "strangers" in line)
    asked = [line["peer"] for line in lines if line.get("asked") == method]
    among_themselves = sum(peer in honest for peer in asked)
    if not there or not among_themselves or not set(keys).isdisjoint(asked):
        return ""
    return f"never asked: there in {there} looks of honest nodes, which asked each other {among_themselves} times"


def _peers(arm: Arm) -> set[str]:
    return {node.started.peer_id for node in arm.swarm.nodes if node.started}


def _attack_lines(arm: Arm) -> list[Mapping[str, Any]]:
    return [line for node in arm.swarm.nodes for line in arm.watched(node, "attack")]


async def _judge_end(clean: Arm, attacked: Arm, verdict: Verdict) -> None:
    ends = [node.stopped.reason if node.stopped else node.describe_exit() for node in attacked.core]
    verdict.demand("the target is reached", set(ends) == {"target_reached"}, ", ".join(sorted(ends)))
    for arm in (
        clean,
        attacked,
    ):  # one after the other: libraries that are imported late are not imported twice at once
        arm.loss = await merged_loss(arm.overrides, arm.core, arm.swarm.folder)
    ratio = attacked.loss / clean.loss
    found = f"{attacked.loss:.4f} against {clean.loss:.4f}, {ratio:.4f}"
    verdict.demand(f"validation loss within {LOSS_RATIO} of clean", ratio <= LOSS_RATIO, found)
    trained = {arm.name: tokens_between(arm.core[::2], 0.0, float("inf")) for arm in (clean, attacked)}
    share = trained["attacked"] / max(1, trained["clean"])
    least = attacked.plan.replicas / (attacked.plan.replicas + 1)  # an answerer counts as one replica, key after key
    held = least <= share <= 1 + AFTER_SHARE
    verdict.demand(f"at least {least:.0%} of the clean run's tokens are trained", held, f"{share:.3f}, {trained}")
    verdict.figures["clock over tokens during the attack"] = {arm.name: _haste(arm) for arm in (clean, attacked)}
    for arm in (clean, attacked):
        ends = [node.stopped.time for node in arm.core if node.stopped]
        took = max(ends) - arm.spans["before"][0] if ends else float("inf")
        verdict.figures[f"seconds to the end, {arm.name}"] = took
    if attacked.plan.joiners:
        verdict.figures["late joiners, clean"] = "; ".join(clean.joined)
        held = all(joined.startswith("honest") for joined in attacked.joined)
        verdict.demand("late joiners get an honest state", held, "; ".join(attacked.joined))


def _judge_averaging(clean: Arm, attacked: Arm, verdict: Verdict) -> None:
    """Outer steps with an honest partner for each inner step of the attack, beside the clean arm at the same time. A
    stranger that answers as an origin has its part of the devices, so inner steps alone may be fewer."""
    pace = {arm.name: _averaged_with_honest(arm) for arm in (clean, attacked)}
    share = pace["attacked"] / pace["clean"] if pace["clean"] else 0.0
    found = f"{share:.3f}, for each inner step {pace}"
    if attacked.plan.attack >= TELLING_SECONDS:
        verdict.demand(f"averaging goes on at {AVERAGING_SHARE:.0%} of its pace", share >= AVERAGING_SHARE, found)
    else:
        verdict.figures["averaging under attack beside clean"] = found


def _averaged_with_honest(arm: Arm) -> float:
    honest, (start, end) = _peers(arm), arm.spans["attack"]
    seen = [e for n in arm.core for e in n.events if start <= e.time < end]
    paired = sum(isinstance(e, OuterStep) and e.partner in honest for e in seen)
    return paired / max(1, sum(isinstance(e, InnerStep) for e in seen))


def _haste(arm: Arm) -> float:
    """How far stage 0's clocks run in the attack for each token that is trained there."""
    origins, (start, end) = arm.core[::2], arm.spans["attack"]
    steps = [[e for e in n.events if isinstance(e, InnerStep) and start <= e.time < end] for n in origins]
    gained = _mean(taken[-1].clock - taken[0].clock for taken in steps if taken)
    return gained / max(1, sum(e.tokens for taken in steps for e in taken[1:]))


def _judge_bans(arm: Arm, verdict: Verdict) -> None:
    honest = {node.started.peer_id for node in arm.core if node.started}
    lines = [line for node in arm.core for span in arm.spans for line in arm.watched(node, span) if "ban" in line]
    wrong = [line for line in lines if line["peer"] in honest]
    banned = [line for line in wrong if line["ban"]]
    found = f"{len(banned)} bans, {len(wrong)} offences {sorted({line['detail'] for line in wrong})[:3]}"
    verdict.demand("no honest node is banned by an honest node", not banned, found)
    verdict.figures["bans of the stranger's keys"] = sum(line["ban"] for line in lines) - len(banned)
    last = [account for node in arm.core if (account := last_account(node))]
    verdict.figures["audits"] = {f"{n.name} {k}": float(v) for n, a in zip(arm.core, last, strict=False)
                                 for k, v in a.strangers.audits.items()}  # fmt: skip


def _judge_burden(clean: Arm, attacked: Arm, verdict: Verdict) -> None:
    more = [_most(attacked, a.name) - _most(clean, c.name) for a, c in zip(attacked.core, clean.core, strict=True)]
    found = f"{max(more):.0f} MB at most, {statistics.median(more):.0f} in the middle"
    verdict.demand(f"a node takes at most {MOST_MEMORY:.0f} MB more", max(more) <= MOST_MEMORY, found)
    lags = {
        arm.name: sorted(account.loop_lag_seconds for account in arm.accounts("attack")) for arm in (clean, attacked)
    }
    shares = {name: sum(lag < LAG_SECONDS for lag in values) / max(1, len(values)) for name, values in lags.items()}
    worst = {name: values[-1] if values else 0.0 for name, values in lags.items()}
    found = f"{shares['attacked']:.4f} of {len(lags['attacked'])}, worst {worst['attacked']:.2f} s; clean: " + (
        f"{shares['clean']:.4f}, worst {worst['clean']:.2f} s"
    )
    verdict.demand(
        f"{LAG_SHARE:.0%} of loop lags of its own are below {LAG_SECONDS} s", shares["attacked"] >= LAG_SHARE, found
    )
    verdict.figures[f"lags over {LAG_SECONDS} s with what the kernel gave to others"] = {
        arm.name: float(sum("lag" in line for node in arm.core for line in arm.watched(node, "attack")))
        for arm in (clean, attacked)
    }
    during = {arm.name: stage_rate(arm.core, *arm.spans["attack"]) for arm in (clean, attacked)}
    verdict.figures["tokens/s during the attack"] = during


def _most(arm: Arm, name: str) -> float:
    """The largest weight of a node during the attack."""
    start, end = arm.spans["attack"]
    return max((weight for when, weight in arm.memory.get(name, []) if start <= when < end + 30.0), default=0.0)


def _judge_after(clean: Arm, attacked: Arm, verdict: Verdict) -> None:
    """After against before. What the clean arm lost in the same spans as well is the machine's doing, not the
    stranger's; what the clean arm gained is no demand."""
    for what, measure, better in (
        ("peers seen", _peers_seen, 0),
        ("tokens/s", lambda arm, span: stage_rate(arm.core, *arm.spans[span]), 1),
    ):
        values = {arm.name: (measure(arm, "before"), measure(arm, "after")) for arm in (clean, attacked)}
        change = {name: after / before if before else 0.0 for name, (before, after) in values.items()}
        shares = [change["attacked"]]
        if better and change["clean"]:
            shares.append(change["attacked"] / change["clean"])
        held = max(shares) >= 1 - AFTER_SHARE and (better > 0 or min(shares) <= 1 + AFTER_SHARE)
        found = "; ".join(f"{name} {before:.4g} → {after:.4g}" for name, (before, after) in values.items())
        verdict.demand(f"{what} within {AFTER_SHARE:.0%} of before, {attacked.plan.after:g} s after", held, found)
    rows = {span: _mean(line["rows"] for n in attacked.core for line in attacked.watched(n, span) if "rows" in line)
            for span in attacked.spans}  # fmt: skip
    verdict.figures["records in the view"] = rows


def _peers_seen(arm: Arm, span: str) -> float:
    """Nodes that a node counts, on average."""
    return _mean(sum(account.nodes_per_stage) for account in arm.accounts(span))


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return statistics.fmean(found) if found else 0.0
