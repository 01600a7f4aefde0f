"""A run folder that cannot be written is noticed at the start."""

from __future__ import annotations

from pathlib import Path

import pytest

from noloco_node.errors import ExitCode, UserError
from noloco_node.storage.run_folder import RunFolder


def test_a_folder_is_made_with_its_parents_and_may_exist_already(tmp_path: Path) -> None:
    """A second start takes the folder as it is, and the probe leaves nothing."""
    folder = RunFolder.create(tmp_path / "runs" / "one")
    folder.events.write_text("{}\n")
    again = RunFolder.create(tmp_path / "runs" / "one")
    assert again.events.read_text() == "{}\n"
    assert [path.name for path in folder.path.iterdir()] == ["events.jsonl"]


def test_every_path_lies_inside_and_they_are_apart(tmp_path: Path) -> None:
    """No two names collide."""
    folder = RunFolder.create(tmp_path / "run")
    paths = [folder.events, folder.identity, folder.log, folder.final]
    assert len(set(paths)) == 4
    assert all(path.parent == tmp_path / "run" for path in paths)


@pytest.mark.parametrize("place", ["file", "under a file", "/proc/noloco-node", "/proc"])
def test_a_folder_that_cannot_be_written_is_refused(place: str, tmp_path: Path) -> None:
    """A file in the way, or a file system that takes none; root is refused as well."""
    (tmp_path / "file").write_text("in the way")
    path = {"file": tmp_path / "file", "under a file": tmp_path / "file" / "run"}.get(place, Path(place))
    with pytest.raises(UserError, match="run_folder is") as caught:
        RunFolder.create(path)
    assert caught.value.exit_code is ExitCode.RUN_FOLDER
    assert str(path) in caught.value.message
    assert (tmp_path / "file").read_text() == "in the way"
