"""Plots of an experiment: loss by tokens, by bytes, spread beside the learning rate, sweeps, γ, scaling."""

# pyright: reportUnknownMemberType=false
# matplotlib's own types leave the keywords of most methods open.

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from noloco_node.config.lab_spec import Plot
from noloco_node.laboratory.canvas import (
    PALETTE,
    REFERENCE_COLOUR,
    Sheet,
    caption,
    few_ticks,
    legend_beside,
    logarithmic,
    mark_above,
    style,
    ticks_at,
    tokens_axis,
)
from noloco_node.laboratory.expansion import GAMMA
from noloco_node.laboratory.figures import (
    FigureLine,
    Results,
    Spot,
    as_text,
    best,
    best_of,
    lines,
    setting,
    spread_follows_rate,
)
from noloco_node.outer import Momentum
from noloco_node.outer.stability import admissible_gamma

BAND_LABEL = "range of the seeds"
LAST_LABEL = "after the last step"
"""This mark is the outer step that ends a training: it leads from the last loss on the way to the loss of the table."""
LOSS_LABEL = "validation loss (nats per token)"
SPREAD_LABEL = "√spread across replicas"

MODE_STYLES: dict[Momentum, tuple[str, str, float]] = {
    "averaged": (PALETTE[0], "o", 0.96),
    "local": (PALETTE[1], "s", 0.89),
}
"""Colour, marker, and height of the marks of values beyond the panel."""

TALLEST = 1.5
"""A mean loss above this multiple of the panel's least is marked at the upper edge instead of drawn."""

EARLY_SHARE = 0.2
"""The steep losses of this first share of the training are left above the upper edge of the convergence plot."""


def draw(plot: Plot, record: Results, path: Path) -> Path:
    """Draw one of the plots as a PNG; returns its path. Raises OSError where it cannot be written."""
    painters: dict[Plot, Callable[[Results], Sheet]] = {
        "convergence": convergence,
        "spread": spread,
        "gamma": gamma,
        "sweep": sweep,
        "scaling": scaling,
        "frontier": frontier,
    }
    sheet = painters[plot](record)
    sheet.legend()
    sheet.save(path)
    return path


def convergence(record: Results) -> Sheet:
    """Validation loss by tokens, a panel for each number of replicas, for the longest training."""
    rows = _longest(lines(record))
    counts = _replicas(rows)
    sheet = Sheet(1, len(counts), title=f"{record.run['name']}: convergence")
    for panel, count in zip(sheet.panels[0], counts, strict=True):
        for line in _best_of_each(row for row in rows if row.replicas == count):
            _loss_curve(panel, line, *_look(record, line))
        _leave_out_the_start(panel, rows)
        caption(panel, f"{count} replicas")
        tokens_axis(panel)
    first = sheet.panels[0][0]
    first.set_ylabel(LOSS_LABEL)
    if any(len(line.results) > 1 for line in rows):
        first.fill_between([], [], [], color=REFERENCE_COLOUR, alpha=0.35, lw=0, label=BAND_LABEL)
    first.plot([], [], color=REFERENCE_COLOUR, marker="o", ms=5.5, ls="none", label=LAST_LABEL)
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


def _leave_out_the_start(panel: Axes, shown: Sequence[FigureLine]) -> None:
    """The first steep losses would press all differences into one line."""
    late = [
        point.validation_loss
        for line in shown
        for result in line.results
        for point in result.curve
        if point.validation_loss is not None and point.tokens >= EARLY_SHARE * line.tokens
    ]
    late += [line.loss.mean for line in shown if line.loss is not None]
    if late:
        margin = 0.05 * (max(late) - min(late)) or 0.05
        panel.set_ylim(min(late) - margin, max(late) + margin)


