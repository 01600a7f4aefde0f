"""Where this machine keeps the texts of a mixture: a path for each source, beside the configuration or in joining."""

from __future__ import annotations

from pathlib import Path

import pytest

from noloco_node.bootstrap.spec_fetch import read_agreed, with_own_data
from noloco_node.cli import main as cli
from noloco_node.cli.node_options import node_overrides
from noloco_node.config.load import OwnData, load_config, load_join
from noloco_node.data.prepared import fingerprint_of
from noloco_node.data.windows import load_windows
from noloco_node.errors import ExitCode, UserError
from noloco_node.node.early_checks import check_own_data

MICRO = Path(__file__).parent.parent / "configs" / "micro.yaml"
PARTS = "{source: stdlib}, {source: text, name: web/a.1}, {source: text, name: code, path: /owner}, {source: text}"
"""As an owner may hand them out: with paths of his own, or with none."""


def given(line: str) -> list[str]:
    """Overrides that this command line stands for."""
    return node_overrides(cli.parser().parse_args(line.split()))


def test_a_path_for_each_source_goes_with_the_configuration() -> None:
    """By name, whatever signs it has, or by number; the run is the same wherever the texts lie."""
    mixture = f"run.data.mixture=[{PARTS}]"
    line = "run x --data-path web/a.1=/w=1 --data-path 3=books --data-path code=/c --data-path code=/d --stage 0"
    mixed = load_config(MICRO, [mixture, *given(line)])
    assert [part.path for part in mixed.run.data.mixture] == [None, "/w=1", "/d", "books"]
    assert mixed.node.stage == 0
    other = load_config(MICRO, [mixture, "run.data.paths.code=/e", 'run.data.paths={web/a.1: b, "3": c}'])
    assert [part.path for part in other.run.data.mixture] == [None, "b", "/owner", "c"]
    assert other.run.run_id == mixed.run.run_id
    single = load_config(MICRO, ["run.data.source=text", *given("run x --data-path ./a=b.txt")])
    assert single.run.data.path == "./a=b.txt"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--data-path cdoe=/c", ["'cdoe'", "its texts are web/a.1, code, 3", "--data-path code=PATH"]),
        ("--data-path 0=/c", ["'0'", "the same on every machine"]),
        ("--data-path code=/c", ["run.data.mixture[1].path is not set"]),
        ("--set run.data.paths=/c", ["--data-path NAME=PATH"]),
        ("--set run.data.mixture=[] --data-path code=/c", ["'code'", "--data-path PATH"]),
    ],
)
def test_a_path_of_no_source_is_refused_with_the_names_that_there_are(line: str, words: list[str]) -> None:
    """Nothing of it is passed over."""
    with pytest.raises(UserError) as caught:
        load_config(MICRO, [f"run.data.mixture=[{PARTS}]", *given(f"run x {line}")])
    assert caught.value.exit_code is ExitCode.CONFIG
    assert all(word in str(caught.value) for word in words)


def test_who_joins_says_it_in_the_same_words_and_hears_early_what_is_not_there(tmp_path: Path) -> None:
    """Before anybody is asked for a run."""
    own = load_join(given(f"join --data-path code={tmp_path} --data-path web/a.1=/none/such")).run.data
    assert own.paths == {"code": str(tmp_path), "web/a.1": "/none/such"}
    with pytest.raises(UserError, match=r"run\.data\.paths\.web/a\.1 is '/none/such', which does not exist"):
        check_own_data(own)


def test_who_holds_another_text_of_a_mixture_is_told_which(tmp_path: Path) -> None:
    """Each source has a fingerprint of its own, checked wherever the joiner keeps its copy."""
    for name in ("web", "code", "elsewhere"):
        (tmp_path / name).mkdir()
        for number in range(40):
            (tmp_path / name / f"{number}.txt").write_text(f"{name.replace('elsewhere', 'code')} {number} " * 40)
    parts = [f"{{source: text, name: {name}, path: {tmp_path / name}}}" for name in ("web", "code")]
    prints = [fingerprint_of(load_config(MICRO, [f"run.data.mixture=[{each}]"]).run.data.parts[0]) for each in parts]
    held = ", ".join(f"{each[:-1]}, fingerprint: {its}}}" for each, its in zip(parts, prints, strict=True))
    told = read_agreed(load_config(MICRO, [f"run.data.mixture=[{held}]"]).run.agreed_json.encode())
    mine = {"web": str(tmp_path / "web"), "code": str(tmp_path / "elsewhere")}
    joined = with_own_data(told, OwnData(paths=mine), reads_text=True)
    assert load_windows(joined.data, 256).train_count
    (tmp_path / "elsewhere" / "7.txt").write_text("another text " * 40)
    with pytest.raises(
        UserError, match=rf"run\.data\.mixture\[1\] \(code\): .*is not the run's.*{prints[1]}"
    ) as caught:
        load_windows(joined.data, 256)
    assert caught.value.exit_code is ExitCode.DATA
