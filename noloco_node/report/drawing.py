"""Charts as SVG and HTML whose colours are the page's, so that they are dark where the page is. All text is escaped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from math import ceil, floor, log10

from noloco_node.report.figures import Bars, ChartLine, Curves, Timeline, named, shares

WIDE, HIGH = 400, 240
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 12, 38
PART_CLASSES = 12
"""The page's style has so many colours of parts, `p0` to `p11`."""


class _Scale:
    """Values to pixels along one axis."""

    def __init__(self, low: float, high: float, begin: float, end: float, *, logarithmic: bool = False) -> None:
        self.logarithmic = logarithmic
        self.low, self.high = low, high if high > low else low + (abs(low) or 1.0)
        self._begin, self._end = begin, end

    def at(self, value: float) -> float:
        """The pixel of a value."""
        low, high = self._of(self.low), self._of(self.high)
        return self._begin + (self._of(value) - low) / (high - low) * (self._end - self._begin)

    def _of(self, value: float) -> float:
        return log10(value) if self.logarithmic else value

    def ticks(self, about: int, *, whole: bool = False) -> list[float]:
        """A few round values within; `whole` ones alone, of what is counted."""
        if self.logarithmic:
            powers = range(floor(log10(self.low)), ceil(log10(self.high)) + 1)
            # Over more than a decade the whole powers of ten are enough.
            steps = (1.0,) if log10(self.high / self.low) > 1.0 else (1.0, 2.0, 5.0)
            found = [step * 10.0**power for power in powers for step in steps]
            inside = [value for value in found if self.low * 0.999 <= value <= self.high * 1.001]
            return inside[:: max(1, ceil(len(inside) / (about + 1)))] or [self.low]
        rough = (self.high - self.low) / about
        size = 10.0 ** floor(log10(rough))
        step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough)
        if whole:
            step = max(1.0, step)
        first = ceil(self.low / step - 1e-9)
        return [index * step for index in range(first, floor(self.high / step + 1e-9) + 1)]


def curves(chart: Curves) -> str:
    """The chart as one SVG with a legend below, or a word that there is nothing to see yet."""
    if not chart.lines:
        return '<p class="dim">nothing to draw yet</p>'
    return "".join([*_svg(chart), _legend(chart.lines)])


def _svg(chart: Curves) -> Iterator[str]:
    left = [line for line in chart.lines if not line.right]
    right = [line for line in chart.lines if line.right]
    edge = WIDE - (LEFT if right else RIGHT)
    xs = [x for line in chart.lines for x, _ in line.points]
    x = _Scale(min(0.0, *xs) if len(xs) > 1 else 0.0, max(xs), LEFT, edge)
    yield f'<svg viewBox="0 0 {WIDE} {HIGH}" role="img" aria-label="{escape(chart.title, quote=True)}">'
    for value in x.ticks(4):
        at = x.at(value)
        yield f'<text x="{at:.1f}" y="{HIGH - BOTTOM + 15}" text-anchor="middle">{figure(value)}</text>'
    yield f'<text x="{(LEFT + edge) / 2}" y="{HIGH - 5}" text-anchor="middle">{escape(chart.x_label)}</text>'
    if left:
        y = _upright(left, logarithmic=chart.logarithmic, from_zero=chart.from_zero)
        for value in y.ticks(5):
            at = y.at(value)
            yield f'<line class="grid" x1="{LEFT}" x2="{edge}" y1="{at:.1f}" y2="{at:.1f}"/>'
            yield f'<text x="{LEFT - 5}" y="{at + 4:.1f}" text-anchor="end">{figure(value)}</text>'
        yield _turned(chart.y_label, 12)
        yield from _drawn(left, x, y)
    if right:
        y = _upright(right, logarithmic=False, from_zero=True)
        for value in y.ticks(5, whole=chart.right_counts):
            yield f'<text x="{edge + 5}" y="{y.at(value) + 4:.1f}">{figure(value)}</text>'
        yield _turned(chart.right_label, WIDE - 6)
        yield from _drawn(right, x, y)
    yield "</svg>"


