"""A whole swarm of real daemons on this machine: it ends by itself, or when told to, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from noloco_node.cli.main import main
from noloco_node.config.load import Config, load_config
from noloco_node.data.reading import held_out_windows
from noloco_node.errors import ExitCode, UserError
from noloco_node.launch.local_swarm import STOP_SECONDS, LocalSwarm, Observer, SwarmNode
from noloco_node.storage.run_folder import RunFolder
from noloco_node.telemetry.events import Evaluation, InnerStep, OuterStep, read_events
from noloco_node.telemetry.summary import Summary
from tests.chaos.paced_node import OPERATION_SECONDS
from tests.chaos.swarm import PACED
from tests.support import eventually, last_account

pytestmark = [pytest.mark.daemons, pytest.mark.timeout(240)]

MICRO = Path(__file__).parent / "configs" / "micro.yaml"
ENDLESS = "run.inner.target_tokens=1_000_000_000"
SHORT = "run.inner.target_tokens=24_576"
TWO_NODES = (ENDLESS, "local_swarm.replicas=1")


class LauncherProcess:
    """`noloco-node swarm` in a process and session of its own."""

    def __init__(self, run_folder: Path, temporary: Path, *overrides: str) -> None:
        self.run_folder = run_folder
        command = [sys.executable, "-m", "noloco_node", "swarm", str(MICRO), "--run-folder", str(run_folder)]
        self.process = subprocess.Popen(
            [*command, *(part for override in overrides for part in ("--set", override))],
            env={**os.environ, "TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": str(run_folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.seen: dict[int, psutil.Process] = {}

    def look(self) -> int:
        """Remember all processes below the launcher; their number now."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.seen |= {child.pid: child for child in children}
        return len(children)

    def alive(self) -> list[int]:
        """Which of the processes ever seen still run; a process id that was used anew does not count."""
        return [pid for pid, process in self.seen.items() if _runs(process)]

    def end(self, within: float) -> tuple[int, str]:
        """Exit code and output, once it has ended."""
        output, _ = self.process.communicate(timeout=within)
        return self.process.returncode, output


@pytest.fixture
def launched() -> Iterator[list[LauncherProcess]]:
    """Launchers put in here are killed with all below them, should the test fail before they end."""
    launchers: list[LauncherProcess] = []
    yield launchers
    for launcher in launchers:
        for process in (launcher.process, *launcher.seen.values()):
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                process.kill()
        launcher.process.wait()


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def training(launcher: LauncherProcess) -> bool:
    """True once every node has taken an inner step."""
    launcher.look()
    files = [launcher.run_folder / "nodes" / name / "events.jsonl" for name in ("s0-r0", "s1-r0")]
    return all(file.exists() and b'"inner_step"' in file.read_bytes() for file in files)


def starting(launcher: LauncherProcess) -> bool:
    """True once the first daemon is there, long before it is up."""
    return launcher.look() > 0


def test_a_swarm_trains_to_its_end_and_leaves_what_it_promised(
    tmp_path: Path, temporary: Path, launched: list[LauncherProcess]
) -> None:
    """Exit code 0, a model that transformers can load, figures that agree with each other, a report, a sample."""
    folder = tmp_path / "run"
    launcher = LauncherProcess(folder, temporary, SHORT)
    launched.append(launcher)
    code, output = launcher.end(within=200)
    assert code == ExitCode.OK, output
    for name in ("summary.json", "report/report.html", "sample.txt", "model", "nodes"):
        assert (folder / name).exists()
        assert str(folder / name) in output
    summary = Summary.model_validate_json((folder / "summary.json").read_text(encoding="utf-8"))
    assert (summary.nodes, summary.stages, summary.died) == (4, 2, [])
    targets = json.loads((folder / "targets.json").read_text(encoding="utf-8"))
    assert [row["labels"]["node"] for row in targets] == ["s0-r0", "s1-r0", "s0-r1", "s1-r1"]
    assert len({row["targets"][0] for row in targets}) == 4, "Prometheus finds each node at a port of its own"
    books = summary.microbatches
    assert books.drawn == books.trained + books.dropped + books.held_at_end > 0
    assert set(summary.distinct_partners.values()) == {1}
    for name in ("s0-r0", "s1-r0"):
        account = last_account(read_events(folder / "nodes" / name / "events.jsonl"))
        carried = account.bytes_sent["microbatches"] + account.bytes_received["microbatches"]
        assert account.bytes_nearby > 0.9 * carried > 0, "nodes of one machine talk without p2pd"
    assert summary.tokens < 1.1 * 24_576, "all began together, so the clock is what was trained"
    assert summary.validation_loss is not None
    assert summary.validation_loss_merged is not None
    assert summary.validation_loss_merged < 5.2
    assert summary.validation_loss_merged < summary.validation_loss + 0.05
    page = (folder / "report/report.html").read_text(encoding="utf-8")
    assert f"{summary.validation_loss_merged:.4f}" in page
    assert "Replica divergence" in page
    assert "continued by the model" in (folder / "sample.txt").read_text(encoding="utf-8")
    model, tokenizer = (kind.from_pretrained(folder / "model") for kind in (AutoModelForCausalLM, AutoTokenizer))
    assert model(**tokenizer("import os", return_tensors="pt")).logits.shape == (1, 9, 256)


