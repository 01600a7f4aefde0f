"""Plots of an experiment: loss by tokens, loss and spread by γ; and the sheet that they are drawn on."""

# pyright: reportUnknownMemberType=false
# matplotlib's own types leave the keywords of most methods open.

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator
from PIL import Image

from noloco_node.config.experiments import Plot
from noloco_node.laboratory.expansion import GAMMA
from noloco_node.laboratory.figures import (
    FigureLine,
    Results,
    Spot,
    as_text,
    best,
    lines,
    setting,
)
from noloco_node.outer import Momentum
from noloco_node.outer.stability import admissible_gamma

BLUE, ORANGE, GREEN, GREY = "#2f6db3", "#d9622b", "#3a8f5c", "#8a8a8a"
PALETTE = (BLUE, ORANGE, GREEN, "#8e5bb5", "#c79a1e", "#2f9aa0", "#b5446e", "#6b4a2f", "#5a6b8a", "#93a33c")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")

BAND_LABEL = "range of the seeds"
LAST_LABEL = "after the last step"
"""This mark is the outer step that ends a training: it leads from the last loss on the way to the loss of the table."""
LOSS_LABEL = "validation loss (nats per token)"
SPREAD_LABEL = "√replica divergence"

MODE_STYLES: dict[Momentum, tuple[str, str, float]] = {
    "averaged": (PALETTE[0], "o", 0.96),
    "local": (PALETTE[1], "s", 0.89),
}
"""Colour, marker, and height of the marks of values beyond the panel."""


def draw(plot: Plot, record: Results, path: Path) -> Path:
    """Draw one of the plots as a PNG; returns its path. Raises OSError where it cannot be written."""
    painters: dict[Plot, Callable[[Results], Sheet]] = {"convergence": convergence, "gamma": gamma}
    sheet = painters[plot](record)
    sheet.legend()
    sheet.save(path)
    return path


def convergence(record: Results) -> Sheet:
    """Validation loss by tokens, a panel for each number of replicas."""
    rows = lines(record)
    counts = sorted({line.replicas for line in rows})
    sheet = Sheet(1, len(counts), title=f"{record.run['name']}: convergence")
    for panel, count in zip(sheet.panels[0], counts, strict=True):
        for line in _best_of_each(row for row in rows if row.replicas == count):
            _loss_curve(panel, line, *_look(record, line))
        _leave_out_the_start(panel, rows, record.run["inner"]["target_tokens"])
        caption(panel, f"{count} replicas")
        tokens_axis(panel)
    first = sheet.panels[0][0]
    first.set_ylabel(LOSS_LABEL)
    if any(len(line.results) > 1 for line in rows):
        first.fill_between([], [], [], color=GREY, alpha=0.35, lw=0, label=BAND_LABEL)
    first.plot([], [], color=GREY, marker="o", ms=5.5, ls="none", label=LAST_LABEL)
    return sheet


def _loss_curve(panel: Axes, line: FigureLine, colour: str, marker: str) -> None:
    """The losses on the way, and where the last outer step led from the last of them: to the loss of the table."""
    spots = _over_seeds([[(p.tokens, p.validation_loss) for p in result.curve] for result in line.results])
    tokens = list(spots)
    panel.plot(tokens, [spots[t].mean for t in tokens], color=colour, lw=1.6, label=_name(line))
    if len(line.results) > 1:
        low, high = [spots[t].low for t in tokens], [spots[t].high for t in tokens]
        panel.fill_between(tokens, low, high, color=colour, alpha=0.18, lw=0)
    if tokens and line.loss is not None:
        panel.plot([tokens[-1]] * 2, [spots[tokens[-1]].mean, line.loss.mean], color=colour, lw=1.0, ls=":")
        panel.plot([tokens[-1]], [line.loss.mean], color=colour, marker=marker, ms=5.5, ls="none")


def _leave_out_the_start(panel: Axes, shown: Sequence[FigureLine], tokens: int) -> None:
    """The steep losses of the first fifth would press all differences into one line."""
    late = [
        point.validation_loss
        for line in shown
        for result in line.results
        for point in result.curve
        if point.validation_loss is not None and point.tokens >= 0.2 * tokens
    ]
    late += [line.loss.mean for line in shown if line.loss is not None]
    if late:
        margin = 0.05 * (max(late) - min(late)) or 0.05
        panel.set_ylim(min(late) - margin, max(late) + margin)


