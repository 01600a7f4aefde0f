"""An animated SVG of a recorded run: nodes, averagings, deaths, the loss, and the text of the model that came out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from textwrap import wrap
from typing import Any

WIDTH, HEIGHT = 860, 440
RUN_SECONDS = 10.0
"""In which the run is played."""
SECONDS = 17.0
"""Of the whole picture, which then begins anew; the text stands from the run's end on."""
FLASH = 0.4
"""Seconds for which an averaging is shown."""
PLOT = (420, 56, 836, 262)
"""Left, top, right and bottom of the loss."""
ROWS = {0: 104, 1: 220}
"""Height of each stage's nodes."""
LINE, TEXT_LINES = 84, 5
"""Letters in a line of text, and lines of it."""
FONT = "font-family='DejaVu Sans,Verdana,sans-serif'"
MONO = "font-family='DejaVu Sans Mono,Menlo,monospace'"
COLOURS = ("#1f6feb", "#8250df")
"""Of each stage."""


@dataclass(frozen=True)
class Part:
    """Something that is seen from one moment to another, in seconds of the picture."""

    drawn: str
    begin: float = 0.0
    end: float = SECONDS

    def animated(self) -> str:
        """With its times; where nothing moves it is seen if it is part of the last moment."""
        if self.begin <= 0.0 and self.end >= SECONDS:
            return self.drawn
        times = sorted({0.0, min(self.begin, SECONDS), min(self.end, SECONDS)})
        moments = [time for time in times if time < SECONDS]
        values = ";".join("1" if self.begin <= time < self.end else "0" for time in moments)
        keys = ";".join(f"{time / SECONDS:.4f}".rstrip("0").rstrip(".") for time in moments)
        last = int(self.end >= SECONDS)
        return (
            f"<g opacity='{last}'>{self.drawn}<animate attributeName='opacity' calcMode='discrete' dur='{SECONDS:g}s' "
            f"repeatCount='indefinite' values='{values}' keyTimes='{keys}'/></g>"
        )


def svg(made: dict[str, Any]) -> str:
    """The moving picture of a recording."""
    return _page(part.animated() for part in parts(made))


def still(made: dict[str, Any], at: float) -> str:
    """What is seen of it at one moment, in seconds from its begin."""
    return _page(part.drawn for part in parts(made) if part.begin <= at < part.end)


def _page(drawn: Iterator[str]) -> str:
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' width='{WIDTH}' height='{HEIGHT}'>"
    back = f"<rect width='{WIDTH}' height='{HEIGHT}' rx='10' fill='#ffffff' stroke='#d0d7de'/>"
    return "\n".join([head, back, *drawn, "</svg>"]) + "\n"


def _words(x: float, y: float, text: str, *, size: int = 17, colour: str = "#1f2328", more: str = FONT) -> str:
    place = f"x='{x:g}' y='{y:g}' font-size='{size}' fill='{colour}'"
    return f"<text {place} {more} xml:space='preserve'>{escape(text)}</text>"


def parts(made: dict[str, Any]) -> Iterator[Part]:
    """All that is ever seen."""
    length = max(time for time, _, _ in made["loss"])
    pace = RUN_SECONDS / length
    deaths = {name: time * pace for time, name in made["deaths"]}
    places = _places(made["nodes"])
    yield Part(_words(24, 34, "8 nodes, 2 stages, no coordinator", size=20))
    for stage, y in ROWS.items():
        yield Part(_words(24, y - 32, f"stage {stage}", colour=COLOURS[stage]))
    yield from _pairs(made, pace, places)
    for name, (x, y) in places.items():
        alive = f"<circle cx='{x}' cy='{y}' r='20' fill='{COLOURS[made['nodes'][name]]}'/>"
        end = deaths.get(name, SECONDS)
        yield Part(alive, 0.0, end)
        yield Part(_words(x - 24, y + 40, name, size=16, colour="#59636e"))
        if name in deaths:
            cross = f"<path d='M{x - 9} {y - 9}l18 18m0 -18l-18 18' stroke='#cf222e' stroke-width='4'/>"
            yield Part(f"<circle cx='{x}' cy='{y}' r='20' fill='#eaeef2' stroke='#cf222e'/>{cross}", end)
    yield from _loss(made, pace, deaths)
    yield from _text(made)


