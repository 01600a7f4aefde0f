"""Charts as data: what is to be drawn, before `drawing` says how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

ChartPoint = tuple[float, float]


@dataclass(frozen=True, slots=True)
class ChartLine:
    """A curve. `colour` is a class of the page's style: first, second, third, quiet."""

    label: str
    """Empty where it is one of several that are named once."""
    colour: str
    points: tuple[ChartPoint, ...]
    dashed: bool = False
    dots: bool = False
    right: bool = False
    """Belongs to the axis on the right."""
    breaks: tuple[float, ...] = ()
    """Places along the axis from which on nobody looked, up to the next point: nothing is drawn over that."""

    @property
    def pieces(self) -> tuple[tuple[ChartPoint, ...], ...]:
        """The points, parted where the line breaks."""
        at = [
            index
            for index, ((before, _), (after, _)) in enumerate(pairwise(self.points), 1)
            if any(before <= place < after for place in self.breaks)
        ]
        return tuple(self.points[begin:end] for begin, end in pairwise([0, *at, len(self.points)]))


@dataclass(frozen=True, slots=True)
class Curves:
    """Curves over one axis."""

    title: str
    x_label: str
    y_label: str
    lines: tuple[ChartLine, ...]
    right_label: str = ""
    logarithmic: bool = False
    """The axis on the left, where all is above 0."""
    from_zero: bool = False
    """The axis on the left begins at 0."""
    right_counts: bool = False
    """The axis on the right counts something: it has whole numbers alone."""


@dataclass(frozen=True, slots=True)
class Bars:
    """A bar a row, put together of parts with the same names everywhere, and the same colours in every report."""

    title: str
    unit: str
    parts: tuple[str, ...]
    """Those that are there."""
    colours: tuple[int, ...]
    """The colour of each part, by number."""
    rows: tuple[tuple[str, Mapping[str, float]], ...]


@dataclass(frozen=True, slots=True)
class Edge:
    """Two that met, and how often."""

    one: str
    other: str
    times: int


@dataclass(frozen=True, slots=True)
class ChartGraph:
    """The meetings among the replicas of one stage, as a graph."""

    title: str
    nodes: tuple[str, ...]
    edges: tuple[Edge, ...]
    left_out: int = 0
    """Nodes for which there is no room: those that met least often."""


@dataclass(frozen=True, slots=True)
class ChartMark:
    """Something that happened at one time."""

    time: float
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class ChartRow:
    """A node's lives along the time, with what happened in them."""

    label: str
    spans: tuple[tuple[float, float], ...]
    marks: tuple[ChartMark, ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    """Rows along one time, which begins at 0 and ends at `end`."""

    title: str
    unit: str
    end: float
    rows: tuple[ChartRow, ...]
