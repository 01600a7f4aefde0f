"""The sheet that the laboratory's plots are drawn on: panels, colours, legends; matplotlib's untyped part."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from noloco_node.telemetry.plots import BLUE, GREEN, GREY, ORANGE, Axes

PALETTE = (BLUE, ORANGE, GREEN, "#8e5bb5", "#c79a1e", "#2f9aa0", "#b5446e", "#6b4a2f", "#5a6b8a", "#93a33c")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")

LEGEND_COLUMNS = 4


class Panel(Axes, Protocol):
    """One panel: matplotlib's axes, as far as they are drawn on here."""

    yaxis: Any

    def fill_between(
        self, x: Sequence[float], y1: Sequence[float], y2: Sequence[float], *, color: str, alpha: float, lw: float
    ) -> object: ...
    def errorbar(
        self,
        x: Sequence[float],
        y: Sequence[float],
        yerr: Sequence[float],
        *,
        color: str,
        marker: str,
        label: str,
        lw: float = 1.4,
        ms: float = 5.0,
        capsize: float = 3.0,
    ) -> object: ...
    def scatter(
        self, x: Sequence[float], y: Sequence[float], *, color: str, s: float, alpha: float, lw: float, label: str
    ) -> object: ...
    def axvline(self, x: float, *, color: str, lw: float, ls: str, label: str = "") -> object: ...
    def axhline(self, y: float, *, color: str, lw: float, ls: str, label: str = "") -> object: ...
    def axvspan(self, low: float, high: float, *, color: str, alpha: float, lw: float) -> object: ...
    def set_xscale(self, scale: str) -> object: ...
    def set_xlim(self, low: float, high: float) -> object: ...
    def get_ylim(self) -> tuple[float, float]: ...
    def get_xaxis_transform(self) -> object: ...


class Sheet:
    """A figure of rows × columns panels with one legend below them all."""

    def __init__(self, rows: int, columns: int, *, title: str, width: float = 4.6, height: float = 3.5) -> None:
        size = (max(columns * width, 6.4), rows * height + 0.9)
        self._figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(self._figure)
        made: Any = self._figure.subplots(rows, columns, squeeze=False)  # pyright: ignore[reportUnknownMemberType]
        self.panels: list[list[Panel]] = [[cast("Panel", axes) for axes in row] for row in made]
        self._figure.suptitle(  # pyright: ignore[reportUnknownMemberType]
            title, x=0.01, ha="left", fontsize=12, fontweight="bold"
        )
        for panel in (panel for row in self.panels for panel in row):
            tidy(panel)

    def legend(self) -> None:
        """Collect the labels of all panels, each once, below them."""
        handles: dict[str, Any] = {}
        for panel in (panel for row in self.panels for panel in row):
            for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
                handles.setdefault(label, handle)
        if handles:
            columns = min(len(handles), LEGEND_COLUMNS)
            self._figure.legend(  # pyright: ignore[reportUnknownMemberType]
                list(handles.values()), list(handles), loc="outside lower center", ncols=columns, frameon=False
            )

    def save(self, path: Path, *, dpi: int = 150) -> None:
        """Write a PNG. Raises OSError where `path` cannot be written."""
        self._figure.savefig(path, dpi=dpi)  # pyright: ignore[reportUnknownMemberType]


def tidy(panel: Axes) -> None:
    """Grid behind the lines, no frame above."""
    panel.grid(True, color="#e4e4e4", lw=0.7)
    panel.set_axisbelow(True)
    panel.spines["top"].set_visible(False)


def caption(panel: Axes, text: str) -> None:
    """The title of a panel."""
    panel.set_title(text, loc="left", fontsize=10, fontweight="normal")


def tokens_axis(panel: Axes) -> None:
    """Name the x axis by tokens, with k and M."""
    panel.set_xlabel("tokens")
    panel.xaxis.set_major_locator(MaxNLocator(5))
    panel.xaxis.set_major_formatter(EngFormatter(sep=""))


def ticks_at(panel: Axes, values: Sequence[float], labels: Sequence[str]) -> None:
    """Ticks of the x axis at these values only."""
    names = dict(zip(values, labels, strict=True))

    def name(value: float, _position: int) -> str:
        return names.get(value, "")

    panel.xaxis.set_major_locator(FixedLocator(list(values)))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(FuncFormatter(name))


def mark_diverged(panel: Panel, at: Sequence[float], color: str) -> None:
    """Crosses at the upper edge of the panel, for trainings whose value lies beyond any axis."""
    cast("Any", panel).plot(
        list(at),
        [0.97] * len(at),
        color=color,
        marker="x",
        ms=7,
        mew=1.8,
        ls="none",
        transform=panel.get_xaxis_transform(),
        clip_on=False,
    )
    cast("Any", panel).plot([], [], color="black", marker="x", ms=7, mew=1.8, ls="none", label="diverged")


def style(index: int) -> tuple[str, str]:
    """Colour and marker of the index-th line."""
    return PALETTE[index % len(PALETTE)], MARKERS[index % len(MARKERS)]


REFERENCE_COLOUR = GREY
