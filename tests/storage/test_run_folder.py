"""A run folder that cannot be written is noticed at the start."""

from __future__ import annotations

import subprocess
import sys
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


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("file", "file' is a file, not a folder"),
        ("under a file", "file' is a file, not a folder"),
        ("/proc/noloco-node", "no folder can be made there"),
        ("/proc", "it takes no file"),
    ],
)
def test_a_folder_that_cannot_be_written_is_refused(place: str, why: str, tmp_path: Path) -> None:
    """A file in the way, or a file system that takes none; root is refused as well. In other words than the system's,
    which says of a file that it exists and of a folder that it does not."""
    (tmp_path / "file").write_text("in the way")
    path = {"file": tmp_path / "file", "under a file": tmp_path / "file" / "run"}.get(place, Path(place))
    with pytest.raises(UserError, match="run_folder is") as caught:
        RunFolder.create(path)
    assert caught.value.exit_code is ExitCode.RUN_FOLDER
    assert str(path) in caught.value.message
    assert caught.value.message.endswith(why)
    assert (tmp_path / "file").read_text() == "in the way"


HOLDER = """
import sys
from pathlib import Path
from noloco_node.storage.run_folder import RunFolder
with RunFolder(Path(sys.argv[1])).lock():
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_folder_is_held_by_one_process_and_free_once_that_is_killed(tmp_path: Path) -> None:
    """The second is told the first one's pid and what to do. An observer sees that it is in use, and is in nobody's
    way; `kill -9` frees it at once."""
    folder = RunFolder.create(tmp_path / "run")
    assert not folder.in_use
    assert not list(folder.path.iterdir()), "to look makes no file"
    command = [sys.executable, "-c", HOLDER, str(folder.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
            assert folder.in_use
            with pytest.raises(UserError, match="is in use by") as caught, folder.lock():
                pass
            assert caught.value.exit_code is ExitCode.RUN_FOLDER
            assert f"pid {holder.pid}" in caught.value.message
            assert "--run-folder" in caught.value.remedy
        finally:
            holder.kill()
    assert not folder.in_use
    with folder.lock():
        assert folder.in_use
    assert not folder.in_use


def test_a_folder_belongs_to_one_run(tmp_path: Path) -> None:
    """The owner may come back to it; another run is refused by name, with what to do; the end is remembered."""
    folder = RunFolder.create(tmp_path / "run")
    assert not folder.claimed
    assert folder.claim("a" * 32, "first") is False
    assert folder.claim("a" * 32, "first") is False
    with pytest.raises(UserError, match="holds run 'first'") as caught:
        folder.claim("b" * 32, "second")
    assert caught.value.exit_code is ExitCode.RUN_FOLDER
    assert "--run-folder" in caught.value.remedy
    folder.mark_ended("a" * 32, "first")
    assert folder.ended
    assert RunFolder.create(tmp_path / "run").claim("a" * 32, "first") is True


def test_a_mark_that_cannot_be_read_is_no_free_folder(tmp_path: Path) -> None:
    """Nobody's training is written over because one file is damaged."""
    folder = RunFolder.create(tmp_path / "run")
    (folder.path / "run.json").write_text("{")
    with pytest.raises(UserError, match=r"run\.json"):
        folder.claim("a" * 32, "first")


def test_a_folder_is_judged_without_a_trace(tmp_path: Path) -> None:
    """Before a node touches it: nothing of a refused node may lie in another run's folder."""
    assert not RunFolder(tmp_path / "none").judge("a", "a")
    folder = RunFolder.create(tmp_path / "run")
    assert folder.may_be_of("a")
    assert folder.may_be_of(None)
    folder.claim("a", "first")
    before = sorted(path.name for path in folder.path.iterdir())
    with pytest.raises(UserError, match="holds run 'first'"):
        folder.judge("b", "second")
    assert not folder.judge("a", "first")
    assert [folder.may_be_of(run) for run in ("a", "b", None)] == [True, False, False]
    folder.mark_ended("a", "first")
    assert folder.judge("a", "first")
    assert not folder.may_be_of("a")
    assert sorted(path.name for path in folder.path.iterdir()) == before


def test_a_full_disk_says_why(tmp_path: Path) -> None:
    """A folder that is not there stands for a disk that refuses; nothing is left where it takes a block."""
    assert RunFolder(tmp_path).refusal() == ""
    assert list(tmp_path.iterdir()) == []
    assert "No such file" in RunFolder(tmp_path / "none").refusal()


FILES = ("events.jsonl", "contribution.jsonl", "run.json", "node.lock", "node.log")


@pytest.mark.parametrize("name", [*FILES, "checkpoints", "final"])
def test_what_is_of_another_kind_than_a_node_leaves_is_refused(name: str, tmp_path: Path) -> None:
    """A folder where a file should be used to end as a defect, later; no checkpoint goes into a file."""
    if name in FILES:
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_text("")
    with pytest.raises(UserError, match=name) as caught:
        RunFolder.create(tmp_path)
    assert caught.value.exit_code is ExitCode.RUN_FOLDER


@pytest.mark.parametrize("name", FILES)
def test_a_link_in_the_place_of_a_file_is_followed_by_nobody(tmp_path: Path, name: str) -> None:
    """A node wrote its events into whatever the link named."""
    other = tmp_path / "other"
    other.write_text("mine")
    folder = RunFolder.create(tmp_path / "run")
    place = folder.path / name
    place.symlink_to(other)
    with pytest.raises(UserError) as caught:
        RunFolder.create(tmp_path / "run")
    assert caught.value.exit_code is ExitCode.RUN_FOLDER
    assert place.name in caught.value.message
    assert other.read_text() == "mine"


def test_a_mark_that_never_ends_is_not_waited_for(tmp_path: Path) -> None:
    """`run.json` as a link to /dev/zero hung every reader of the mark; a long one is refused as well."""
    folder = RunFolder.create(tmp_path / "run")
    mark = folder.path / "run.json"
    mark.symlink_to("/dev/zero")
    with pytest.raises(UserError, match="cannot be read"):
        folder.judge("ab" * 16, "a run")
    mark.unlink()
    mark.write_bytes(b" " * (2 << 20))
    with pytest.raises(UserError, match="cannot be read"):
        folder.judge("ab" * 16, "a run")
