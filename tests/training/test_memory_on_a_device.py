"""What is planned of a device's memory for the shipped files is what a device takes that is not the host."""

from __future__ import annotations

import json
import subprocess
import sys

CASES = [
    ("consumer-24gb", 0, ["run.model.config.num_hidden_layers=4"]),
    ("consumer-24gb", 1, ["run.model.config.num_hidden_layers=4"]),
    ("paper-1.3b", 1, ["run.model.config.num_hidden_layers=8"]),
]
"""A first and a last stage that make each layer anew, and a middle one that makes all of them at once, two layers
each."""


def test_the_plan_is_what_a_stage_takes_at_the_highest() -> None:
    """A process of its own trains on a device that counts what lives on it, and refuses tensors of the host."""
    asked = [sys.executable, "-m", "tests.training.fake_device", json.dumps(CASES)]
    told = subprocess.run(asked, check=False, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr[-2000:]
    found = [json.loads(line) for line in told.stdout.splitlines()]
    assert len(found) == len(CASES)
    for each in found:
        assert each["built"] < 0.9 * each["peak"], "work is a part of it"
        assert 0.995 < each["planned"] / each["peak"] < 1.1, each
