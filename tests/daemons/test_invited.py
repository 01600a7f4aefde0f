"""A run that only guests take part in, with real daemons and the real commands."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import pytest

from noloco_node.errors import ExitCode
from noloco_node.identity.keys import load_or_create_identity
from noloco_node.telemetry.events import InnerStep, NodeStarted, OuterStep
from tests.chaos.paced_node import OPERATION_SECONDS
from tests.daemons.test_bad_input import command, refused
from tests.daemons.test_join import ENDLESS, MICRO, node
from tests.support import eventually

pytestmark = [pytest.mark.daemons, pytest.mark.timeout(600)]


async def test_a_guest_with_an_invitation_trains_and_one_without_is_told_why(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner starts the run and invites whoever holds a file; they train and average; who has none, or one that was
    changed on its way, is turned away before it builds anything."""
    monkeypatch.setenv(OPERATION_SECONDS, "0.08")  # a run without end leaves its guests and the commands something
    key = tmp_path / "owner.key"
    owner = load_or_create_identity(key).peer_id
    settings = [str(MICRO)]
    for setting in (ENDLESS, "run.access.mode=invited", f"run.access.owner={owner}", "run.model.stages=1"):
        settings += ["--set", setting]
    founder, guest, file = tmp_path / "founder", tmp_path / "guest", tmp_path / "invitation"
    made = await asyncio.to_thread(
        subprocess.run, command("invite", *settings, "--key", key), capture_output=True, text=True, timeout=120
    )
    assert made.returncode == 0, made.stderr
    file.write_text(made.stdout)
    async with node(founder, "run", *settings, "--stage", "0", "--identity", str(key)) as events:
        first = (await eventually(lambda: [e for e in events if isinstance(e, NodeStarted)], 180, "it is up"))[0]
        for given, code, words in (
            ([], ExitCode.NOT_ADMITTED, owner),
            (["--invitation", made.stdout.strip()[:-9]], ExitCode.CONFIG, "cut off or changed"),
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
                subprocess.run, command(*speak, "--invitation", file), capture_output=True, text=True, timeout=120
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
