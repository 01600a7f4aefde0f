"""A made-up run of 2 stages × 2 replicas, written by hand so that every figure in it can be checked in the head."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from noloco_node.storage.run_folder import RunFolder
from noloco_node.telemetry.events import (
    Account,
    AnyEvent,
    CheckpointTaken,
    Evaluation,
    EventFile,
    InnerStep,
    NodeReassigned,
    NodeStarted,
    NodeStopped,
    OuterStep,
)
from noloco_node.telemetry.history import NodeHistory
from noloco_node.telemetry.summary import Summary, summarize_histories

NAMES = ("s0-r0", "s0-r1", "s1-r0", "s1-r1")
STEPS = 60
STEPS_PER_ROUND = 10
TOKENS = 512
SPREADS = (1e-6, 4e-6, 8e-6, 6e-6, 4e-6, 2e-6)


def peer_of(name: str) -> str:
    """The peer id of a node of the made-up run."""
    return f"12D3KooWmade-up-{name}"


def stage_peer_of(name: str) -> str:
    """The other replica of the same stage."""
    return name[:-1] + ("1" if name.endswith("0") else "0")


def loss_at(clock: float) -> float:
    """The made-up loss."""
    return 1.5 + 4.0 * math.exp(-clock / 15_000)


def started(name: str) -> NodeStarted:
    """A node is up."""
    return NodeStarted(
        time=1000.0,
        peer_id=peer_of(name),
        stage=int(name[1]),
        stages=2,
        run_id="0123456789abcdef0123456789abcdef",
        run_name="made-up",
        version="0.1.0",
        pid=4242,
        addresses=[f"/ip4/127.0.0.1/tcp/4001/p2p/{peer_of(name)}"],
        metrics_address=None,
        parameters=1_600_000,
        origin="seed",
    )


def moved(time: float, from_stage: int, stage: int) -> NodeReassigned:
    """A node has gone to another stage, with a standby copy."""
    return NodeReassigned(
        time=time,
        from_stage=from_stage,
        stage=stage,
        why="lost",
        origin="standby",
        clock=1.0,
        parameters=1,
        seconds=1.0,
    )


def checkpoint(error: str = "") -> CheckpointTaken:
    """A checkpoint that held the device for 10 ms, or could not be written."""
    return CheckpointTaken(
        time=1000.0,
        path=None if error else "checkpoints/00000001",
        clock=1.0,
        outer_steps_taken=1,
        step=1,
        size=0 if error else 1000,
        held_seconds=0.01,
        seconds=0.5,
        error=error,
    )


def inner_step(step: int, **changes: object) -> InnerStep:
    """Inner step `step`, one a second; both replicas of a stage count."""
    values: dict[str, object] = {
        "time": 1000.0 + step,
        "step": step,
        "clock": step * 2.0 * TOKENS,
        "tokens": TOKENS,
        "loss": loss_at(step * 2.0 * TOKENS),
        "learning_rate": 2e-3 * min(1.0, step / 6) * (1 - 0.9 * step / STEPS),
        "gradient_norm": 0.5,
        "skipped": False,
        "live_replicas": 2,
    }
    return InnerStep.model_validate(values | changes)


def outer_step(number: int, partner: str | None, **changes: object) -> OuterStep:
    """Outer round `number` (from 1) with a partner's name."""
    step = number * STEPS_PER_ROUND
    values: dict[str, object] = {
        "time": 1000.0 + step,
        "kind": "paired",
        "outer_steps_taken": number,
        "step": step,
        "clock": step * 2.0 * TOKENS,
        "learning_rate": 2e-3 * (1 - 0.9 * step / STEPS),
        "partner": peer_of(partner) if partner else None,
        "role": "dialler",
        "reason": "",
        "replica_divergence": SPREADS[(number - 1) % len(SPREADS)],
        "difference_norm": 3.0,
        "clipped": False,
        "bytes_sent": 3_200_000,
        "bytes_received": 3_200_000,
        "seconds": 0.5,
        "held_seconds": 0.01,
        "inner_steps_meanwhile": 1,
    }
    return OuterStep.model_validate(values | changes)


def account(**changes: object) -> Account:
    """Books that close: 60 = 58 + 0 + 2."""
    values: dict[str, object] = {
        "time": 1000.0 + STEPS,
        "clock": STEPS * 2.0 * TOKENS,
        "target": STEPS * 2 * TOKENS,
        "tokens": STEPS * TOKENS,
        "drawn": 60,
        "trained": 58,
        "dropped": 0,
        "held_at_end": 2,
        "requeued": 3,
        "retried": 4,
        "repeated": 1,
        "served": 7,
        "refused": {"busy": 5},
        "bytes_sent": {"activations": 1000, "exchange": 500},
        "bytes_received": {"gradients": 900},
        "nodes_per_stage": [2, 2],
        "loop_lag_seconds": 0.02,
        "busy_seconds": 42.0,
    }
    return Account.model_validate(values | changes)


def stopped(name: str) -> NodeStopped:
    """The node ended in order."""
    return NodeStopped(
        time=1000.0 + STEPS + 1,
        reason="target_reached",
        detail="",
        outer_steps_taken=STEPS // STEPS_PER_ROUND,
        partners={peer_of(stage_peer_of(name)): STEPS // STEPS_PER_ROUND},
        final_weights="weights",
        seconds=61.0,
    )


def node_events(name: str) -> Iterator[AnyEvent]:
    """All events of one node that ran to the end."""
    yield started(name)
    for step in range(1, STEPS + 1):
        yield inner_step(step)
        if step % STEPS_PER_ROUND == 0:
            yield outer_step(step // STEPS_PER_ROUND, stage_peer_of(name))
        if step % 20 == 0 and name.startswith("s0"):
            clock = step * 2.0 * TOKENS
            yield Evaluation(
                time=1000.0 + step, clock=clock, step=step, loss=loss_at(clock) + 0.1, tokens=4096, final=step == STEPS
            )
    yield account()
    yield stopped(name)


def whole_run() -> dict[str, list[AnyEvent]]:
    """Events of all nodes by name."""
    return {name: list(node_events(name)) for name in NAMES}


def summarize(events: Mapping[str, Sequence[AnyEvent]], merged_loss: float | None = None) -> Summary:
    """The figures of a run from the events of its nodes, by node name."""
    return summarize_histories([NodeHistory.of(name, rows) for name, rows in events.items()], merged_loss)


def write(folder: Path, *events: AnyEvent) -> Path:
    """Append to the events of the node in this folder, which is made where it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    file = EventFile(RunFolder(folder).events)
    for event in events:
        file.write(event)
    file.close()
    return folder