def spread(record: Results) -> Sheet:
    """√spread by tokens beside the learning rate, and against it after the warm-up; a row by number of replicas."""
    rows = [line for line in _longest(lines(record)) if _varies(line)]
    counts = _replicas(rows)
    sheet = Sheet(max(1, len(counts)), 2, title=f"{record.run['name']}: spread and learning rate", width=6.0)
    for (left, right), count in zip(sheet.panels, counts, strict=False):
        shown = _best_of_each(row for row in rows if row.replicas == count)
        rate = left.twinx()
        for line in shown:
            _spread_curve(left, line, _look(record, line)[0])
            _against_rate(record, right, line, _look(record, line)[0])
        first = shown[0].results[0].spread
        rate.plot([p.tokens for p in first], [p.learning_rate for p in first], color=REFERENCE_COLOUR, lw=1.4, ls="--")
        rate.set_ylabel("learning rate (dashed)", color=REFERENCE_COLOUR)
        rate.set_ylim(bottom=0.0)
        rate.spines["top"].set_visible(False)
        logarithmic(left)
        left.set_ylabel(SPREAD_LABEL)
        right.set_xlabel("learning rate after the warm-up")
        few_ticks(right)
        right.set_ylabel("√spread, as share of its greatest")
        right.set_ylim(bottom=0.0)
        legend_beside(right)
        caption(left, f"{count} replicas")
        tokens_axis(left)
    return sheet


def _varies(line: FigureLine) -> bool:
    return any(point.spread for result in line.results for point in result.spread)


def _spread_curve(panel: Axes, line: FigureLine, colour: str) -> None:
    spots = _over_seeds([[(p.tokens, p.spread) for p in result.spread if p.spread] for result in line.results])
    tokens = list(spots)
    panel.plot(tokens, [math.sqrt(spots[t].mean) for t in tokens], color=colour, lw=1.6, label=_name(line))


def _against_rate(record: Results, panel: Axes, line: FigureLine, colour: str) -> None:
    rates: list[float] = []
    shares: list[float] = []
    for result in line.results:
        warmup = setting(record, result, "inner.warmup_tokens")
        points = [(p.learning_rate, p.spread) for p in result.spread if p.tokens > warmup and p.spread is not None]
        greatest = max((value for _, value in points), default=0.0)
        rates += [rate for rate, _ in points if greatest]
        shares += [math.sqrt(value / greatest) for _, value in points if greatest]
    follows = line.figure(lambda result: spread_follows_rate(record, result))
    label = f"{line.variant}: r = {follows.mean:.2f}" if follows is not None else f"{line.variant}: r undefined"
    panel.scatter(rates, shares, color=colour, s=14, alpha=0.6, lw=0, label=label)


def gamma(record: Results) -> Sheet:
    """Loss and final spread by γ, a column for each α; the predicted admissible interval of each momentum mode.

    Shaded where both are admissible by `outer.stability.admissible_gamma`; for the longest training and the most
    replicas.
    """
    rows = [line for line in _longest(_swept_lines(record)) if GAMMA in line.swept]
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
            limit = TALLEST * min((line.loss.mean for line in shown if line.loss is not None), default=math.inf)
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
        group = line.replicas if line.algorithm == "diloco" else _of(record, line, "world.group_size")
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


