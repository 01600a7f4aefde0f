"""Real daemons: the only replica of a stage leaves, and its state is neither lost nor set back without a word."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import sys
from asyncio.subprocess import Process
from pathlib import Path

import pytest

from noloco_node.errors import ExitCode
from noloco_node.storage.checkpoint import STATE
from noloco_node.telemetry.events import CheckpointTaken, InnerStep, NodeStarted
from tests.chaos.paced_node import OPERATION_SECONDS
from tests.daemons.test_resume import ENDLESS, MICRO, OFTEN, daemon, of
from tests.support import eventually

pytestmark = [pytest.mark.daemons, pytest.mark.timeout(900)]


def node(folder: Path, stage: int, *arguments: str) -> list[str]:
    """A node of a stage in its folder, as its owner starts it each time."""
    settings = (ENDLESS, "node.reassign=never", *OFTEN)
    overrides = [part for setting in settings for part in ("--set", setting)]
    place = ["--stage", str(stage), "--run-folder", str(folder), *arguments]
    return [sys.executable, "-m", "tests.daemons.patient_node", "run", str(MICRO), *place, *overrides]


def printed(folder: Path) -> str:
    """What a node has said so far, in one line."""
    return " ".join((folder / "printed").read_text().split())


async def leaves(process: Process) -> None:
    """Ctrl-C, to the end."""
    process.send_signal(signal.SIGINT)
    assert await asyncio.wait_for(process.wait(), 120) == ExitCode.INTERRUPTED


def damage(folder: Path) -> None:
    """Cut off the half of every checkpoint."""
    states = list((folder / "checkpoints").rglob(STATE))
    assert states
    for state in states:
        state.write_bytes(state.read_bytes()[: state.stat().st_size // 2])


async def test_a_stage_whose_only_holder_leaves_is_waited_for_and_a_node_with_damaged_checkpoints_copies(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user that ends such a node by Ctrl-C is warned. A newcomer that knows its peers from a file names the holder
    and waits, and copies once that is back with its checkpoint. Then it finds its own checkpoints damaged, says so, and
    copies."""
    monkeypatch.setenv(OPERATION_SECONDS, "0.04")
    head, holder, newcomer = (tmp_path / name for name in ("head", "holder", "newcomer"))
    for folder in (head, holder, newcomer):
        folder.mkdir()
    async with daemon(*node(head, 0), folder=head) as (entry, first):
        entrance = (await eventually(lambda: of(NodeStarted, first), 120, "the first node"))[0].addresses[0]
        joining = node(holder, 1, "--initial-peers", entrance)
        coming = node(newcomer, 1, "--initial-peers", entrance)
        async with daemon(*joining, folder=holder) as (process, events):
            name = (await eventually(lambda: of(NodeStarted, events), 120, "the holder"))[0].peer_id
            await eventually(lambda: len(of(InnerStep, events)) > 10, 120, "it trains")
            await eventually(lambda: name in holders(head), 120, "the first node has written down what it holds")
            await leaves(process)
            left = of(CheckpointTaken, events)[-1].clock
        assert left > 0.0
        assert "THE LAST REPLICA OF STAGE 1 LEAVES" in printed(holder)

        shutil.copy(head / "peers.json", newcomer)
        async with daemon(*coming, folder=newcomer) as (process, events):
            await eventually(lambda: "THE STATE OF STAGE 1 IS ELSEWHERE" in printed(newcomer), 120, "it waits")
            assert f"it was held by {name}" in printed(newcomer)
            async with daemon(*joining, folder=holder) as (returned, back):
                await eventually(lambda: of(InnerStep, events), 90, "it trains with the state of the holder")
                assert [event.origin for event in of(NodeStarted, back)] == ["checkpoint"]
                assert [event.origin for event in of(NodeStarted, events)] == ["peer"]
                assert of(InnerStep, events)[0].clock > left
                await eventually(lambda: any(not e.error for e in of(CheckpointTaken, events)), 120, "a checkpoint")
                await leaves(process)
                assert "LAST REPLICA" not in printed(newcomer)
                damage(newcomer)
                async with daemon(*coming, folder=newcomer) as (healed, again):
                    started = await eventually(lambda: of(NodeStarted, again), 120, "it is back")
                    assert started[0].origin == "peer"
                    assert "CHECKPOINTS ARE DAMAGED" in printed(newcomer)
                    await leaves(healed)
                await leaves(returned)
        await leaves(entry)
        assert "STARTS AGAIN" not in printed(newcomer) + printed(holder)


def holders(folder: Path) -> list[str]:
    """Peers whose state the node's file of peers names."""
    path = folder / "peers.json"
    return list(json.loads(path.read_text()).get("held", {})) if path.exists() else []
