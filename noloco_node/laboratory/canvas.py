"""The sheet that the laboratory's plots are drawn on: panels, colours, legends."""

# pyright: reportUnknownMemberType=false
# matplotlib's own types leave the keywords of most methods open.

from __future__ import annotations

import math
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator
from PIL import Image

BLUE, ORANGE, GREEN, GREY = "#2f6db3", "#d9622b", "#3a8f5c", "#8a8a8a"
PALETTE = (BLUE, ORANGE, GREEN, "#8e5bb5", "#c79a1e", "#2f9aa0", "#b5446e", "#6b4a2f", "#5a6b8a", "#93a33c")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")

LEGEND_INCHES = 0.7
"""The width, in inches, of a label's mark in the common legend, and of the room around it."""
INCHES_A_LETTER = 0.078
INCHES_A_ROW = 0.21
COLOURS = 64
ROWS_WITHIN = 4
"""The sheet has room for so many rows of the legend; each further one makes it higher, not the panels lower."""


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
            widest = LEGEND_INCHES + INCHES_A_LETTER * max(map(len, handles))
            columns = max(1, min(len(handles), int(self._width / widest)))
            more = max(0, math.ceil(len(handles) / columns) - ROWS_WITHIN)
            self._figure.set_figheight(self._figure.get_figheight() + more * INCHES_A_ROW)
            self._figure.legend(
                list(handles.values()), list(handles), loc="outside lower center", ncols=columns, frameon=False
            )

    def save(self, path: Path) -> None:
        """Write a PNG of few colours, which is a quarter as large. Raises OSError where `path` cannot be written."""
        drawn = BytesIO()
        self._figure.savefig(drawn, format="png", dpi=150)
        Image.open(drawn).convert("RGB").quantize(COLOURS).save(path, format="png", optimize=True)


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


def whole_numbers(axis: Axis) -> None:
    """Ticks of what is counted."""
    axis.set_major_locator(MaxNLocator(5, integer=True))


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


REFERENCE_COLOUR = GREY
