"""Real daemons share a text out in blocks: what each of them really drew, though one is killed and one leaves."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
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
BLOCK, BLOCKS = 320, 9


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


def read_by(nodes: list[SwarmNode]) -> dict[int, list[tuple[int, int]]]:
    """For each slot the window from which, and to which, each node has read it. The end of a node that was killed
    within a block is not known: it read as far as the next reader began."""
    read: dict[int, list[tuple[int, int]]] = defaultdict(list)
    unfinished: list[tuple[int, int]] = []
    for node in nodes:
        begun: dict[int, int] = {}
        for event in blocks_of(node):
            if event.what == "begun":
                begun[event.slot] = event.position
            elif event.slot in begun:
                read[event.slot].append((begun.pop(event.slot), event.position))
        unfinished += begun.items()
    for slot, start in unfinished:
        end = min((first for first, _ in read[slot] if first >= start), default=start)
        read[slot].append((start, end))
    return read


def starts(spans: Iterable[tuple[int, int]]) -> set[int]:
    """Where reading began, or was gone on with."""
    return {start for start, _ in spans}


@pytest.mark.long
async def test_one_pass_is_read_once_though_a_node_is_killed_and_one_leaves(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four replicas of stage 0 on devices of a set speed, and blocks of eight seconds, four looks at the directory.
    Overlap below a hundredth, coverage above 99."""
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
    windows = load_windows(config.run.data, 256).train_count
    row = -(-windows // BLOCK)
    swarm = LocalSwarm(config, tmp_path / "run", command=(*PACED, "run"))
    try:
        await swarm.start()
        waiting = asyncio.create_task(swarm.wait())

        def finished() -> int:
            return sum(event.what == "finished" for node in swarm.nodes for event in blocks_of(node))

        await eventually(lambda: finished() >= 3, 120, "the text is read")
        swarm.kill(swarm.nodes[0])
        begun_before = begun_by(swarm.nodes[1])

        def has_begun_another() -> bool:
            return begun_by(swarm.nodes[1]) > begun_before

        await eventually(has_begun_another, 60, "it is in the middle of a block", every=0.01)
        os.kill(swarm.nodes[1].pid, signal.SIGTERM)

        def whole() -> bool:
            read = read_by(swarm.nodes)
            return sum(end - start for slot in range(row) for start, end in read[slot]) > 0.99 * windows

        await eventually(whole, 250, "a pass is read", every=0.2)

        def gone_on_with() -> bool:
            read = read_by(swarm.nodes)
            given_back = [event for event in blocks_of(swarm.nodes[1]) if event.what == "given_back"]
            return bool(given_back) and all(event.position in starts(read[event.slot]) for event in given_back)

        await eventually(gone_on_with, 60, "another goes on just where the leaver gave its blocks back", every=0.2)
        waiting.cancel()
    finally:
        await swarm.stop()
    read = read_by(swarm.nodes)
    again = 0
    for slot in range(row):
        spans = sorted(read[slot])
        again += sum(max(0, before[1] - after[0]) for before, after in pairwise(spans))
    assert again / windows < 0.01
    books = [event for event in swarm.nodes[2].events if isinstance(event, Account)][-1]
    assert books.text_slots["finished"] > 0
