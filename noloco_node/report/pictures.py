"""The charts of a report as PNG files, for who wants to paste them somewhere."""

# pyright: reportUnknownMemberType=false
# matplotlib's own types leave the keywords of most methods open.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from noloco_node.report import figures
from noloco_node.report.charts import Bars, ChartGraph, Curves, Timeline
from noloco_node.report.drawing import circle
from noloco_node.report.figures import shares
from noloco_node.report.folder import ReportedRun
from noloco_node.telemetry.plots import BLUE, GREEN, GREY, ORANGE, plot_run

COLOURS = {"first": BLUE, "second": ORANGE, "third": GREEN, "quiet": GREY}
PART_COLOURS = (
    "#2f6db3",
    "#5a9bd8",
    "#3a8f5c",
    "#8fc79f",
    "#8e5bb5",
    "#d9a05b",
    "#c9ced6",
    "#c63a3a",
    "#b5886b",
    "#2f9aa0",
    "#b5446e",
    "#93a33c",
)
"""As `p0` to `p11` of the page's style."""
MARKS = {"start": GREEN, "end": GREY, "death": "#c63a3a", "fault": "#b98000", "warning": "#7b3fb5"}
"""As the marks of the page's style."""
NAMES = {"start": "up, or moved", "end": "ended", "death": "gone"}
INCHES_A_ROW = 0.3
DPI = 130


def draw(told: ReportedRun, folder: Path) -> list[Path]:
    """Write the pictures into a folder that is there; their paths. Raises OSError where it cannot be written."""
    nodes = figures.nodes_told(told.summary.nodes)
    title = _plain(f"Run {told.summary.run_name}: {told.summary.stages} stages, {nodes}")
    losses = folder / "losses.png"
    histories = [chronicle.history for chronicle in told.chronicles]
    plot_run(histories, losses, title=title, merged_loss=told.summary.validation_loss_merged, dpi=DPI)
    made = [losses]
    painters: Mapping[str, Callable[[], Figure]] = {
        "throughput": lambda: _curves(figures.throughput(told)),
        "nodes": lambda: _timeline(figures.lives(told)),
        "time": lambda: _bars(figures.time_spent(told)),
    }
    for name, paint in painters.items():
        made.append(_save(paint(), folder / f"{name}.png"))
    graphs = figures.meetings(told)
    if graphs:
        made.append(_save(_graphs(graphs), folder / "meetings.png"))
    return made


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, dpi=DPI)
    return path


def _sheet(width: float, height: float, columns: int = 1) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def _plain(text: str) -> str:
    """A text in which matplotlib finds no formula."""
    return figures.words(text).replace("$", r"\$")


def _curves(chart: Curves) -> Figure:
    figure, (panel,) = _sheet(7.0, 3.8)
    right = panel.twinx() if any(line.right for line in chart.lines) else None
    for line in chart.lines:
        for piece in line.pieces:
            (right if line.right and right is not None else panel).plot(
                [x for x, _ in piece],
                [y for _, y in piece],
                color=COLOURS[line.colour],
                ls="--" if line.dashed else "-",
                marker="." if line.dots or len(piece) == 1 else "",
                lw=1.3,
            )
    panel.set_title(chart.title, loc="left", fontsize=11, fontweight="bold")
    panel.set_xlabel(chart.x_label)
    panel.set_ylabel(chart.y_label)
    panel.set_ylim(bottom=0 if chart.from_zero else None)
    panel.grid(True, color="#e4e4e4", lw=0.7)
    if right is not None:
        right.set_ylabel(f"{chart.right_label} (dashed)", color=GREY)
        right.set_ylim(bottom=0)
        if chart.right_counts:
            right.yaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def _rows(panel: Axes, labels: Sequence[str], title: str) -> None:
    panel.set_yticks(range(len(labels)), [_plain(label) for label in labels], fontsize=8)
    panel.set_ylim(len(labels) - 0.4, -0.6)
    panel.set_title(title, loc="left", fontsize=11, fontweight="bold")


def _bars(chart: Bars) -> Figure:
    figure, (panel,) = _sheet(8.0, 1.6 + INCHES_A_ROW * len(chart.rows))
    left = [0.0] * len(chart.rows)
    by_row = [shares(row, chart.parts) for _, row in chart.rows]
    for index, part in enumerate(chart.parts):
        widths = [row[index] for row in by_row]
        panel.barh(
            range(len(left)),
            widths,
            left=left,
            color=PART_COLOURS[chart.colours[index] % len(PART_COLOURS)],
            label=figures.named(part),
            height=0.7,
        )
        left = [before + width for before, width in zip(left, widths, strict=True)]
    _rows(panel, [label for label, _ in chart.rows], chart.title)
    panel.set_xlim(0, 1)
    panel.set_xlabel("share of the time")
    if chart.parts:
        figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return figure


def _timeline(chart: Timeline) -> Figure:
    figure, (panel,) = _sheet(8.0, 1.6 + INCHES_A_ROW * len(chart.rows))
    for index, row in enumerate(chart.rows):
        panel.broken_barh([(a, b - a) for a, b in row.spans], (index - 0.25, 0.5), color=BLUE, alpha=0.35)
        for mark in row.marks:
            panel.plot([mark.time], [index], marker="|", ms=11, mew=2, color=MARKS[mark.kind], ls="none")
    _rows(panel, [row.label for row in chart.rows], chart.title)
    for kind, colour in MARKS.items():
        panel.plot([], [], marker="|", ms=9, mew=2, color=colour, ls="none", label=NAMES.get(kind, kind))
    panel.set_xlim(0, chart.end * 1.01)
    panel.set_xlabel(f"{chart.unit} since the start")
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    return figure


def _graphs(graphs: Sequence[ChartGraph]) -> Figure:
    shown = graphs[:6]
    figure, panels = _sheet(max(4.5, 4.0 * len(shown)), 4.4, len(shown))
    for panel, chart in zip(panels, shown, strict=True):
        at = dict(zip(chart.nodes, circle(len(chart.nodes)), strict=True))
        most = max((edge.times for edge in chart.edges), default=1)
        for edge in chart.edges:
            (a, b), (c, d) = at[edge.one], at[edge.other]
            panel.plot([a, c], [-b, -d], color=BLUE, alpha=0.45, lw=0.6 + 5.0 * edge.times / most)
        for name, (x, y) in at.items():
            panel.plot([x], [-y], marker="o", ms=8, color=BLUE, ls="none")
            panel.text(1.18 * x, -1.18 * y, _plain(name), ha="center", va="center", fontsize=8)
        panel.set_title(f"who averaged with whom: {chart.title}", loc="left", fontsize=10)
        panel.set_xlim(-1.6, 1.6)
        panel.set_ylim(-1.4, 1.4)
        panel.set_axis_off()
    return figure
