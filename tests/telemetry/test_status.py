"""`noloco-node status`: what a node does, waits for and has done, from its run folder alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from noloco_node.accounting.statements import ContributionFile, Receipt, Work, statement_text
from noloco_node.cli import main as cli
from noloco_node.diagnostics.status import status_lines
from noloco_node.errors import ExitCode, UserError
from noloco_node.identity.keys import Identity, load_or_create_identity, sign_statement
from noloco_node.storage.run_folder import RunFolder
from noloco_node.telemetry.events import Account, Doing, NodeReassigned, NodeStarted, NodeStopped, P2pdRestarted
from noloco_node.telemetry.words import an_hour, as_clock_time
from tests.telemetry import made_events as made
from tests.telemetry.made_events import write

NOW = 1000.0


def started(identity: Identity) -> NodeStarted:
    """A node of stage 1 that came up at 100 s."""
    changes = {"time": 100.0, "peer_id": identity.peer_id, "pid": 1 << 30}
    return made.started("s1-r0").model_copy(update=changes)


def account() -> Account:
    """Its books at 990 s."""
    nothing = dict.fromkeys(("drawn", "trained", "held_at_end", "requeued", "retried", "repeated"), 0)
    return made.account(**nothing, time=990.0, clock=50_000.0, target=200_000, refused={})


def stopped() -> NodeStopped:
    """Its last word, at 995 s."""
    return made.stopped("s1-r0").model_copy(update={"time": 995.0})


def received(server: Identity, **done: int) -> Receipt:
    """What a peer signs for this one."""
    receipt = {"run": "r" * 32, "since": 0.0, "until": 60.0, "server": server.peer_id, "session": "0" * 16, "serial": 0}
    return Receipt.model_validate({**receipt, **done})


def add(file: ContributionFile, signer: Identity, statement: Work | Receipt) -> None:
    """Sign a statement and write it down."""
    text = statement_text(statement)
    file.append(signer.peer_id, text, sign_statement(signer, text.encode()))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "node").mkdir()
    return tmp_path / "node"


@pytest.fixture
def identity(folder: Path) -> Identity:
    return load_or_create_identity(folder / "identity.key")


def now_line(folder: Path) -> str:
    """What it says of the present."""
    return next(line for line in status_lines(folder, NOW) if line.startswith("now")).removeprefix("now").strip()


def test_a_running_node_names_what_it_waits_for_and_for_how_long(folder: Path, identity: Identity) -> None:
    """The holder of the run folder's lock runs."""
    wait = Doing(time=940.0, what="waiting_for_peers", detail="a replica of stage 0: none is known", since=940.0)
    write(folder, started(identity), wait, account())
    assert now_line(folder).startswith("gone without a last word 10 s ago")
    with RunFolder(folder).lock():
        write(folder, wait, account())
        assert now_line(folder) == "waiting for 60 s for a replica of stage 0: none is known"
        lines = status_lines(folder, NOW)
        assert "progress            50,000 of 200,000 tokens (25 %)" in lines
        assert not any("silent" in line for line in lines)
        assert not any("silent" in line for line in status_lines(folder, NOW + 50))
        assert any("silent            for 90 s" in line for line in status_lines(folder, NOW + 80))
        write(folder, Doing(time=991.0, what="training", detail="training", since=991.0))
        assert now_line(folder) == "training, for 9 s"
        write(folder, Doing(time=992.0, what="joining", detail="copying the state of a stage peer", since=992.0))
        assert not any("silent" in line for line in status_lines(folder, NOW + 80))


def test_a_node_that_has_moved_is_shown_where_it_is(folder: Path, identity: Identity) -> None:
    moved = NodeReassigned(
        time=960.0, from_stage=1, stage=0, why="lost", origin="standby", clock=5.0, parameters=777, seconds=2.0
    )
    write(folder, started(identity), account(), moved)
    assert any(line.split() == ["stage", "0", "of", "2,", "777", "parameters"] for line in status_lines(folder, NOW))