def gamma(record: Results) -> Sheet:
    """Loss and final spread by γ, a column for each α; the predicted admissible interval of each momentum mode.

    Shaded where both are admissible by `outer.stability.admissible_gamma`; for the most replicas.
    """
    tuned, reported = ([each for each in lines(record, kind) if GAMMA in each.swept] for kind in ("tune", "report"))
    rows = tuned or reported
    most = max(line.replicas for line in rows)
    rows = [line for line in rows if line.replicas == most]
    alphas = sorted({_of(record, line, "outer.alpha") for line in rows})
    sheet = Sheet(2, len(alphas), title=f"{record.run['name']}: γ, {most} replicas", width=3.6, height=2.9)
    for column, alpha in enumerate(alphas):
        losses, spreads = sheet.panels[0][column], sheet.panels[1][column]
        shown = [line for line in rows if _of(record, line, "outer.alpha") == alpha]
        edges = _edges(record, shown, alpha)
        for mode, edge in edges.items():
            chosen = [line for line in shown if _of(record, line, "outer.momentum") == mode]
            colour = MODE_STYLES[mode][0]
            # What is higher than that is marked at the upper edge instead of drawn.
            limit = 1.5 * min((line.loss.mean for line in shown if line.loss is not None), default=math.inf)
            _by_gamma(losses, chosen, lambda line: line.loss, mode, limit)
            _by_gamma(spreads, chosen, lambda line: line.root_of_final_spread, mode)
            for panel in (losses, spreads):
                panel.axvline(edge, color=colour, lw=1.3, ls="--", label=f"predicted limit, {mode}")
        right = 1.04 * max([*edges.values(), *(line.swept[GAMMA] for line in shown)])
        for panel in (losses, spreads):
            panel.axvspan(0.0, min(edges.values()), color=PALETTE[2], alpha=0.08, lw=0)
            panel.set_xlim(0.0, right)
        logarithmic(spreads)
        spreads.set_xlabel("γ")
        caption(losses, f"α = {alpha:g}")
    sheet.panels[0][0].set_ylabel(LOSS_LABEL)
    sheet.panels[1][0].set_ylabel(f"{SPREAD_LABEL}\nat the end")
    return sheet


def _edges(record: Results, shown: Sequence[FigureLine], alpha: float) -> dict[Momentum, float]:
    """Upper end of the admissible interval for each momentum mode that was tried."""
    edges: dict[Momentum, float] = {}
    for line in shown:
        mode: Momentum = _of(record, line, "outer.momentum")
        group = line.replicas if line.algorithm == "diloco" else 2
        edges[mode] = admissible_gamma(alpha, group_size=group, replicas=line.replicas, momentum=mode)[1]
    return dict(sorted(edges.items()))


def _by_gamma(
    panel: Axes,
    chosen: Sequence[FigureLine],
    figure: Callable[[FigureLine], Spot | None],
    mode: Momentum,
    limit: float = math.inf,
) -> None:
    ordered = sorted(chosen, key=lambda line: line.swept[GAMMA])
    colour, marker, height = MODE_STYLES[mode]
    spots = [(line.swept[GAMMA], figure(line)) for line in ordered]
    _error_bars(panel, spots, (colour, marker), f"momentum {mode}", limit=limit, height=height)


def _error_bars(
    panel: Axes,
    spots: Sequence[tuple[float, Spot | None]],
    look: tuple[str, str],
    label: str,
    *,
    limit: float = math.inf,
    height: float = 0.96,
) -> None:
    """Means with sample standard deviations; at the upper edge, marks for what diverged or lies above `limit`."""
    colour, marker = look
    there = [(x, spot) for x, spot in spots if spot is not None and spot.mean <= limit]
    if there:
        x, y, deviations = zip(*((x, spot.mean, spot.deviation) for x, spot in there), strict=True)
        panel.errorbar(x, y, deviations, color=colour, marker=marker, label=label, lw=1.4, ms=5.0, capsize=3.0)
    gone = [x for x, spot in spots if spot is None]
    if gone:
        mark_above(panel, gone, colour, marker="x", label="diverged", height=height)
    beyond = [x for x, spot in spots if spot is not None and spot.mean > limit]
    if beyond:
        mark_above(panel, beyond, colour, marker=6, label="above the axis", height=height)


def _over_seeds(curves: Iterable[Sequence[tuple[int, float | None]]]) -> dict[int, Spot]:
    """By tokens, where every seed has a value."""
    by_tokens: dict[int, list[float]] = {}
    count = 0
    for curve in curves:
        count += 1
        for tokens, value in curve:
            if value is not None and math.isfinite(value):
                by_tokens.setdefault(tokens, []).append(value)
    return {tokens: Spot.of(values) for tokens, values in sorted(by_tokens.items()) if len(values) == count}


