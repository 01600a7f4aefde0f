"""Real daemons that end in whatever way and are started again by the same command: they go on where they were."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from noloco_node.config.load import load_config
from noloco_node.errors import ExitCode
from noloco_node.launch.local_swarm import LocalSwarm, SwarmNode
from noloco_node.storage.checkpoint import CheckpointFolder
from noloco_node.storage.run_folder import RunFolder
from noloco_node.telemetry.events import (
    Account,
    AnyEvent,
    CheckpointTaken,
    Evaluation,
    EventReader,
    InnerStep,
    NodeStarted,
    NodeStopped,
    OuterStep,
    StateDownload,
)
from tests.chaos.paced_node import OPERATION_SECONDS
from tests.chaos.swarm import program
from tests.support import eventually

pytestmark = [pytest.mark.daemons, pytest.mark.timeout(900)]

MICRO = Path(__file__).parent.parent / "configs" / "micro.yaml"
OFTEN = ("node.checkpoint_outer_steps=1", "node.checkpoint_seconds=0.5", "run.outer.max_lag_tokens=10_000_000")
ENDLESS = "run.inner.target_tokens=1_000_000_000"

E = TypeVar("E", NodeStarted, InnerStep, Evaluation, Account, CheckpointTaken, NodeStopped, OuterStep, StateDownload)


def command(folder: Path, *arguments: str, settings: tuple[str, ...]) -> list[str]:
    """`noloco-node run` in this folder. A device of a set speed where OPERATION_SECONDS is in the environment."""
    overrides = [part for setting in settings for part in ("--set", setting)]
    return [*program(), "run", str(MICRO), *arguments, "--run-folder", str(folder), *overrides]


@contextlib.asynccontextmanager
async def daemon(*arguments: str, folder: Path) -> AsyncIterator[tuple[Process, list[AnyEvent]]]:
    """A process of this command and the events that it writes from now on. It is killed at the end of the block,
    should it still run. What it prints is added to `folder`/printed."""
    reader, events = EventReader(folder / "events.jsonl"), list[AnyEvent]()
    list(reader.new_events())
    with (folder / "printed").open("ab") as printed:
        process = await asyncio.create_subprocess_exec(*arguments, stdout=printed, stderr=printed)

    async def follow() -> None:
        while True:
            events.extend(reader.new_events())
            await asyncio.sleep(0.1)

    following = asyncio.create_task(follow())
    try:
        yield process, events
    finally:
        following.cancel()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        events.extend(reader.new_events())


def of(kind: type[E], events: Sequence[AnyEvent]) -> list[E]:
    """The events of a kind."""
    return [event for event in events if isinstance(event, kind)]


async def test_a_node_that_is_told_to_leave_saves_itself_and_the_same_command_goes_on(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It trains on while the disk refuses its checkpoints, and says so; on SIGTERM it leaves a checkpoint whose account
    closes, and says goodbye. Started again it goes on from there: clock, counts, text, identity. Another run in its
    folder is refused."""
    monkeypatch.setenv(OPERATION_SECONDS, "0.03")  # it trains for as long as others take to look
    folder = tmp_path / "node"
    alone = command(folder, settings=("run.model.stages=1", ENDLESS, *OFTEN))
    folder.mkdir()
    async with daemon(*alone, folder=folder) as (process, events):
        await eventually(lambda: RunFolder(folder).claimed, 60, "it has found nothing strange in its folder")
        (folder / "checkpoints").write_text("in the way")
        failed = await eventually(lambda: of(CheckpointTaken, events), 120, "a checkpoint was tried")
        assert "File exists" in failed[0].error or "Not a directory" in failed[0].error
        steps = len(of(InnerStep, events))
        await eventually(lambda: len(of(InnerStep, events)) > steps + 10, 60, "it trains on")
        (folder / "checkpoints").unlink()
        await eventually(lambda: any(not e.error for e in of(CheckpointTaken, events)), 60, "the disk takes it again")
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 180) == ExitCode.INTERRUPTED
    stopped = of(NodeStopped, events)
    assert [(event.reason, event.final_weights) for event in stopped] == [("interrupted", "final")]
    first, last, account = of(NodeStarted, events)[0], of(CheckpointTaken, events)[-1], of(Account, events)[-1]
    saved = CheckpointFolder(folder / "checkpoints", keep=2).newest(first.run_id, 0)
    assert saved is not None
    assert str(saved.path) == last.path
    ledger, progress = saved.standing.ledger, saved.standing.progress
    assert ledger["drawn"] == ledger["trained"] + ledger["dropped"] + len(saved.standing.held)
    assert (ledger["drawn"], ledger["trained"], progress.tokens) == (account.drawn, account.trained, account.tokens)
    printed = (folder / "printed").read_text()
    assert printed.count("no checkpoint can be written") == printed.count("checkpoints are written to") == 1

    async with daemon(*alone, folder=folder) as (process, events):
        stepped = await eventually(lambda: of(InnerStep, events), 120, "it trains again")
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 180) == ExitCode.INTERRUPTED
    again = of(NodeStarted, events)[0]
    assert (again.origin, again.resumed, again.peer_id) == ("checkpoint", True, first.peer_id)
    assert (stepped[0].step, stepped[0].clock) == (progress.steps + 1, progress.clock + 1024)
    assert "begins from its own checkpoint: nobody else answers" in (folder / "printed").read_text()
    account = of(Account, events)[-1]
    assert account.drawn == account.trained + account.dropped + account.held_at_end > ledger["drawn"]

    peers = (folder / "peers.json").read_text()
    assert first.run_id in peers
    other = command(folder, settings=("run.model.stages=1", ENDLESS, *OFTEN, "run.inner.learning_rate=0.5"))
    refused = await asyncio.to_thread(subprocess.run, other, capture_output=True, text=True, timeout=300)
    assert refused.returncode == ExitCode.RUN_FOLDER
    assert "holds run 'micro'" in refused.stderr
    assert "remedy: name another folder with --run-folder" in refused.stderr
    assert (folder / "peers.json").read_text() == peers, "who is refused overwrites nothing of the other run"
    await _comes_home_to_a_run_begun_anew(folder, alone)


