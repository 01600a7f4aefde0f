"""Real daemons that go where they are needed: a stage without replicas comes back, a poor one gets help."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from noloco_node.config.load import Config, load_config
from noloco_node.launch.local_swarm import LocalSwarm, SwarmNode
from noloco_node.telemetry.events import Account, Evaluation, InnerStep, NodeReassigned, NodeStopped
from tests.chaos.swarm import program
from tests.support import eventually, last_account

pytestmark = [pytest.mark.daemons, pytest.mark.timeout(400)]

MICRO = Path(__file__).parent.parent / "configs" / "micro.yaml"
TARGET = 80_000
LOST = 1.0
"""The held-out loss, in nats, that tells of a lost stage. A stage that begins anew costs 1.4 to 2.3 of it here, one
restored from a copy of the last second 0 to 0.5. The run is so short that a second is a fifth of it."""


def micro(*overrides: str) -> Config:
    """Two stages of three replicas each, all of which may move."""
    settings = ("local_swarm.replicas=3", "node.reassign=always", f"run.inner.target_tokens={TARGET}")
    return load_config(MICRO, (*settings, f"run.evaluation.every_tokens={TARGET // 10}", *overrides))


@contextlib.asynccontextmanager
async def running(config: Config, folder: Path) -> AsyncIterator[tuple[LocalSwarm, asyncio.Task[None]]]:
    """The swarm, up, and the wait for its end. Devices of a set speed where OPERATION_SECONDS is in the environment."""
    swarm = LocalSwarm(config, folder, command=(*program(), "run"))
    try:
        await swarm.start()
        waiting = asyncio.create_task(swarm.wait())
        yield swarm, waiting
        waiting.cancel()
    finally:
        await swarm.stop()


def of_stage(swarm: LocalSwarm, stage: int) -> list[SwarmNode]:
    """The nodes that began at a stage."""
    return [node for node in swarm.nodes if node.stage == stage]


def clock_of(node: SwarmNode) -> float:
    """The node's clock at its last inner step."""
    return next((e.clock for e in reversed(node.events) if isinstance(e, InnerStep)), 0.0)


def moves(swarm: LocalSwarm) -> list[NodeReassigned]:
    """All moves so far."""
    return [e for node in swarm.nodes for e in node.events if isinstance(e, NodeReassigned)]


def said(node: SwarmNode) -> str:
    """What a node has logged."""
    return node.log.read_text()


def losses(swarm: LocalSwarm) -> list[Evaluation]:
    """All held-out losses in the order of their time."""
    return sorted((e for n in swarm.nodes for e in n.events if isinstance(e, Evaluation)), key=lambda e: e.time)


async def kill_stage_1_and_wait(swarm: LocalSwarm, waiting: asyncio.Task[None]) -> tuple[NodeReassigned, float, float]:
    """kill -9 of all replicas of stage 1 once it has been trained a while, then the run's end. The first move, the last
    held-out loss before it and the first one after it. On the survivors every sample is accounted for, none dropped."""
    await eventually(lambda: min(map(clock_of, swarm.nodes)) > 0.55 * TARGET, within=150, what="most of the run")
    for node in of_stage(swarm, 1):
        swarm.kill(node)
    await asyncio.wait_for(asyncio.shield(waiting), 250)
    move, *later = sorted(moves(swarm), key=lambda event: event.time)
    assert {(event.from_stage, event.stage, event.why) for event in (move, *later)} == {(0, 1, "lost")}
    # On a busy machine a second one may go before it can know of the first; it finds the stage served, and copies.
    assert [event.origin for event in later] in ([], ["peer"])
    survivors = of_stage(swarm, 0)
    for node in survivors:
        account = last_account(node.events)
        assert account.drawn == account.trained + account.dropped + account.held_at_end > 0
        assert account.dropped == 0
        assert [e.reason for e in node.events if isinstance(e, NodeStopped)] == ["target_reached"], node.last_lines()
    assert any(e.missing_stages == [1] for node in survivors for e in node.events if isinstance(e, Account))
    movers = [node for node in survivors if any(isinstance(e, NodeReassigned) for e in node.events)]
    stayed = [node for node in survivors if node not in movers]
    assert stayed
    # A node that looked only after another had come in their place has seen no gap.
    held_back = [n for n in survivors if "stage 1 has lost its last replica: microbatches are held back" in said(n)]
    assert held_back
    assert all("stage 1 is served again" in said(node) for node in stayed if node in held_back)
    # One that went too may come when the run is as good as over.
    (first,) = [node for node in movers if move in node.events]
    assert any(isinstance(e, InnerStep) and e.time > move.time for e in first.events)
    before = [e.loss for e in losses(swarm) if e.time < move.time][-1]
    after = next(e.loss for e in losses(swarm) if e.time > move.time)
    return move, before, after


IN_SUBSPACE = ("run.model.subspace_rank=8", "run.model.embedding_std=0.3")


@pytest.mark.long
@pytest.mark.parametrize("subspace", [(), IN_SUBSPACE])
async def test_a_stage_is_restored_from_the_copy_that_another_stage_kept(
    subspace: tuple[str, ...], tmp_path: Path, temporary: Path
) -> None:
    """With standby_copies the loss goes on near where it was, in a subspace as well."""
    config = micro("run.standby_copies=1", "run.limits.standby_seconds=0.5", *subspace)
    async with running(config, tmp_path / "run") as (swarm, waiting):
        move, before, after = await kill_stage_1_and_wait(swarm, waiting)
        assert move.origin == "standby"
        assert move.clock > 0.15 * TARGET
        assert after < before + LOST, "most of what the stage had learnt is kept"
        logs = "".join(map(said, of_stage(swarm, 0)))
        assert "STARTS AGAIN" not in logs
        assert logs.count("stage 1 was restored from a copy") == 1
