"""What is planned of a device's memory for the shipped files is what a device takes that is not the host."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from noloco_node.config.load import load_config

SHIPPED = sorted(path.stem for path in (Path(__file__).parents[2] / "noloco_node" / "configs").glob("*.yaml"))

Case = tuple[str, int, list[str]]
"""A file, a stage, and changes of settings."""


def cases(backward: str) -> list[Case]:
    """A first, a middle and a last stage of each shipped file, as far as it has them, with their own shapes."""
    changes = [f"run.inner.backward={backward}", "node.in_flight=2"]
    ends = {name: load_config(Path(name)).run.stages - 1 for name in SHIPPED}
    return [(name, stage, changes) for name, end in ends.items() for stage in sorted({0, min(1, end), end})]


def check(wanted: list[Case]) -> None:
    """A process of its own trains on a device that counts what lives on it, and refuses tensors of the host."""
    asked = [sys.executable, "-m", "tests.training.fake_device", json.dumps(wanted)]
    told = subprocess.run(asked, check=False, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr[-2000:]
    found = [json.loads(line) for line in told.stdout.splitlines()]
    assert len(found) == len(wanted)
    for each in found:
        assert each["built"] < 0.95 * each["peak"], "work is a part of it"
        assert 0.99 < each["planned"] / each["peak"] < 1.1, each


def test_the_plan_is_what_a_stage_takes_at_the_highest() -> None:
    """A first stage that makes each of a few layers anew, and a last one that keeps them."""
    check([("consumer-24gb", 0, ["run.model.config.num_hidden_layers=4", "node.in_flight=2"]), ("own-text", 1, [])])


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("backward", ["keep", "recompute", "checkpoint"])
def test_the_plan_of_every_stage_is_what_it_takes_at_the_highest(backward: str) -> None:
    """With all their layers, by each backward."""
    check(cases(backward))
