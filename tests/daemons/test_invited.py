"""A run that only guests take part in, with real daemons and the real commands."""

from __future__ import annotations

import asyncio
import subprocess
import time
from pathlib import Path

import pytest

from noloco_node.errors import ExitCode
from noloco_node.identity.keys import load_or_create_identity
from noloco_node.identity.peer_id import PeerId
from noloco_node.storage.run_folder import RunFolder
from noloco_node.telemetry.events import (
    CheckpointTaken,
    InnerStep,
    NodeStarted,
    NodeStopped,
    OuterStep,
    Warned,
    read_events,
)
from tests.chaos.paced_node import OPERATION_SECONDS
from tests.chaos.swarm import program
from tests.daemons.test_bad_input import command, refused
from tests.daemons.test_join import ENDLESS, MICRO, node
from tests.support import eventually

pytestmark = [pytest.mark.daemons, pytest.mark.timeout(900)]


async def invited(*arguments: str | Path) -> str:
    """What `noloco-node invite` prints."""
    made = await asyncio.to_thread(
        subprocess.run, command("invite", *arguments), capture_output=True, text=True, timeout=300
    )
    assert made.returncode == 0, made.stderr
    return made.stdout


def settings_of(owner: PeerId, stages: int = 1) -> list[str]:
    """A run without end, by invitations of `owner`."""
    settings = [str(MICRO)]
    for setting in (ENDLESS, "run.access.mode=invited", f"run.access.owner={owner}", f"run.model.stages={stages}"):
        settings += ["--set", setting]
    return settings


async def test_a_guest_with_an_invitation_trains_and_one_without_is_told_why(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner starts the run and invites any holder of a file; they train and average. A node without the invitation,
    or with one that was changed on its way, is turned away before it builds anything."""
    monkeypatch.setenv(OPERATION_SECONDS, "0.15")  # a run without end leaves its guests and the commands something
    key = tmp_path / "owner.key"
    owner = load_or_create_identity(key).peer_id
    settings = settings_of(owner)
    founder, guest, file = tmp_path / "founder", tmp_path / "guest", tmp_path / "invitation"
    made = await invited(*settings, "--key", key)
    file.write_text(made)
    async with node(founder, "run", *settings, "--stage", "0", "--identity", str(key)) as events:
        first = (await eventually(lambda: [e for e in events if isinstance(e, NodeStarted)], 180, "it is up"))[0]
        for given, code, words in (
            ([], ExitCode.NOT_ADMITTED, owner),
            (["--invitation", made.strip()[:-9]], ExitCode.USAGE, "in the command line"),
        ):
            arguments = ("join", first.addresses[0], "--run-folder", str(tmp_path / "outsider"), *given)
            found, complaint = await asyncio.to_thread(refused, *arguments)
            assert found == code, complaint
            assert words in complaint
        speak = ("generate", first.addresses[0], "--prompt", "import ", "--max-tokens", "4")
        found, complaint = await asyncio.to_thread(refused, *speak)
        assert found == ExitCode.NOT_ADMITTED, complaint
        said = asyncio.create_task(
            asyncio.to_thread(
                subprocess.run, command(*speak, "--invitation", file), capture_output=True, text=True, timeout=300
            )
        )
        async with node(guest, "join", first.addresses[0], "--invitation", str(file)) as joined:
            await eventually(lambda: [e for e in joined if isinstance(e, InnerStep)], 180, "it trains")
            paired = await eventually(
                lambda: [e for e in joined if isinstance(e, OuterStep) and e.kind == "paired"], 180, "they average"
            )
            assert paired[0].partner == owner
            await eventually(
                lambda: [e for e in events if isinstance(e, OuterStep) and e.kind == "paired"], 180, "on both sides"
            )
            spoken = await said
            assert (spoken.returncode, spoken.stdout[:7]) == (0, "import "), spoken.stderr


async def test_guests_whose_invitation_ends_are_warned_and_leave_with_everything_saved(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None trains on alone to an end that is none. The one that is the last of its stage says so, as one that is told
    to leave does: its checkpoint is all that is left but for copies. One goes on from its checkpoint with a new
    invitation."""
    monkeypatch.setenv(OPERATION_SECONDS, "0.15")
    key, file = tmp_path / "owner.key", tmp_path / "invitation"
    settings = settings_of(load_or_create_identity(key).peer_id, stages=2)
    began = time.monotonic()
    async with node(tmp_path / "founder", "run", *settings, "--stage", "0", "--identity", str(key)) as events:
        first = (await eventually(lambda: [e for e in events if isinstance(e, NodeStarted)], 180, "it is up"))[0]
        # Guests come up, train and average before it ends: a busy machine takes as many times as long for all of it.
        hours = (30.0 + 5.0 * (time.monotonic() - began)) / 3600
        file.write_text(await invited(*settings, "--key", key, "--hours", f"{hours:.4f}"))
        folders = [RunFolder(tmp_path / name) for name in ("guest", "last")]
        joins = [
            ("join", first.addresses[0], "--invitation", file, "--stage", stage, "--run-folder", folder.path)
            for stage, folder in enumerate(folders)
        ]
        left = await asyncio.gather(
            *(
                asyncio.to_thread(
                    subprocess.run, [*program(), *map(str, join)], capture_output=True, text=True, timeout=400
                )
                for join in joins
            )
        )
        for done in left:
            assert done.returncode == ExitCode.NOT_ADMITTED, done.stderr
            complaint = done.stderr.rpartition("noloco-node: ")[2]
            assert "the invitation to run 'micro' ended on" in complaint
            assert "--invitation FILE" in complaint
        seen, of_last = (read_events(folder.events) for folder in folders)
        assert [e for e in seen if isinstance(e, OuterStep) and e.kind == "paired"]
        warned = [e for e in seen if isinstance(e, Warned) and e.what == "invitation_ends"]
        assert "ends in" in warned[0].detail
        assert [e.reason for e in seen if isinstance(e, NodeStopped)] == ["failed"]
        saved = [e for e in seen if isinstance(e, CheckpointTaken)][-1]
        assert saved.step == [e for e in seen if isinstance(e, InnerStep)][-1].step
        assert folders[0].final.is_dir()
        assert not folders[0].ended
        assert [e for e in of_last if isinstance(e, InnerStep)]
        assert [e for e in of_last if isinstance(e, Warned) and e.what == "last_of_stage"]
        assert not [e for e in seen if isinstance(e, Warned) and e.what == "last_of_stage"]
        file.write_text(await invited(*settings, "--key", key))
        async with node(folders[0].path, *map(str, joins[0][:6])) as joined:
            lives = await eventually(
                lambda: [e for e in joined if isinstance(e, NodeStarted)][1:], 180, "the same command with a new one"
            )
    assert lives[0].resumed
