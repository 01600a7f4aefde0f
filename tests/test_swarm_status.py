"""`status` of a folder that holds several nodes, and of a run that is over."""

from __future__ import annotations

from pathlib import Path

import pytest

from noloco_node.cli import main as cli
from noloco_node.diagnostics.status import status_lines
from noloco_node.errors import ExitCode, UserError
from noloco_node.storage.run_folder import RunFolder
from noloco_node.telemetry.events import AnyEvent, Doing, EventFile
from noloco_node.telemetry.words import an_hour
from tests.telemetry import made_events as made


def write(folder: Path, *events: AnyEvent) -> None:
    """Events of a node in its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    diary = EventFile(RunFolder(folder).events)
    for event in events:
        diary.write(event)
    diary.close()


@pytest.mark.parametrize("below", ["nodes", "."])
def test_the_folder_of_several_nodes_shows_a_line_of_each(below: str, tmp_path: Path) -> None:
    """A local swarm's lie in `nodes`, those of a machine's devices side by side."""
    for name in made.NAMES[:3]:
        write(tmp_path / below / name, *made.node_events(name))
    write(
        tmp_path / below / "s1-r1", made.started("s1-r1"), made.inner_step(3), made.account(clock=6144.0, time=1003.0)
    )
    lines = status_lines(tmp_path, now=1121.0)
    assert lines[0] == f"4 nodes in {tmp_path}"
    assert sum("made-up" in line for line in lines) == 1
    shown = {line.split()[0]: line for line in lines[2:]}
    assert "stage 0, 100 %, training loss 1.5666; stopped 60 s ago (target reached)" in shown["s0-r0"]
    assert "stage 1, 10 %, training loss" in shown["s1-r1"]
    assert "gone without a last word" in shown["s1-r1"]
    assert lines[-1].endswith(f"noloco-node status {tmp_path / below / 's0-r0'}")


def test_nodes_of_several_runs_stand_below_their_own(tmp_path: Path) -> None:
    """One that was never up stands last, below no run; it stood below the run of the one before it."""
    other = made.started("s0-r1").model_copy(update={"run_id": "f" * 32, "run_name": "another"})
    write(tmp_path / "a", *made.node_events("s0-r0"))
    write(tmp_path / "b", Doing(time=1000.0, what="joining", detail="joining", since=1000.0))
    write(tmp_path / "c", other)
    write(tmp_path / "d", *made.node_events("s1-r0"))
    _, *lines, _ = status_lines(tmp_path, now=1121.0)
    first = [line.split()[0] if line.split()[0] != "run" else line.split()[1] for line in lines]
    assert first == ["made-up", "a", "d", "another", "c", "none", "b"]


def test_a_paused_node_says_for_how_long(tmp_path: Path) -> None:
    """`resume goes on, for 4 s` told when it would."""
    write(tmp_path, Doing(time=1117.0, what="paused", detail="paused: noloco-node resume goes on", since=1117.0))
    with RunFolder(tmp_path).lock():
        assert any(line.endswith("resume goes on (for 4 s)") for line in status_lines(tmp_path, now=1121.0))


def test_what_stayed_on_this_machine_is_told_apart_from_what_the_line_carried(tmp_path: Path) -> None:
    """A volunteer with two nodes at home read all of it as sent over the line."""
    write(tmp_path, made.started("s0-r0"), made.account())
    assert not any("this machine" in line for line in status_lines(tmp_path, now=1121.0))
    write(tmp_path, made.account(bytes_nearby=5_000_000))
    assert "  off the line      5.0 MB of both stayed on this machine" in status_lines(tmp_path, now=1121.0)


def test_a_folder_without_nodes_is_still_refused(tmp_path: Path) -> None:
    """Whatever else lies there."""
    (tmp_path / "nodes" / "s0-r0").mkdir(parents=True)
    with pytest.raises(UserError, match="no node has run there"):
        status_lines(tmp_path)


def test_a_seeds_folder_is_said_to_be_one_and_what_shows_its_swarm(tmp_path: Path) -> None:
    """Identity and peers lie there; a node whose events were moved away has kept its run beside them."""
    for name in ("identity.key", "peers.json"):
        (tmp_path / name).touch()
    with pytest.raises(UserError, match="looks like a seed's") as raised:
        status_lines(tmp_path)
    assert "noloco-node watch ADDRESS" in raised.value.remedy
    assert raised.value.exit_code is ExitCode.RUN_FOLDER
    RunFolder(tmp_path).keep_spec("{}")
    with pytest.raises(UserError, match=r"it has no events\.jsonl"):
        status_lines(tmp_path)


def test_a_run_that_is_over_is_over_although_this_nodes_clock_was_behind(tmp_path: Path) -> None:
    """`81 %` beside `target reached` leaves one wondering; a node that was interrupted there shows its share."""
    behind = made.account(clock=0.81 * 61_440)
    write(tmp_path / "a", made.started("s0-r0"), behind, made.stopped("s0-r0"))
    assert any(
        "the run is over: 61,440 tokens; this node stood at 49,766" in line for line in status_lines(tmp_path / "a")
    )
    said = "(target reached by the run; this node itself stood at 81 %)"
    assert any(line.startswith("now") and line.endswith(said) for line in status_lines(tmp_path / "a"))
    write(tmp_path / "c", *made.node_events("s0-r0"))
    assert any(line.endswith(f"stage 0, 81 %; stopped 60 s ago {said}") for line in status_lines(tmp_path, 1121.0))
    interrupted = made.stopped("s0-r0").model_copy(update={"reason": "interrupted"})
    write(tmp_path / "b", made.started("s0-r0"), behind, interrupted)
    assert any("(81 %)" in line for line in status_lines(tmp_path / "b"))


def test_status_and_report_look_where_the_environment_has_the_node_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the daemon does; a folder on the command line wins, and a variable with a mistake is named."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "here", *made.node_events("s0-r0"))
    assert cli.main(["status"]) == ExitCode.RUN_FOLDER
    assert "'runs/node'" in capsys.readouterr().err
    monkeypatch.setenv("NOLOCO_NODE_RUN_FOLDER", str(tmp_path / "here"))
    assert cli.main(["status"]) == ExitCode.OK
    assert f"node in {tmp_path / 'here'}" in capsys.readouterr().out
    monkeypatch.setenv("NOLOCO_NODE_RUN_FOLDER", str(tmp_path / "nowhere"))
    assert cli.main(["report"]) == ExitCode.RUN_FOLDER
    assert cli.main(["status", str(tmp_path / "here")]) == ExitCode.OK
    monkeypatch.setenv("NOLOCO_NODE_RUN_FODLER", "x")
    capsys.readouterr()
    assert cli.main(["status"]) == ExitCode.CONFIG
    assert "did you mean NOLOCO_NODE_RUN_FOLDER?" in capsys.readouterr().err


def test_a_node_that_has_written_nothing_yet_is_starting(tmp_path: Path) -> None:
    """Its silence was counted from 1970 on: `silent for 498,832.2 h`, stuck or frozen."""
    folder = RunFolder(tmp_path)
    folder.events.touch()
    with folder.lock():
        lines = status_lines(tmp_path, now=1121.0)
    assert "now                 starting" in lines
    assert not any("silent" in line for line in lines)


def test_a_volunteer_is_told_what_its_node_takes_of_the_line_the_device_and_the_disk(tmp_path: Path) -> None:
    """In bytes by kind and a rate on average, of the life that the account is of."""
    mega = {"bytes_sent": {"microbatches": 3_000_000, "exchange": 4_500_000}, "bytes_received": {"state": 1_000_000}}
    books = made.account(time=1060.0, busy_seconds=15.0, **mega)
    write(tmp_path, made.started("s0-r0"), books)
    (tmp_path / "large").write_bytes(bytes(2_000_000))
    told = "\n".join(status_lines(tmp_path, now=1061.0))
    seconds = 1060.0 - made.started("s0-r0").time
    rate = 8e-6 * 7_500_000 / seconds
    exchange, microbatches = (an_hour(count, seconds) for count in (4.5e6, 3e6))
    kinds = f"(exchange 4.5 MB, {exchange}; microbatches 3.0 MB, {microbatches})"
    assert f"sent              7.5 MB, {rate:.2f} Mbit/s on average {kinds}" in told
    assert "received          1.0 MB" in told
    assert f"at work for {15.0 / seconds:.0%} of the time" in told
    assert "disk              2.0 MB in" in told
