"""`noloco-node doctor` as a person runs it, against a real seed."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from noloco_node.config.load import load_config
from noloco_node.config.node_settings import NodeSettings
from noloco_node.diagnostics import doctor as doctor_module
from noloco_node.diagnostics.doctor import check_invitation
from noloco_node.errors import ExitCode
from noloco_node.identity.invitations import invite
from noloco_node.identity.keys import load_or_create_identity
from noloco_node.node.checks import CheckOutcome
from tests.daemons.test_seed import address_of, command

pytestmark = [pytest.mark.daemons, pytest.mark.timeout(300)]

NOBODY = "12D3KooWKrCeA5nCWnQ5gm5FLAszTb6cDMk2hX8BH7Hj8MhGeFx9"
MICRO = Path(__file__).parent.parent / "configs" / "micro.yaml"


async def doctor(folder: Path, *arguments: str) -> tuple[int | None, str]:
    """Exit code and words of the command."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "noloco_node", "doctor", *arguments, "--run-folder", str(folder)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    words, _ = await asyncio.wait_for(process.communicate(), 120)
    return process.returncode, words.decode()


async def test_a_sound_machine_passes_and_others_reach_it(tmp_path: Path, temporary: Path) -> None:
    """Every check of the list is there, and the seed has dialled back."""
    async with command(tmp_path / "seed", "seed", str(MICRO)):
        address = await address_of(tmp_path / "seed")
        code, words = await doctor(tmp_path / "node", address, "--json")
    checks = {row["check"]: row for row in json.loads(words)}
    assert code == ExitCode.OK, words
    assert list(checks) == [
        *("open files", "disk", "memory", "device", "identity", "port"),
        *("peer", "p2pd", "clock", "versions", "reachable", "admission"),
    ]
    assert {row["outcome"] for row in checks.values()} <= {"pass", "warn"}
    assert "1 of 1 peers reached port" in checks["reachable"]["found"]
    assert "1 peer" in checks["clock"]["found"]
    assert not (tmp_path / "node").exists(), "it leaves nothing in the run folder"


async def test_a_node_behind_a_relay_is_told_that_it_is_reached_there_only(tmp_path: Path, temporary: Path) -> None:
    """By a stranger's connection through the seed; a seed that was not told to relay is named with the remedy."""
    async with command(tmp_path / "seed", "seed", str(MICRO), "--relay-for-others"):
        address = await address_of(tmp_path / "seed")
        code, words = await doctor(tmp_path / "node", address, "--relay", "--json")
    checks = {row["check"]: row for row in json.loads(words)}
    assert code == ExitCode.OK, words
    assert checks["reachable"]["outcome"] == "pass"
    assert "through a relay only (127.0.0.1)" in checks["reachable"]["found"]
    async with command(tmp_path / "other", "seed", str(MICRO)):
        address = await address_of(tmp_path / "other")
        code, words = await doctor(tmp_path / "node", address, "--relay", "--json")
    [failed] = [row for row in json.loads(words) if row["outcome"] == "fail"]
    assert code == ExitCode.CHECK_FAILED
    assert "it relays for nobody" in failed["found"]
    assert "--relay-for-others" in failed["remedy"]


async def test_who_would_be_refused_by_an_invited_run_hears_it_from_doctor(tmp_path: Path, temporary: Path) -> None:
    """No invitation, a file that is not there, half of one, and one to another run: as `join` ends, so does this."""
    owner = load_or_create_identity(tmp_path / "owner.key")
    settings = ["run.access.mode=invited", f"run.access.owner={owner.peer_id}"]
    run = load_config(MICRO, settings).run.run_id
    named = [word for setting in settings for word in ("--set", setting)]
    async with command(tmp_path / "seed", "seed", str(MICRO), *named):
        address = await address_of(tmp_path / "seed")
        good = invite(owner, run, int(time.time()) + 3600, None).text()
        other = invite(owner, "0" * 32, int(time.time()) + 3600, None).text()
        files = {"good": good, "half": good[:-9], "other": other}
        for name, text in files.items():
            (tmp_path / name).write_text(text, encoding="utf-8")
        for given, check, told in (
            ([], "admission", "admits only peers that its owner"),
            (["--invitation", str(tmp_path / "nofile.invitation")], "invitation", "neither an invitation nor a file"),
            (["--invitation", str(tmp_path / "half")], "invitation", "cut off or changed"),
            (["--invitation", str(tmp_path / "other")], "admission", "the invitation is for run 0000"),
        ):
            code, words = await doctor(tmp_path / "node", address, "--json", *given)
            [failed] = [row for row in json.loads(words) if row["outcome"] == "fail"]
            assert (code, failed["check"]) == (ExitCode.CHECK_FAILED, check), words
            assert told in failed["found"]
            assert failed["remedy"]
        code, words = await doctor(tmp_path / "node", address, "--json", "--invitation", str(tmp_path / "good"))
    checks = {row["check"]: row for row in json.loads(words)}
    assert code == ExitCode.OK, words
    assert (checks["invitation"]["outcome"], checks["admission"]["outcome"]) == ("pass", "pass")


def test_an_invitation_that_has_ended_fails_before_any_peer_is_asked(tmp_path: Path) -> None:
    """Its time is said; a machine whose clock is ahead is told of that too."""
    owner = load_or_create_identity(tmp_path / "owner.key")
    check = check_invitation(invite(owner, "0" * 32, 1_700_000_000, None).text())
    assert check.outcome is CheckOutcome.FAIL
    assert "ended on 2023-11-14 22:13 UTC" in check.found
    assert "clock" in check.remedy


@pytest.mark.parametrize("failure", [TimeoutError, ConnectionResetError, EOFError])
async def test_a_p2pd_that_does_not_say_who_is_connected_ends_no_check(failure: type[Exception]) -> None:
    """It is busy, or has died: the other peers are not asked, and what was found is told."""

    async def connections() -> None:
        raise failure

    daemon = SimpleNamespace(joined_peers=(), visible_addresses=list[str], connections=connections)
    among: Any = vars(doctor_module)["_among_peers"]
    checks = await among(NodeSettings(), SimpleNamespace(daemon=daemon, transport=None))
    assert "reachable" in [check.name for check in checks]


async def test_what_is_wrong_is_named_with_its_remedy_and_an_exit_code(tmp_path: Path, temporary: Path) -> None:
    """The faults are a port that is taken, a dead peer, an address that is none, and a device that is not there. All of
    them come at once, and the rest is checked all the same."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        dead = f"/ip4/127.0.0.1/tcp/9/p2p/{NOBODY}"
        code, words = await doctor(tmp_path / "node", dead, "nonsense", "--port", port, "--set", "node.device=cuda:77")
    assert code == ExitCode.CHECK_FAILED
    lines = words.splitlines()
    failed = [line for line in lines if line.startswith("fail")]
    for told in (f"{dead}: refused", "nonsense: malformed", f"{port} on 127.0.0.1", "cuda:77"):
        assert any(told in line for line in failed), words
    assert all(lines[lines.index(line) + 1].lstrip().startswith("-> ") for line in failed)
    assert any(line.startswith("pass") for line in lines)
    assert "5 failed" in lines[-1], "p2pd cannot start on the taken port either"