def _places(nodes: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Where each node is drawn."""
    columns: dict[int, int] = {}
    places: dict[str, tuple[int, int]] = {}
    for name, stage in nodes.items():
        places[name] = (60 + 85 * columns.setdefault(stage, 0), ROWS[stage])
        columns[stage] += 1
    return places


def _pairs(made: dict[str, Any], pace: float, places: dict[str, tuple[int, int]]) -> Iterator[Part]:
    """Each averaging, as an arc between the two nodes."""
    for time, one, other in made["pairs"]:
        if one in places and other in places:
            (x, y), (to, _) = places[one], places[other]
            arc = (
                f"<path d='M{x} {y}Q{(x + to) / 2:g} {y - 46} {to} {y}' fill='none' stroke='#1a7f37' stroke-width='3'/>"
            )
            yield Part(arc, time * pace, time * pace + FLASH)
    yield Part(_words(24, 290, "green: two replicas average weights", size=16, colour="#1a7f37"))


def _loss(made: dict[str, Any], pace: float, deaths: dict[str, float]) -> Iterator[Part]:
    """The curve, piece by piece, with the figure of the moment and a mark for each death."""
    left, top, right, bottom = PLOT
    losses = [loss for _, _, loss in made["loss"]]
    high, low = max(losses), min(losses)
    yield Part(f"<path d='M{left} {top}V{bottom}H{right}' fill='none' stroke='#59636e'/>")
    yield Part(_words(left, 34, f"training loss over {made['target']:,} tokens", size=20))
    points = [
        (
            time * pace,
            left + (right - left) * clock / made["target"],
            bottom - (bottom - top) * (loss - low) / (high - low),
        )
        for time, clock, loss in made["loss"]
    ]
    for (_, x, y), (moment, to, below) in pairwise(points):
        piece = f"<path d='M{x:.1f} {y:.1f}L{to:.1f} {below:.1f}' stroke='#1f6feb' stroke-width='2.5'/>"
        yield Part(piece, moment)
    ends = [moment for moment, _, _ in points[1:]] + [SECONDS]
    for (moment, _, _), end, loss in zip(points, ends, losses, strict=True):
        yield Part(_words(right - 90, top + 34, f"{loss:.2f}", size=36), moment if moment > points[0][0] else 0.0, end)
    for name, moment in deaths.items():
        _, x, _ = min(points, key=lambda point: abs(point[0] - moment))
        line = f"<path d='M{x:.1f} {top}V{bottom}' stroke='#cf222e' stroke-dasharray='4 4'/>"
        yield Part(line + _words(x - 26, bottom + 20, "kill -9", size=16, colour="#cf222e"), moment)
        yield Part(_words(x - 24, bottom + 38, name, size=16, colour="#cf222e"), moment)


def _text(made: dict[str, Any]) -> Iterator[Part]:
    """What the merged model makes of a beginning that it has not seen."""
    prompt = made["prompt"].rstrip("\n").splitlines()[-1]
    told = f"one model of the five nodes left, held-out loss {made['merged_loss']:.2f}, "
    told += f"it goes on with “{prompt.strip()}”"
    yield Part(_words(24, 332, told, size=16), RUN_SECONDS)
    pieces = (wrap(line, LINE, drop_whitespace=False) or [""] for line in made["text"].splitlines())
    lines = [line for piece in pieces for line in piece]
    for number, line in enumerate(lines[:TEXT_LINES]):
        yield Part(_words(24, 357 + 19 * number, line, size=16, more=MONO), RUN_SECONDS + 0.4 * (number + 1))
