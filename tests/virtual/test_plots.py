"""The plots show the experiment: lines, limits, marks and labels where the numbers say."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import matplotlib.image
import numpy as np
import pytest

from noloco_node.config.experiments import Plot
from noloco_node.laboratory import plots
from noloco_node.laboratory.figures import Results
from noloco_node.laboratory.plots import PALETTE, Sheet
from noloco_node.outer.stability import admissible_gamma
from tests.virtual import made_results as made

GAMMAS = [0.3, 0.7, 1.3, 2.5]


def pixels_of(image: np.ndarray, colour: str) -> int:
    """How many pixels have about that colour."""
    wanted = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return int((np.abs(image[..., :3] - wanted).max(axis=-1) < 0.06).sum())


def comparison(**more: Any) -> Results:
    """The four algorithms."""
    return made.everything(made.config({"seeds": [1, 2, 3], "replicas": [4, 8], **more}))


def gammas() -> Results:
    """Both momentum modes, two α, beyond the limits too."""
    variants = [
        {
            "name": mode,
            "algorithm": "noloco",
            "set": {"outer.momentum": mode},
            "sweep": {"outer.alpha": [0.0, 0.5], "outer.gamma": GAMMAS},
        }
        for mode in ("averaged", "local")
    ]
    lab = {"variants": variants, "world": {"allow_inadmissible": True}, "plots": ["gamma"], "replicas": [4, 8]}
    return made.everything(made.config(lab))


def labels(sheet: Sheet, row: int = 0, column: int = 0) -> dict[str, Any]:
    """What a panel draws, by label."""
    handles, names = sheet.panels[row][column].get_legend_handles_labels()
    return dict(zip(names, handles, strict=True))


def title(sheet: Sheet, row: int = 0, column: int = 0) -> str:
    """The caption of a panel."""
    panel: Any = sheet.panels[row][column]
    return str(panel.get_title(loc="left"))


@pytest.mark.parametrize("plot", get_args(Plot))
def test_every_plot_is_a_picture_with_its_lines_in_it(plot: Plot, tmp_path: Path) -> None:
    """A PNG of a readable size, in which the first colours can be found."""
    record = gammas() if plot == "gamma" else comparison()
    image = matplotlib.image.imread(plots.draw(plot, record, tmp_path / f"{plot}.png"))
    assert image.shape[0] >= 500
    assert image.shape[1] >= 900
    for colour in PALETTE[:2]:
        assert pixels_of(image, colour) > 100


def test_convergence_has_a_panel_for_each_number_of_replicas_and_a_line_for_each_variant() -> None:
    """The lines are means over seeds, in bands from the least to the greatest."""
    sheet = plots.convergence(comparison())
    assert [title(sheet, 0, column) for column in (0, 1)] == ["4 replicas", "8 replicas"]
    drawn = labels(sheet)
    variants = ["noloco", "diloco", "data parallel", "no exchange"]
    assert set(drawn) == {*variants, plots.BAND_LABEL, plots.LAST_LABEL}
    x, y = drawn["noloco"].get_data()
    assert x[-1] == 49_152
    assert y[-1] == pytest.approx(1.6 + 0.02 * 2 + 0.1 / 4, abs=1e-3)
    panel: Any = sheet.panels[0][0]
    assert len([band for band in panel.collections if len(band.get_paths())]) == 4
    band = panel.collections[0].get_paths()[0].vertices
    assert band[band[:, 0] == x[-1], 1].max() - band[band[:, 0] == x[-1], 1].min() == pytest.approx(0.04)


def test_gamma_has_a_column_for_each_alpha_with_the_predicted_limits_drawn_in() -> None:
    """The dashed lines are `admissible_gamma` of the most replicas; what diverged is marked above them."""
    sheet = plots.gamma(gammas())
    assert [title(sheet, 0, column) for column in (0, 1)] == ["α = 0", "α = 0.5"]
    for column, alpha in enumerate((0.0, 0.5)):
        for row in (0, 1):
            drawn = labels(sheet, row, column)
            for mode in ("averaged", "local"):
                limit = admissible_gamma(alpha, replicas=8, momentum=mode)[1]
                assert drawn[f"predicted limit, {mode}"].get_xdata()[0] == pytest.approx(limit)
                line = drawn[f"momentum {mode}"].lines[0]
                assert list(line.get_xdata()) == [gamma for gamma in GAMMAS if gamma < limit]
            assert "diverged" in drawn
            panel: Any = sheet.panels[row][column]
            crosses = [line for line in panel.lines if line.get_marker() == "x" and len(line.get_xdata())]
            assert {x for line in crosses for x in line.get_xdata()} == {2.5}


def test_gamma_is_drawn_of_a_variant_that_has_one_beside_others_that_are_tuned() -> None:
    """Only what was tuned was looked at, and the experiment ended with a traceback after all of its trainings."""
    variants: list[dict[str, Any]] = [
        {"name": "one", "algorithm": "noloco", "sweep": {"outer.gamma": [0.5]}},
        {"name": "tuned", "algorithm": "noloco", "sweep": {"inner.learning_rate": [1e-3, 2e-3]}},
    ]
    config = made.config({"variants": variants, "tune_seeds": [2], "seeds": [1]})
    found = [made.result(point, 2, "tune") for point in made.points(config) if point.variant == "tuned"]
    record = made.record(config, [*found, *(made.result(point, 1) for point in made.points(config))])
    assert title(plots.gamma(record), 0, 0) == "α = 0"


def test_an_experiment_in_which_all_diverged_still_has_its_plots(tmp_path: Path) -> None:
    """Nothing to draw is no failure."""
    config = made.config({"replicas": [4, 8]})
    record = made.record(config, [made.diverged(point, 1) for point in made.points(config)])
    assert plots.draw("convergence", record, tmp_path / "convergence.png").stat().st_size > 4_000
