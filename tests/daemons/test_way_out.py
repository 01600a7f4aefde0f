"""Real daemons a part of which hangs, whichever: they end within their time, and say what they still waited for."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from noloco_node.errors import ExitCode
from noloco_node.storage.held import sweep_dead_folders
from noloco_node.telemetry.events import EventReader, InnerStep, NodeStopped
from tests.chaos.paced_node import OPERATION_SECONDS
from tests.daemons.hung_node import PART
from tests.made_runs import MICRO, OWN_TEXT
from tests.support import eventually, p2pd_children, printed_file

pytestmark = [pytest.mark.daemons, pytest.mark.timeout(900)]

LEAVES = 3.0
ALONE = ("run.inner.target_tokens=1_000_000_000", "run.model.stages=1", "node.drain_seconds=0.5")
SLOW_MACHINE = 100.0
NOBODY = "12D3KooWKrCeA5nCWnQ5gm5FLAszTb6cDMk2hX8BH7Hj8MhGeFx9"


@asynccontextmanager
async def hung_node(part: str, folder: Path, *settings: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """One of which that part hangs; what it says goes to `printed` in its folder."""
    overrides = [word for setting in (*ALONE, *OWN_TEXT, *settings) for word in ("--set", setting)]
    with printed_file(folder) as printed:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.daemons.hung_node", "run", str(MICRO), "--run-folder", str(folder)),
            *overrides,
            stdout=printed,
            stderr=printed,
            env={**os.environ, PART: part, OPERATION_SECONDS: "0.02"},
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            os.kill(process.pid, signal.SIGKILL)
        await process.wait()


@pytest.mark.parametrize(
    ("part", "waits_for"), [("weights", "_save_weights (node/stay.py"), ("loop", "thread MainThread: ")]
)
async def test_no_part_that_hangs_holds_a_node_that_was_told_to_leave(
    part: str, waits_for: str, tmp_path: Path, temporary: Path
) -> None:
    """Nor does its p2pd; the exit code is that of a node that was told to leave, and its last event says what it
    was."""
    before, folder = set(p2pd_children()), tmp_path / "node"
    reader = EventReader(folder / "events.jsonl")
    async with hung_node(part, folder, f"node.leave_seconds={LEAVES:g}") as process:
        await eventually(lambda: [e for e in reader.new_events() if isinstance(e, InnerStep)], 150, "it trains")
        process.send_signal(signal.SIGTERM)
        told = time.monotonic()
        assert await asyncio.wait_for(process.wait(), LEAVES + SLOW_MACHINE) == ExitCode.INTERRUPTED
        assert time.monotonic() - told >= LEAVES, "it has its whole time"
    said = (folder / "printed").read_text()
    _, hangs, words = said.partition("HANGS")
    assert hangs
    assert re.search(r"noloco-node: leaving has taken \d+ s and is given up", words)
    assert waits_for in words
    assert "hung_node" not in words, "only this package's own places are named"
    stopped = [event for event in reader.new_events() if isinstance(event, NodeStopped)]
    assert [event.reason for event in stopped] == ["failed"]
    assert "is given up" in stopped[0].detail
    await eventually(lambda: set(p2pd_children()) <= before, what="its p2pd is gone")
    sweep_dead_folders()  # as the next node does


async def test_a_node_whose_device_is_lost_ends_by_itself(tmp_path: Path, temporary: Path) -> None:
    """It would refuse whatever it is asked for ever. With a code by which a service manager starts it again."""
    async with hung_node("device", folder := tmp_path / "node") as process:
        assert await asyncio.wait_for(process.wait(), SLOW_MACHINE) == ExitCode.CHECK_FAILED
    said = (folder / "printed").read_text()
    assert "the device answers nothing any more: CUDA error: unspecified launch failure" in said
    sweep_dead_folders()


async def test_a_node_whose_device_has_no_memory_for_long_ends_by_itself(tmp_path: Path, temporary: Path) -> None:
    """It says so once as it begins, and what to do as it ends; the text goes on where it was. No defect is told of."""
    async with hung_node("memory", folder := tmp_path / "node") as process:
        assert await asyncio.wait_for(process.wait(), SLOW_MACHINE) == ExitCode.CHECK_FAILED
    said = (folder / "printed").read_text()
    assert said.count("there is no memory for a microbatch now, so it is refused: CUDA out of memory") == 1
    assert re.search(r"the device has had no memory for a microbatch for \d+ s \(CUDA out of memory", said)
    assert "serve a smaller stage with --stage" in said
    assert "Traceback" not in said
    sweep_dead_folders()


async def test_who_is_told_to_leave_before_it_trains_waits_for_nothing_that_was_begun(
    tmp_path: Path, temporary: Path
) -> None:
    """A large stage that is being built, a server that sends no text: the process has ended long before its time."""
    async with hung_node("building", folder := tmp_path / "node") as process:
        await eventually(lambda: "HANGS" in (folder / "printed").read_text(), 150, "it builds its stage")
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), SLOW_MACHINE) == ExitCode.INTERRUPTED
    assert "is given up" not in (folder / "printed").read_text()


async def test_a_seed_that_is_told_to_end_as_it_begins_waits_for_nobody(tmp_path: Path, temporary: Path) -> None:
    """Here for a peer that takes its call and says nothing."""
    called = asyncio.Event()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        called.set()
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()

    before = set(p2pd_children())
    listener = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    with printed_file(folder := tmp_path / "seed") as printed:
        seed = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "noloco_node", "seed", "--run-folder", str(folder)),
            *("--initial-peers", f"/ip4/127.0.0.1/tcp/{port}/p2p/{NOBODY}"),
            stdout=printed,
            stderr=printed,
        )
    try:
        await asyncio.wait_for(called.wait(), 150)
        seed.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(seed.wait(), SLOW_MACHINE) == ExitCode.INTERRUPTED
        assert set(p2pd_children()) <= before
    finally:
        if seed.returncode is None:
            os.kill(seed.pid, signal.SIGKILL)
        await seed.wait()
        listener.close()
