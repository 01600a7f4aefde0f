"""A model goes from run folders to a hub, against a hub on this machine: whole, and the token nowhere else."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from noloco_node.cli.main import main
from noloco_node.errors import ExitCode
from noloco_node.exporting import write
from tests.hub import TOKEN, Hub, running_hub
from tests.made_runs import finished
from tests.support import files_up_to

NAME = "alice/book-model"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """The one that `--push` goes to; what HF_ENDPOINT and the like say is read when the library is loaded."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    with running_hub() as made:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", made.url)
        yield made


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """An export that is pushed."""
    for stage in (0, 1):
        finished(tmp_path / "run" / str(stage), stage)
    return ["export", str(tmp_path / "run"), "--out", str(tmp_path / "model"), "--push", NAME]


def contents(folder: Path) -> dict[str, bytes]:
    """All files by name."""
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_a_pushed_model_is_the_folder_byte_by_byte_and_private(
    hub: Hub,
    command: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Weights of an earlier push under other names are gone, other files stay; the token is nowhere but in requests."""
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr(write, "export_model", partial(write.export_model, shard_bytes=60_000))
    assert main(command) == ExitCode.OK
    assert f"{hub.url}/{NAME}" in capsys.readouterr().out
    assert hub.repositories[NAME] == contents(tmp_path / "model")
    assert hub.visibility == {NAME: "private"}
    hub.repositories[NAME]["notes.txt"] = b"mine"
    again = [*command[:3], str(tmp_path / "again"), *command[4:]]
    assert main([*again, "--public"]) == ExitCode.OK
    assert hub.repositories[NAME] == contents(tmp_path / "again") | {"notes.txt": b"mine"}
    assert hub.visibility == {NAME: "private"}, "the owner's choice stands"
    printed = capsys.readouterr()
    told = printed.out + printed.err + caplog.text
    files = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    assert TOKEN not in told
    assert TOKEN.encode() not in files
    assert main([*command[:3], str(tmp_path / "open"), "--push", "alice/open", "--public"]) == ExitCode.OK
    assert hub.visibility["alice/open"] == "public"


@pytest.mark.parametrize(
    ("refused", "status", "words"),
    [
        ("/api", 401, "does not accept the token"),
        ("/api", 403, "may not write there"),
        ("/commit", 409, "somebody else changes it"),
        ("/commit", 500, "HTTP 500"),
    ],
)
def test_a_push_that_is_refused_leaves_the_model_here(
    refused: str,
    status: int,
    words: str,
    hub: Hub,
    command: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One screen with the reason, what to do, and how to push it then."""
    hub.refused = {refused: status}
    assert main(command) == ExitCode.HUB
    complaint = capsys.readouterr().err
    assert words in complaint
    assert f"hf upload {NAME}" in complaint
    assert "Traceback" not in complaint
    assert TOKEN not in complaint
    assert (tmp_path / "model" / "model.safetensors").is_file()
    assert not hub.repositories.get(NAME)


def test_what_can_be_known_before_is_said_before_anything_is_written(
    hub: Hub, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No OWNER/NAME, --public for nothing, no token."""
    assert main([*command[:-1], "book-model"]) == ExitCode.USAGE
    assert main([*command[:-2], "--public"]) == ExitCode.USAGE
    monkeypatch.delenv("HF_TOKEN")
    assert main(command) == ExitCode.HUB
    assert "hf auth login" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()
    assert hub.asked == []


def test_a_hub_that_cannot_be_reached_is_told_so(
    command: list[str], tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model is here all the same."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert main(command) == ExitCode.HUB
    assert "was not pushed" in capsys.readouterr().err
    assert (tmp_path / "model" / "config.json").is_file()


def test_a_logged_in_users_token_is_found_where_it_is_kept(
    hub: Hub, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where `hf auth login` leaves it; nothing is pushed of an export that failed."""
    monkeypatch.delenv("HF_TOKEN")
    (tmp_path / "kept").write_text(TOKEN)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "kept"))
    with files_up_to(1 << 10):
        assert main(command) == ExitCode.RUN_FOLDER
    assert hub.asked == []
    assert main(command) == ExitCode.OK
    assert hub.repositories[NAME] == contents(tmp_path / "model")
