"""The command as a person gives it: from a file to a folder of results, the same every time."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from noloco_node.cli import main as cli
from noloco_node.config.load import load_config, render, setting_names
from noloco_node.errors import ExitCode
from noloco_node.laboratory.course import command_line, plan_lab
from noloco_node.laboratory.expansion import expand, job_of
from noloco_node.laboratory.experiment import train
from noloco_node.laboratory.figures import Measurement, Result, Results
from tests.fork_server import forked_workers
from tests.virtual import made_results as made

LAB = """
lab:
  variants:
    - {name: data parallel, algorithm: data_parallel}
    - {name: noloco, algorithm: noloco, sweep: {outer.beta: [0.3, 0.6]}}
    - {name: none, algorithm: local}
  replicas: [2, 4]
  tune_seeds: [1]
  seeds: [2, 3]
  plots: [convergence]
  evaluations: 4
  divergence_points: 6
"""


@pytest.fixture
def lab_file(tmp_path: Path) -> Path:
    """The micro run with a small experiment."""
    path = tmp_path / "lab.yaml"
    run = made.MICRO.read_text(encoding="utf-8").replace("target_tokens: 49_152", "target_tokens: 4_096")
    path.write_text(run + LAB, encoding="utf-8")
    return path


def numbers(out: Path) -> list[dict[str, Any]]:
    """The results of a folder but for the time that they took."""
    results = json.loads((out / "results.json").read_text())["results"]
    return [{name: value for name, value in result.items() if name != "seconds"} for result in results]


def test_a_real_experiment_goes_on_without_training_and_has_the_same_numbers_in_another_process(
    lab_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What its worker has trained and this process trains again is equal to the last digit; a second start trains
    nothing."""
    one, workers = tmp_path / "one", ("--set", "lab.workers=1")
    with forked_workers():
        assert cli.main(["lab", str(lab_file), "--out", str(one), *workers]) == 0
    first = capsys.readouterr().out
    # There are 2 × (2 tune + 2 report) of noloco, 2 × 2 of none, 2 of data parallel.
    assert "laboratory: 3 variants, 14 trainings, 57,344 tokens in all" in first
    assert "14 of 14: " in first
    _check_results(one)
    before = numbers(one)
    _check_trained_again(lab_file, one)
    assert cli.main(["lab", str(lab_file), "--out", str(one), *workers]) == 0
    assert " of 14: " not in capsys.readouterr().out
    assert numbers(one) == before


def _check_trained_again(lab_file: Path, out: Path) -> None:
    config = load_config(lab_file)
    results = Results.model_validate_json((out / "results.json").read_text()).results
    found = [result for result in results if (result.replicas, result.seed) == (2, 2)]
    assert len(found) == 3
    for result in found:
        labels = (result.variant, result.replicas, result.options)
        [point] = (p for cell in expand(config) for p in cell.points if (p.variant, p.replicas, p.options) == labels)
        again = Result.model_validate_json(train(job_of(point, 2, config.lab)))
        told = {"bytes_per_outer_step", "bytes_per_inner_step"} if result.algorithm == "data_parallel" else set[str]()
        measured = Measurement.model_fields.keys() - {"seconds"} - told
        assert again.model_dump(include=measured) == result.model_dump(include=measured)


def _check_results(out: Path) -> None:
    record = Results.model_validate_json((out / "results.json").read_text())
    assert record.versions.keys() == {"noloco_node", "torch", "python"}
    assert len(record.results) == 4 + 2 * 4 + 4
    assert all(result.tokens == 4_096 and not result.diverged for result in record.results)
    assert all(result.validation_loss is not None and 2.0 < result.validation_loss < 5.6 for result in record.results)
    for replicas in (2, 4):
        tried = [r for r in record.results if (r.purpose, r.replicas) == ("tune", replicas)]
        best = min(tried, key=lambda result: result.validation_loss or 0.0)
        reported = [r for r in record.results if (r.variant, r.purpose, r.replicas) == ("noloco", "report", replicas)]
        assert {result.options["outer.beta"] for result in reported} == {best.options["outer.beta"]}
        assert [result.seed for result in reported] == [2, 3]
    table = (out / "table.md").read_text()
    assert record.command in table
    assert "## 4,096 tokens, 4 replicas" in table
    assert (out / "convergence.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("override", "code", "words"),
    [
        ("lab.variants=[{name: a, algorithm: noloco, set: {outer.gamma: 3}}]", ExitCode.CONFIG, "lab.variants[0].set"),
        ("lab.variants=[{name: a, algorithm: adam}]", ExitCode.CONFIG, "lab.variants[0].algorithm"),
        ("lab.variants=[{name: a, algorythm: noloco}]", ExitCode.CONFIG, "did you mean lab.variants[0].algorithm"),
        ("lab.seed=[1]", ExitCode.CONFIG, "did you mean lab.seeds"),
        ("lab.seeds=[1]", ExitCode.CONFIG, "share a seed"),
        ("lab.world.tensors_sent=3", ExitCode.CONFIG, "lab.world.tensors_sent"),
        ("run.inner.target_tokens=1024", ExitCode.CONFIG, "target_tokens"),
    ],
)
def test_a_mistake_is_named_before_anything_is_trained(
    lab_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, code: ExitCode, words: str
) -> None:
    """The documented code, the setting, a remedy; no folder."""
    assert cli.main(["lab", str(lab_file), "--out", str(tmp_path / "out"), "--set", override]) == code
    errors = capsys.readouterr().err
    assert words in errors
    assert "remedy:" in errors
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written_is_the_users_to_change(
    lab_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file stands where the folder should be."""
    assert cli.main(["lab", str(lab_file), "--out", str(lab_file)]) == ExitCode.RUN_FOLDER
    assert "--out" in capsys.readouterr().err


def test_settings_of_the_laboratory_are_settings_like_all_others(lab_file: Path, tmp_path: Path) -> None:
    """--set works, the written-out configuration loads as itself, and the run id does not know of the laboratory."""
    config = load_config(lab_file, ["lab.seeds=[7, 8]", "lab.world.tensors_sent=2", "run.inner.learning_rate=1e-3"])
    assert (config.lab.seeds, config.lab.world.tensors_sent, config.run.inner.learning_rate) == ((7, 8), 2, 1e-3)
    copy = tmp_path / "copy.yaml"
    copy.write_text(render(config), encoding="utf-8")
    assert load_config(copy) == config
    assert load_config(lab_file, ["lab.seeds=[7, 8]"]).run.run_id == load_config(lab_file).run.run_id
    assert {"lab.seeds", "lab.world.tensors_sent"} <= set(setting_names())


def test_validate_says_what_the_laboratory_comes_to_where_there_is_one(
    lab_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trainings and tokens; a file without `lab:` is not told of it."""
    assert cli.main(["config", "validate", str(lab_file)]) == 0
    assert "laboratory: 3 variants, 14 trainings, 57,344 tokens in all" in capsys.readouterr().out
    assert cli.main(["config", "validate", str(made.MICRO)]) == 0
    assert "laboratory" not in capsys.readouterr().out
    assert plan_lab(load_config(made.MICRO))[0] == 4


def test_the_command_that_is_written_down_repeats_the_experiment() -> None:
    """Read by a shell it gives the same arguments, odd names and all."""
    written = command_line(Path("my lab.yaml"), Path("out"), ["lab.seeds=[1, 2]", "run.data.path='a b'"])
    options = cli.parser().parse_args(shlex.split(written)[1:])
    assert (options.config, options.out) == (Path("my lab.yaml"), Path("out"))
    assert options.set == ["lab.seeds=[1, 2]", "run.data.path='a b'"]
