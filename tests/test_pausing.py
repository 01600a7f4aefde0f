"""The word to pause or to go on, where nothing can be paused: a clear answer, and no harm."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from pathlib import Path

import pytest

from noloco_node.diagnostics import pausing
from noloco_node.diagnostics.pausing import tell_nodes
from noloco_node.errors import ExitCode, UserError
from noloco_node.node.interrupts import Interrupts, PauseSwitch, Word
from noloco_node.storage.run_folder import RunFolder
from tests.support import eventually
from tests.telemetry import made_events as made
from tests.telemetry.made_events import write


async def test_a_node_that_leaves_is_not_paused_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """Before that its words reach the switch."""
    heard, interrupts = list[Word](), Interrupts()
    interrupts.word = heard.append
    interrupts.graceful(asyncio.Event())
    interrupts.on_word("pause")
    interrupts.on_signal()
    with caplog.at_level(logging.WARNING):
        interrupts.on_word("pause")
    assert heard == ["pause"]
    assert "leaving already: 'pause' changes nothing" in caplog.text


async def test_a_process_without_a_switch_says_that_there_is_nothing_to_pause(caplog: pytest.LogCaptureFixture) -> None:
    """The signal would end a process that does not hear it."""
    with caplog.at_level(logging.INFO):
        Interrupts().on_word("resume")
    assert "only a node that trains can be paused" in caplog.text


def test_a_signal_is_never_sent_to_a_process_that_it_would_end(tmp_path: Path) -> None:
    """This process holds the folder and has no handler; where nobody holds it, there is nothing to pause."""
    write(tmp_path, made.started("s0-r0"))
    with pytest.raises(UserError, match="no node runs in") as nobody:
        list(tell_nodes(tmp_path, "pause"))
    assert nobody.value.exit_code is ExitCode.RUN_FOLDER
    with RunFolder(tmp_path).lock(), pytest.raises(UserError, match="does not listen for SIGUSR1") as deaf:
        list(tell_nodes(tmp_path, "pause"))
    assert str(os.getpid()) in deaf.value.message
    assert deaf.value.exit_code is ExitCode.FAILURE


def test_a_signal_is_never_sent_to_another_process_of_the_nodes_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node in a container writes down its number there: outside that was the system's first process, which listens
    for the signal too."""
    write(tmp_path, made.started("s0-r0"))
    monkeypatch.setattr(pausing, "_pid_of", lambda _folder: os.getppid())
    monkeypatch.setattr(pausing, "_listens", lambda *_: True)
    killed = list[int]()
    monkeypatch.setattr(os, "kill", lambda pid, _number: killed.append(pid))
    with RunFolder(tmp_path).lock(), pytest.raises(UserError, match="is not the node") as another:
        list(tell_nodes(tmp_path, "pause"))
    assert "docker exec" in another.value.remedy
    assert not killed


def test_one_node_that_cannot_be_told_keeps_no_other_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a machine's nodes one was about to leave: those after it were never told, and nothing was said of those
    before."""
    monkeypatch.setattr(pausing, "STUCK_SECONDS", 0.2)
    told, folders = list[Path](), [tmp_path / name for name in ("a", "b", "c")]

    def send(folder: RunFolder, _pid: int, _word: Word) -> None:
        if folder.path == folders[1]:
            raise UserError(ExitCode.FAILURE, "process 7 does not listen for SIGUSR1", "wait until it is up")
        told.append(folder.path)

    monkeypatch.setattr(pausing, "_send", send)
    with contextlib.ExitStack() as stack:
        for folder in folders:
            write(folder, made.started("s0-r0"))
            stack.enter_context(RunFolder(folder).lock())
        lines, saying = list[str](), tell_nodes(tmp_path, "pause")
        with pytest.raises(UserError, match="b: process 7 does not listen"):
            lines.extend(saying)
    assert told == [folders[0], folders[2]]


def test_a_node_that_ended_while_it_was_told_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was about to end does not listen any more, and its owner heard that it was not up yet."""
    write(tmp_path, made.started("s0-r0"))
    with contextlib.ExitStack() as lock:
        lock.enter_context(RunFolder(tmp_path).lock())

        def ends(_folder: RunFolder, _pid: int, _word: Word) -> None:
            lock.close()
            raise UserError(ExitCode.FAILURE, "process 7 does not listen for SIGUSR1", "wait until it is up")

        monkeypatch.setattr(pausing, "_send", ends)
        assert list(tell_nodes(tmp_path, "pause")) == [f"{tmp_path}: it has ended just now"]


def test_a_system_that_does_not_say_who_listens_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS has no /proc: the answer was that there is no such file."""
    write(tmp_path, made.started("s0-r0"))
    monkeypatch.setattr(pausing, "ABOUT_PROCESSES", tmp_path / "missing")
    with RunFolder(tmp_path).lock(), pytest.raises(UserError, match="does not say whether process") as unknown:
        list(tell_nodes(tmp_path, "resume"))
    assert f"kill -USR2 {os.getpid()}" in unknown.value.remedy


async def test_those_that_wait_for_a_rest_or_its_end_hear_of_it() -> None:
    """What copies a state waits for the one, a paused node for the other."""
    switch = PauseSwitch(())
    begins = asyncio.create_task(switch.begins())
    await asyncio.sleep(0)
    assert not begins.done()
    switch.told("pause")
    await begins
    assert "noloco-node resume" in switch.why()
    ends = asyncio.create_task(switch.ends())
    switch.told("resume")
    await eventually(ends.done, 5, "it goes on")
