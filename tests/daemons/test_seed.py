"""A seed holds a swarm together whose nodes know nothing but its address."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from noloco_node.errors import ExitCode
from noloco_node.small_commands import ask_health
from noloco_node.storage.run_folder import RunFolder
from noloco_node.telemetry.events import Account, NodeStarted, NodeStopped, OuterStep, read_events
from tests.support import eventually, printed_file

pytestmark = [pytest.mark.daemons, pytest.mark.timeout(420)]

MICRO = Path(__file__).parent.parent / "configs" / "micro.yaml"


@contextlib.asynccontextmanager
async def command(folder: Path, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """`noloco-node` with these arguments, its words in `folder`/printed; killed at the end if it still runs."""
    with printed_file(folder) as printed:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "noloco_node", *arguments, "--run-folder", str(folder)),
            stdout=printed,
            stderr=printed,
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), 20)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def address_of(folder: Path) -> str:
    """What the seed prints for others."""
    words = await eventually(lambda: (folder / "printed").read_text().partition(" is up\n")[2], 120, "the seed is up")
    return words.split()[-1]


@pytest.mark.parametrize("knows_the_run", [True, False])
async def test_a_swarm_that_knows_only_its_seed_trains_to_its_end(
    tmp_path: Path, temporary: Path, knows_the_run: bool
) -> None:
    """Two stages of which no node was told of another; the seed serves no stage, and is still there at the end. One
    that was given the run hands it to strangers, who join with its address alone, and says when it is over."""
    folders = [tmp_path / f"node{number}" for number in range(3)]
    given = [str(MICRO)] if knows_the_run else []
    async with command(tmp_path / "seed", "seed", *given) as seed, contextlib.AsyncExitStack() as stack:
        address = await address_of(tmp_path / "seed")
        entering = ["join", address] if knows_the_run else ["run", str(MICRO), "--initial-peers", address]
        nodes = [
            await stack.enter_async_context(command(folder, *entering, "--stage", stage))
            for folder, stage in zip(folders, "010", strict=True)
        ]
        assert [await asyncio.wait_for(node.wait(), 300) for node in nodes] == [ExitCode.OK] * 3
        assert seed.returncode is None
        if knows_the_run:
            await eventually(lambda: RunFolder(tmp_path / "seed").ended, 60, "the seed has seen the end")
            late = await stack.enter_async_context(command(tmp_path / "late", "join", address))
            assert await asyncio.wait_for(late.wait(), 120) == ExitCode.NO_DONOR
            assert "has come to its end: so say the peers" in (tmp_path / "late" / "printed").read_text()
        seed.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(seed.wait(), 20) == ExitCode.INTERRUPTED
    events = [read_events(folder / "events.jsonl") for folder in folders]
    started = [next(e for e in each if isinstance(e, NodeStarted)) for each in events]
    assert [e.stage for e in started] == [0, 1, 0]
    for each in events:
        assert next(e for e in each if isinstance(e, NodeStopped)).reason == "target_reached"
        assert max(e.nodes_per_stage for e in each if isinstance(e, Account)) == [2, 1], "the seed is no replica"
    paired = {e.partner for each in events for e in each if isinstance(e, OuterStep) and e.partner}
    assert paired == {started[0].peer_id, started[2].peer_id}
    seen = json.loads((folders[0] / "peers.json").read_text())["peers"]
    assert set(seen) >= {address.rpartition("/")[2], started[1].peer_id}


async def test_a_seed_is_light_and_says_when_it_knows_no_run(tmp_path: Path, temporary: Path) -> None:
    """It loads no model library, and says that it is alive; who asks it for a run is told what to do."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    async with command(tmp_path / "seed", "seed", "--set", f"node.metrics_port={port}") as seed:
        address = await address_of(tmp_path / "seed")
        assert await asyncio.to_thread(ask_health, "127.0.0.1", port) == (True, "ok")
        loaded = {Path(row.path).parent.name for row in psutil.Process(seed.pid).memory_maps()}
        assert not loaded & {"tokenizers", "pyarrow", "safetensors"}
        async with command(tmp_path / "stranger", "join", address) as stranger:
            assert await asyncio.wait_for(stranger.wait(), 120) == ExitCode.PEERS_UNREACHABLE
        assert "a seed that knows of no run" in (tmp_path / "stranger" / "printed").read_text()
