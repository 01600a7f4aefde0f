"""What is wrong about how a benchmark is called is said in a line, before anything is measured."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks import home_line, hop, lines, pipeline, utilisation
from benchmarks.command import command, device, folder_with, positive, results_file, whole
from noloco_node.config.files import find_config
from noloco_node.config.load import load_config
from noloco_node.errors import ExitCode, UserError
from noloco_node.sizing.devices import Device
from noloco_node.sizing.footprint import footprint_of
from noloco_node.sizing.utilisation import Link


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        (whole, "0", "1 or more"),
        (whole, "2.5", "1 or more"),
        (positive, "0", "above 0"),
        (positive, "-1", "above 0"),
        (positive, "nan", "no finite number"),
        (positive, "soon", "no finite number"),
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
    assert (whole("3"), positive("0.5"), device("cpu")) == (3, 0.5, "cpu")
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


@pytest.mark.parametrize(
    ("main", "arguments", "words"),
    [
        (pipeline.main, ("configs/tiny.yaml", "--single", "0", "0"), "--single: '0' is not one: name a whole number"),
        (hop.main, ("--rounds", "0"), "--rounds: '0' is not one"),
    ],
)
def test_arguments_are_refused_before_anything_is_started(
    main: Callable[[], None],
    arguments: tuple[str, ...],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With what is wrong and what would do."""
    monkeypatch.setattr(sys, "argv", ["benchmark", *arguments])
    monkeypatch.setattr(pipeline, "run_single", lambda *_: pytest.fail("a process is started"))
    monkeypatch.setattr(hop, "run", lambda *_: pytest.fail("a process is started"))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == ExitCode.USAGE
    assert words in capsys.readouterr().err.splitlines()[-1]


