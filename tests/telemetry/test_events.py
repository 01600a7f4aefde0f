"""The event file: what was written can be read, whatever the figures."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from noloco_node.telemetry.events import EventFile, InnerStep, read_events


@pytest.mark.parametrize("norm", [math.nan, math.inf, 0.5])
def test_figures_that_are_not_finite_are_read_back(tmp_path: Path, norm: float) -> None:
    """A skipped step has a gradient norm of NaN or infinity; each line is ordinary JSON all the same."""
    event = InnerStep(
        step=1, clock=64.0, tokens=64, loss=2.0, learning_rate=1e-3, gradient_norm=norm, skipped=True, live_replicas=1
    )
    path = tmp_path / "events.jsonl"
    file = EventFile(path)
    file.write(event)
    file.close()

    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    json.loads(path.read_text(), parse_constant=no_constant)
    (read,) = read_events(path)
    assert isinstance(read, InnerStep)
    assert read.gradient_norm == norm or (math.isnan(read.gradient_norm) and math.isnan(norm))
    assert read.step == 1
