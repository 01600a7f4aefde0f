"""What is wrong about how a benchmark is called is said in a line, before anything is measured."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks.command import command, device, folder_with, not_negative, positive, results_file, whole, whole_or_none
from noloco_node.config.load import load_config
from noloco_node.errors import ExitCode


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        (whole, "0", "1 or more"),
        (whole, "2.5", "1 or more"),
        (whole_or_none, "-1", "0 or more"),
        (whole_or_none, "many", "0 or more"),
        (positive, "0", "above 0"),
        (positive, "nan", "no finite number"),
        (positive, "soon", "no finite number"),
        (not_negative, "-1", "0 or a larger"),
        (results_file, "/nowhere/at/all.json", "there is no folder '/nowhere/at'"),
        (results_file, "/", "is a folder"),
        (folder_with("summary.json"), "/nowhere", "there is no folder '/nowhere': name one that holds summary.json"),
        (folder_with("a", "b/c"), "/", "does not hold a or b/c"),
        (device, "cuda:99", "cuda:99"),
        (device, "quux", "quux"),
    ],
)
def test_a_value_that_cannot_be_is_named_with_the_remedy(kind: object, text: str, words: str) -> None:
    """By argparse, which names the option, and ends the program."""
    assert callable(kind)
    with pytest.raises(argparse.ArgumentTypeError) as refused:
        kind(text)
    said = str(refused.value)
    assert words in said
    assert text in said
    assert "\n" not in said


def test_what_can_be_is_taken(tmp_path: Path) -> None:
    """As what it is."""
    assert (whole("3"), whole_or_none("0"), whole_or_none("2")) == (3, 0, 2)
    assert (positive("0.5"), not_negative("0"), device("cpu")) == (0.5, 0.0, "cpu")
    (tmp_path / "summary.json").touch()
    assert folder_with("other", "summary.json")(str(tmp_path)) == tmp_path
    assert results_file(str(tmp_path / "found.json")) == tmp_path / "found.json"


def test_a_configuration_that_is_missing_ends_a_benchmark_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """With the exit code that the program itself has for it; what a benchmark returns is its own."""
    with pytest.raises(SystemExit) as ended:
        command(lambda: load_config(Path("nowhere.yaml")))
    assert ended.value.code == ExitCode.CONFIG
    said = capsys.readouterr().err
    assert "nowhere.yaml" in said
    assert said.count("\n") == 1
    for returned, code in ((None, 0), (3, 3)):
        with pytest.raises(SystemExit) as ended:
            command(lambda given=returned: given)
        assert ended.value.code == code
