"""A configuration file's mistakes are named: which setting, what is wrong with it, what to do."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest
from pydantic import ValidationError

from noloco_node.config.load import Config, load_config, load_simulation, render, setting_names
from noloco_node.config.run_spec import RunSpec
from noloco_node.config.settings import RENAMED
from noloco_node.errors import ExitCode, UserError
from noloco_node.laboratory.course import plan_lab
from tests.sources import nodes_of

ROOT = Path(__file__).parent.parent.parent
GOOD = """
run:
  name: good
  model: {stages: 2, config: {model_type: llama}}
  inner: {target_tokens: 100_000, global_batch_tokens: 4096, learning_rate: 1e-3}
  evaluation: {every_tokens: 10_000}
"""


def load(tmp_path: Path, text: str, *overrides: str) -> Config:
    """The configuration that `text` makes."""
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(path, overrides)


def refusal(tmp_path: Path, text: str, *overrides: str) -> UserError:
    """The error that `text` gets."""
    with pytest.raises(UserError) as caught:
        load(tmp_path, text, *overrides)
    assert caught.value.remedy
    return caught.value


@pytest.mark.parametrize(
    "path", [*sorted((ROOT / "configs").rglob("*.yaml")), ROOT / "tests/configs/micro.yaml"], ids=str
)
def test_every_configuration_of_the_repository_is_valid(path: Path) -> None:
    """What we hand out can be loaded: by `simulate` alone what only that runs."""
    config = load_simulation(path)
    if not isinstance(config, Config):
        with pytest.raises(UserError, match="noloco-node simulate"):
            load_config(path)
        return
    assert config == load_config(path)
    assert config.run.stages >= 1
    assert plan_lab(config)[0] >= 1


def test_a_rendered_configuration_is_complete_and_loads_as_itself(tmp_path: Path) -> None:
    """`config show` prints every setting, and its output is a configuration file of the same run."""
    config = load(tmp_path, GOOD, "node.initial_peers=[/ip4/127.0.0.1/tcp/1/p2p/QmA]", "run.inner.eps=1e-9")
    text = render(config)
    assert load(tmp_path, text) == config
    assert load(tmp_path, text).run.run_id == config.run.run_id
    for name in setting_names():
        assert f"{name.rpartition('.')[2]}:" in text


def test_numbers_with_an_exponent_are_numbers(tmp_path: Path) -> None:
    """YAML 1.1 reads 1e-3 as a string."""
    assert load(tmp_path, GOOD).run.inner.learning_rate == 0.001
    assert load(tmp_path, GOOD, "run.inner.target_tokens=1e6").run.inner.target_tokens == 1_000_000
    rope = load(tmp_path, GOOD, "run.model.config.rope_theta=1e4").run.model.config["rope_theta"]
    assert isinstance(rope, float)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["run.inner.lerning_rate=1"], ["run.inner.lerning_rate", "did you mean run.inner.learning_rate"]),
        (["run.learning_rate=1"], ["run.learning_rate", "did you mean run.inner.learning_rate"]),
        (["inner.learning_rate=1"], ["inner: there is no such setting; did you mean run.inner?"]),
        (["model.stages=2"], ["did you mean run.model"]),
        (["learning_rte=1"], ["did you mean run.inner.learning_rate"]),
        (["node.uplink=20"], ["did you mean node.uplink_mbit?"]),
        (["run.outer.steps=4"], ["did you mean run.outer.inner_steps?"]),
        (["run.outer.fragments=1"], ["run.outer.fragments: this release has no such setting any more: delete it"]),
        (["node.generate_share=0.1"], ["node.generate_share: this release has no such setting any more"]),
        (["xyzzy=1"], ["xyzzy", "known here: run, node, local_swarm"]),
        (["run.inner.learning_rate=-1"], ["run.inner.learning_rate", "-1", "greater than 0"]),
        (["run.inner.beta1=fast"], ["run.inner.beta1", "'fast'", "must be a number"]),
        (["run.outer.codec=int7"], ["run.outer.codec", "'int7'", "'int8', 'int4', 'dct' or 'sign'"]),
        (["run.outer.codec=bf16"], ["run.outer.codec: bf16 is no longer a codec", "use fp16", "or int8"]),
        (["run.outer.gamma=2.5"], ["outer.gamma (2.5)", "1 - alpha"]),
        (["run.name=Not Good"], ["run.name", "'Not Good'", "small letters, digits"]),
        (["run.model.stages=yes"], ["run.model.stages", "boolean"]),
        (["node.metrics_port=on"], ["node.metrics_port", "boolean"]),
        (["node.port=99999"], ["node.port", "99999", "65535"]),
        (["node.stage=first"], ["node.stage", "'first'", "'auto'"]),
        (["node.stage=2"], ["node.stage (2)", "run.model.stages is 2", "0 to 1"]),
        (
            ["node.compile=true", "run.model.config.output_router_logits=true"],
            ["node.compile is true, but", "run.model.config.output_router_logits", "set node.compile to false"],
        ),
        (["run.inner.warmup_tokens=100_000"], ["inner.warmup_tokens", "100000", "lower the warm-up"]),
        (["run.inner.global_batch_tokens=512"], ["1024 tokens", "inner.global_batch_tokens (512)"]),
        (["run.data.source=text"], ["data.path is not set"]),
        (["run.evaluation=5"], ["run.evaluation", "group of settings", "every_tokens"]),
        (["run.inner=null"], ["run.inner", "group of settings"]),
        (["local_swarm.replicas=65"], ["local_swarm.replicas (65)"]),
        (["run.inner.learning_rate="], ["run.inner.learning_rate: nothing (null)", "must be a number"]),
        (["run.data.path=2026-01-01"], ["the date 2026-01-01 (in quotes it would be text)", "must be text"]),
        (["run.model.stages=1.5"], ["must be a whole number"]),
        (["run.access.owner=abc"], ["must be a peer id: 52 letters"]),
        (["run.access.peers=abc"], ["must be a list"]),
        (["run.name.x=3"], ["run.name", "not a group", "--set"]),
        (["run.outer.min_inner_steps=-1"], ["outer.min_inner_steps"]),
        (["run.inner.learning_rate=.inf"], ["inner.learning_rate"]),
        (["run.outer.beta=.nan"], ["outer.beta"]),
        (["run.model.config.rope_theta=.inf"], ["model.config.rope_theta"]),
        (["node.drain_seconds=.inf"], ["node.drain_seconds"]),
        (["run.inner.target_tokens=1" + "0" * 4000], ["run.inner.target_tokens"]),
        (["run.inner.target_tokens=" + "9" * 19], ["run.inner.target_tokens"]),
        (["node.torch_threads=1e11"], ["node.torch_threads"]),
        (["run.pipeline.activations=[]"], ["[] is not allowed: must name at least 1"]),
        (["run.pipeline.activations=int2"], ["run.pipeline.activations[0]: 'int2' is not allowed"]),
        (["run.data.block_windows=3"], ["run.data.block_windows is 3, less than one microbatch"]),
    ],
)
def test_a_wrong_setting_is_named_with_what_is_allowed(
    tmp_path: Path, overrides: Sequence[str], named: list[str]
) -> None:
    """One mistake: its dotted name, its value, and what would do, on one screen and in no library's words. `stage:
    first` is one, although it is neither an integer nor `auto`. Numbers beyond all use would break the run later."""
    good = GOOD if overrides != ["run.name.x=3"] else GOOD.replace("name: good", "name: [good]")
    error = refusal(tmp_path, good, *overrides)
    assert error.exit_code is ExitCode.CONFIG
    assert "a setting is wrong" in error.message or overrides == ["run.name.x=3"]
    assert len(error.message) < 700
    assert "Tuple" not in error.message
    for words in named:
        assert words in str(error)


def test_messages_name_settings_as_the_command_line_takes_them() -> None:
    """What is read in a message can be typed behind --set."""
    package = Path(__file__).parents[2] / "noloco_node"
    names = "|".join(re.escape(name) for name in [*setting_names(RunSpec), "model.config"] if "." in name)
    short = re.compile(rf"(?<![\w.])(?:{names})\b")
    found: list[str] = []
    for path in package.rglob("*.py"):
        # files of the laboratory name them within `run:`
        if path.parent.name == "laboratory" or path.name == "experiments.py":
            continue
        if not short.search(path.read_text(encoding="utf-8")):
            continue
        nodes = nodes_of(path)
        docs = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        texts = [node.value for node in nodes if isinstance(node, ast.Constant) and id(node) not in docs]
        found += [f"{path.name}: {text}" for text in texts if isinstance(text, str) and short.search(text)]
    assert not found


def test_a_missing_setting_is_named(tmp_path: Path) -> None:
    """What has no default must be there."""
    error = refusal(tmp_path, GOOD.replace("target_tokens: 100_000, ", ""))
    assert "run.inner.target_tokens: is not set" in str(error)


def test_all_mistakes_come_at_once_on_one_screen(tmp_path: Path) -> None:
    """A person corrects a file once, not once a mistake; and a wholly wrong file still fits the screen."""
    error = refusal(tmp_path, GOOD, "run.inner.beta1=3", "run.outer.codec=x", "node.port=-1", "foo=1", "node.seed=no")
    assert "5 settings are wrong" in error.message
    for name in ("run.inner.beta1", "run.outer.codec", "node.port", "foo", "node.seed"):
        assert f"  {name}: " in error.message
    many = refusal(tmp_path, GOOD, *(f"run.wrong_{number}=1" for number in range(40)))
    assert len(str(many).splitlines()) <= 24
    assert "and 32 more" in many.message


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("run:\n  a: 1\n b: 2\n", ["line 3, column 2", "not valid YAML"]),
        ("run:\n  name: a\n  name: b\n", ["line 3, column 3", "'name' is set twice"]),
        ("", ["is empty", "run:"]),
        ("- a\n- b\n", ["is a list", "run:"]),
        ("run: !!python/object/apply:os.system [ls]\n", ["not valid YAML"]),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, text: str, named: list[str]) -> None:
    """Bad YAML is placed by line and column; nothing in it is ever run."""
    error = refusal(tmp_path, text)
    assert error.exit_code is ExitCode.CONFIG
    for words in named:
        assert words in str(error)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    """Missing, a folder, or no text at all."""
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "wide.yaml").write_text(GOOD, encoding="utf-16")
    for path, reason in [
        ("missing.yaml", "No such file"),
        (".", "directory"),
        ("binary.yaml", "UTF-8"),
        ("wide.yaml", "iconv"),
    ]:
        with pytest.raises(UserError, match=reason) as caught:
            load_config(tmp_path / path)
        assert caught.value.exit_code is ExitCode.CONFIG


@pytest.mark.parametrize("override", ["run.name", "=3", "run..name=3", "run.name=["])
def test_an_override_that_is_none_is_a_usage_error(tmp_path: Path, override: str) -> None:
    """`--set` takes name=value."""
    assert refusal(tmp_path, GOOD, override).exit_code is ExitCode.USAGE


@pytest.mark.parametrize("value", ["[2024] books", "it's {a} b: c: d", '@home, "no"'])
def test_a_value_that_is_no_yaml_is_shown_quoted_as_a_shell_takes_it(value: str, tmp_path: Path) -> None:
    """A folder's name may begin with a bracket."""
    remedy = refusal(tmp_path, GOOD, f"run.data.path={value}").remedy
    words = shlex.split(remedy.removeprefix("quote it: "))
    assert words[0] == "--set"
    assert load(tmp_path, GOOD, "run.data.source=text", words[1]).run.data.path == value


def test_the_last_override_wins(tmp_path: Path) -> None:
    """As everywhere on a command line."""
    assert load(tmp_path, GOOD, "run.outer.inner_steps=3", "run.outer.inner_steps=4").run.outer.inner_steps == 4


def test_the_laboratory_alone_may_leave_the_admissible_set(tmp_path: Path) -> None:
    """By a context of the validation: no key of a file reaches it."""
    config = load(tmp_path, GOOD).run.model_dump()
    config["outer"]["gamma"] = 2.5
    with pytest.raises(ValidationError, match="outside the admissible set"):
        RunSpec.model_validate(config)
    assert RunSpec.model_validate(config, context={"allow_inadmissible": True}).outer.gamma == 2.5
    assert "outer.allow_inadmissible" in refusal(tmp_path, GOOD, "run.outer.allow_inadmissible=true").message


def test_a_setting_is_read_by_its_old_name_for_one_release_with_a_line_that_names_the_new_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each of the table; under both names the new one's value counts, and what is wrong is told by the new name."""
    assert set(RENAMED.values()) <= {*setting_names(Config)}
    assert not set(RENAMED) & {*setting_names(Config)}
    old = load(tmp_path, GOOD, "run.guard_copies=2", "run.limits.guard_seconds=7")
    assert old == load(tmp_path, GOOD, "run.standby_copies=2", "run.limits.standby_seconds=7")
    assert "run.guard_copies is called run.standby_copies now" in caplog.text
    assert load(tmp_path, GOOD, "run.guard_copies=2", "run.standby_copies=3").run.standby_copies == 3
    later = load(tmp_path, GOOD, "run.standby_copies=3", "run.guard_copies=2")
    assert later.run.standby_copies == 2, "a word of the command line counts over the file"
    assert "run.standby_copies: -1" in refusal(tmp_path, GOOD, "run.guard_copies=-1").message
    caplog.clear()
    load(tmp_path, GOOD)
    assert "is called" not in caplog.text
