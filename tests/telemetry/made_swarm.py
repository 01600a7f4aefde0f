"""A swarm as a seed might see it, made up."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console, RenderableType

from noloco_node.telemetry.node_state import NodeSeen
from noloco_node.telemetry.swarm_state import STATES, Departed, Happening, Middle, StageSeen, SwarmView


def node(number: int, stage: int = 0, **changes: Any) -> NodeSeen:
    """A node that trains and answers."""
    values: dict[str, Any] = {
        "peer_id": f"peer-{number:06}",
        "stage": stage,
        "state": "training",
        "version": "0.1.0",
        "answers": True,
        "clock": 900.0,
        "lag": 100.0,
        "tokens_per_second": 512.0,
        "capacity": 600.0,
        "outer_steps_taken": 3,
        "newcomer": False,
        "name": f"volunteer {number}",
        "tokens": 4096,
        "training_loss": 2.25,
        "replica_divergence": 1.5e-5,
        "seen_seconds": 90.0,
    }
    return NodeSeen(**(values | changes))


def stage(training: int, **changes: Any) -> StageSeen:
    """One with so many nodes that train."""
    nodes = dict.fromkeys(STATES, 0) | {"training": training}
    values: dict[str, Any] = {
        "missing": False,
        "unreachable": 0,
        "capacity": 600.0 * training,
        "clock": 900.0,
        "lag": 100.0,
        "replica_divergence": Middle(1.5e-5, training) if training else None,
    }
    return StageSeen(nodes, **(values | changes))


def swarm(**changes: Any) -> SwarmView:
    """Two stages: one of two nodes, one that only a record claims to serve."""
    values: dict[str, Any] = {
        "time": 1_700_000_000.0,
        "run_id": "0123abcd",
        "run_name": "made-up",
        "target": 30_720,
        "stages": (stage(2), stage(0, unreachable=1, capacity=0.0, clock=None, lag=None, missing=True)),
        "nodes": (node(0), node(1), node(2, 1, answers=False)),
        "introduced": 3,
        "clock": 1000.0,
        "tokens_per_second": 640.0,
        "speed_from": "progress",
        "versions": {"0.1.0": 2, "other": 0},
        "joins": 3,
        "left": 0,
        "lost": 1,
        "training_loss": Middle(2.25, 2),
        "validation_loss": Middle(2.375, 1),
        "replica_divergence": Middle(1.5e-5, 2),
        "departed": (Departed("peer-000009", 1, "gone fishing", 2048, 45.0, 1_699_999_990.0),),
        "happenings": (Happening(1_699_999_990.0, "lost", "peer-000009", 1),),
    }
    return SwarmView(**(values | changes))


def drawn(what: RenderableType, height: int = 50) -> str:
    """As text, 120 columns wide."""
    console = Console(file=io.StringIO(), width=120, height=height)
    with console.capture() as capture:
        console.print(what)
    return capture.get()
