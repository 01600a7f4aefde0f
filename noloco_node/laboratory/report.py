"""The table of an experiment, in Markdown: a block for each number of replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from noloco_node.laboratory.figures import (
    FigureLine,
    Results,
    Spot,
    activation_bytes,
    as_text,
    best_of,
    lines,
)

NONE = "–"

TELLING_ROUNDS = 20
"""Below so many outer steps the first steps of the replicas, each alone, weigh more than how they average."""

COLUMNS = (
    "variant",
    "settings",
    "validation loss",
    "before the last exchange",
    "merged",
    "gap",
    "sent per outer step",
    "sent per inner step",
    "activations per inner step",
    "outer steps",
    "no partner",
    "clipped",
    "√divergence at the end",
    "seconds",
)


def markdown(record: Results) -> str:
    """The whole of table.md."""
    parts = [*_header(record), *_blocks(record), *_tuning(record)]
    return "\n".join(parts).rstrip("\n") + "\n"


def _header(record: Results) -> Iterator[str]:
    run, lab = record.run, record.lab
    inner, outer = run["inner"], run["outer"]
    yield f"# {run['name']}\n"
    yield f"Repeat it with\n\n```sh\n{record.command}\n```\n"
    yield ", ".join(f"{name} {version}" for name, version in record.versions.items()) + ".\n"
    parameters = sorted({result.parameters for result in record.results})
    yield (
        f"Model: {' or '.join(f'{count:,}' for count in parameters)} parameters in {run['model']['stages']} stages. "
        f"Data: {_source(run['data'], record.text)}. "
        f"{inner['global_batch_tokens']:,} tokens an inner step over all replicas, H = {outer['inner_steps']}, "
        f"where a variant sets nothing else. Seeds: {_listed(lab['seeds'])}"
        + (f", chosen on seeds {_listed(lab['tune_seeds'])}" if lab["tune_seeds"] else "")
        + ".\n"
    )
    yield (
        "*Settings* are those in which a variant differs from the file's. Losses are in nats per token, mean ± sample "
        "standard deviation over the seeds (as many as n says), after the last outer step, and just before it; "
        "*merged* is the mean of the replicas' weights. "
        f"*Gap* is loss / loss of `{lab['reference']}` − 1. Bytes are sent by one "
        "replica of each stage together: exchanges of weights or gradients, and apart from them *activations* with "
        "labels and gradients between the stages. *No partner* is the share of outer steps without one, *clipped* the "
        "share of exchanges whose pull was clipped.\n"
    )


def _blocks(record: Results) -> Iterator[str]:
    rows = lines(record)
    hidden = set[str]() if any(line.options for line in rows) else {"settings"}
    shown = [name not in hidden for name in COLUMNS]
    for replicas in dict.fromkeys(line.replicas for line in rows):
        block = [line for line in rows if line.replicas == replicas]
        yield f"## {record.run['inner']['target_tokens']:,} tokens, {replicas} replicas\n"
        columns, *cells = (
            [cell for cell, visible in zip(row, shown, strict=True) if visible]
            for row in (COLUMNS, *(_row(record, rows, line) for line in block))
        )
        yield from _table(columns, cells)
        yield from _too_short(block)


def _too_short(block: Sequence[FigureLine]) -> Iterator[str]:
    """A warning where a variant that exchanges had too few outer steps to be judged by."""
    rounds = {line.variant: line.figure(lambda result: result.outer_rounds) for line in block}
    short = {name: spot.mean for name, spot in rounds.items() if spot is not None and 0 < spot.mean < TELLING_ROUNDS}
    if short:
        named = ", ".join(f"{name} took {mean:.1f}" for name, mean in short.items())
        yield (
            f"**Fewer than {TELLING_ROUNDS} outer steps say nothing about a method**: {named}. "
            "Raise `run.inner.target_tokens` before you compare.\n"
        )


def _row(record: Results, rows: Sequence[FigureLine], line: FigureLine) -> list[str]:
    return [
        line.variant,
        _options(line.options),
        _loss(line),
        _number(line.figure(lambda result: result.validation_loss_fast), "{:.4f}"),
        _number(line.figure(lambda result: result.validation_loss_merged), "{:.4f}"),
        _gap(line, best_of(record.lab["reference"], rows, line.replicas)),
        _number(line.figure(lambda result: result.bytes_per_outer_step), _bytes),
        _number(line.figure(lambda result: result.bytes_per_inner_step), _bytes),
        _number(line.figure(lambda result: activation_bytes(record, result)), _bytes),
        _number(line.figure(lambda result: result.outer_rounds), "{:.1f}"),
        _number(line.figure(lambda result: result.alone_share), "{:.1%}"),
        _number(line.figure(lambda result: result.clipped_share), "{:.1%}"),
        _number(line.root_of_final_spread, "{:.3g}"),
        _number(line.figure(lambda result: result.seconds), "{:.0f}"),
    ]


def _tuning(record: Results) -> Iterator[str]:
    """Every point that was tried before the seeds of the report were trained."""
    rows = lines(record, "tune")
    if not rows:
        return
    seeds = record.lab["tune_seeds"]
    yield f"## Tuning\n\nValidation loss on seeds {_listed(seeds)}.\n"
    yield from _table(
        ("variant", "replicas", "settings", "validation loss"),
        [[line.variant, str(line.replicas), _options(line.swept), _loss(line)] for line in rows],
    )


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(columns) + " |"
    yield "|" + " --- |" * len(columns)
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
    yield ""


def _loss(line: FigureLine) -> str:
    spot = line.loss
    if spot is None:
        return f"diverged in {line.diverged} of {len(line.results)}"
    return (
        f"{spot.mean:.4f} ± {spot.deviation:.4f} (n = {spot.count})" if spot.count > 1 else f"{spot.mean:.4f} (n = 1)"
    )


def _gap(line: FigureLine, against: FigureLine | None) -> str:
    loss, least = line.loss, against.loss if against is not None else None
    return NONE if loss is None or least is None else f"{loss.mean / least.mean - 1:+.2%}"


def _number(spot: Spot | None, style: str | Callable[[float], str]) -> str:
    if spot is None:
        return NONE
    return style.format(spot.mean) if isinstance(style, str) else style(spot.mean)


def _bytes(count: float) -> str:
    """Decimal units, three digits: 1.23 MB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def _options(options: dict[str, Any]) -> str:
    return ", ".join(f"{name} {as_text(value)}" for name, value in options.items()) or NONE


def _source(data: dict[str, Any], fingerprint: str) -> str:
    named = f"{data['source']}{' ' + data['path'] if data['path'] else ''}"
    return f"{named}, windows of {data['sequence_length']} tokens" + (f", {fingerprint}" if fingerprint else "")


def _listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, values))
