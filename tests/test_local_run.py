"""What a person reads of a local swarm that is not begun."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from noloco_node.config.load import load_config
from noloco_node.errors import ExitCode, UserError
from noloco_node.local_run import run_local_swarm
from noloco_node.storage.run_folder import RunFolder
from noloco_node.telemetry.events import EventFile
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