def test_the_settings_of_a_swarm_are_checked_before_one_process_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of every variant are: the last of them comes after hours."""
    asked = ["benchmark", "configs/tiny.yaml", "--activations", "fp16", "fp17", "--single", "1", "1"]
    monkeypatch.setattr(sys, "argv", asked)
    monkeypatch.setattr(pipeline, "run_single", lambda *_: pytest.fail("it has begun"))
    with pytest.raises(UserError, match="fp17"):
        pipeline.main()


def test_a_run_too_short_to_be_measured_says_so() -> None:
    """Its window never opened."""
    with pytest.raises(UserError, match="its 400 tokens before anything could be measured"):
        pipeline.Activity(2, 400).result()


def test_the_table_of_a_swarm_tells_where_all_its_cpu_went() -> None:
    """Not compute threads alone."""
    shares = {"compute_thread": 0.8, "event_loop": 0.1, "other_threads": 0.06, "p2pd": 0.04}
    swarm = {
        "tokens_per_second": 1.0,
        "cpu_seconds_per_million_tokens": 2.0,
        "validation_loss": 3.0,
        "cpu_share": shares,
    }
    row = {
        "variant": "2 × 2",
        "ratio": 0.5,
        "cpu_ratio": 1.5,
        "swarm": swarm,
        "single": {"cpu_seconds_per_million_tokens": 1.0},
    }
    lines = pipeline.table({"2 × 2": pipeline.summary([row], "2 × 2")}).splitlines()
    assert lines[0].endswith("| compute threads | event loops | other threads | p2pd | loss |")
    assert lines[2] == "| 2 × 2 | 0.50 (0.50 to 0.50) | 1.50 | 80.0% | 10.0% | 6.0% | 4.0% | 3.000 |"


def test_utilisation_prints_the_table_that_its_page_shows() -> None:
    """Planned, measured, simulated and the bound; what was not measured is a dash."""
    one, outer = utilisation.POINTS[0], utilisation.POINTS[3]
    row = {"planned": 0.344, "simulated": 0.345, "bound": 1.0}
    table = utilisation.table([asdict(one) | row | {"device_share": 0.342, "ratio": 0.994}, asdict(outer) | row])
    assert table.splitlines() == [
        "| uplink, round trip, in flight | planned | measured | measured / planned | simulated | bound |",
        "|---|---|---|---|---|---|",
        "| 100 Mbit/s, 400 ms, 1 | 0.344 | 0.342 | 0.99 | 0.345 | 1.00 |",
        "| 5 Mbit/s, 100 ms, 3, H 2 | 0.344 | – | – | 0.345 | 1.00 |",
    ]


def test_a_run_at_home_keeps_the_ratio_of_line_and_device_on_its_scale() -> None:
    """The planner says the same of both, so that what is measured tells of the real ones."""
    home = home_line.Home(find_config(Path("consumer-24gb")), None, Link(2.5e6, 0.1), 66e12, stretch=5.0)
    full, scaled = home.planned_in_full(), home.planned()
    assert scaled.share == pytest.approx(full.share, rel=0.03)
    assert scaled.limit == full.limit
    assert scaled.cycle_seconds == pytest.approx(5.0 * full.cycle_seconds, rel=0.03)
    assert home.line.round_trip == 0.5
    forward, backward = map(float, home.operations[0].split(","))
    assert forward + backward == pytest.approx(5.0 * home.full_loads[0].compute_seconds, abs=2e-4)
    found = {"simulated": [0.75, 0.77], "device_share": 0.76}
    row = {**home_line.row_of(home, found), "planned_in_full": 0.7617, "planned": 0.7699}
    told = home_line.table([row]).splitlines()
    assert "simulated / planned" in told[0]
    ratio = f"{0.76 / home.planned().share:.2f}"
    assert told[2].startswith(f"| as the file has it | 0.762 | 0.770 | 0.760 (0.750, 0.770) | {ratio} | – |")


def test_a_line_without_a_subspace_does_in_virtual_time_what_is_planned_of_it() -> None:
    """Its bodies take turns: sharing the line evenly they come to 0.64 of the plan with this seed, and so to 0.87."""
    home = home_line.Home(find_config(Path("consumer-24gb")), "bf16", Link(2.5e6, 0.1), 66e12, stretch=1.0)
    assert home_line.simulated(home, 60.0, 60.0, 1) > 0.8 * home.planned().share


def test_a_ring_is_waited_for_and_an_exchange_beside_the_training_where_it_is_longer_than_h_steps() -> None:
    """Data parallel takes the same step as all others where nothing limits, and its ring's bytes over the line more
    elsewhere. Who trains beside an exchange loses nothing until it lasts longer than H steps."""
    config = load_config(find_config(Path("tiny")))
    footprint, replicas = footprint_of(config.run), config.local_swarm.replicas
    most = max(footprint.parameters)
    ring, own = lines.METHODS[0], next(method for method in lines.METHODS if method.name.startswith("defaults"))
    assert ring.sent(most, replicas) == pytest.approx(2 * (replicas - 1) / replicas * 2 * most)

    def paces(uplink: float, flop_per_second: float = 1e12) -> list[lines.Pace]:
        device = Device("card", flop_per_second, None)
        return [lines.pace_of(each, config, footprint, Link(uplink, 0.0), device) for each in (ring, own)]

    free, beside = paces(1e18, 1e9)
    assert free.seconds == pytest.approx(beside.seconds)
    slow, narrow = paces(1e5)
    trained = lines.pace_of(replace(ring, tensors=0), config, footprint, Link(1e5, 0.0), Device("card", 1e12, None))
    assert slow.seconds - trained.seconds == pytest.approx(ring.sent(most, replicas) / 1e5)
    assert narrow.unwaited <= narrow.seconds < slow.seconds
    assert (narrow.steps > own.h) == (narrow.unwaited < narrow.seconds)
    assert lines.cell(narrow, slow, 3600).startswith(f"{narrow.seconds:.3g} s, {narrow.seconds:.3g} h (")
