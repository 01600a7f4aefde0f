"""The plot is a picture with the run in it."""

from __future__ import annotations

from pathlib import Path

import matplotlib.image
import numpy as np

from noloco_node.telemetry.history import NodeHistory
from noloco_node.telemetry.plots import BLUE, GREEN, ORANGE, plot_run
from tests.telemetry import made_events as made


def pixels_of(image: np.ndarray, colour: str) -> int:
    """How many pixels have about that colour."""
    wanted = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return int((np.abs(image[..., :3] - wanted).max(axis=-1) < 0.06).sum())


def test_a_run_is_drawn_with_its_losses_and_its_spread(tmp_path: Path) -> None:
    """A PNG of a readable size, in which all curves can be found."""
    path = tmp_path / "plot.png"
    histories = [NodeHistory.of(name, rows) for name, rows in made.whole_run().items()]
    plot_run(histories, path, title="made-up", merged_loss=1.6)
    image = matplotlib.image.imread(path)
    assert image.shape[0] >= 800
    assert image.shape[1] >= 1000
    for colour in (BLUE, ORANGE, GREEN):
        assert pixels_of(image, colour) > 100


def test_a_run_that_never_trained_still_has_a_plot(tmp_path: Path) -> None:
    """Nothing to draw is no failure: the curves are missing, the picture is there."""
    path = tmp_path / "plot.png"
    plot_run([NodeHistory("s0-r0")], path, title="nothing")
    image = matplotlib.image.imread(path)
    assert pixels_of(image, BLUE) == pixels_of(image, ORANGE) == 0


def test_a_spread_of_zero_does_not_break_the_logarithm(tmp_path: Path) -> None:
    """Replicas that never differed have a spread of exactly zero."""
    events = [made.started("s0-r0"), made.inner_step(1), made.outer_step(1, "s0-r1", spread=0.0)]
    plot_run([NodeHistory.of("s0-r0", events)], tmp_path / "plot.png", title="zero")
    assert (tmp_path / "plot.png").stat().st_size > 10_000
