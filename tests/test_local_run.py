"""What a person reads of a local swarm that is not begun."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from noloco_node.config.load import load_config
from noloco_node.errors import ExitCode, UserError
from noloco_node.launch.local_run import disk_use, drop_checkpoints, run_local_swarm
from noloco_node.launch.local_swarm import LocalSwarm, Observer, SwarmNode
from noloco_node.storage.run_folder import RunFolder
from noloco_node.telemetry.events import AnyEvent, EventFile
from tests.telemetry import made_events as made

MICRO = Path(__file__).parent / "configs" / "micro.yaml"


@pytest.mark.parametrize("claimed", [True, False])
def test_nothing_of_another_run_is_shown_where_its_folder_is_named(claimed: bool, tmp_path: Path) -> None:
    """The refusal alone: the events that lie there are not this run's. Nothing is written."""
    (tmp_path / "nodes" / "s0-r0").mkdir(parents=True)
    diary = EventFile(RunFolder(tmp_path / "nodes" / "s0-r0").events)
    for event in made.node_events("s0-r0"):
        diary.write(event)
    diary.close()
    if claimed:
        RunFolder(tmp_path).claim("another", "other-run")
    before = sorted(tmp_path.rglob("*"))
    console = Console(file=io.StringIO())
    with pytest.raises(UserError) as caught:
        run_local_swarm(load_config(MICRO), tmp_path, console)
    assert caught.value.exit_code is ExitCode.RUN_FOLDER
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == ""
    assert sorted(tmp_path.rglob("*")) == before


def test_where_nothing_can_be_written_no_swarm_is_shown(tmp_path: Path) -> None:
    """It was said to train on, unseen, before it was refused."""
    (tmp_path / "file").write_text("no folder")
    console = Console(file=io.StringIO())
    with pytest.raises(UserError, match="cannot be written: Not a directory"):
        run_local_swarm(load_config(MICRO), tmp_path / "file" / "run", console)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == ""


def test_a_launcher_keeps_no_event_that_it_has_shown(tmp_path: Path) -> None:
    """A kilobyte for each step of each node: a swarm of some days filled the machine's memory."""
    seen = list[AnyEvent]()

    class Follower(Observer):
        def on_event(self, node: SwarmNode, event: AnyEvent) -> None:
            """Shown."""
            seen.append(event)

    EventFile(RunFolder(tmp_path).events).write(made.inner_step(1))
    kept, shown = (SwarmNode("s0-r0", 0, tmp_path, Follower(), keeps=keeps) for keeps in (True, False))
    kept.read_events()
    shown.read_events()
    assert [len(events) for events in (seen, kept.events, shown.events)] == [2, 1, 0]


def test_a_run_folder_says_what_takes_its_place(tmp_path: Path) -> None:
    """Checkpoints, final weights, the model, and all the rest: nothing is left out, nothing counted twice."""
    for name, size in (
        ("nodes/s0-r0/checkpoints/00000001/state.safetensors", 1000),
        ("nodes/s0-r0/final/slow.safetensors", 200),
        ("nodes/s0-r0/events.jsonl", 30),
        ("model/model.safetensors", 4),
        ("summary.json", 5),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(bytes(size))
    use = disk_use(tmp_path)
    assert use == {"nodes' checkpoints": 1000, "nodes' final weights": 200, "model": 4, "the rest": 35}


def test_checkpoints_stay_where_the_run_has_not_ended(tmp_path: Path) -> None:
    """A node that died before the end can still go on from its own."""
    swarm = LocalSwarm(load_config(MICRO), tmp_path)
    for node in swarm.nodes:
        RunFolder(node.folder).checkpoints.mkdir(parents=True)
    ended, *others = swarm.nodes
    RunFolder(ended.folder).mark_ended("run", "name")
    drop_checkpoints(swarm)
    assert not RunFolder(ended.folder).checkpoints.exists()
    assert all(RunFolder(node.folder).checkpoints.is_dir() for node in others)
