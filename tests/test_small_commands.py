"""Commands that must answer at once: health, examples, completion."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest

from noloco_node import __version__
from noloco_node.cli import main as cli
from noloco_node.cli.help_texts import HELP
from noloco_node.cli.small import DEFAULT_METRICS_PORT, FOLDER_VARIABLE, HOST_VARIABLE, PORT_VARIABLE, health_address
from noloco_node.config.environment import variable_of
from noloco_node.config.files import find_config, shipped_configs
from noloco_node.config.load import load_config
from noloco_node.errors import ExitCode
from noloco_node.storage.run_folder import RunFolder
from noloco_node.telemetry import web
from noloco_node.telemetry.events import EventFile
from noloco_node.telemetry.web import Page, WebServer
from noloco_node.telemetry.words import say_asking
from tests.support import files_up_to
from tests.telemetry import made_events as made

ROOT = Path(__file__).parent.parent


@pytest.fixture
def node() -> Iterator[tuple[dict[str, HTTPStatus], str]]:
    """A node's pages, whose health the test decides, and their port."""
    says = {"status": HTTPStatus.OK}
    server = WebServer({"/healthz": lambda _: Page(b"the loop beats\n", status=says["status"])})
    try:
        yield says, server.start("127.0.0.1", 0).rpartition(":")[2]
    finally:
        server.stop()