def test_restarts_of_p2pd_are_shown_for_this_life_of_the_node(folder: Path, identity: Identity) -> None:
    """How often, and why the last time; those of an earlier life are over."""
    training = Doing(time=940.0, what="training", detail="training", since=940.0)
    earlier = P2pdRestarted(time=90.0, cause="died", restarts=7)
    with RunFolder(folder).lock():
        write(folder, earlier, started(identity), training)
        assert not any(line.startswith("  p2pd") for line in status_lines(folder, NOW))
        write(folder, P2pdRestarted(time=960.0, cause="frozen", restarts=2))
        shown = next(line for line in status_lines(folder, NOW) if line.startswith("  p2pd"))
    assert shown.split(maxsplit=1)[1] == "started again 2 times, last 40 s ago: it had frozen"


def test_a_stopped_node_says_when_and_why_and_a_new_life_counts(folder: Path, identity: Identity) -> None:
    """The last of start, word and end decides; a joining node has a present before it is up."""
    write(folder, started(identity), account(), stopped())
    assert now_line(folder) == "stopped 5 s ago (target reached by the run; this node itself stood at 25 %)"
    with RunFolder(folder).lock():
        write(folder, Doing(time=999.0, what="joining", detail="looking for the nodes of the run", since=999.0))
        assert now_line(folder) == "looking for the nodes of the run, for 1 s"


def test_who_runs_is_shown_so_though_its_former_life_had_a_clock_that_was_ahead(
    folder: Path, identity: Identity
) -> None:
    """An hour ahead, and set right before the new start: the line that was written last counts."""
    now, hour = NOW, 3600.0
    earlier = [started(identity), account(), stopped()]
    write(folder, *(event.model_copy(update={"time": now + hour}) for event in earlier))
    write(folder, started(identity).model_copy(update={"time": now - 60.0}))
    with RunFolder(folder).lock():
        write(folder, Doing(time=now - 50.0, what="training", detail="training", since=now - 50.0))
        assert "training, for 5" in now_line(folder)
        assert not any("the run is over" in line for line in status_lines(folder, now))
        assert any("silent" in line for line in status_lines(folder, now + hour))


def test_the_contribution_is_shown_with_what_could_not_be_verified(folder: Path, identity: Identity) -> None:
    """Own work, receipts by peer, and a warning for a line that nobody signed."""
    peer = load_or_create_identity(folder / "peer.key")
    file = ContributionFile(folder / "contribution.jsonl")
    work = Work(run="r" * 32, stage=1, since=0.0, until=7200.0, tokens=5000, drawn=0, served=40, outer_rounds=3)
    receipt = received(identity, microbatches=38, tokens=4800)
    for signer, statement in ((identity, work), (peer, receipt)):
        add(file, signer, statement)
    file.append(peer.peer_id, statement_text(receipt).replace("4800", "9999"), b"")
    write(folder, started(identity), stopped())
    lines = status_lines(folder, NOW)
    until = as_clock_time(7200.0, "%Y-%m-%d %H:%M")
    assert any(f" at work until {until}, as this node says" in line for line in lines), "the rest is not known"
    assert "  tokens            5,000" in lines
    assert "  microbatches      0 drawn, 40 served for others" in lines
    assert "  outer steps       3" in lines
    assert "  receipts          38 microbatches, 4,800 tokens, signed by 1 peers" in lines
    assert f"    {peer.peer_id}  38 microbatches, 4,800 tokens" in lines
    assert sum(line.startswith("  refused           1 lines of") for line in lines) == 1


def test_own_work_that_is_not_written_down_yet_is_no_zero_beside_receipts(folder: Path, identity: Identity) -> None:
    """Peers may sign first: `nothing yet, tokens 0` stood above `receipts 65 microbatches, 133,120 tokens`."""
    peer = load_or_create_identity(folder / "peer.key")
    file = ContributionFile(folder / "contribution.jsonl")
    add(file, peer, received(identity, microbatches=65, tokens=133_120))
    write(folder, started(identity), account())
    lines = status_lines(folder, NOW)
    at = next(index for index, line in enumerate(lines) if line.startswith("contribution"))
    assert "its own work is not written down yet" in lines[at]
    assert lines[at + 1] == "  receipts          65 microbatches, 133,120 tokens, signed by 1 peers"


