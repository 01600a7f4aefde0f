"""Writes the report of a run folder: one HTML page that loads nothing and runs nothing; style, charts and tables lie
in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path

from noloco_node import __version__, ambient
from noloco_node.errors import ExitCode, UserError
from noloco_node.report import drawing, figures
from noloco_node.report.figures import words
from noloco_node.report.folder import MOST_MOMENTS, Chronicle, ReportedRun, read_folder
from noloco_node.storage import atomic
from noloco_node.telemetry.summary import TRAINING_LOSS_SHARE
from noloco_node.telemetry.web import text_of
from noloco_node.telemetry.words import as_bytes, as_clock_time, as_long, as_loss

PLACE = "report"
"""The report's folder within a run folder."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


@dataclass(frozen=True, slots=True)
class Made:
    """A report that was written: what it tells, and its page."""

    told: ReportedRun
    page: Path


def make_report(run_folder: Path, target: Path | None = None, now: float | None = None) -> Made:
    """Write the report of the run folder into `target`, or into `PLACE` within the run folder. A report that lies
    there is replaced.

    Raises UserError (RUN_FOLDER) as `read_folder` does, and where the target cannot be written.
    """
    told = read_folder(run_folder, ambient.wall() if now is None else now)
    text = page(told)
    folder = target or run_folder / PLACE
    written = folder / "report.html"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        atomic.write_bytes(written, text.encode())
    except OSError as error:
        raise UserError(
            ExitCode.RUN_FOLDER,
            f"the report cannot be written to '{folder}': {error.strerror or error}",
            "name another folder with --out",
        ) from None
    return Made(told, written)


def page(told: ReportedRun) -> str:
    """The whole page."""
    style = text_of("page.css") + files("noloco_node.report").joinpath("style.css").read_text(encoding="utf-8")
    title = _title(told)
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{escape(words(title))}</title><style>{style}</style></head>"
    )
    return head + f"<body><main>{''.join(_sections(told))}</main></body></html>\n"


def _title(told: ReportedRun) -> str:
    return f"Report of run {told.summary.run_name}" if told.summary.run_name else "Report of a run"


def _sections(told: ReportedRun) -> Iterator[str]:
    yield f"<section>{''.join(_header(told))}</section>"
    for chart in (figures.losses(told), figures.spread(told), figures.throughput(told)):
        yield _section(chart.title, drawing.curves(chart), "third")
    yield _section("The nodes", _table(("node", "stage", "done", *_LOSSES, *_COUNTS, "now"), _nodes(told), "even"))
    parts = told.summary.validation_losses_by_source
    if parts:
        rows = [(words(name), as_loss(loss)) for name, loss in parts.items()]
        yield _section("Held-out loss by source of the text", _table(("source", "validation loss"), rows))
    yield _section("Lives of the nodes, and what went wrong in them", drawing.timeline(figures.lives(told)))
    yield _section("Who averaged with whom, and how often", _meetings(told))
    yield _section("Where the time of the devices went", drawing.bars(figures.time_spent(told)))
    yield _section("What went wrong and was dealt with", _faults(told), "half")
    yield _section(
        "What it took",
        _table(("node", "device busy", "waited for text", "sent", "received"), _costs(told), "even"),
        "half",
    )
    yield _section("What happened", _moments(told))


def _section(title: str, inside: str, kind: str = "") -> str:
    return f'<section class="{kind}"><h2>{escape(title)}</h2>{inside}</section>'


def _header(told: ReportedRun) -> Iterator[str]:
    s = told.summary
    axis = figures.TimeAxis.of(told.chronicles)
    versions = sorted({version for chronicle in told.chronicles for version in chronicle.versions})
    yield f"<h1>{escape(words(_title(told)))}</h1>"
    yield (
        f'<p class="dim">run {escape(words(s.run_id))} · {s.stages} stages · {figures.nodes_told(s.nodes)} · '
        f"noloco-node {escape(', '.join(map(words, versions)))} · {_day(axis.since)} to {_day(axis.until)}, "
        f"{as_long(axis.until - axis.since)}</p>"
    )
    if told.running:
        still = "the node runs" if s.nodes == 1 else f"{len(told.running)} of the nodes run"
        yield f'<p class="going">The training goes on: as of {_day(told.read_at)}, {still}.</p>'
    yield '<div class="tiles">'
    for label, value in _tiles(told):
        yield f"<div><b>{value}</b><span>{label}</span></div>"
    yield "</div>"
    if told.passed_over:
        yield f'<p class="dim">{told.passed_over:,} lines hold no event that this version writes: passed over.</p>'
    yield (
        f'<p class="dim">Made by noloco-node {__version__} from the event files of {escape(words(str(told.path)))}. '
        "Tokens and their speed are those of the nodes in this folder while they served its earliest stage; the speed "
        "counts from the first inner step on.</p>"
    )