@pytest.mark.parametrize(
    ("moment", "number"),
    [pytest.param(starting, signal.SIGTERM, marks=[pytest.mark.spawned, pytest.mark.long]), (training, signal.SIGINT)],
    ids=["starting", "training"],
)
async def test_a_signal_ends_the_whole_swarm_in_order(
    tmp_path: Path, temporary: Path, launched: list[LauncherProcess], moment: object, number: signal.Signals
) -> None:
    """Ctrl-C or SIGTERM: exit code 130, no process of the swarm left, and its figures so far are written. Daemons that
    take longer than the launcher waits are killed, so that on a quiet machine it is over within ten seconds."""
    assert STOP_SECONDS < 10.0
    launcher = LauncherProcess(tmp_path / "run", temporary, *TWO_NODES)
    launched.append(launcher)
    assert moment in (starting, training)
    reached = starting if moment is starting else training
    await eventually(lambda: reached(launcher), within=120, what="the moment of the signal", every=0.2)
    assert launcher.alive()
    launcher.process.send_signal(number)
    code, output = await asyncio.to_thread(launcher.end, 60)
    assert code == ExitCode.INTERRUPTED, output
    assert launcher.alive() == []
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert (summary["tokens"] > 0) == (reached is training)


async def test_daemons_end_when_their_launcher_is_killed(
    tmp_path: Path, temporary: Path, launched: list[LauncherProcess]
) -> None:
    """kill -9 of the launcher: nobody is left to stop the daemons, so they stop themselves."""
    launcher = LauncherProcess(tmp_path / "run", temporary, *TWO_NODES)
    launched.append(launcher)
    await eventually(lambda: training(launcher), within=120, what="training", every=0.2)
    assert len(launcher.alive()) >= 4
    launcher.process.kill()
    await eventually(lambda: not launcher.alive(), within=60, what="the end of all daemons", every=0.2)
    launcher.process.wait()
    remove_folder_without_sockets(temporary)


async def test_a_disk_that_fills_is_named_on_the_screen_and_ctrl_c_ends_in_order(
    tmp_path: Path, temporary: Path, launched: list[LauncherProcess]
) -> None:
    """A real full file system: the display used to stand still without a word, and Ctrl-C ended as a defect."""
    folder = tmp_path / "run"
    with small_disk(folder):
        launcher = LauncherProcess(folder, temporary, ENDLESS, "local_swarm.replicas=1", "run.model.stages=1")
        launched.append(launcher)
        events = folder / "nodes" / "s0-r0" / "events.jsonl"
        await eventually(
            lambda: launcher.look() and b'"inner_step"' in (events.read_bytes() if events.exists() else b""),
            within=120,
            every=0.2,
        )
        fill(folder)
        out = launcher.process.stdout
        assert out is not None
        seen = await asyncio.to_thread(lambda: next((line for line in out if "NOTHING CAN BE WRITTEN" in line), ""))
        assert "No space left on device" in seen
        os.kill(launcher.process.pid, signal.SIGINT)
        code, output = await asyncio.to_thread(launcher.end, 60)
        assert code == ExitCode.INTERRUPTED, output
        assert "Traceback" not in output
        assert "the summary cannot be written" in output
        assert await eventually(lambda: not launcher.alive())