def _upright(lines: Sequence[ChartLine], *, logarithmic: bool, from_zero: bool = False) -> _Scale:
    ys = [y for line in lines for _, y in line.points]
    low, high = min(ys), max(ys)
    if not logarithmic:
        room = 0.05 * (high - low)
        low, high = (min(0.0, low) if from_zero or low < 0.2 * high else low - room), high + room
    return _Scale(low, high, HIGH - BOTTOM, TOP, logarithmic=logarithmic)


def _turned(text: str, x: float) -> str:
    y = (TOP + HIGH - BOTTOM) / 2
    return f'<text x="{x}" y="{y}" text-anchor="middle" transform="rotate(-90 {x} {y})">{escape(text)}</text>'


def _drawn(lines: Sequence[ChartLine], x: _Scale, y: _Scale) -> Iterator[str]:
    for line in lines:
        dashes = ' stroke-dasharray="5 4"' if line.dashed else ""
        for piece in line.pieces:
            spots = [(x.at(a), y.at(b)) for a, b in piece]
            if len(spots) > 1:
                places = " ".join(f"{a:.1f},{b:.1f}" for a, b in spots)
                yield f'<polyline class="line {line.colour}"{dashes} points="{places}"/>'
            if line.dots or len(spots) == 1:
                yield from (f'<circle class="dot {line.colour}" cx="{a:.1f}" cy="{b:.1f}" r="2.6"/>' for a, b in spots)


def _legend(lines: Sequence[ChartLine]) -> str:
    rows = (f'<span><i class="key {line.colour}"></i>{escape(line.label)}</span>' for line in lines if line.label)
    return f'<div class="legend">{"".join(rows)}</div>'


def bars(chart: Bars) -> str:
    """A bar a row, each as long as the next: the parts are shares of its row. The legend names them."""
    if not chart.parts:
        return '<p class="dim">nothing to show yet</p>'
    made: list[str] = []
    for label, row in chart.rows:
        pieces = zip(chart.parts, chart.colours, shares(row, chart.parts), strict=True)
        inside = "".join(
            f'<span class="p{colour % PART_CLASSES}" style="width:{100 * share:.3f}%" '
            f'title="{escape(named(part), quote=True)}: {row.get(part, 0.0):,.0f} s, {100 * share:.1f} %"></span>'
            for part, colour, share in pieces
            if share > 0.0
        )
        made.append(f'<div class="row"><b>{escape(label)}</b><div class="bar">{inside}</div></div>')
    keys = "".join(
        f'<span><i class="key p{colour % PART_CLASSES}"></i>{escape(named(part))}</span>'
        for part, colour in zip(chart.parts, chart.colours, strict=True)
    )
    return f'{"".join(made)}<div class="legend">{keys}</div>'


def timeline(chart: Timeline) -> str:
    """A row a node: its lives as bars, what happened as marks."""
    made: list[str] = []
    for row in chart.rows:
        spans = "".join(
            f'<span class="life" style="left:{_share(a, chart.end)}%;width:{_share(b - a, chart.end)}%"></span>'
            for a, b in row.spans
        )
        marks = "".join(
            f'<span class="mark {mark.kind}" style="left:min({_share(mark.time, chart.end)}%,100% - 3px)" '
            f'title="{escape(mark.text, quote=True)}"></span>'
            for mark in row.marks
        )
        made.append(f'<div class="row"><b>{escape(row.label)}</b><div class="lane">{spans}{marks}</div></div>')
    ends = f'<div class="row ends"><b></b><div><span>0</span><span>{chart.end:.3g} {chart.unit}</span></div></div>'
    kinds = (("life", "there"), ("start", "up, or reassigned"), ("end", "ended"), ("death", "gone"), ("fault", "fault"))
    keys = "".join(f'<span><i class="key {kind}"></i>{text}</span>' for kind, text in (*kinds, ("warning", "warning")))
    return f'{"".join(made)}{ends}<div class="legend">{keys}</div>'


def _share(value: float, end: float) -> str:
    return f"{100 * min(1.0, max(0.0, value / end)):.3f}"


def figure(value: float) -> str:
    """A value on an axis: `0`, `2.5`, `250k`, `1.5M`, `4e-07`."""
    size = abs(value)
    if size < 1e-12:
        return "0"
    if size < 1e-3:
        return f"{value:.0e}".replace("e-0", "e-")
    for unit, one in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if size >= (one if one > 1e3 else 1e4):
            return f"{value / one:.4g}{unit}"
    return f"{value:.4g}"