def _best_of_each(rows: Iterable[FigureLine]) -> list[FigureLine]:
    """The best line of each variant; its first where all diverged."""
    by_variant: dict[str, list[FigureLine]] = {}
    for line in rows:
        by_variant.setdefault(line.variant, []).append(line)
    return [best(found) or found[0] for found in by_variant.values()]


def _look(record: Results, line: FigureLine) -> tuple[str, str]:
    """Colour and marker of a variant: by its place in the file, the same in every plot."""
    return style([variant["name"] for variant in record.lab["variants"]].index(line.variant))


def _of(record: Results, line: FigureLine, name: str) -> Any:
    return setting(record, line.results[0], name)


def _name(line: FigureLine) -> str:
    options = ", ".join(f"{name.rpartition('.')[2]} {as_text(value)}" for name, value in line.swept.items())
    return f"{line.variant} ({options})" if options else line.variant


class Sheet:
    """A figure of rows × columns panels with one legend below them all."""

    def __init__(self, rows: int, columns: int, *, title: str, width: float = 4.6, height: float = 3.5) -> None:
        self._width = max(columns * width, 6.4)
        self._figure = Figure(figsize=(self._width, rows * height + 0.9), layout="constrained")
        FigureCanvasAgg(self._figure)
        made: Any = self._figure.subplots(rows, columns, squeeze=False)
        self.panels: list[list[Axes]] = [list(row) for row in made]
        self._figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
        for panel in (panel for row in self.panels for panel in row):
            tidy(panel)

    def legend(self) -> None:
        """Collect the labels of all panels that have no legend of their own, each once, below them."""
        handles: dict[str, Any] = {}
        for panel in (panel for row in self.panels for panel in row if panel.get_legend() is None):
            for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
                handles.setdefault(label, handle)
        if handles:
            # In inches: a label's mark with the room around it, and its letters.
            widest = 0.7 + 0.078 * max(map(len, handles))
            columns = max(1, min(len(handles), int(self._width / widest)))
            # There is room for four rows; each further one makes the sheet higher, not the panels lower.
            more = max(0, math.ceil(len(handles) / columns) - 4)
            self._figure.set_figheight(self._figure.get_figheight() + 0.21 * more)
            self._figure.legend(
                list(handles.values()), list(handles), loc="outside lower center", ncols=columns, frameon=False
            )

    def save(self, path: Path) -> None:
        """Write a PNG of few colours, which is a quarter as large. Raises OSError where `path` cannot be written."""
        drawn = BytesIO()
        self._figure.savefig(drawn, format="png", dpi=150)
        Image.open(drawn).convert("RGB").quantize(64).save(path, format="png", optimize=True)


def tidy(panel: Axes) -> None:
    """Grid behind the lines, no frame above."""
    panel.grid(True, color="#e4e4e4", lw=0.7)
    panel.set_axisbelow(True)
    panel.spines["top"].set_visible(False)


def logarithmic(panel: Axes) -> None:
    """A logarithmic y axis, where something positive has been drawn."""
    if math.isfinite(panel.dataLim.minposy):
        panel.set_yscale("log")


def caption(panel: Axes, text: str) -> None:
    """The title of a panel."""
    panel.set_title(text, loc="left", fontsize=10, fontweight="normal")


def tokens_axis(panel: Axes) -> None:
    """Name the x axis by tokens, with k and M."""
    panel.set_xlabel("tokens")
    panel.xaxis.set_major_locator(MaxNLocator(5))
    panel.xaxis.set_major_formatter(EngFormatter(sep=""))


def mark_above(
    panel: Axes, at: Sequence[float], color: str, *, marker: str | int, label: str, height: float = 0.96
) -> None:
    """Marks near the upper edge of the panel, for values that lie beyond it."""
    where = panel.get_xaxis_transform()
    panel.plot(list(at), [height] * len(at), color=color, marker=marker, ms=7, mew=1.8, ls="none", transform=where)
    panel.plot([], [], color="black", marker=marker, ms=7, mew=1.8, ls="none", label=label)


def style(index: int) -> tuple[str, str]:
    """Colour and marker of the index-th line."""
    return PALETTE[index % len(PALETTE)], MARKERS[index % len(MARKERS)]
