"""What a person can get wrong, through the real command: one screen, setting and remedy, an exit code of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from noloco_node.config.load import load_config
from noloco_node.diagnostics.status import status_lines
from noloco_node.errors import ExitCode
from noloco_node.storage.run_folder import RunFolder
from noloco_node.telemetry.events import AnyEvent, EventFile, NodeStarted, NodeStopped, read_events

pytestmark = [pytest.mark.daemons, pytest.mark.timeout(180)]

MICRO = Path(__file__).parent.parent / "configs" / "micro.yaml"
NOBODY = "/ip4/127.0.0.1/tcp/{port}/p2p/12D3KooWKrCeA5nCWnQ5gm5FLAszTb6cDMk2hX8BH7Hj8MhGeFx9"


def command(*arguments: str | Path) -> list[str]:
    """`noloco-node` with these arguments."""
    return [sys.executable, "-m", "noloco_node", *map(str, arguments)]


def refused(*arguments: str | Path) -> tuple[int, str]:
    """Exit code and complaint of a command that must fail; the complaint fits one screen and is no traceback."""
    done = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=120)
    assert done.returncode != 0, done.stdout
    assert "Traceback" not in done.stderr + done.stdout
    assert "remedy" in done.stderr
    assert len(done.stderr.splitlines()) <= 24, done.stderr
    return done.returncode, done.stderr


@pytest.fixture
def busy_port() -> Iterator[int]:
    """A port that someone listens on."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield int(holder.getsockname()[1])


def events_of(file: Path) -> list[AnyEvent]:
    """Those that it has written so far."""
    return read_events(file) if file.exists() else []


@contextlib.contextmanager
def running_node(folder: Path) -> Iterator[NodeStarted]:
    """A real daemon that waits for others, ended by SIGTERM."""
    arguments = command("run", MICRO, "--stage", "1", "--run-folder", folder)
    with subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            events = folder / "events.jsonl"
            deadline = time.monotonic() + 60
            while not (started := [e for e in events_of(events) if isinstance(e, NodeStarted)]):
                assert process.poll() is None, "the node ended during its start"
                assert time.monotonic() < deadline
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.1)
            yield started[0]
        finally:
            os.kill(process.pid, signal.SIGTERM)
            assert process.wait(20) == ExitCode.INTERRUPTED


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--set", "run.outer.gama=0.3"], ExitCode.CONFIG, ["run.outer.gama", "gamma"]),
        (["--set", "run.outer.gamma=2.4"], ExitCode.CONFIG, ["gamma", "2.4", "admissible"]),
        (["--set", "run.model.stages=9"], ExitCode.CONFIG, ["model.stages", "9", "num_hidden_layers"]),
        (["--set", "run.model.config.tie_word_embeddings=true"], ExitCode.CONFIG, ["tie_word_embeddings"]),
        (
            ["--set", "run.data.source=text", "--set", "run.data.path=/nowhere"],
            ExitCode.DATA,
            ["data.path", "/nowhere"],
        ),
        (["--stage", "7"], ExitCode.CONFIG, ["node.stage", "7"]),
        (["--run-folder", "/proc/nowhere"], ExitCode.RUN_FOLDER, ["/proc/nowhere"]),
    ],
    ids=["wrong key", "gamma", "stages", "tied", "no text", "no such stage", "run folder"],
)
def test_a_wrong_setting(
    arguments: list[str], code: ExitCode, words: list[str], tmp_path: Path, temporary: Path
) -> None:
    """Named with its value and what to do about it."""
    folder = [] if "--run-folder" in arguments else ["--run-folder", str(tmp_path / "node")]
    stage = [] if "--stage" in arguments else ["--stage", "0"]
    returned, complaint = refused("run", MICRO, *folder, *stage, *arguments)
    assert returned == code, complaint
    assert all(word in complaint for word in words), complaint


def test_a_taken_identity_and_another_run(tmp_path: Path, temporary: Path) -> None:
    """A second node with a living node's identity is turned away, and so is one whose RunSpec differs."""
    with running_node(tmp_path / "first") as first:
        key = tmp_path / "first" / "identity.key"
        code, complaint = refused("run", MICRO, "--run-folder", tmp_path / "second", "--identity", key)
        assert code == ExitCode.IDENTITY_TAKEN
        assert str(first.pid) in complaint
        other_key = ["--identity", tmp_path / "other.key"]
        code, complaint = refused("run", MICRO, "--run-folder", tmp_path / "first", *other_key)
        assert code == ExitCode.RUN_FOLDER
        assert str(first.pid) in complaint
        assert not any("stopped" in line for line in status_lines(tmp_path / "first")), "it has left no word there"
        copied = tmp_path / "copied.key"
        copied.write_bytes(key.read_bytes())
        copied.chmod(0o600)
        joining = ["--initial-peers", first.addresses[0]]
        code, complaint = refused("run", MICRO, "--run-folder", tmp_path / "third", "--identity", copied, *joining)
        assert code == ExitCode.IDENTITY_TAKEN, complaint
        other = ["--set", "run.inner.learning_rate=0.5"]
        code, complaint = refused("run", MICRO, "--run-folder", tmp_path / "fourth", *joining, *other)
        assert code == ExitCode.WRONG_RUN
        assert first.run_id in complaint


def test_a_refused_start_leaves_no_trace_in_another_runs_folder(
    tmp_path: Path, temporary: Path, busy_port: int
) -> None:
    """The run may be another, or have ended, and it may be refused before either is read. `status` goes on saying what
    the run's own node said last."""
    folder = RunFolder.create(tmp_path / "done")
    run = load_config(MICRO).run
    folder.claim(run.run_id, run.name)
    folder.mark_ended(run.run_id, run.name)
    diary = EventFile(folder.events)
    diary.write(
        NodeStopped(
            reason="target_reached",
            detail="",
            outer_steps_taken=3,
            partners={},
            final_weights=None,
            seconds=1.0,
            time=9.0,
        )
    )
    diary.close()
    before = {path: path.read_bytes() for path in folder.path.iterdir()}
    for more in (
        [],
        ["--set", "run.inner.learning_rate=0.5"],
        ["--port", str(busy_port)],
        ["--set", "node.device=none"],
    ):
        code, complaint = refused("run", MICRO, "--run-folder", folder.path, *more)
        assert code == ExitCode.RUN_FOLDER, complaint
        assert {path: path.read_bytes() for path in folder.path.iterdir()} == before
    nobody = NOBODY.format(port=busy_port)
    code, _ = refused("join", nobody, "--run-folder", folder.path)
    assert code == ExitCode.PEERS_UNREACHABLE
    assert folder.events.read_bytes() == before[folder.events]
    assert any("stopped" in line and "target reached" in line for line in status_lines(folder.path))
