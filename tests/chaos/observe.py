"""What a swarm did and came to, from what its nodes left: their event files, and the weights that they saved."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from pathlib import Path

from noloco_node.config.load import load_config
from noloco_node.exporting.write import merge_run
from noloco_node.launch.local_swarm import SwarmNode
from noloco_node.telemetry.events import Account, InnerStep, OuterStep
from tests.chaos.swarm import CONFIG, Node

WINDOW_SECONDS = 3.0
"""In which a swarm shows that it trains again."""


def tokens_between(nodes: Iterable[SwarmNode], start: float, end: float) -> int:
    """Tokens in the inner steps that these nodes took from wall time `start` to `end`."""
    return sum(e.tokens for n in nodes for e in n.events if isinstance(e, InnerStep) and start <= e.time < end)


def rate(nodes: Iterable[SwarmNode], start: float, end: float) -> float:
    """Tokens per second of these nodes together."""
    return tokens_between(nodes, start, end) / (end - start)


def stage_rate(nodes: Sequence[SwarmNode], start: float, end: float) -> float:
    """Tokens per second of the swarm: what stage 0 trained."""
    return rate([node for node in nodes if node.stage == 0], start, end)


def seconds_to_recover(nodes: Sequence[SwarmNode], after: float, until: float, wanted: float) -> float | None:
    """Seconds from `after` to the start of the first window in which the swarm trained `wanted` tokens per second;
    None where it has none before `until`."""
    start = after
    while start + WINDOW_SECONDS <= until:
        if stage_rate(nodes, start, start + WINDOW_SECONDS) >= wanted:
            return start - after
        start += 0.25
    return None


def last_account(node: SwarmNode) -> Account | None:
    """A node's books as it wrote them last."""
    return next((event for event in reversed(node.events) if isinstance(event, Account)), None)


def account_gap(account: Account) -> int:
    """Samples that the books of a stage-0 node cannot account for: zero, or something is lost."""
    return account.drawn - account.trained - account.dropped - account.held_at_end


def outer_steps(node: SwarmNode, *kinds: str, since: float = 0.0) -> list[OuterStep]:
    """A node's outer steps of these kinds from wall time `since` on."""
    return [e for e in node.events if isinstance(e, OuterStep) and e.kind in kinds and e.time >= since]


def spread(nodes: Iterable[SwarmNode], start: float, end: float) -> float | None:
    """Mean of the spreads that were measured in this span; None where none was."""
    values = [
        e.replica_divergence
        for node in nodes
        for e in node.events
        if isinstance(e, OuterStep)
        and e.kind == "paired"
        and e.replica_divergence is not None
        and start <= e.time < end
    ]
    return sum(values) / len(values) if values else None


def clock_of(node: SwarmNode) -> float:
    """The clock that a node wrote last."""
    clocks = [e.clock for e in node.events if isinstance(e, InnerStep | OuterStep | Account)]
    return clocks[-1] if clocks else 0.0


async def merged_loss(overrides: Sequence[str], nodes: Sequence[Node], folder: Path) -> float:
    """Held-out loss, nats per token, of the mean of these nodes' slow weights; NaN where a stage saved none.

    Computed here, from the saved files: nobody's answers have a part in it.
    """
    run = load_config(CONFIG, list(overrides)).run
    ended = [(node, node.stopped.final_weights) for node in nodes if node.stopped is not None]
    saved = {node.folder / weights: node.stage for node, weights in ended if weights is not None}
    if set(saved.values()) != set(range(run.stages)):
        return float("nan")
    return (await asyncio.to_thread(merge_run, run, list(saved), folder, lambda _: None)).loss
