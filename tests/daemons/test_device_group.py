"""One daemon for each device, from one command: their folders, identities and ports; and real ones on two devices."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from noloco_node.config.node_settings import NodeSettings
from noloco_node.errors import ExitCode, UserError
from noloco_node.launch.device_group import DeviceGroup, devices_of, members_of
from noloco_node.telemetry.events import InnerStep, NodeStarted, NodeStopped, read_events
from noloco_node.telemetry.web import TARGETS
from tests.support import eventually
from tests.telemetry import made_events as made

MICRO = Path(__file__).parent.parent / "configs" / "micro.yaml"


def test_all_means_every_gpu_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """If there is none the error says what to do."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert devices_of("all") == ["cuda:0", "cuda:1", "cuda:2"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="finds no GPU") as caught:
        devices_of("all")
    assert "cpu" in caught.value.remedy
    assert devices_of("cuda:1, cuda:3") == ["cuda:1", "cuda:3"]
    with pytest.raises(UserError, match="a name is missing"):
        devices_of("cuda:0,")


def test_no_two_daemons_share_a_folder_an_identity_or_a_port() -> None:
    """That holds on one device twice, too; ports that the system chooses stay 0."""
    plain = NodeSettings(run_folder=Path("runs/x"), port=31337, metrics_port=9100)
    for settings in (plain, plain.model_copy(update={"identity": Path("keys/own.key")})):
        members = members_of(["cpu", "cpu", "cuda:1"], settings)
        for values in ([m.folder for m in members], [m.identity for m in members]):
            assert len(set(values)) == 3
        assert [m.port for m in members] == [31337, 31338, 31339]
        assert [m.metrics_port for m in members] == [9100, 9101, 9102]
    free = members_of(["cpu", "cpu"], NodeSettings())
    assert [(m.port, m.metrics_port) for m in free] == [(0, None), (0, None)]


def test_each_daemon_announces_its_own_port() -> None:
    """All announced the first one's, so that nobody reached the others."""
    settings = NodeSettings(port=31337, announce=("203.0.113.7:31337",))
    with pytest.raises(UserError, match=r"'203\.0\.113\.7:31337' has one port"):
        members_of(["cpu", "cpu"], settings)
    assert len(members_of(["cpu"], settings)) == 1
    assert len(members_of(["cpu", "cpu"], settings.model_copy(update={"announce": ("203.0.113.7",)}))) == 2


DAEMON = """
import sys, time
from pathlib import Path
folder = Path(sys.argv[sys.argv.index("--run-folder") + 1])
folder.mkdir(parents=True)
(folder / "events.jsonl").write_text((Path(sys.argv[1]) / folder.name).read_text())
sys.stdin.read()
"""
"""Writes what it finds under its name, and ends when its launcher wants it to."""


async def test_prometheus_finds_the_daemons_of_a_group_as_they_come_up(tmp_path: Path) -> None:
    """Those that show their metrics; one that listens everywhere is found on this machine."""
    words, folder = tmp_path / "words", tmp_path / "run"
    words.mkdir()
    for name, address in (("0-cpu", "0.0.0.0:9100"), ("1-cpu", "127.0.0.1:9101"), ("2-cpu", None)):
        event = made.started("s0-r0").model_copy(update={"metrics_address": address})
        (words / name).write_text(event.model_dump_json() + "\n", encoding="utf-8")
    members = members_of(["cpu"] * 3, NodeSettings(run_folder=folder))
    said = list[str]()

    def say(line: str) -> None:
        said.append(line)
        raise BrokenPipeError(errno.EPIPE, "nobody listens to the group, which trains all the same")

    group = DeviceGroup([sys.executable, "-S", "-c", DAEMON, str(words)], members, folder, founds=True, say=say)
    running = asyncio.create_task(group.run())

    def all_there() -> bool:
        return (folder / TARGETS).exists() and len(json.loads((folder / TARGETS).read_text())) == 2

    await eventually(all_there, within=60, what="both have a target")
    os.kill(os.getpid(), signal.SIGUSR1)  # it ended the group, and its daemons with it
    await eventually(lambda: any("there is nothing to pause" in line for line in said), 30, "it is passed on")
    os.kill(os.getpid(), signal.SIGTERM)
    assert await running == ExitCode.NODE_DIED, "this daemon knows no drain"
    assert json.loads((folder / TARGETS).read_text()) == [
        {"targets": ["127.0.0.1:9100"], "labels": {"node": "0-cpu", "run": "made-up"}},
        {"targets": ["127.0.0.1:9101"], "labels": {"node": "1-cpu", "run": "made-up"}},
    ]


@pytest.mark.daemons
@pytest.mark.timeout(900)
async def test_one_command_trains_on_two_devices_and_ctrl_c_ends_both_in_order(tmp_path: Path, temporary: Path) -> None:
    """The first founds the swarm, the second joins it and takes the other stage; each has an identity of its own."""
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "noloco_node", "run", str(MICRO), "--devices", "cpu,cpu"]
    process = await asyncio.create_subprocess_exec(
        *(
            *command,
            "--run-folder",
            str(folder),
            "--metrics-port",
            "0",
            "--set",
            "run.inner.target_tokens=1_000_000_000",
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    children: list[psutil.Process] = []
    try:
        files = [folder / name / "events.jsonl" for name in ("0-cpu", "1-cpu")]

        def trains() -> bool:
            return all(f.exists() and any(isinstance(e, InnerStep) for e in read_events(f)) for f in files)

        def both_are_targets() -> bool:
            return (folder / TARGETS).exists() and len(json.loads((folder / TARGETS).read_text())) == 2

        await eventually(trains, within=150, what="both train")
        await eventually(both_are_targets, what="the group has seen that both are up")
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 4, "two daemons and their p2pd"
        os.kill(process.pid, signal.SIGINT)
        output, _ = await asyncio.wait_for(process.communicate(), 120)
    finally:
        for child in (process, *children):
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                child.kill()
        await process.wait()
    assert process.returncode == ExitCode.INTERRUPTED
    started = [next(e for e in read_events(f) if isinstance(e, NodeStarted)) for f in files]
    assert started[0].peer_id != started[1].peer_id
    assert {e.stage for e in started} == {0, 1}
    targets = json.loads((folder / TARGETS).read_text(encoding="utf-8"))
    assert [(t["targets"], t["labels"]["node"]) for t in targets] == [
        ([started[0].metrics_address], "0-cpu"),
        ([started[1].metrics_address], "1-cpu"),
    ]
    for file in files:
        stopped = [e for e in read_events(file) if isinstance(e, NodeStopped)]
        assert [(e.reason, e.final_weights) for e in stopped] == [("interrupted", "final")]
    assert output.decode().count("ended, exit code 130") == 2