def _tiles(told: ReportedRun) -> Iterator[tuple[str, str]]:
    s = told.summary
    yield "tokens trained", f"{s.tokens:,}"
    yield "tokens per second", f"{s.tokens_per_second:,.0f}"
    yield f"training loss, mean of the last {100 * TRAINING_LOSS_SHARE:.0f} % of the tokens", as_loss(s.training_loss)
    yield "validation loss", as_loss(s.validation_loss)
    if s.validation_loss_merged is not None:
        yield "validation loss, merged", as_loss(s.validation_loss_merged)
    yield "outer steps, of all nodes", f"{sum(s.outer_steps_taken.values()):,}"
    yield "of them without a partner", f"{sum(part.outer_steps.get('no_partner', 0) for part in s.per_node.values()):,}"
    yield "came to nothing", f"{sum(part.outer_steps['aborted'] for part in s.per_node.values()):,}"


_LOSSES = ("training loss, last inner step", "validation loss, last one")
_COUNTS = ("inner steps", "outer steps", "stage peers met")


def _nodes(told: ReportedRun) -> Iterator[Sequence[str]]:
    for chronicle in told.chronicles:
        part, account = told.summary.per_node[chronicle.name], chronicle.history.account
        loss, held_out = _last_losses(chronicle)
        share = "–" if account is None else f"{100.0 * min(1.0, account.clock / max(1, account.target)):.0f} %"
        yield (
            chronicle.name,
            "–" if part.stage is None else str(part.stage),
            share,
            as_loss(loss),
            as_loss(held_out),
            f"{part.inner_steps:,}",
            f"{told.summary.outer_steps_taken[chronicle.name]:,}",
            f"{told.summary.distinct_partners[chronicle.name]:,}",
            told.now[chronicle.name],
        )


def _last_losses(chronicle: Chronicle) -> tuple[float | None, float | None]:
    """The losses as `noloco-node status` has them: of the last inner step and the last evaluation."""
    inner, evaluations = chronicle.history.inner, chronicle.history.evaluations
    return inner[-1].loss if inner else None, evaluations[-1].loss if evaluations else None


def _costs(told: ReportedRun) -> Iterator[Sequence[str]]:
    for chronicle in told.chronicles:
        busy, waited = sum(chronicle.spent.busy.values()), chronicle.spent.data_wait
        sent, received = sum(chronicle.history.sent.values()), sum(chronicle.history.received.values())
        yield chronicle.name, as_long(busy), as_long(waited), as_bytes(sent), as_bytes(received)


def _meetings(told: ReportedRun) -> str:
    rows = [(str(row.stage), row.one, row.other, f"{row.times:,}") for row in figures.meetings(told)]
    shown = _table(("stage", "node", "with", "outer steps together"), rows[:MOST_MOMENTS], "even")
    return f'<div class="tall">{shown}</div>' if rows else '<p class="dim">nobody yet</p>'


def _faults(told: ReportedRun) -> str:
    rows = [(count.what, f"{count.times:,}", count.where) for count in figures.faults(told)]
    return _table(("what", "times", "where most"), rows) if rows else '<p class="dim">nothing</p>'


def _moments(told: ReportedRun) -> str:
    rows = figures.moments(told)
    shown = rows[-MOST_MOMENTS:]
    lines = "".join(
        f'<li class="{m.kind}"><time>{_day(m.time)}</time> <b>{escape(name)}</b> {escape(words(m.text))}</li>'
        for name, m in shown
    )
    earlier = (
        f'<p class="dim">{len(rows) - len(shown):,} earlier ones are left out</p>' if len(rows) > len(shown) else ""
    )
    return f"{earlier}<ol>{lines}</ol>"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _day(when: float) -> str:
    return as_clock_time(when, "%Y-%m-%d %H:%M:%S")
