"""A process that tests fork is what one that is spawned would be: nothing but the time to start tells them apart."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from asyncio.subprocess import PIPE
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.fork_server import SPAWN, Popen, spawning
from tests.support import eventually

COMMAND = [sys.executable, "-m", "tests.says_itself"]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere every process is spawned")


def both(work: Callable[[], Any]) -> tuple[Any, Any]:
    """What it gives with processes that are forked, and with such that are spawned."""
    forked = work()
    with spawning():
        return forked, work()


def comparable(done: subprocess.CompletedProcess[str]) -> tuple[dict[str, Any], float, int, str]:
    """What a process said, its chance, its exit code, and its last complaint."""
    said, chance = json.loads(done.stdout)
    return said, chance, done.returncode, done.stderr.splitlines()[-1]


@pytest.mark.skipif(bool(os.environ.get(SPAWN)), reason="every process is spawned")
def test_what_a_part_of_the_suite_starts_is_forked() -> None:
    """A variable that pytest had set by then made every daemon of two parts import everything for itself."""
    assert Popen.client is not None
    assert Popen.client.takes(os.environ)


@pytest.mark.parametrize("how", ["0", "7", "ends", "fails", "says"])
def test_it_sees_and_says_what_a_spawned_one_does(how: str, tmp_path: Path) -> None:
    """Arguments, environment, parent, session, signals, files, and what is read; then each way to end."""
    environment = {**os.environ, "NOLOCO_SAID": how, "TMPDIR": str(tmp_path)}
    given: dict[str, Any] = {"env": environment, "start_new_session": how == "7", "input": "word\n"}
    command = [*COMMAND, how, "b c"]
    forked, spawned = both(lambda: comparable(subprocess.run(command, capture_output=True, text=True, **given)))
    assert forked[0] == spawned[0]
    assert forked[2:] == spawned[2:]
    assert forked[1] != spawned[1], "no two processes have the same chances"
    assert forked[0]["parent"] == os.getpid()


async def test_it_is_a_child_that_signals_reach() -> None:
    """Told to end, interrupted, killed; stopped it stands still. asyncio starts it as `subprocess` does."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
        codes: list[int] = []
        for way in (contextlib.nullcontext, spawning):
            with way():
                process = await asyncio.create_subprocess_exec(*COMMAND, "waits", stdout=PIPE, stderr=PIPE)
            assert process.stdout is not None
            await process.stdout.readline()
            process.send_signal(signal.SIGSTOP)
            await eventually(lambda pid=process.pid: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
            process.send_signal(number)
            if number != signal.SIGKILL:
                # A second signal polls first: it would take a dead one's exit status away from asyncio's watcher.
                process.send_signal(signal.SIGCONT)
            await process.communicate()
            codes.append(process.returncode or 0)
        assert codes[0] == codes[1] == -number
