"""From what a folder tells to charts and tables: pure functions. A figure is the summary's, or a count of events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import isfinite

from noloco_node.report.folder import Chronicle, Moment, ReportedRun
from noloco_node.telemetry.events import Account
from noloco_node.telemetry.node_state import POINTS
from noloco_node.telemetry.summary import (
    Microbatches,
    divergence_curve,
    throughput_curve,
    token_counters,
    training_curve,
    validation_curves,
)
from noloco_node.telemetry.words import one_line

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

    parts: tuple[str, ...]
    """Those that are there."""
    colours: tuple[int, ...]
    """The colour of each part, by number."""
    rows: tuple[tuple[str, Mapping[str, float]], ...]


@dataclass(frozen=True, slots=True)
class Meetings:
    """Two replicas of a stage that averaged, and how often."""

    stage: int
    one: str
    other: str
    times: int


@dataclass(frozen=True, slots=True)
class ChartRow:
    """A node's lives along the time, with what happened in them."""

    label: str
    spans: tuple[tuple[float, float], ...]
    marks: tuple[Moment, ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    """Rows along one time, which begins at 0 and ends at `end`."""

    unit: str
    end: float
    rows: tuple[ChartRow, ...]


GOOD_FINDINGS = ("agreed",)
UNITS = ((3 * 86400.0, 86400.0, "days"), (3 * 3600.0, 3600.0, "hours"), (300.0, 60.0, "minutes"))
BUSY = {
    "forward": "forward, at the last stage with its backward",
    "backward": "backward",
    "step": "step",
    "draw": "forward of newly drawn microbatches",
}
"""The work of a device, by its name in the events. At the last stage the backward is part of the forward's call: it
needs no answer from anybody."""
DRAW_OF_ONE_STAGE = "forward and backward of newly drawn microbatches"
"""The work of a model in one stage, which is the first and the last."""
IDLE = {
    "answers": "idle: microbatches were under way, with other nodes",
    "microbatches": "idle: there was no microbatch",
    "no_replica": "idle: a stage had no replica",
    "joining": "idle: joining",
    "ending": "idle: ending",
    "paused": "idle: paused",
}


@dataclass(frozen=True, slots=True)
class Count:
    """How often something went wrong, and where most of all."""

    what: str
    times: int
    where: str


@dataclass(frozen=True, slots=True)
class TimeAxis:
    """Wall time as it is shown: since `since`, in `unit`s of `seconds`."""

    since: float
    until: float
    seconds: float
    unit: str

    @classmethod
    def of(cls, chronicles: Iterable[Chronicle]) -> TimeAxis:
        """From the first start to the last event."""
        lives = [life for chronicle in chronicles for life in chronicle.lives]
        since, until = min(life.began for life in lives), max(life.last for life in lives)
        seconds, unit = next(((size, name) for least, size, name in UNITS if until - since >= least), (1.0, "seconds"))
        return cls(since, until, seconds, unit)

    def at(self, when: float) -> float:
        """Where a wall time lies."""
        return max(0.0, when - self.since) / self.seconds

    @property
    def end(self) -> float:
        """Where the last event lies."""
        return max(self.at(self.until), 1e-9)


def nodes_told(count: int) -> str:
    """The number of nodes whose events a report is made of: there may have been others in the run."""
    return f"{count} nodes in this folder" if count != 1 else "one node in this folder"


def losses(told: ReportedRun) -> Curves:
    """Losses by tokens."""
    histories = [chronicle.history for chronicle in told.chronicles]
    training = tuple((p.clock, p.loss) for p in training_curve(token_counters(histories)))
    held_out = [tuple((p.clock, p.loss) for p in curve) for curve in validation_curves(histories)]
    through = f"validation{' of each replica' if len(held_out) > 1 else ''}, through the swarm"
    lines = [
        ChartLine("training", "first", training),
        *(ChartLine("" if n else through, "second", curve, dots=True) for n, curve in enumerate(held_out)),
    ]
    merged = told.summary.validation_loss_merged
    if merged is not None and held_out:
        end = max(curve[-1][0] for curve in held_out)
        lines.append(ChartLine("validation, merged", "third", ((end, merged),), dots=True))
    return Curves("Loss", "tokens trained by the swarm", "nats per token", _drawn(lines))


def spread(told: ReportedRun) -> Curves:
    """The variance of a weight across replicas beside the learning rate, which it must follow."""
    histories = [chronicle.history for chronicle in told.chronicles]
    curve = sorted(divergence_curve(histories), key=lambda point: point.clock)
    # A replica of a later stage has the learning rate of the same clock.
    steps = sorted((s for h in token_counters(histories) for s in h.inner), key=lambda s: s.clock)
    steps = steps[:: max(1, len(steps) // POINTS)]
    lines = (
        ChartLine(
            "replica divergence",
            "third",
            tuple((p.clock, p.replica_divergence) for p in curve if p.replica_divergence > 0.0),
            dots=True,
        ),
        ChartLine("learning rate", "quiet", tuple((s.clock, s.learning_rate) for s in steps), dashed=True, right=True),
    )
    title = "Replica divergence, and learning rate"
    return Curves(title, "tokens trained by the swarm", "variance per weight", _drawn(lines), "learning rate", True)


def throughput(told: ReportedRun) -> Curves:
    """Tokens per second of all first-stage replicas in this folder, and the nodes that were there."""
    axis = TimeAxis.of(told.chronicles)
    lines = (
        ChartLine("tokens per second", "first", tuple((axis.at(when), rate) for when, rate in _rates(told, axis))),
        _nodes_seen(told, axis),
    )
    return Curves(
        "Throughput",
        f"{axis.unit} since the start",
        "tokens per second",
        _drawn(lines),
        "nodes",
        right_counts=True,
        from_zero=True,
    )


def _rates(told: ReportedRun, axis: TimeAxis) -> Iterator[tuple[float, float]]:
    """Wall time and tokens per second; 0 at last, where others went on after the nodes that trained had ended."""
    heads = token_counters([chronicle.history for chronicle in told.chronicles])
    curve = throughput_curve(heads)
    yield from ((point.time, point.tokens_per_second) for point in curve)
    if not curve or any(history.name in told.running for history in heads):
        return
    last, ended = curve[-1], max(history.inner[-1].time for history in heads if history.inner)
    if axis.until - ended > 2.0 * (ended - last.time):  # by more than one of the curve's stretches
        yield from ((ended, last.tokens_per_second), (ended, 0.0), (axis.until, 0.0))


def _nodes_seen(told: ReportedRun, axis: TimeAxis) -> ChartLine:
    """By the node that looked for longest, while it looked."""
    longest = max(told.chronicles, key=lambda c: sum(life.last - life.began for life in c.lives))
    points: list[tuple[float, float]] = []
    for life in longest.lives:
        seen: float | None = None
        for when, count in longest.nodes:
            if life.began <= when <= life.last:
                points += [(axis.at(when), seen)] if seen is not None else []
                points.append((axis.at(when), float(count)))
                seen = float(count)
        points += [(axis.at(life.last), seen)] if seen is not None else []
    ends = tuple(axis.at(life.last) for life in longest.lives[:-1])
    label = "live nodes, as one of them saw it"
    return ChartLine(label, "quiet", tuple(points), dashed=True, right=True, breaks=ends)


def _drawn(lines: Iterable[ChartLine]) -> tuple[ChartLine, ...]:
    """Those with something to draw."""
    finite = (replace(n, points=tuple(p for p in n.points if isfinite(p[0]) and isfinite(p[1]))) for n in lines)
    return tuple(line for line in finite if line.points)


def lives(told: ReportedRun) -> Timeline:
    """When each node was there, and what went wrong meanwhile."""
    axis = TimeAxis.of(told.chronicles)
    rows = tuple(
        ChartRow(
            chronicle.name,
            tuple((axis.at(life.began), axis.at(life.last)) for life in chronicle.lives),
            tuple(
                replace(m, time=axis.at(m.time), text=f"{chronicle.name}: {words(m.text)}")
                for m in _all_moments(told, chronicle)
            ),
        )
        for chronicle in told.chronicles
    )
    return Timeline(axis.unit, axis.end, rows)


def _all_moments(told: ReportedRun, chronicle: Chronicle) -> Iterator[Moment]:
    yield from chronicle.moments
    if _died(told, chronicle):
        yield Moment(chronicle.lives[-1].last, "death", "gone without a last word")


def _died(told: ReportedRun, chronicle: Chronicle) -> bool:
    return bool(chronicle.lives) and chronicle.history.stopped is None and chronicle.name not in told.running


def moments(told: ReportedRun) -> list[tuple[str, Moment]]:
    """What happened, of all nodes, in its order; node and moment."""
    rows = [(chronicle.name, moment) for chronicle in told.chronicles for moment in _all_moments(told, chronicle)]
    return sorted(rows, key=lambda row: row[1].time)


def time_spent(told: ReportedRun) -> Bars:
    """What the device of each node did, in seconds."""
    works = BUSY | ({"draw": DRAW_OF_ONE_STAGE} if told.summary.stages == 1 else {})
    rows: list[tuple[str, dict[str, float]]] = []
    for chronicle in told.chronicles:
        spent = chronicle.spent
        busy = {text: spent.busy.get(name, 0.0) for name, text in works.items()}
        other = sum(spent.busy.values()) - sum(busy.values())
        row = {**busy, "other work": max(0.0, other)} | {text: spent.idle.get(name, 0.0) for name, text in IDLE.items()}
        rows.append((chronicle.name, row))
    names = (*works.values(), "other work", *IDLE.values())
    shown = [(part, index) for index, part in enumerate(names) if any(row.get(part, 0.0) > 0.0 for _, row in rows)]
    return Bars(tuple(part for part, _ in shown), tuple(index for _, index in shown), tuple(rows))


def meetings(told: ReportedRun) -> list[Meetings]:
    """Who averaged with whom, by the stage at which they met, the most frequent first."""
    names = {c.history.started.peer_id: c.name for c in told.chronicles if c.history.started}
    times: dict[tuple[int, str, str], int] = {}
    for chronicle in told.chronicles:
        for (stage, partner), count in chronicle.meetings.items():
            one, other = sorted((chronicle.name, names.get(partner) or short(partner)))
            times[stage, one, other] = max(count, times.get((stage, one, other), 0))  # each side has counted it
    rows = (Meetings(*pair, count) for pair, count in times.items())
    return sorted(rows, key=lambda row: (row.stage, -row.times, row.one, row.other))


def faults(told: ReportedRun) -> list[Count]:
    """What went wrong and was dealt with, the most frequent first; nothing that never happened."""
    rows: dict[str, Counter[str]] = {}

    def add(what: str, name: str, count: int) -> None:
        rows.setdefault(what, Counter())[name] += count

    for chronicle in told.chronicles:
        name, books = chronicle.name, chronicle.history.account
        part = told.summary.per_node[name]
        for what, count in _of_books(part.microbatches):
            add(what, name, count)
        for reason, count in part.refused.items():
            why = "not served then, as while joining or paused" if reason == "unknown_method" else words(named(reason))
            add(f"refusals given: {why}", name, count)
        for reason, count in chronicle.aborted.items():
            add(f"outer steps that came to nothing: {named(reason)}", name, count)
        add("outer steps without a partner", name, part.outer_steps.get("no_partner", 0))
        add("states taken over from a stage peer", name, part.outer_steps.get("caught_up", 0))
        for what, count in chronicle.counts.items():
            add(what, name, count)
        add("ended without a last word", name, _died(told, chronicle))
        for what, count in _of_strangers(books):
            add(words(named(what)), name, count)
    counts = [Count(what, sum(by.values()), _where(by)) for what, by in rows.items() if sum(by.values())]
    return sorted(counts, key=lambda row: (-row.times, row.what))


def _of_books(books: Microbatches) -> Iterator[tuple[str, int]]:
    yield "microbatches tried again", books.retried
    yield "microbatches requeued", books.requeued
    yield "microbatches asked for again after their answer broke off", books.repeated
    yield "microbatches dropped", books.dropped


def _of_strangers(books: Account | None) -> Iterator[tuple[str, int]]:
    if books is None:
        return
    peers = books.strangers
    yield from ((f"offences of peers: {kind}", count) for kind, count in peers.offences.items())
    yield from ((f"bans of peers: {kind}", count) for kind, count in peers.bans.items())
    yield from ((f"audits: {kind}", count) for kind, count in peers.audits.items() if kind not in GOOD_FINDINGS)
    yield from ((f"beyond a bound on norms: {kind}", count) for kind, count in peers.bounded.items())
    yield from ((f"records of others without room: {kind}", count) for kind, count in peers.no_room.items())
    yield "peers banned at the last look", peers.banned_now
    yield "next-stage peers set aside at the last look", peers.set_aside_now


def _where(by: Counter[str]) -> str:
    first = [f"{name} {count:,}" for name, count in by.most_common(4) if count]
    rest = sum(1 for count in by.values() if count) - len(first)
    return ", ".join(first) + (f" and {rest} more" if rest > 0 else "")


def short(name: str) -> str:
    """A node's name, or the end of a peer id."""
    return words(name) if len(name) < 32 else f"…{words(name)[-6:]}"


def named(part: str) -> str:
    """A kind of ours, `waiting_for_work`, for a person."""
    return part.replace("_", " ")


def words(text: str) -> str:
    """A text that may be a stranger's, as it can be shown."""
    return one_line(text)[:300]


def shares(row: Mapping[str, float], parts: Sequence[str]) -> list[float]:
    """The share of each part in the row's sum; zeros for an empty row."""
    whole = sum(row.get(part, 0.0) for part in parts)
    return [row.get(part, 0.0) / whole if whole else 0.0 for part in parts]