def fill(disk: Path) -> None:
    """To the last block."""
    subprocess.run(["mount", "-o", "remount,size=1m", str(disk)], check=True)
    with (disk / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        while filler.write(bytes(4096)):
            pass


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A file system that can be made smaller."""
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8g", "tmpfs", str(folder)], capture_output=True)
    if done.returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def remove_folder_without_sockets(folder: Path) -> None:
    """What a launcher that was killed could not remove: folders, but no socket."""
    assert not [path for path in folder.rglob("*") if path.is_socket()]
    for path in folder.iterdir():
        shutil.rmtree(path)


class Deaths(Observer):
    """Remembers the nodes that died."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def on_death(self, node: SwarmNode) -> None:
        self.names.append(node.name)


def micro(*overrides: str) -> Config:
    """The smallest configuration."""
    return load_config(MICRO, overrides)


@pytest.mark.timeout(300)
async def test_a_node_of_each_stage_dies_and_the_others_reach_the_target(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 of the node that all others joined through and of one of the other stage, while they train: both deaths
    are reported. On the two survivors every sample is accounted for, none is dropped, repeats are few. Their
    folders, brought together from elsewhere, are a model with the loss that they have reported themselves."""
    monkeypatch.setenv(OPERATION_SECONDS, "0.05")  # a run that outlasts the records of the dead on any machine
    deaths = Deaths()
    target = 50_000
    config = micro(
        "local_swarm.replicas=2",
        f"run.inner.target_tokens={target}",
        f"run.evaluation.every_tokens={target}",
        "run.inner.min_learning_rate_ratio=0",
    )
    swarm = LocalSwarm(config, tmp_path / "run", observer=deaths, command=(*PACED, "run"))
    victims = ("s0-r0", "s1-r1")
    at_death: dict[str, int] = {}
    try:
        await swarm.start()
        waiting = asyncio.create_task(swarm.wait())
        for name in victims:
            node = swarm.node(name)
            await eventually(lambda node=node: paired_steps(node) >= 2, within=120, what=f"{name} has averaged twice")
            swarm.kill(node)
            at_death[name] = sum(isinstance(event, InnerStep) for event in node.events)
        await waiting
    finally:
        await swarm.stop()
    assert sorted(deaths.names) == sorted(victims)
    assert all(swarm.node(name).exit_code == -signal.SIGKILL for name in victims)
    assert min(at_death.values()) > 0
    survivors = [node for node in swarm.nodes if node.name not in victims]
    assert [node.stopped.reason if node.stopped else None for node in survivors] == ["target_reached"] * 2
    accounts = [last_account(node.events) for node in survivors]
    heads = [last_account(node.events) for node in survivors if node.stage == 0]
    assert [account.drawn > 0 for account in heads] == [True]
    assert all(account.clock > 0.95 * target for account in heads), "a last average may pull a clock back a little"
    assert all(account.drawn == account.trained + account.dropped + account.held_at_end for account in heads)
    assert sum(account.dropped for account in heads) == 0
    assert sum(account.repeated for account in accounts) < 0.05 * sum(account.drawn for account in heads)
    for node in survivors:
        last_steps = [event for event in node.events if isinstance(event, InnerStep)][-5:]
        assert all(event.live_replicas <= 1 for event in last_steps), "the dead are no longer counted"
    folders = [shutil.move(node.folder, tmp_path / f"machine-{number}") for number, node in enumerate(survivors)]
    assert main(["export", *map(str, folders), "--out", str(tmp_path / "model")]) == ExitCode.OK
    reported = [e.loss for node in survivors for e in node.events if isinstance(e, Evaluation) and e.final]
    assert len(reported) == 1
    loss = await asyncio.to_thread(scored_by_transformers_alone, tmp_path / "model", config)
    assert loss == pytest.approx(fmean(reported), abs=1e-3)


def scored_by_transformers_alone(model: Path, config: Config) -> float:
    """What transformers says that a folder's model loses on the run's held-out tokens, nats per token."""
    tokens = held_out_windows(config.run.data, 256, config.run.evaluation.windows).long()
    loaded: Any = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        return float(loaded(tokens, labels=tokens).loss)


def paired_steps(node: SwarmNode) -> int:
    """Outer steps that a node has taken with a partner."""
    return sum(isinstance(event, OuterStep) and event.kind == "paired" for event in node.events)


async def test_a_daemon_that_cannot_start_is_reported_with_its_own_exit_code(tmp_path: Path, temporary: Path) -> None:
    """More stages than layers: the first daemon says so, and so does the launcher."""
    swarm = LocalSwarm(micro("run.model.stages=2", "run.model.config.num_hidden_layers=1"), tmp_path / "run")
    try:
        with pytest.raises(UserError, match=r"num_hidden_layers") as caught:
            await swarm.start()
    finally:
        await swarm.stop()
    assert caught.value.exit_code is ExitCode.CONFIG
    assert not any(node.running for node in swarm.nodes)


async def test_a_run_folder_is_one_runs_and_must_be_writable(tmp_path: Path, temporary: Path) -> None:
    """Two runs never share a folder, whichever wrote there before; a file is no folder."""
    (tmp_path / "old" / "nodes").mkdir(parents=True)
    (tmp_path / "file").write_text("")
    RunFolder.create(tmp_path / "other").claim("0" * 32, "other run")
    (tmp_path / "other" / "nodes").mkdir()
    for folder, words in (
        (tmp_path / "old", "already holds a run"),
        (tmp_path / "other", "holds run 'other run'"),
        (tmp_path / "file", "cannot be written"),
    ):
        swarm = LocalSwarm(micro(), folder)
        with pytest.raises(UserError, match=words) as caught:
            await swarm.start()
        await swarm.stop()
        assert caught.value.exit_code is ExitCode.RUN_FOLDER


def test_daemons_that_compile_have_longer_to_come_up(tmp_path: Path) -> None:
    """Each takes minutes on its own, and they share the machine: three for all would never do."""
    plain, compiled = (LocalSwarm(micro(f"node.compile={on}"), tmp_path / on) for on in ("false", "true"))
    assert plain.start_seconds == plain.config.local_swarm.start_seconds
    assert compiled.start_seconds == plain.start_seconds * (1 + len(compiled.nodes))


async def test_a_swarm_that_does_not_come_up_in_time_is_given_up(tmp_path: Path, temporary: Path) -> None:
    """The setting and its value are named, and nothing is left running."""
    swarm = LocalSwarm(micro("local_swarm.start_seconds=0.3"), tmp_path / "run")
    try:
        with pytest.raises(UserError, match=r"local_swarm\.start_seconds \(0\.3\)"):
            await swarm.start()
    finally:
        await swarm.stop()
    assert not any(node.running for node in swarm.nodes)