def test_health_is_what_the_node_says_of_itself(
    node: tuple[dict[str, HTTPStatus], str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """0 where it answers 200; 1 where it answers anything else, or nobody answers."""
    says, port = node
    assert cli.main(["health", "--metrics-port", port]) == ExitCode.OK
    assert capsys.readouterr().out == "the loop beats\n"
    monkeypatch.setenv(PORT_VARIABLE, port)
    monkeypatch.setenv(HOST_VARIABLE, "0.0.0.0")
    assert cli.main(["health"]) == ExitCode.OK
    says["status"] = HTTPStatus.SERVICE_UNAVAILABLE
    assert cli.main(["health"]) == ExitCode.FAILURE
    monkeypatch.setenv(PORT_VARIABLE, "1")
    assert cli.main(["health"]) == ExitCode.FAILURE
    assert "no answer from 127.0.0.1 port 1" in capsys.readouterr().out
    monkeypatch.setenv(PORT_VARIABLE, "web")
    assert cli.main(["health"]) == ExitCode.CONFIG
    assert f"{PORT_VARIABLE}: 'web' is no port" in capsys.readouterr().err


def test_a_node_that_hangs_is_not_taken_for_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a process that is stopped: the system takes questions for it, and none more once its queue is full."""
    monkeypatch.setattr(web, "ANSWER_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0), backlog=1) as stopped:
        for _ in range(4):
            assert cli.main(["health", "--metrics-port", str(stopped.getsockname()[1])]) == ExitCode.FAILURE
            said = capsys.readouterr().out
            assert "something listens there and does not answer" in said
            assert "no node runs here" not in said


def test_health_is_asked_where_the_node_listens_by_the_same_variables() -> None:
    """A command line wins, an address for all interfaces is asked on this machine, and a default is left."""
    assert (variable_of("metrics_host"), variable_of("metrics_port")) == (HOST_VARIABLE, PORT_VARIABLE)
    environ = {HOST_VARIABLE: "::", PORT_VARIABLE: "9200"}
    named = cli.parser().parse_args(["health", "--metrics-host", "10.0.0.1", "--metrics-port", "1"])
    assert health_address(named, environ) == ("10.0.0.1", 1)
    plain = cli.parser().parse_args(["health"])
    assert health_address(plain, environ) == ("::1", 9200)
    assert health_address(plain, {}) == ("127.0.0.1", DEFAULT_METRICS_PORT)


def test_a_node_is_asked_where_it_said_that_its_pages_are(tmp_path: Path) -> None:
    """The last life's word, as long as a process holds the run folder that the environment names; whatever lies there
    else is no address."""
    plain, folder = cli.parser().parse_args(["health"]), RunFolder(tmp_path)
    environ, default = {FOLDER_VARIABLE: str(tmp_path)}, ("127.0.0.1", DEFAULT_METRICS_PORT)
    assert variable_of("run_folder") == FOLDER_VARIABLE
    assert health_address(plain, environ) == default
    with folder.lock():
        assert health_address(plain, environ) == default
        diary = EventFile(folder.events)
        for address in ("127.0.0.1:9101", "0.0.0.0:40123"):
            diary.write(made.started("s0-r0").model_copy(update={"metrics_address": address}))
            diary.write(made.inner_step(1))
        assert health_address(plain, environ) == ("127.0.0.1", 40123)
        assert health_address(plain, environ | {PORT_VARIABLE: "0"}) == ("127.0.0.1", 40123)
        assert health_address(plain, environ | {PORT_VARIABLE: "9200"}) == ("127.0.0.1", 9200)
        named = cli.parser().parse_args(["top", str(tmp_path)])
        assert health_address(named, {PORT_VARIABLE: "9200"}) == ("127.0.0.1", 40123)
        diary.write(made.started("s0-r0"))
        diary.close()
        assert health_address(plain, environ) == default
        for text in ('{"event":"node_started","metrics_address":7}\n', '{"event":"node_started"', ""):
            folder.events.write_text(text, encoding="utf-8")
            assert health_address(plain, environ) == default
    assert health_address(plain, environ) == default


@pytest.mark.parametrize(("command", "code"), [("health", ExitCode.FAILURE), ("top", ExitCode.CHECK_FAILED)])
def test_where_no_node_shows_itself_in_the_folder_that_is_named_no_other_is_asked(
    command: str, code: ExitCode, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([command, str(tmp_path)]) == code
    assert f"no node that shows itself runs in {tmp_path}" in capsys.readouterr().err


def test_health_costs_next_to_nothing(node: tuple[dict[str, HTTPStatus], str]) -> None:
    """A container asks every half minute beside the training: no library of ours is loaded, and no setting read."""
    code = (
        "import sys; from noloco_node.cli.main import main\n"
        f"assert main(['health', '--metrics-port', {node[1]!r}]) == 0\n"
        "heavy = {'torch', 'numpy', 'pydantic', 'yaml', 'hivemind', 'rich', 'argcomplete'} & set(sys.modules)\n"
        "import resource; used = resource.getrusage(resource.RUSAGE_SELF); spent = used.ru_utime + used.ru_stime\n"
        "sys.exit(str(heavy) if heavy else f'{spent} s of CPU' if spent > 1.0 else 0)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (answer.returncode, answer.stderr) == (0, "")


def test_a_configuration_that_comes_along_is_known_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From any folder; a file of that name comes first, a folder of that name does not count."""
    monkeypatch.chdir(tmp_path)
    assert load_config(Path("tiny")) == load_config(ROOT / "configs" / "tiny.yaml")
    assert load_config(Path("lab/first")).run.name
    (tmp_path / "tiny").mkdir()
    assert find_config(Path("tiny")) == shipped_configs()["tiny"]
    (tmp_path / "own-text").write_text("x", encoding="utf-8")
    assert find_config(Path("own-text")) == Path("own-text")


def test_every_configuration_lies_in_the_wheel() -> None:
    """The patterns of the package's data find them all, what the pages are made of, and the table of metrics. The
    repository's folder is the same one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["noloco_node"]
    found = {path for pattern in patterns for path in (ROOT / "noloco_node").glob(pattern)}
    pages = {path for path in (ROOT / "noloco_node").rglob("*") if path.suffix in (".html", ".css", ".js", ".md")}
    assert found == {*shipped_configs().values(), *pages}
    assert {"tiny", "own-text", "lab/first"} <= shipped_configs().keys()
    assert (ROOT / "configs").resolve() == ROOT / "noloco_node" / "configs"


@pytest.mark.parametrize("name", ["tinny", "configs/tiny.yaml", "tiny.yml"])
def test_a_name_that_is_none_gets_the_nearest(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may also be a path of the repository, if the package was installed without one."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["config", "show", name]) == ExitCode.CONFIG
    said = f"did you mean tiny? name a YAML file, or one that comes with noloco-node: {', '.join(shipped_configs())}"
    assert said in capsys.readouterr().err
    assert cli.main(["config", "init", name]) == ExitCode.CONFIG
    assert "did you mean tiny?" in capsys.readouterr().err


def test_an_example_is_written_whole_and_never_over_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Comments included; a second time is refused, and what is there stays."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["config", "init"]) == ExitCode.OK
    said = [line.strip() for line in capsys.readouterr().out.splitlines()]
    commands = [" ".join(line.split("  ")[0].split()[1:3]) for line in said[1:]]
    assert commands == ["config validate", "swarm tiny.yaml", "seed tiny.yaml"]
    text = (tmp_path / "tiny.yaml").read_text(encoding="utf-8")
    assert text == shipped_configs()["tiny"].read_text(encoding="utf-8")
    assert "# what all peers must agree on" in text
    (tmp_path / "tiny.yaml").write_text("mine", encoding="utf-8")
    assert cli.main(["config", "init", "tiny"]) == ExitCode.RUN_FOLDER
    assert "--to" in capsys.readouterr().err
    assert (tmp_path / "tiny.yaml").read_text(encoding="utf-8") == "mine"
    assert cli.main(["config", "init", "lab/first", "--to", "a.yaml"]) == ExitCode.OK
    assert load_config(Path("a.yaml")) == load_config(Path("lab/first"))
    with files_up_to(10):
        assert cli.main(["config", "init", "--to", "c.yaml"]) == ExitCode.RUN_FOLDER
    assert not (tmp_path / "c.yaml").exists(), "a second try would be told that the file exists"
    capsys.readouterr()
    assert cli.main(["config", "init", "sim/hunt", "--to", "b.yaml"]) == ExitCode.OK
    assert "noloco-node simulate b.yaml" in capsys.readouterr().out


def test_the_configurations_that_come_along_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """Each with the first sentence of its head, whole or with a sign that there is more."""
    assert cli.main(["config", "list"]) == ExitCode.OK
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(shipped_configs())
    assert all(len(line.split()) > 3 for line in lines)
    assert all(line.endswith((".", "?", "…")) for line in lines)
    assert len({len(line) - len(line.split(maxsplit=1)[1]) for line in lines}) == 1, "one column"


def test_each_command_explains_itself_with_an_example() -> None:
    """The README promises it."""
    assert not [name for name, text in HELP.items() if f"noloco-node {name}" not in text.partition("\nexample")[2]]


def test_a_shell_completes_commands_and_options(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The printed script asks this command, which answers without its heavy libraries."""
    for shell in ("bash", "zsh", "fish"):
        assert cli.main(["completion", shell]) == ExitCode.OK
        assert "noloco-node" in capsys.readouterr().out
    line, answers = "noloco-node join --no-re", tmp_path / "answers"
    environ = {**os.environ, "_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_TYPE": "9"}
    environ["_ARGCOMPLETE_STDOUT_FILENAME"] = str(answers)
    subprocess.run([sys.executable, "-m", "noloco_node"], env=environ, timeout=60, check=True, capture_output=True)
    assert {word.strip() for word in answers.read_text().split("\v")} >= {"--no-relay", "--no-relay-for-others"}


def test_there_is_one_version() -> None:
    """The changelog's newest release and the image's label say what the package says."""
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    entries = re.findall(r"^## (\S+)", changes, flags=re.MULTILINE)
    assert next(entry for entry in entries if entry != "Unreleased") == __version__
    assert f"ARG VERSION={__version__}\n" in (ROOT / "Dockerfile").read_text(encoding="utf-8")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_process_whose_standard_streams_are_closed_runs(closed: str, tmp_path: Path) -> None:
    """As cron and some launchers start one: libuv ended it by a signal, and sockets got the numbers of streams."""
    script = (
        "import asyncio, pathlib, socket, sys, uvloop; from noloco_node.cli.main import open_standard_streams; "
        "open_standard_streams(); uvloop.run(asyncio.sleep(0)); print('out'); print('err', file=sys.stderr); "
        f"pathlib.Path({str(tmp_path / 'number')!r}).write_text(str(socket.socket().fileno()))"
    )
    line = f"exec {sys.executable} -c {shlex.quote(script)} {closed}"
    done = subprocess.run(["bash", "-c", line], timeout=60, check=False, capture_output=True)
    assert done.returncode == 0, done
    assert int((tmp_path / "number").read_text()) > 2


def run_as_command(work: str, **streams: Any) -> subprocess.Popen[Any]:
    """A process whose command does this."""
    script = f"import signal, sys, tempfile, time; from noloco_node.cli import main as cli; {work}; cli.entry()"
    environ = {name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.Popen([sys.executable, "-c", script], env=environ, **streams)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_that_is_ended_takes_its_temporary_files_away(number: signal.Signals, tmp_path: Path) -> None:
    """By SIGTERM or with its terminal `generate` left a whole model in the folder for temporary files."""
    waits = f"with tempfile.TemporaryDirectory(dir={str(tmp_path)!r}): print('now', flush=True); time.sleep(60)"
    script = f"cli._check_no_secret = lambda _: exec({waits!r}); sys.argv = ['noloco-node', 'config', 'list']"
    with run_as_command(script, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"now\n"
        process.send_signal(number)
        assert process.wait(60) == ExitCode.INTERRUPTED
    assert list(tmp_path.iterdir()) == []


def test_what_a_full_disk_does_not_take_is_no_success() -> None:
    """`invite ... > FILE` left an empty file, and said that all was well."""
    with Path("/dev/full").open("wb") as full:
        process = run_as_command("sys.argv = ['noloco-node', 'config', 'list']", stdout=full, stderr=subprocess.PIPE)
        said = process.communicate(timeout=60)[1]
    assert (process.returncode, b"No space left on device" in said) == (ExitCode.RUN_FOLDER, True)


def test_a_console_without_unicode_shows_what_it_lacks_in_letters_that_it_has() -> None:
    """Comments of a configuration, a model's text and a mistake's words all hold letters that ASCII lacks."""
    script = (
        "import sys; from noloco_node.cli import main as cli; "
        "cli.main = lambda: print('out ·\\ud800') or print('err ·\\ud800', file=sys.stderr) or 7; cli.entry()"
    )
    environ = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", script], timeout=60, check=False, capture_output=True, env=environ)
    assert (done.returncode, done.stdout, done.stderr) == (7, b"out \\xb7\\ud800\n", b"err \\xb7\\ud800\n")


def test_a_variable_for_servers_of_several_processes_ends_no_command(tmp_path: Path) -> None:
    """The metrics' library would write a file for each count into that folder, which need not be there."""
    script = (
        "from noloco_node.cli import main as cli; cli.main = lambda: __import__('noloco_node.telemetry.metrics') and "
        "int(not __import__('prometheus_client').Counter('a', 'b').inc() is None); cli.entry()"
    )
    environ = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "none")}
    done = subprocess.run([sys.executable, "-c", script], timeout=60, check=False, capture_output=True, env=environ)
    assert (done.returncode, done.stderr) == (0, b"")


class Stopped(Exception):
    """A command has come to where it loads what takes seconds."""


DEAD = "/ip4/127.0.0.1/tcp/9/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
MICRO = str(ROOT / "tests" / "configs" / "micro.yaml")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (f"join {DEAD}", "asking the peer at"),
        (f"run {MICRO} --initial-peers {DEAD}", "asking the peer at"),
        (f"seed --initial-peers {DEAD} {DEAD}", "asking 2 peers at"),
        (f"watch {DEAD} --once", "asking the peer at"),
        (f"generate {DEAD} --prompt a", "asking the peer at"),
        (f"eval {DEAD}", "asking the peer at"),
        (f"export {DEAD} --out FOLDER/model", "loading torch"),
        ("export FOLDER --out FOLDER/model", "loading torch"),
        ("eval FOLDER", "loading torch"),
        ("generate FOLDER --prompt a", "loading torch"),
        (f"swarm {MICRO}", "loading torch"),
        (f"config validate {MICRO}", "loading torch"),
        (f"data prepare {MICRO} --to FOLDER/tokens", "loading torch"),
        ("seed", "loading torch"),
        ("doctor", "loading torch"),
    ],
)
def test_a_command_says_what_it_does_before_it_is_silent_for_seconds(
    line: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ten seconds without a word look like a process that hangs."""

    def stop() -> None:
        raise Stopped

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("noloco_node.telemetry.words.SLOW_TO_LOAD", "nothing that could be loaded")
    for room in ("cli.handlers", "cli.printing", "cli.small", "cli.exporting", "cli.data"):
        monkeypatch.setattr(f"noloco_node.{room}.loading", stop)
    for room in ("exporting.sources", "node.early_checks"):
        monkeypatch.setattr(f"noloco_node.{room}.loading", stop)
    assert cli.main(line.replace("FOLDER", str(tmp_path)).split()) == ExitCode.FAILURE
    said = capsys.readouterr().err
    assert said.startswith(words)
    assert "Stopped" in said


def test_a_log_of_json_has_no_line_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    """What is said to a person would be one."""
    say_asking([DEAD], "json")
    say_asking([], "json")
    assert capsys.readouterr().err == ""
