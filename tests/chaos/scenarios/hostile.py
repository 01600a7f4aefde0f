"""One peer of the swarm is hostile: what it sends is refused or bounded and named, and the others learn as well."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from tests.chaos.hostile_node import HOSTILITY
from tests.chaos.lab import Lab
from tests.chaos.observe import account_gap, last_account, merged_loss, outer_steps
from tests.chaos.report import Verdict
from tests.chaos.swarm import HERE, Node, Place, Swarm

LOSS_RATIO = 1.03


@dataclass(frozen=True)
class Arm:
    """One kind of hostility, in a run of its own."""

    name: str
    attacks: tuple[str, ...]
    runs: int = 1
    """Whose mean loss is judged: that of a single run varies by 2 %."""


LONG = (
    Arm("poison that is not finite", ("nan gradients", "nan weights")),
    Arm("flipped gradients", ("flipped gradients",), runs=3),
    Arm("huge gradients", ("huge gradients",), runs=3),
    Arm("flipped weights", ("flipped weights",), runs=3),
    Arm("huge weights", ("huge weights",), runs=3),
)
SHORT = LONG[:1]


async def hostile_peer(lab: Lab) -> Verdict:
    """A hostile replica of the last stage, among honest ones. The long form has one run for each kind, against runs in
    which an honest peer holds its place."""
    verdict = Verdict("hostile")
    replicas, target = (3, 200_000) if lab.long else (2, 24_000)
    clean = [await _run(lab, f"clean-{n}", None, replicas, target, verdict) for n in range(3)] if lab.long else []
    if clean:
        verdict.figures["loss of the merged honest model, clean runs"] = clean
    for arm in LONG if lab.long else SHORT:
        name = arm.name.replace(" ", "-")
        losses = [await _run(lab, f"{name}-{n}", arm, replicas, target, verdict) for n in range(arm.runs)]
        verdict.figures[f"{arm.name}: loss of the merged honest model"] = losses
        if clean:
            ratio = statistics.mean(losses) / statistics.mean(clean)
            verdict.demand(f"{arm.name}: loss at most {LOSS_RATIO} of clean", ratio <= LOSS_RATIO, f"{ratio:.3f}")
    return verdict


async def _run(lab: Lab, name: str, arm: Arm | None, replicas: int, target: int, verdict: Verdict) -> float:
    """One run; the held-out loss of the honest nodes' merged model."""
    layout = [0, 1] * replicas
    overrides = [f"run.inner.target_tokens={target}", f"run.model.seed={lab.seed}", f"run.data.seed={lab.seed}"]
    swarm = Swarm(lab.folder / name, overrides, 0.05 if lab.long else 0.03)
    evil = len(layout) - 1
    began = time.time()
    try:
        await swarm.start(layout, lambda number: _place(arm) if number == evil else HERE)
        await swarm.until_training(steps=1)
        await swarm.until(lambda: all(not n.running for n in swarm.nodes[:evil]), 600, "the honest nodes end")
    finally:
        await swarm.stop()
    honest = swarm.nodes[:evil]
    if arm is not None:
        _judge(arm, swarm.nodes[evil], honest, began, verdict)
    return await merged_loss(overrides, honest, lab.folder / name)


def _place(arm: Arm | None) -> Place:
    if arm is None:
        return HERE
    command = (sys.executable, "-m", "tests.chaos.hostile_node")
    return Place(command=command, environment={HOSTILITY: ",".join(arm.attacks)})


def _judge(arm: Arm, evil: Node, honest: list[Node], began: float, verdict: Verdict) -> None:
    done = json.loads((evil.folder / "attacks.json").read_text())
    refused: Counter[str] = Counter()
    bans: Counter[str] = Counter()
    audits: Counter[str] = Counter()
    for node in honest:
        account = last_account(node)
        assert account is not None
        refused.update(account.refused)
        bans.update(account.strangers.bans)
        audits.update(account.strangers.audits)
    shut_out = f"shut out before: banned {bans.total()} times" if bans.total() else ""
    for attack in arm.attacks:
        evidence = f"carried out {done[attack]} times" if done.get(attack) else shut_out
        verdict.fault(began, f"{arm.name}: {attack}", evidence)
    verdict.figures[f"{arm.name}: bans by the honest"] = {name: float(count) for name, count in bans.items()}
    aborted = Counter(step.reason.split(":")[0][:60] for node in honest for step in outer_steps(node, "aborted"))
    verdict.figures[f"{arm.name}: refused by the honest"] = {name: float(count) for name, count in refused.items()}
    verdict.figures[f"{arm.name}: exchanges aborted"] = {name: float(count) for name, count in aborted.items()}
    clipped = sum(step.clipped for node in honest for step in outer_steps(node, "paired"))
    verdict.figures[f"{arm.name}: exchanges clipped"] = clipped
    verdict.figures[f"{arm.name}: audits by the honest"] = {name: float(count) for name, count in audits.items()}
    _judge_harm(arm.name, honest, verdict)


def _judge_harm(name: str, honest: list[Node], verdict: Verdict) -> None:
    ends = [node.stopped.reason if node.stopped else node.describe_exit() for node in honest]
    verdict.demand(f"{name}: every honest node reaches the target", set(ends) == {"target_reached"}, sorted(set(ends)))
    heads: Mapping[str, int] = {n.name: account_gap(a) for n in honest if n.stage == 0 and (a := last_account(n))}
    verdict.demand(f"{name}: their books close", not any(heads.values()), heads)
    dropped = sum(a.dropped for n in honest if n.stage == 0 and (a := last_account(n)))
    verdict.demand(f"{name}: no sample is dropped", dropped == 0, dropped)
    caught = [step for node in honest for step in outer_steps(node, "caught_up")]
    verdict.demand(f"{name}: nobody takes its clock or state", not caught, f"{len(caught)} catch-ups")
