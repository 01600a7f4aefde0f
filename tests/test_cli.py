"""The command line as a person meets it: quick, helpful, never a traceback."""

from __future__ import annotations

import errno
import re
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

from noloco_node import __version__
from noloco_node.cli import handlers
from noloco_node.cli import main as cli
from noloco_node.cli.node_options import node_overrides
from noloco_node.cli.printing import print_run
from noloco_node.config.data_spec import NOT_READ
from noloco_node.errors import ExitCode, UserError
from noloco_node.node.stay import stopped_event
from noloco_node.telemetry.events import NodeStopped

MICRO = Path(__file__).parent / "configs" / "micro.yaml"


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "noloco_node", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.spawned
def test_the_module_is_the_command() -> None:
    """`python -m noloco_node` answers."""
    answer = run_cli("--version")
    assert (answer.returncode, answer.stdout) == (0, f"noloco-node {__version__}\n")


@pytest.mark.parametrize(
    ("line", "usage", "meant"),
    [
        ("swarm tiny --run-foldr x", "noloco-node swarm", "--run-foldr x; did you mean --run-folder?"),
        ("config show tiny --sett a=b", "noloco-node config show", "did you mean --set?"),
        ("join --metrics-prt=1 /ip4/1.2.3.4", "noloco-node join", "did you mean --metrics-port?"),
        ("join --device cuda /ip4/1.2.3.4", "noloco-node join", "--device; did you mean --devices?"),
        ("swrm tiny", "noloco-node", "; did you mean swarm?"),
        ("config shw tiny", "noloco-node config", "; did you mean show?"),
        ("join --q", "noloco-node join", "unrecognized arguments: --q\n"),
    ],
)
def test_what_is_no_option_or_command_is_told_with_what_was_meant(
    line: str, usage: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command that was named, with its usage."""
    with pytest.raises(SystemExit) as ended:
        cli.main(line.split())
    told = capsys.readouterr().err
    assert ended.value.code == ExitCode.USAGE
    assert told.startswith(f"usage: {usage} [-h]")
    assert meant in told


def test_a_link_is_judged_and_wants_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is printed: a plan without a device says nothing of links."""
    for option, wrong in (("--uplink", "fast"), ("--round-trip", "soon")):
        assert cli.main(["config", "validate", str(MICRO), option, wrong]) == ExitCode.USAGE
        told = capsys.readouterr()
        assert (told.out, f"{option} is '{wrong}'" in told.err) == ("", True)
    for option, right in (("--uplink", "20Mbit"), ("--round-trip", "20ms")):
        assert cli.main(["config", "validate", str(MICRO), option, right]) == ExitCode.USAGE
        told = capsys.readouterr()
        assert (told.out, f"{option} changes only how busy a device would be" in told.err) == ("", True)


@pytest.mark.parametrize(
    ("name", "size", "said"), [("a.txt", 2048, True), ("a.txt", 4096, False), ("a.csv", 2048, True)]
)
def test_a_text_that_its_run_would_read_far_too_often_is_noted_before_it_begins(
    name: str, size: int, said: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only a node said so, in its log, once it trained."""
    head = "text\n" if name.endswith("csv") else ""
    (tmp_path / name).write_text(head + "and on\n" * ((size - len(head)) // 7))
    ours = [f"run.data.{each}" for each in ("source=text", f"path={tmp_path / name}")]
    assert cli.main(["config", "validate", str(MICRO), "--set", ours[0], "--set", ours[1]]) == 0
    assert ("24 times the text of 2,04" in capsys.readouterr().out) is said


def test_a_path_is_not_added_to_paths_that_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    """It ended in a traceback."""
    given = ["--set", "run.data.paths=/a", "--data-path", "b=/b"]
    with pytest.raises(SystemExit) as ended:
        cli.main(["config", "validate", str(MICRO), *given])
    assert (ended.value.code, "is no list of names and paths" in capsys.readouterr().err) == (ExitCode.USAGE, True)


def test_a_mistyped_folder_gets_the_name_that_lies_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`eval` does not ask for a run folder alone, since it takes a model as well."""
    (tmp_path / "my-model").mkdir()
    assert cli.main(["eval", str(tmp_path / "my-modle")]) == ExitCode.RUN_FOLDER
    told = capsys.readouterr().err
    assert f"did you mean '{tmp_path / 'my-model'}'?" in told
    assert "`eval` takes a folder that `export` wrote as well" in told


def test_help_and_settings_need_no_heavy_library() -> None:
    """Help, version, `config show` and a mistyped address answer at once: nothing that takes seconds to load is loaded.
    The command alone lists the commands."""
    code = (
        "import sys; from noloco_node.cli.main import main\n"
        f"assert main(['config', 'show', {str(MICRO)!r}]) == 0\n"
        "assert main([]) == 2\n"
        "assert main(['join', '/ip4/10.0.0.5/tcp/31337']) == 3\n"
        "assert main(['join', '--run-folder', '/nowhere']) == 4\n"
        f"assert main(['run', {str(MICRO)!r}, '--host', '8.8.8.8']) == 3\n"
        "assert main(['seed', '--host', 'localhost']) == 3\n"
        "heavy = {'torch', 'transformers', 'hivemind', 'matplotlib', 'rich', 'datasets'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert answer.returncode == 0, answer.stderr
    assert "run id" in answer.stdout
    for words in (
        "train on a swarm of nodes on this machine",
        "this is no address of a peer",
        "no address was given",
        "no address of this machine",
    ):
        assert answer.stderr.count(words) == 1
    assert "firewall" not in answer.stderr


def test_validate_says_what_a_run_comes_to(capsys: pytest.CaptureFixture[str]) -> None:
    """Parameters, steps, rounds and bytes, before anything is started."""
    assert cli.main(["config", "validate", str(MICRO)]) == 0
    output = capsys.readouterr().out
    for words in (
        "parameters        37,024 (18,496 + 18,528)",
        "inner steps       48",
        "is valid",
        "with fewer than 4",
    ):
        assert words in output


LACKS = ["--set", "run.data.source=text", "--set", "run.data.path=gone-*.txt"]
PARTS = ["--set", "run.data.mixture=[{source: stdlib}, {source: text, path: gone-*.txt}]"]


@pytest.mark.parametrize("text", [LACKS, PARTS])
def test_a_card_is_judged_without_the_runs_text(
    text: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pages have a volunteer ask before he has it, and the command ended in an error. A text with another fault, or
    none where no card is named, is one still."""
    monkeypatch.chdir(tmp_path)
    asked = ["config", "validate", str(MICRO), *text]
    assert cli.main([*asked, "--device", "RTX 4060", "--uplink", "20Mbit"]) == ExitCode.OK
    told = capsys.readouterr().out
    assert "GPU utilisation" in told
    assert re.search(r"text +not looked at: .*'gone-\*\.txt', which does not exist\n", told)
    assert cli.main(asked) == ExitCode.DATA
    (tmp_path / "gone-1.txt").write_text("short")
    if text is LACKS:
        assert cli.main([*asked, "--device", "RTX 4060"]) == ExitCode.DATA


def test_guard_copies_of_one_stage_are_said_to_do_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody serves another stage that could keep them."""
    arguments = ["config", "validate", str(MICRO), "--set", "run.standby_copies=1", "--set"]
    assert cli.main([*arguments, "run.model.stages=1"]) == 0
    assert "note: run.standby_copies is 1, and does nothing with one stage" in capsys.readouterr().out
    assert cli.main([*arguments, "run.model.stages=2"]) == 0
    assert "does nothing" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["config", "validate", "missing.yaml"], ExitCode.CONFIG, "missing.yaml"),
        (["config", "validate", str(MICRO), "--set", "run.inner.rate=3"], ExitCode.CONFIG, "run.inner.rate"),
        (["config", "validate", str(MICRO), "--set", "run.model.stages=3"], ExitCode.CONFIG, "model.stages"),
        (
            ["config", "validate", str(MICRO), "--set", "run.model.config.tie_word_embeddings=true"],
            ExitCode.CONFIG,
            "tie_word_embeddings",
        ),
        (["config", "validate", str(MICRO), "--set", "run.outer.gamma=2"], ExitCode.CONFIG, "outer.gamma"),
        (["config", "show", str(MICRO), "--set", "nonsense"], ExitCode.USAGE, "name=value"),
        (["run", str(MICRO), "--port", "http"], ExitCode.CONFIG, "node.port"),
        (["run", str(MICRO), "--stage", "7"], ExitCode.CONFIG, "node.stage"),
        (["join", "/a", "--set", "node.sped=3"], ExitCode.CONFIG, "node.sped"),
        (["join", "/a", "--set", "node.port=yes"], ExitCode.CONFIG, "true is a boolean"),
        (["join", "/a", "--set", "run.outer.gamma=0.1"], ExitCode.CONFIG, "takes the run's settings from a peer"),
        (["join", "/a", "--set", "run.data.path=no"], ExitCode.CONFIG, "run.data.path"),
        (
            ["join", "/a", "--set", "run.data.path=gone.txt"],
            ExitCode.DATA,
            "run.data.path is 'gone.txt', which does not",
        ),
        (["join", "/a", "--set", "run.data.path=/gone"], ExitCode.DATA, "nobody was asked for a run yet"),
        (["join", "/a", "--set", f"run.data.path={MICRO.parent}/*.yaml"], ExitCode.CONFIG, "/a"),
        (["join", "/a", "--set", "run.data.tokenizer=./gone"], ExitCode.DATA, "run.data.tokenizer is './gone'"),
        (["join", "/a", "--set", "run.data.path=owner/name"], ExitCode.CONFIG, "/a"),
        (["join", "/a", "--set", "lab.seeds=[1]"], ExitCode.CONFIG, "there is no such setting"),
    ],
)
def test_a_mistake_gets_one_screen_and_its_own_exit_code(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: ExitCode, words: str
) -> None:
    """What is wrong, what to do, the documented code; no traceback."""
    assert cli.main(arguments) == code
    errors = capsys.readouterr().err
    assert words in errors
    assert "remedy:" in errors
    assert "Traceback" not in errors
    assert len(errors.splitlines()) <= 24


@pytest.mark.parametrize("arguments", [["swarm"], ["fly"], ["run", "a.yaml", "--speed", "9"]])
def test_a_wrong_command_line_is_a_usage_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """argparse's own errors have the documented code as well."""
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == ExitCode.USAGE
    assert "usage: noloco-node" in capsys.readouterr().err


def test_options_of_run_are_settings_of_the_node() -> None:
    """Each option stands for the setting of its name, and odd file names survive the way."""
    line = f"run {MICRO} --stage 1 --port 4001 --host 0.0.0.0 --metrics-port 0 --set node.in_flight=7"
    line += " --initial-peers /ip4/1.2.3.4/tcp/1/p2p/QmA /b --announce /ip4/5.6.7.8/tcp/2"
    options = cli.parser().parse_args([*line.split(), "--identity", "yes: no", "--run-folder", "a b"])
    from noloco_node.config.load import load_config

    node = load_config(MICRO, node_overrides(options)).node
    assert (node.stage, node.port, node.host, node.metrics_port, node.in_flight) == (1, 4001, "0.0.0.0", 0, 7)
    assert (node.identity, node.run_folder) == (Path("yes: no"), Path("a b"))
    assert node.initial_peers == ("/ip4/1.2.3.4/tcp/1/p2p/QmA", "/b")
    assert node.announce == ("/ip4/5.6.7.8/tcp/2",)


def test_the_address_to_join_may_come_from_the_environment() -> None:
    """As a container or a service has it: `noloco-node join` without an address does not hide it; one that is given
    wins."""
    from noloco_node.config.load import load_join

    environ = {"NOLOCO_NODE_INITIAL_PEERS": "/a /b"}
    for line, joined in (("join", ("/a", "/b")), ("join /c", ("/c",))):
        overrides = node_overrides(cli.parser().parse_args(line.split()))
        assert load_join(overrides, environ).node.initial_peers == joined


def test_who_joins_gives_addresses_and_settings_of_its_own_node_only() -> None:
    """The options are those of `run`; of the run only the place of one's own text can be set."""
    line = "join /a /b --stage 1 --port 4001 --host 0.0.0.0 --set node.device=cuda:1 --set run.data.path=book.txt"
    from noloco_node.config.load import load_join

    config = load_join(node_overrides(cli.parser().parse_args(line.split())))
    assert config.node.initial_peers == ("/a", "/b")
    assert (config.node.stage, config.node.port, config.node.host) == (1, 4001, "0.0.0.0")
    assert (config.node.device, config.run.data.path, config.run.data.tokenizer) == ("cuda:1", "book.txt", None)


@pytest.mark.parametrize(
    ("clock", "replicas", "speed", "words"),
    [
        (
            12_288.0,
            (2, 1),
            1.024,
            ["nodes 3 (stage 0: 2, stage 1: 1)", "12,288 of 49,152 tokens (25 %)", "about 10.0 h at this speed"],
        ),
        (49_200.0, (2, 1), 9.0, ["nothing: this run is over"]),
        (49_200.0, (2, 1), 9.0, ["49,152 of 49,152 tokens, and 48 beyond its end (100 %)"]),
        (0.0, (2, 0), 9.0, ["not known: stage 1 has no node"]),
        (0.0, (0, 0), 9.0, ["not known: stages 0 and 1 have no node", "not known: no node of the run is there to say"]),
        (0.0, (1, 1), 0.0, ["not known yet: nobody says how fast it is"]),
    ],
)
def test_a_joiner_sees_what_it_joins(
    clock: float, replicas: tuple[int, ...], speed: float, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Model, data, tokens, stages, H, bytes of an outer step, progress and hours to go."""
    from noloco_node.config.load import load_config
    from noloco_node.directory.summary import SwarmSummary

    print_run(load_config(MICRO).run, SwarmSummary(clock, 49_152, replicas, speed))
    output = capsys.readouterr().out
    usual = [
        "run micro",
        "37,024 (18,496 + 18,528)",
        "llama",
        "stdlib",
        "49,152",
        "one in 6 inner steps",
        "0.02 / 0.02 MB",
    ]
    for each in [*usual, *words]:
        assert each in output


def test_a_text_that_a_joiner_does_not_read_is_no_path(capsys: pytest.CaptureFixture[str]) -> None:
    """Its tokenizer is no name either: no quotes around what stands for them."""
    from noloco_node.config.load import load_config
    from noloco_node.directory.summary import SwarmSummary

    run = load_config(MICRO).run
    data = run.data.model_copy(update={"source": "text", "path": NOT_READ, "tokenizer": NOT_READ})
    print_run(run.model_copy(update={"data": data}), SwarmSummary(0.0, 49_152, (1, 1), 1.0))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  data ")]
    assert "text, not named: only stage 0 reads the text, windows of" in line
    assert '"' not in line


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (
            UserError(ExitCode.DATA, "no text", "write some"),
            ExitCode.DATA,
            "noloco-node: no text\n  remedy: write some",
        ),
        (KeyboardInterrupt(), ExitCode.INTERRUPTED, "interrupted"),
        (RuntimeError("boom"), ExitCode.FAILURE, "unexpected failure: RuntimeError: boom"),
        (
            PermissionError(errno.EACCES, "Permission denied", "runs/theirs/node.lock"),
            ExitCode.RUN_FOLDER,
            "the system refuses to read or write ('runs/theirs/node.lock'): Permission denied\n  remedy: ",
        ),
        (
            FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"),
            ExitCode.RUN_FOLDER,
            "refuses to read or write: No usable temporary directory found",
        ),
        (OSError(errno.EIO, "a broken disk"), ExitCode.RUN_FOLDER, "refuses to read or write: a broken disk"),
        (PermissionError(errno.EACCES, "Permission denied"), ExitCode.FAILURE, "unexpected failure: PermissionError"),
    ],
)
def test_every_way_a_command_can_fail_has_its_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, words: str
) -> None:
    """Known errors, interruption and defects are told apart."""

    def fail(options: object) -> int:
        raise error

    monkeypatch.setattr(handlers, "show", fail)
    assert cli.main(["config", "show", "x.yaml"]) == code
    assert words in capsys.readouterr().err


def test_a_full_disk_is_no_defect() -> None:
    """The system's word for it, a remedy, and the code of a folder that cannot be written."""
    command = [sys.executable, "-u", "-m", "noloco_node", "config", "show", str(MICRO)]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == ExitCode.RUN_FOLDER, done.stderr
    assert "No space left on device" in done.stderr
    assert "remedy" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", [["config", "validate"], ["swarm"], ["run"], ["run", "--devices", "cpu,cpu"]])
@pytest.mark.parametrize(
    ("settings", "code", "words"),
    [
        (["run.model.config.vocab_size=100"], ExitCode.DATA, "has 256 tokens, more than run.model.config.vocab_size"),
        (["run.data.tokenizer=./no-tokenizer"], ExitCode.DATA, "run.data.tokenizer is './no-tokenizer'"),
        (["run.data.source=text", "run.data.path=gone.txt"], ExitCode.DATA, "'gone.txt', which does not exist"),
        (["run.data.source=huggingface", "run.data.path=./here"], ExitCode.CONFIG, "set run.data.source to text"),
        (["run.data.source=text", "run.data.path=./*.jsonl"], ExitCode.DATA, "of 'rows.jsonl' has the columns body"),
        (["run.data.source=text", "run.data.path=short.txt"], ExitCode.DATA, "has 5 bytes, too few"),
        (["run.model.config.max_position_embeddings=31"], ExitCode.CONFIG, "less than run.data.sequence_length (32)"),
        (["run.model.config.hiden_size=3"], ExitCode.CONFIG, "did you mean hidden_size?"),
    ],
)
def test_what_cannot_be_trained_on_is_said_before_anything_starts(
    command: list[str],
    settings: list[str],
    code: ExitCode,
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By `config validate`, and by what would start a node: none is started, and no folder is made."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("noloco_node.launch.local_run.run_local_swarm", _never)
    monkeypatch.setattr("noloco_node.node.daemon.run_node", _never)
    monkeypatch.setattr("noloco_node.launch.device_group.run_devices", _never)
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "rows.jsonl").write_text('{"body": "text"}\n')
    options = [option for setting in settings for option in ("--set", setting)]
    assert cli.main([*command, str(MICRO), *options]) == code
    assert words in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def _never(*_: object) -> None:
    raise AssertionError("it was started")


def test_a_node_of_a_later_stage_needs_no_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only stage 0 reads it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("noloco_node.node.daemon.run_node", _never)
    text = ["--set", "run.data.source=text", "--set", "run.data.path=gone.txt"]
    assert cli.main(["run", str(MICRO), "--stage", "1", *text]) == ExitCode.FAILURE  # it went as far as the node
    assert cli.main(["run", str(MICRO), "--stage", "0", *text]) == ExitCode.DATA


@pytest.mark.parametrize(("reason", "told"), [("target_reached", True), ("interrupted", False)])
def test_a_node_at_the_runs_end_says_where_its_weights_are_and_how_they_become_a_model(
    reason: Literal["target_reached", "interrupted"],
    told: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`stopped (target reached)` was the last word, and a volunteer had to find the rest out."""

    async def end(*_: object) -> NodeStopped:
        return stopped_event(reason, "", 0.0, final_weights="final")

    monkeypatch.setattr("noloco_node.node.daemon.run_node", end)
    assert cli.main(["run", str(MICRO), "--run-folder", "here"]) == (0 if told else ExitCode.INTERRUPTED)
    said = capsys.readouterr().out
    assert ("are in here/final;" in said) is told
    assert said.endswith("noloco-node export here --out my-model\n") is told


def test_no_invitation_stands_in_a_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """All users of a machine read its list of processes."""
    for given in (["--invitation", "noloco-invitation-abc"], ["--set", "node.invitation=noloco-invitation-abc"]):
        assert cli.main(["join", "/ip4/127.0.0.1/tcp/1/p2p/x", *given]) == ExitCode.USAGE
        told = capsys.readouterr().err
        assert "--invitation FILE" in told
        assert "noloco-invitation-abc" not in told


def test_a_joiner_sees_what_its_line_disk_and_device_would_give(capsys: pytest.CaptureFixture[str]) -> None:
    """It sees that for stages that it may serve, for what is left of the run; if no speed is known, the bytes alone."""
    from noloco_node.config.load import load_config
    from noloco_node.config.node_settings import NodeSettings
    from noloco_node.directory.summary import SwarmSummary

    run = load_config(MICRO).run
    print_run(run, SwarmSummary(12_288.0, 49_152, (2, 1), 1_000.0), settings=NodeSettings(stage=1))
    own = capsys.readouterr().out
    assert re.search(
        r"costs a node      stage 1: [\d.]+ MB up and [\d.]+ MB down to the run's end, [\d.]+ and [\d.]+ Mbit/s; ", own
    )
    assert "GFLOP of work a second" in own
    assert "stage 0: " not in own.partition("costs a node")[2]
    assert "of the disk" in own
    print_run(run, SwarmSummary(12_288.0, 49_152, (2, 1), 0.0))
    any_stage = capsys.readouterr().out.partition("costs a node")[2]
    assert "stage 0: " in any_stage
    assert "stage 1: " in any_stage
    assert "Mbit/s" not in any_stage
    print_run(run, SwarmSummary(12_288.0, 49_152, (2, 1), 1_000.0), settings=NodeSettings(stage=1, uplink_mbit=0.01))
    bound = capsys.readouterr().out
    needs = float(re.findall(r"([\d.]+) and [\d.]+ Mbit/s", bound)[0])
    share = float(re.findall(r"node\.uplink_mbit 0\.01 lets it do ([\d.]+) % of that", bound)[0])
    assert share == pytest.approx(1.0 / needs, rel=0.02)
    asks = run.model_copy(update={"limits": run.limits.model_copy(update={"least_uplink_mbit": 20.0})})
    for mbit in (None, 25.0):
        print_run(asks, SwarmSummary(12_288.0, 49_152, (2, 1), 1_000.0), settings=NodeSettings(uplink_mbit=mbit))
        said = capsys.readouterr().out
        assert ("asks its nodes for 20 Mbit/s" in said) is (mbit is None), "who names its line is told by a refusal"
        assert "lets it do" not in said
    print_run(run, SwarmSummary(49_200.0, 49_152, (2, 1), 9.0))
    assert "costs a node" not in capsys.readouterr().out


def test_a_joiner_is_told_the_bytes_of_a_day_and_the_bits_of_a_second_as_one_truth(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """36,864 tokens are left at 1,000 a second: what goes to the run's end takes 36.864 s of a day."""
    from noloco_node.config.load import load_config
    from noloco_node.config.node_settings import NodeSettings
    from noloco_node.directory.summary import SwarmSummary

    settings = NodeSettings(stage=1)
    print_run(load_config(MICRO).run, SwarmSummary(12_288.0, 49_152, (2, 1), 1_000.0), settings=settings)
    (told,) = [line for line in capsys.readouterr().out.splitlines() if "a day" in line]
    units = {"kB": 1e3, "MB": 1e6, "GB": 1e9}
    sizes = [float(count) * units[unit] for count, unit in re.findall(r"([\d.]+) ([kMG]B) (?:up|down)", told)]
    bits = re.search(r"([\d.]+) and ([\d.]+) Mbit/s", told)
    assert len(sizes) == 4
    assert bits is not None
    assert sizes[2:] == pytest.approx([86_400.0 / 36.864 * count for count in sizes[:2]], rel=0.04)
    assert sizes[2:] == pytest.approx([86_400.0 * 1e6 / 8 * float(mbit) for mbit in bits.groups()], rel=0.02)
