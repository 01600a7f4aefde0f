"""Real daemons share a text out in blocks: what each of them really drew, though one is killed and one leaves."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from noloco_node.config.load import load_config
from noloco_node.data.windows import load_windows
from noloco_node.launch.local_swarm import LocalSwarm, SwarmNode
from noloco_node.telemetry.events import Account, TextBlock
from tests.chaos.paced_node import OPERATION_SECONDS
from tests.chaos.swarm import PACED
from tests.support import eventually

pytestmark = [pytest.mark.daemons, pytest.mark.timeout(400)]

MICRO = Path(__file__).parent.parent / "configs" / "micro.yaml"
BLOCK, BLOCKS = 160, 24


def text_of_blocks(folder: Path) -> Path:
    """Documents of one window each (a byte a token, and the separator), of which a few are held out."""
    rng = random.Random(0)
    folder.mkdir()
    lines = ["".join(rng.choices("abcdefgh ", k=32)) for _ in range(round(BLOCK * (BLOCKS - 0.5) / 0.95))]
    for number in range(0, len(lines), 33):
        (folder / f"{number:05}.txt").write_text("".join(line + "\n" for line in lines[number : number + 33]))
    return folder


def blocks_of(node: SwarmNode) -> list[TextBlock]:
    """What became of the blocks that it took."""
    return [event for event in node.events if isinstance(event, TextBlock)]


def begun_by(node: SwarmNode) -> int:
    """How many blocks it has begun so far."""
    return sum(event.what == "begun" for event in blocks_of(node))


def finished_by(nodes: Sequence[SwarmNode]) -> Counter[int]:
    """How many nodes have read each slot to its end."""
    return Counter(event.slot for node in nodes for event in blocks_of(node) if event.what == "finished")


def left_by(node: SwarmNode) -> set[int]:
    """The slots that it has begun and not finished."""
    slots = {what: {event.slot for event in blocks_of(node) if event.what == what} for what in ("begun", "finished")}
    return slots["begun"] - slots["finished"]


@pytest.mark.long
async def test_one_pass_is_read_once_though_a_node_is_killed_and_one_leaves(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four replicas of stage 0 on devices of a set speed, and blocks of four seconds, five looks at the directory. No
    block is read twice, and only what the two have begun or claimed is left."""
    monkeypatch.setenv(OPERATION_SECONDS, "0.1")
    config = load_config(
        MICRO,
        (
            "run.model.stages=1",
            "local_swarm.replicas=4",
            "run.data.source=text",
            f"run.data.path={text_of_blocks(tmp_path / 'text')}",
            f"run.data.block_windows={BLOCK}",
            "run.inner.target_tokens=1_000_000_000",
            "run.limits.record_seconds=4",
            "node.checkpoint_outer_steps=1000000",
        ),
    )
    row = -(-load_windows(config.run.data, 256).train_count // BLOCK)
    swarm = LocalSwarm(config, tmp_path / "run", command=(*PACED, "run"))
    try:
        await swarm.start()
        waiting = asyncio.create_task(swarm.wait())
        await eventually(lambda: finished_by(swarm.nodes).total() >= 3, 120, "the text is read")
        gone = swarm.nodes[:2]
        swarm.kill(gone[0])
        begun_before = begun_by(gone[1])
        await eventually(lambda: begun_by(gone[1]) > begun_before, 60, "it is in the middle of a block", every=0.01)
        os.kill(gone[1].pid, signal.SIGTERM)

        def whole() -> bool:
            finished = finished_by(swarm.nodes)
            unread = set(range(row)) - finished.keys() - left_by(gone[0]) - left_by(gone[1])
            return len(unread) <= len(gone) and max(finished, default=0) >= row

        await eventually(whole, 250, "a pass is read", every=0.2)
        waiting.cancel()
    finally:
        await swarm.stop()
    finished = finished_by(swarm.nodes)
    assert sum(finished[slot] > 1 for slot in range(row)) <= 0.05 * row
    books = [event for event in swarm.nodes[2].events if isinstance(event, Account)][-1]
    assert books.text_slots["finished"] > 0
