"""A real daemon that is paused and resumed by the commands."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from pathlib import Path

import pytest

from noloco_node.errors import ExitCode
from noloco_node.storage.checkpoint import CheckpointFolder
from noloco_node.telemetry.events import (
    Account,
    AnyEvent,
    CheckpointTaken,
    Doing,
    InnerStep,
    NodeStarted,
    NodeStopped,
    OuterStep,
    StateDownload,
)
from tests.chaos.paced_node import OPERATION_SECONDS
from tests.daemons.test_resume import ENDLESS, command, daemon, of
from tests.support import eventually

pytestmark = [pytest.mark.daemons, pytest.mark.timeout(900)]


async def say(word: str, folder: Path) -> tuple[int, str]:
    """Exit code and output of `noloco-node WORD FOLDER`."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "noloco_node", word, str(folder)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    told, _ = await process.communicate()
    return process.returncode or 0, told.decode()


def paused(events: list[AnyEvent]) -> list[Doing]:
    """Each time that the node said so."""
    return [event for event in events if isinstance(event, Doing) and event.what == "paused"]


async def test_a_paused_node_is_at_rest_and_goes_on_where_it_was(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is computed while it is paused, and its process lives. The account and the clock go on as if there had
    been no pause. SIGTERM ends it while it is paused, and its checkpoint stands."""
    monkeypatch.setenv(OPERATION_SECONDS, "0.05")
    monkeypatch.setenv("TZ", "XYZ-5")
    folder = tmp_path / "node"
    folder.mkdir()
    alone = command(folder, settings=("run.model.stages=1", ENDLESS))
    async with daemon(*alone, folder=folder) as (process, events):
        await eventually(lambda: len(of(InnerStep, events)) > 5, 120, "it trains")
        (folder / "checkpoints").write_text("in the way")  # what the disk refuses is kept
        process.send_signal(signal.SIGUSR1)
        await eventually(lambda: paused(events), 30, "it is paused")
        taken = await eventually(lambda: of(CheckpointTaken, events), 30, "its state is to be saved")
        assert taken[0].error
        (folder / "checkpoints").unlink()
        steps = of(InnerStep, events)[-1]
        code, printed = await say("pause", folder)
        assert (code, "it is paused already" in printed) == (ExitCode.OK, True), printed
        await asyncio.sleep(1.0)  # of which it would train ten steps
        assert of(InnerStep, events)[-1] == steps

        count = len(of(InnerStep, events))
        code, printed = await say("resume", folder)
        assert (code, "it goes on" in printed) == (ExitCode.OK, True), printed
        later = await eventually(lambda: of(InnerStep, events)[count:], 60, "it trains again")
        assert later[0].step == steps.step + 1
        assert later[0].clock == steps.clock + 1024
        assert len(of(NodeStarted, events)) == 1
        saves = len(of(CheckpointTaken, events))
        code, printed = await say("pause", folder)
        assert (code, "noloco-node resume goes on" in printed) == (ExitCode.OK, True), printed
        await eventually(lambda: len(of(CheckpointTaken, events)) > saves, 30, "it is told to leave once it rests")
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 180) == ExitCode.INTERRUPTED
    saved = CheckpointFolder(folder / "checkpoints", keep=2).newest(of(NodeStarted, events)[0].run_id, 0)
    assert saved is not None
    last, ledger = of(InnerStep, events)[-1], saved.standing.ledger
    assert (saved.standing.progress.steps, saved.standing.progress.clock) == (last.step, last.clock)
    assert ledger["drawn"] == ledger["trained"] + ledger["dropped"] + len(saved.standing.held)
    account = of(Account, events)[-1]
    assert (ledger["drawn"], ledger["trained"]) == (account.drawn, account.trained)
    assert of(NodeStopped, events)[-1].detail == "while it was paused", "nothing was under way"
    code, printed = await say("pause", folder)
    assert (code, "no node runs" in printed) == (ExitCode.RUN_FOLDER, True), printed

    elsewhen = (time.gmtime().tm_hour + 5 + 12) % 24
    hours = f"node.hours={elsewhen}:00-{elsewhen}:30"
    alone = command(folder, settings=("run.model.stages=1", ENDLESS, hours))
    async with daemon(*alone, folder=folder) as (process, events):
        said = await eventually(lambda: paused(events), 120, "it rests outside its hours before it takes a state")
        assert f"until {elsewhen:02}:00 XYZ (node.hours)" in said[0].detail
        assert not of(NodeStarted, events)
        assert said[0].detail in (folder / "printed").read_text(), "who started it outside its hours is told"
        process.send_signal(signal.SIGUSR2)
        later = await eventually(lambda: of(InnerStep, events), 120, "it goes on when it is told to")
        assert later[0].step == last.step + 1
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 180) == ExitCode.INTERRUPTED


async def test_a_pause_while_a_node_joins_copies_or_leaves_is_answered_and_loses_nothing(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A joiner is paused as it starts, and again while it copies, which its donor's narrow line holds up. Each time it
    rests and says so, and then goes on to copy and to train. Told to pause as it leaves, it leaves with all saved."""
    monkeypatch.setenv(OPERATION_SECONDS, "0.05")
    folders = tmp_path / "donor", tmp_path / "joiner"
    for folder in folders:
        folder.mkdir()
    settings = ("run.model.stages=1", "run.limits.chunk_bytes=16384", ENDLESS)
    donor = command(folders[0], settings=(*settings, "node.uplink_mbit=0.5"))
    async with daemon(*donor, folder=folders[0]) as (giver, given):
        await eventually(lambda: of(OuterStep, given), 180, "there is more to copy than the first weights")
        joins = "--initial-peers", of(NodeStarted, given)[0].addresses[0]
        joiner = command(folders[1], *joins, settings=settings)
        async with daemon(*joiner, folder=folders[1]) as (process, events):
            await _paused_as_soon_as_it_listens(folders[1])
            await eventually(lambda: paused(events), 180, "it rests before it copies")
            await say("resume", folders[1])
            await eventually(lambda: of(StateDownload, events), 180, "it copies")
            process.send_signal(signal.SIGUSR1)
            await eventually(lambda: len(paused(events)) == 2, 60, "it rests while it copies")
            code, printed = await say("pause", folders[1])
            assert (code, "it is paused already" in printed, of(NodeStarted, events)) == (ExitCode.OK, True, []), (
                printed
            )
            await say("resume", folders[1])
            stepped = await eventually(lambda: of(InnerStep, events), 180, "it copies anew, and trains")
            assert stepped[0].clock > of(OuterStep, given)[0].clock
            process.send_signal(signal.SIGTERM)
            code, printed = await say("pause", folders[1])
            leaves = ("about to", "it has", "no node runs", "leaves with everything saved")
            assert code in (ExitCode.OK, ExitCode.RUN_FOLDER, ExitCode.FAILURE), printed
            assert any(words in printed for words in leaves), printed
            assert await asyncio.wait_for(process.wait(), 120) == ExitCode.INTERRUPTED
        giver.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(giver.wait(), 120) == ExitCode.INTERRUPTED
    started, last = of(NodeStarted, events)[0], of(InnerStep, events)[-1]
    assert started.origin == "peer"
    saved = CheckpointFolder(folders[1] / "checkpoints", keep=2).newest(started.run_id, 0)
    assert saved is not None
    assert saved.standing.progress.clock >= last.clock


async def _paused_as_soon_as_it_listens(folder: Path) -> None:
    """Before that the command says that nothing was sent, since it would end the process."""
    while True:
        code, printed = await say("pause", folder)
        if code == ExitCode.OK:
            assert "it has been told" in printed or "noloco-node resume goes on" in printed, printed
            return
        assert code in (ExitCode.RUN_FOLDER, ExitCode.FAILURE), printed
        words = ("no node has run there", "no node runs", "does not listen", "is not known")
        assert any(each in printed for each in words), printed