def sweep(record: Results) -> Sheet:
    """Loss by the swept value, a panel for each variant that sweeps one setting, for the longest training."""
    rows = _longest(_swept_lines(record))
    report = lines(record)
    variants = list(dict.fromkeys(line.variant for line in rows if len(line.swept) == 1))
    columns = min(3, len(variants))
    sheet = Sheet(-(-len(variants) // columns), columns, title=f"{record.run['name']}: sweeps")
    panels = [panel for row in sheet.panels for panel in row]
    for panel, variant in zip(panels, variants, strict=False):
        _swept_panel(panel, [line for line in rows if line.variant == variant], record, report)
        caption(panel, variant)
    for panel in panels[len(variants) :]:
        panel.set_axis_off()
    for row in sheet.panels:
        row[0].set_ylabel(LOSS_LABEL)
    return sheet


def _swept_panel(panel: Axes, shown: Sequence[FigureLine], record: Results, report: Sequence[FigureLine]) -> None:
    (name,) = shown[0].swept
    values = list(dict.fromkeys(line.swept[name] for line in shown))
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    numeric = len(numbers) == len(values)
    places = {value: float(value) if numeric else float(index) for index, value in enumerate(values)}
    limit = TALLEST * min((line.loss.mean for line in shown if line.loss is not None), default=math.inf)
    for index, count in enumerate(_replicas(shown)):
        look = style(index)
        chosen = sorted((places[line.swept[name]], place) for place, line in enumerate(shown) if line.replicas == count)
        spots = [(x, shown[place].loss) for x, place in chosen]
        _error_bars(panel, spots, look, f"{count} replicas", limit=limit, height=0.96 - 0.06 * index)
        against = best_of(record.lab["reference"], report, count, shown[0].tokens)
        if against is not None and against.loss is not None and against.variant != shown[0].variant:
            panel.axhline(
                against.loss.mean, color=look[0], lw=1.2, ls="--", label=f"{against.variant}, {count} replicas"
            )
    if numeric and min(numbers) > 0 and max(numbers) >= 8 * min(numbers):
        panel.set_xscale("log")
    if len(values) <= 10:
        ticks_at(panel, list(places.values()), [as_text(value) for value in values])
    panel.set_xlabel(name)


def scaling(record: Results) -> Sheet:
    """Loss and final spread by the number of replicas, for the longest training."""
    rows = _longest(lines(record))
    sheet = Sheet(1, 2, title=f"{record.run['name']}: scaling", width=5.2)
    losses, spreads = sheet.panels[0]
    counts = _replicas(rows)
    for variant in dict.fromkeys(line.variant for line in rows):
        chosen = [line for count in counts for line in _best_of_each(_at(rows, variant, count))]
        look = _look(record, chosen[0])
        _error_bars(losses, [(float(line.replicas), line.loss) for line in chosen], look, variant)
        parted = [(float(line.replicas), line.root_of_final_spread) for line in chosen if _varies(line)]
        _error_bars(spreads, parted, look, variant)
    for panel in (losses, spreads):
        panel.set_xscale("log")
        panel.set_xlabel("replicas of each stage")
        ticks_at(panel, [float(count) for count in counts], [str(count) for count in counts])
    losses.set_ylabel(LOSS_LABEL)
    spreads.set_ylabel(f"{SPREAD_LABEL} at the end")
    logarithmic(spreads)
    return sheet


def frontier(record: Results) -> Sheet:
    """Loss by bytes sent in an inner step, a panel for each number of replicas, for the longest training. It shows
    every point of every variant that exchanges. The reference is a line across: what it sends is another matter."""
    rows = _longest(lines(record))
    counts = _replicas(rows)
    sheet = Sheet(1, len(counts), title=f"{record.run['name']}: loss by traffic", width=5.2)
    reference = record.lab["reference"]
    for panel, count in zip(sheet.panels[0], counts, strict=True):
        shown = [line for line in rows if line.replicas == count and line.variant != reference]
        limit = TALLEST * min((line.loss.mean for line in shown if line.loss is not None), default=math.inf)
        for variant in dict.fromkeys(line.variant for line in shown):
            chosen = [line for line in shown if line.variant == variant]
            traffic = [(line.figure(lambda result: result.bytes_per_inner_step), line.loss) for line in chosen]
            spots = sorted((sent.mean, loss) for sent, loss in traffic if sent is not None and sent.mean > 0.0)
            _error_bars(panel, spots, _look(record, chosen[0]), variant, limit=limit)
        against = best_of(reference, rows, count, rows[0].tokens)
        if against is not None and against.loss is not None:
            panel.axhline(against.loss.mean, color=REFERENCE_COLOUR, lw=1.2, ls="--", label=reference)
        panel.set_xscale("log")
        panel.set_xlabel("bytes sent by a replica of each stage in an inner step")
        caption(panel, f"{count} replicas")
    sheet.panels[0][0].set_ylabel(LOSS_LABEL)
    return sheet


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


def _at(rows: Iterable[FigureLine], variant: str, replicas: int) -> list[FigureLine]:
    return [line for line in rows if (line.variant, line.replicas) == (variant, replicas)]


def _look(record: Results, line: FigureLine) -> tuple[str, str]:
    """Colour and marker of a variant: by its place in the file, the same in every plot."""
    return style([variant["name"] for variant in record.lab["variants"]].index(line.variant))


def _swept_lines(record: Results) -> list[FigureLine]:
    """All points that were tried: those of the tuning if there was one."""
    tried = lines(record, "tune")
    tuned = {line.variant for line in tried}
    return tried + [line for line in lines(record) if line.variant not in tuned and line.swept]


def _longest(rows: Sequence[FigureLine]) -> list[FigureLine]:
    longest = max((line.tokens for line in rows), default=0)
    return [line for line in rows if line.tokens == longest]


def _replicas(rows: Iterable[FigureLine]) -> list[int]:
    return sorted({line.replicas for line in rows})


def _of(record: Results, line: FigureLine, name: str) -> Any:
    return setting(record, line.results[0], name)


def _name(line: FigureLine) -> str:
    options = ", ".join(f"{name.rpartition('.')[2]} {as_text(value)}" for name, value in line.swept.items())
    return f"{line.variant} ({options})" if options else line.variant