async def _comes_home_to_a_run_begun_anew(folder: Path, alone: list[str]) -> None:
    """Somebody begins the same run again, from its first weights: the state of its first life stays out of it."""
    anew, newest = folder.parent / "anew", CheckpointFolder(folder / "checkpoints", keep=2).birth
    anew.mkdir()
    async with daemon(*[str(anew) if part == str(folder) else part for part in alone], folder=anew) as (
        process,
        events,
    ):
        await eventually(lambda: of(InnerStep, events), 120, "the new life trains")
        address = of(NodeStarted, events)[0].addresses[0]
        home = [*alone, "--initial-peers", address]
        refused = await asyncio.to_thread(subprocess.run, home, capture_output=True, text=True, timeout=300)
        assert refused.returncode == ExitCode.RUN_FOLDER
        assert "run 'micro' was begun anew: node.run_folder holds a state of the life" in refused.stderr
        await eventually(lambda: of(CheckpointTaken, events), 60, "the new life keeps its state")
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 180) == ExitCode.INTERRUPTED
    clocks = [event.clock for event in of(InnerStep, events)]
    run = of(NodeStarted, events)[0].run_id
    other = CheckpointFolder(anew / "checkpoints", keep=2).birth(run)
    assert other == RunFolder(anew).birth(run) != newest(run) == RunFolder(folder).birth(run)
    assert max(after - before for before, after in itertools.pairwise(clocks)) == 1024, "no old clock came in"


