"""What a run came to: the held-out loss of the model that its nodes saved."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from noloco_node.config.load import load_config
from noloco_node.exporting.write import merge_run
from tests.chaos.swarm import CONFIG, Node


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
