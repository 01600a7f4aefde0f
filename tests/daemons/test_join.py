"""A stranger joins a real swarm that is under way, with nothing but the configuration and one address."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from noloco_node.config.load import load_config
from noloco_node.errors import ExitCode
from noloco_node.local_swarm import LocalSwarm
from noloco_node.telemetry.events import AnyEvent, EventReader, NodeStarted, NodeStopped, OuterStep
from tests.support import eventually, nothing_left_behind

pytestmark = [pytest.mark.daemons, pytest.mark.timeout(240)]

MICRO = Path(__file__).parent.parent / "configs" / "micro.yaml"
ENDLESS = "run.inner.target_tokens=1_000_000_000"


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Temporary files of the daemons, empty again at the end."""
    with nothing_left_behind() as base:
        monkeypatch.setenv("TMPDIR", str(base))
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
        yield base


@contextlib.asynccontextmanager
async def joining(folder: Path, address: str) -> AsyncIterator[list[AnyEvent]]:
    """A daemon that joins through `address`; its events so far. It is told to leave at the end of the block."""
    arguments = ["run", str(MICRO), "--set", ENDLESS, "--initial-peers", address, "--run-folder", str(folder)]
    quiet = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "noloco_node", *arguments, stdout=quiet, stderr=quiet
    )
    reader, events = EventReader(folder / "events.jsonl"), list[AnyEvent]()

    async def follow() -> None:
        while True:
            events.extend(reader.new_events())
            await asyncio.sleep(0.1)

    following = asyncio.create_task(follow())
    try:
        yield events
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 20) == ExitCode.INTERRUPTED
        events.extend(reader.new_events())
    finally:
        following.cancel()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def test_a_late_joiner_copies_a_fellow_trains_and_leaves_in_order(tmp_path: Path, temporary: Path) -> None:
    """It takes a stage by itself, starts from a fellow's state at its clock, averages with fellows, and on SIGTERM
    says goodbye: the others see it come and go."""
    swarm = LocalSwarm(load_config(MICRO, [ENDLESS]), tmp_path / "run")
    try:
        await swarm.start()
        waiting = asyncio.create_task(swarm.wait())
        first = swarm.node("s0-r0")
        await eventually(lambda: sum(isinstance(e, OuterStep) for e in first.events) >= 3, within=60, what="rounds")
        assert first.started is not None
        async with joining(tmp_path / "joiner", first.started.addresses[0]) as events:
            started = await eventually(lambda: [e for e in events if isinstance(e, NodeStarted)], 60, "it is up")
            paired = await eventually(
                lambda: [e for e in events if isinstance(e, OuterStep) and e.kind == "paired"], 60, "it has averaged"
            )
        assert started[0].origin == "peer"
        assert started[0].run_id == first.started.run_id
        assert paired[0].round > 1, "it went on from the donor's round"
        assert paired[0].clock > 10_000
        known = {node.started.peer_id for node in swarm.nodes if node.started}
        assert paired[0].partner in known
        stopped = [e for e in events if isinstance(e, NodeStopped)]
        assert [e.reason for e in stopped] == ["interrupted"]
        assert stopped[0].final_weights == "final"
        waiting.cancel()
    finally:
        await swarm.stop()
    assert not any(node.died for node in swarm.nodes)