async def test_a_swarm_killed_as_a_whole_resumes_and_so_does_one_node_of_it(tmp_path: Path, temporary: Path) -> None:
    """kill -9 ends all daemons at once, and the same command starts them again.

    Each goes on from its own checkpoint, near the clock at which they died, the loss where it was. Then one node is
    killed and started again by hand, in a swarm that lives. It takes its own checkpoint and its own stage, although its
    former record is still in the directory. All reach the end, and all books close.
    """
    target = 80_000
    settings = (f"run.inner.target_tokens={target}", "run.evaluation.every_tokens=8192", "run.limits.grace_seconds=20")
    config = load_config(MICRO, [*OFTEN, *settings])
    swarm = LocalSwarm(config, tmp_path / "run")
    try:
        await swarm.start()
        waiting = asyncio.create_task(swarm.wait())
        judged = [swarm.node("s0-r0"), swarm.node("s0-r1")]
        await eventually(lambda: all(len(losses(node)) >= 3 for node in judged), 120, "the loss has been seen to fall")
        before = [losses(node)[:3] for node in judged]
        begun = [written(node) for node in swarm.nodes]
        await eventually(
            lambda: all(written(node) > count + 1 for node, count in zip(swarm.nodes, begun, strict=True)),
            60,
            "everyone has a checkpoint from after that",
        )
        swarm.kill_all()
        await waiting
    finally:
        await swarm.stop()
    assert [node.exit_code for node in swarm.nodes] == [-signal.SIGKILL] * 4
    died_at = max(event.clock for node in swarm.nodes for event in of(InnerStep, node.events))
    assert 10_000 < died_at < 0.9 * target

    resumed = LocalSwarm(config, tmp_path / "run")
    victim, host, heads = resumed.node("s1-r1"), resumed.node("s1-r0"), [resumed.node("s0-r0"), resumed.node("s0-r1")]
    try:
        await resumed.start()
        waiting = asyncio.create_task(resumed.wait())
        begun = written(victim)
        await eventually(lambda: written(victim) > begun, 60, "a checkpoint of the second life")
        for head in heads:  # nobody trains while it is away: the swarm must not reach its end without it
            os.kill(head.pid, signal.SIGSTOP)
        resumed.kill(victim)
        await eventually(lambda: victim.exit_code is not None, 120, "it is dead")
        assert host.started is not None
        joining = command(victim.folder, "--initial-peers", host.started.addresses[0], settings=())
        joining[joining.index(str(MICRO))] = str(tmp_path / "run" / "config.yaml")
        async with daemon(*joining, folder=victim.folder) as (process, events):
            started = (await eventually(lambda: of(NodeStarted, events), 120, "it is back"))[0]
            for head in heads:
                os.kill(head.pid, signal.SIGCONT)
            await waiting
            assert await asyncio.wait_for(process.wait(), 180) == ExitCode.OK
    finally:
        for head in heads:
            if head.running:
                os.kill(head.pid, signal.SIGCONT)
        await resumed.stop()
    assert (started.origin, started.stage) == ("checkpoint", 1)
    assert of(InnerStep, events), "it trained on"
    for node in resumed.nodes:
        lives = of(NodeStarted, node.events)
        assert [event.origin for event in lives[:2]] == ["seed", "checkpoint"]
        assert len({event.peer_id for event in lives}) == 1
        steps = [event for event in of(InnerStep, node.events) if event.time > lives[1].time]
        assert 0.3 * died_at < steps[0].clock < died_at + 10 * 1024
        assert [event.reason for event in of(NodeStopped, node.events)] == ["target_reached"]
    for head, first in zip(heads, before, strict=True):
        account = of(Account, head.events)[-1]
        assert account.drawn == account.trained + account.dropped + account.held_at_end
        assert account.dropped == 0
        assert account.clock > 0.95 * target
        second = [e.loss for e in of(Evaluation, head.events) if e.time > of(NodeStarted, head.events)[1].time]
        assert first[0] - 0.5 > first[-1] > second[0] - 0.3, "the loss goes on where it was"
        assert second[-1] <= second[0]


def losses(node: SwarmNode) -> list[float]:
    """What its evaluations found, over all its lives."""
    return [event.loss for event in of(Evaluation, node.events)]


def written(node: SwarmNode) -> int:
    """Checkpoints that a node has on its disk, over all its lives."""
    return sum(not event.error for event in of(CheckpointTaken, node.events))
