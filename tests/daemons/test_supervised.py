"""kill -9 for the p2pd of one daemon in a real swarm: the node lives on, and the run comes to its end."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest

from noloco_node.config.load import load_config
from noloco_node.errors import ExitCode
from noloco_node.launch.local_swarm import LocalSwarm, SwarmNode
from noloco_node.telemetry.events import InnerStep, P2pdRestarted
from tests.chaos.paced_node import OPERATION_SECONDS
from tests.chaos.swarm import PACED
from tests.support import eventually, last_account

pytestmark = [pytest.mark.daemons, pytest.mark.timeout(300)]

MICRO = Path(__file__).parent.parent / "configs" / "micro.yaml"


def p2pd_of(node: SwarmNode) -> psutil.Process:
    """The p2pd that a daemon has running."""
    return next(c for c in psutil.Process(node.pid).children() if any("p2pd" in part for part in c.cmdline()[:6]))


def listens_at(process: psutil.Process) -> str:
    """Where a p2pd was told to listen."""
    return next(part for part in process.cmdline() if part.startswith("-hostAddrs="))


def steps(node: SwarmNode) -> int:
    """Inner steps taken."""
    return sum(isinstance(event, InnerStep) for event in node.events)


@pytest.mark.long
async def test_a_swarm_outlives_the_p2pd_of_one_of_its_nodes(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the p2pd of the only replica of a stage, so that nothing can go on without it. It is back under its peer id
    and port, the others reach it again, the run ends in order, and every account closes with nothing lost."""
    overrides = ["local_swarm.replicas=1", "run.limits.record_seconds=20", "run.inner.target_tokens=24_576"]
    monkeypatch.setenv(OPERATION_SECONDS, "0.02")  # such nodes are not nearby for each other
    swarm = LocalSwarm(load_config(MICRO, overrides), tmp_path / "run", command=(*PACED, "run"))
    try:
        await swarm.start()
        waiting = asyncio.create_task(swarm.wait())
        victim = swarm.node("s1-r0")
        await eventually(lambda: steps(victim) >= 5, within=60, what="it trains")
        assert victim.started is not None
        port = victim.started.addresses[0].split("/")[4]
        first, before = p2pd_of(victim), steps(victim)
        os.kill(first.pid, signal.SIGKILL)
        second = await eventually(lambda: next(iter(successors(victim, first)), None), within=60, what="a new p2pd")
        assert listens_at(second).endswith(f"/tcp/{port}")
        await eventually(lambda: steps(victim) > before + 5, within=60, what="others send it microbatches again")
        await asyncio.wait_for(waiting, 200)
    finally:
        await swarm.stop()
    assert [node.exit_code for node in swarm.nodes] == [ExitCode.OK, ExitCode.OK]
    assert "p2pd is back" in victim.log.read_text()
    assert [(event.cause, event.restarts) for event in victim.events if isinstance(event, P2pdRestarted)] == [
        ("died", 1)
    ]
    assert victim.stopped is not None
    assert victim.stopped.reason == "target_reached"
    books = last_account(swarm.node("s0-r0").events)
    assert books.drawn == books.trained + books.dropped + books.held_at_end > 0
    assert books.dropped == 0, "nothing was lost"


def successors(node: SwarmNode, former: psutil.Process) -> list[psutil.Process]:
    """p2pd processes of a node that came after this one."""
    children = psutil.Process(node.pid).children()
    return [c for c in children if c.pid != former.pid and any(part.startswith("-hostAddrs=") for part in c.cmdline())]
