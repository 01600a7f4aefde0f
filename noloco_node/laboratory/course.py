"""The command `lab`: from a configuration to a folder with results.json, table.md and plots."""

from __future__ import annotations

import platform
import shlex
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from noloco_node import __version__
from noloco_node.config.load import Config
from noloco_node.errors import ExitCode, UserError
from noloco_node.laboratory.expansion import check_points, expand
from noloco_node.laboratory.experiment import Experiment, Journal, OnFinished, planned
from noloco_node.laboratory.figures import (
    FigureLine,
    Result,
    Results,
    Spot,
    activation_bytes,
    as_text,
    best_of,
    lines,
)
from noloco_node.storage import atomic
from noloco_node.telemetry.words import as_bytes


def plan_lab(config: Config) -> tuple[int, int]:
    """The trainings of an experiment, and their tokens together. Raises UserError (CONFIG) as `expand` does."""
    phases = planned(config.lab, expand(config))
    return sum(phase.trainings for phase in phases), sum(phase.tokens for phase in phases)


def run_lab(config: Config, out: Path, command: str, progress: OnFinished) -> dict[str, Path]:
    """Run the experiment, or what is missing of it, and write its results; returns the files by name. `command` repeats
    it. Raises UserError: CONFIG before anything is trained, DATA where the text cannot be read, RUN_FOLDER if `out`
    cannot be written, and what the training raises."""
    from noloco_node.data.prepared import fingerprint_of

    cells = expand(config)
    check_points(cells)
    _create(out)
    text = fingerprint_of(config.run.data)
    results = Experiment(config.lab, cells, Journal(out / "runs.jsonl", text), progress).run()
    return write_results(config, results, text, out, command)


def write_results(config: Config, results: Sequence[Result], text: str, out: Path, command: str) -> dict[str, Path]:
    """Write results.json, table.md and the plots that the lab file asks for; returns the files by name."""
    from noloco_node.laboratory.plots import draw

    record = Results(
        command=command,
        versions={
            "noloco_node": __version__,
            "torch": metadata.version("torch"),
            "python": platform.python_version(),
        },
        text=text,
        run=config.run.model_dump(mode="json"),
        lab=config.lab.model_dump(mode="json"),
        results=list(results),
    )
    files = {"results": out / "results.json", "table": out / "table.md"}
    atomic.write_bytes(files["results"], record.as_json().encode())
    atomic.write_bytes(files["table"], markdown(record).encode())
    for plot in config.lab.plots:
        files[f"plot, {plot}"] = draw(plot, record, out / f"{plot}.png")
    return files


def command_line(config: Path, out: Path, overrides: Sequence[str]) -> str:
    """The command that repeats an experiment, as a shell takes it."""
    parts = ["noloco-node", "lab", str(config), "--out", str(out)]
    for override in overrides:
        parts += ["--set", override]
    return shlex.join(parts)


def _create(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        atomic.write_bytes(out / ".probe", b"")
        (out / ".probe").unlink()
    except OSError as error:
        raise UserError(
            ExitCode.RUN_FOLDER,
            f"--out is '{out}', which cannot be written: {error.strerror or error}",
            "name a folder that does not exist yet or that you may write to",
        ) from None


NONE = "–"

TELLING_ROUNDS = 20
"""Below so many outer steps the first steps of the replicas, each alone, weigh more than how they average."""

COSTS = (
    "sent per outer step",
    "sent per inner step",
    "activations per inner step",
    "outer steps",
    "no partner",
    "clipped",
)
LOSSES = ("validation loss", "before the last exchange", "merged", "gap")
COLUMNS = ("variant", "settings", *LOSSES, *COSTS, "√divergence at the end", "seconds")
ALIKE = "The same in every line: "
"""So begins the sentence below a table with what its lines would all say of their costs."""


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
    for replicas in dict.fromkeys(line.replicas for line in rows):
        block = [line for line in rows if line.replicas == replicas]
        yield f"## {record.run['inner']['target_tokens']:,} tokens, {replicas} replicas\n"
        by_column = zip(COLUMNS, zip(*(_row(record, rows, line) for line in block), strict=True), strict=True)
        columns = {name: cells for name, cells in by_column if name not in hidden}
        same = {name: columns.pop(name)[0] for name in COSTS if len(block) > 1 and len({*columns[name]}) == 1}
        yield from _table(tuple(columns), list(zip(*columns.values(), strict=True)))
        if same:
            yield f"{ALIKE}{', '.join(f'{name} {cell}' for name, cell in same.items())}.\n"
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
        _number(line.figure(lambda result: result.bytes_per_outer_step), as_bytes),
        _number(line.figure(lambda result: result.bytes_per_inner_step), as_bytes),
        _number(line.figure(lambda result: activation_bytes(record, result)), as_bytes),
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


def _options(options: dict[str, Any]) -> str:
    return ", ".join(f"{name} {as_text(value)}" for name, value in options.items()) or NONE


def _source(data: dict[str, Any], fingerprint: str) -> str:
    named = f"{data['source']}{' ' + data['path'] if data['path'] else ''}"
    return f"{named}, windows of {data['sequence_length']} tokens" + (f", {fingerprint}" if fingerprint else "")


def _listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, values))
