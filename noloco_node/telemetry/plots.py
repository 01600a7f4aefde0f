"""The plot of a run: losses by tokens, and the spread of the weights beside the learning rate that it must follow."""

# pyright: reportUnknownMemberType=false
# matplotlib's own types leave the keywords of most methods open.

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from noloco_node.telemetry.history import NodeHistory
from noloco_node.telemetry.summary import (
    spread_curve,
    token_counters,
    training_curve,
    validation_curves,
)

BLUE, ORANGE, GREEN, GREY = "#2f6db3", "#d9622b", "#3a8f5c", "#8a8a8a"


def plot_run(
    histories: Sequence[NodeHistory], path: Path, *, title: str, merged_loss: float | None = None, dpi: int = 150
) -> None:
    """Write a PNG of the run: above training and validation loss, below spread (log) and learning rate.

    `merged_loss` (nats per token) is drawn as the end point of the merged model. Raises OSError where `path` cannot be
    written.
    """
    figure = Figure(figsize=(7.0, 6.4), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 1, height_ratios=[3, 2])
    losses = figure.add_subplot(grid[0])
    weights = figure.add_subplot(grid[1], sharex=losses)
    _losses(losses, histories, merged_loss)
    _spread(weights, histories)
    losses.set_title(title, loc="left", fontsize=11, fontweight="bold")
    weights.set_xlabel("tokens trained by the swarm")
    weights.xaxis.set_major_formatter(EngFormatter(sep=""))
    losses.tick_params(labelbottom=False)
    figure.savefig(path, dpi=dpi)


def _losses(axes: Axes, histories: Sequence[NodeHistory], merged_loss: float | None) -> None:
    training = training_curve(token_counters(histories))
    validation = validation_curves(histories)
    if training:
        axes.plot([p.clock for p in training], [p.loss for p in training], color=BLUE, lw=1.1, label="training")
    for number, curve in enumerate(validation):
        clocks, held_out = [p.clock for p in curve], [p.loss for p in curve]
        label = "" if number else f"validation{' of each replica' if len(validation) > 1 else ''} (through the swarm)"
        axes.plot(clocks, held_out, color=ORANGE, lw=1.0, marker="o", ms=3, label=label)
    if merged_loss is not None and validation:
        end = max(curve[-1].clock for curve in validation)
        axes.plot([end], [merged_loss], color=GREEN, marker="D", ms=6, ls="none", label="validation, merged")
    axes.set_ylabel("loss (nats per token)")
    _tidy(axes)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)


def _spread(axes: Axes, histories: Sequence[NodeHistory]) -> None:
    curve = sorted(spread_curve(histories), key=lambda point: point.clock)
    axes.set_ylabel("spread of weights\nacross replicas", color=GREEN)
    if any(point.spread > 0.0 for point in curve):
        axes.set_yscale("log")
    axes.plot([p.clock for p in curve], [p.spread for p in curve], color=GREEN, lw=1.6, marker=".", ms=5)
    _tidy(axes)
    rate = axes.twinx()
    steps = sorted(
        (step for history in token_counters(histories) for step in history.inner), key=lambda step: step.clock
    )
    rate.plot([s.clock for s in steps], [s.learning_rate for s in steps], color=GREY, lw=1.2, ls="--")
    rate.set_ylabel("learning rate (dashed)", color=GREY)
    rate.set_ylim(bottom=0.0)
    rate.spines["top"].set_visible(False)


def _tidy(axes: Axes) -> None:
    axes.grid(True, color="#e4e4e4", lw=0.7)
    axes.set_axisbelow(True)
    axes.spines["top"].set_visible(False)