def test_to_ask_for_the_status_loads_no_heavy_library(folder: Path, identity: Identity) -> None:
    """Each of them takes a second or two, and a person may look every few seconds; `top` is asked as often."""
    write(folder, started(identity), account())
    script = (
        "import sys; from noloco_node.cli.main import main; import noloco_node.diagnostics.top; "
        "code = main(['status', sys.argv[1]]); "
        "print('loaded', sorted({'torch', 'numpy', 'hivemind', 'transformers'} & set(sys.modules)), code)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "loaded [] 0", done.stdout + done.stderr


def test_a_folder_without_a_node_is_refused(tmp_path: Path) -> None:
    """With the name of the folder and the remedy."""
    with pytest.raises(UserError) as error:
        status_lines(tmp_path)
    assert error.value.exit_code is ExitCode.RUN_FOLDER
    assert str(tmp_path) in error.value.message


def test_a_torn_and_a_foreign_line_harm_nothing(folder: Path, identity: Identity) -> None:
    """The event file of a killed node may end anywhere, and that of another version may hold what nobody knows."""
    write(folder, started(identity), account())
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"event":"from_the_future"}\n{"event":"doing","what":"dancing"}\n{"event":"doing","wh')
    assert now_line(folder).startswith("gone without a last word")


def test_a_hostile_run_folder_neither_ends_nor_fools_status(folder: Path, identity: Identity) -> None:
    """It holds times without end, a target of nothing, words for the terminal, a million brackets, and a line of
    megabytes. It also holds a contribution signed for a year that no calendar has."""
    bad = started(identity).model_copy(update={"run_name": "\x1b[2J\x07evil", "time": float("inf")})
    books = account().model_copy(update={"target": 0, "clock": float("nan")})
    wait = Doing(time=float("-inf"), what="waiting_for_peers", detail="\x1b]0;title\x07", since=float("nan"))
    write(folder, bad, books, wait, stopped())
    with (folder / "events.jsonl").open("ab") as file:
        file.write(b'{"event":"doing",' + b"[" * 1_000_000 + b"\n" + b"x" * (3 << 20) + b"\n\xff\n")
    contribution = ContributionFile(folder / "contribution.jsonl")
    work = Work(run="r" * 32, stage=1, since=1e12, until=1e12, tokens=1, drawn=1, served=1, outer_rounds=1)
    add(contribution, identity, work)
    with (folder / "contribution.jsonl").open("ab") as file:
        file.write(b"[" * 1_000_000 + b"\n" + b"x" * (3 << 20) + b"\n\xff\n")
    lines = status_lines(folder, NOW)
    assert len(lines) < 40
    assert all(line.isprintable() for line in lines)
    assert any("refused" in line for line in lines)


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
    with RunFolder(tmp_path).lock():
        write(tmp_path, Doing(time=1117.0, what="paused", detail="paused: noloco-node resume goes on", since=1117.0))
        assert any(line.endswith("resume goes on (for 4 s)") for line in status_lines(tmp_path, now=1121.0))


def test_what_stayed_on_this_machine_is_told_apart_from_what_the_line_carried(tmp_path: Path) -> None:
    """A volunteer with two nodes at home read all of it as sent over the line."""
    write(tmp_path, made.started("s0-r0"), made.account())
    assert not any("this machine" in line for line in status_lines(tmp_path, now=1121.0))
    write(tmp_path, made.account(bytes_nearby=5_000_000))
    assert "  off the line      5.0 MB of both stayed on this machine" in status_lines(tmp_path, now=1121.0)


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


@pytest.mark.parametrize("in_order", [False, True])
def test_a_node_that_was_started_again_is_starting_whatever_its_former_life_said_last(
    in_order: bool, tmp_path: Path
) -> None:
    """After a kill -9 it was said to train, and to be stuck; after an orderly end it was said to have stopped."""
    training = Doing(time=1000.0, what="training", detail="training", since=1000.0)
    write(tmp_path, made.started("s0-r0"), training, *([made.stopped("s0-r0")] if in_order else []))
    os.utime(RunFolder(tmp_path).events, (0.0, 1000.0))
    with RunFolder(tmp_path).lock():
        lines = status_lines(tmp_path, now=99_999.0)
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
