"""From the event files of all nodes to the figures of the run: pure functions, the same for a live and a dead swarm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import isfinite
from statistics import fmean
from typing import Literal

from pydantic import BaseModel, ConfigDict, JsonValue

from noloco_node.config.data_spec import MOST_SOURCES
from noloco_node.telemetry.events import Account, Evaluation, InnerStep, OuterStep, TrainedTokens
from noloco_node.telemetry.history import NodeHistory, summed
from noloco_node.telemetry.node_state import FEW_STEPS, POINTS

TRAINING_LOSS_SHARE = 0.05
"""The reported training loss is the mean over this last share of the trained tokens: one step alone is noise."""


class Frozen(BaseModel):
    """Base of the figures: they are read, never changed."""

    model_config = ConfigDict(frozen=True)


class Microbatches(Frozen):
    """The books of the samples. On stage 0, and so in the sum over it: drawn = trained + dropped + held_at_end."""

    drawn: int = 0
    trained: int = 0
    dropped: int = 0
    held_at_end: int = 0
    requeued: int = 0
    retried: int = 0
    repeated: int = 0

    @classmethod
    def of(cls, account: Account | None) -> Microbatches:
        """One node's books; zeros where it never wrote any."""
        if account is None:
            return cls()
        return cls(**{name: getattr(account, name) for name in cls.model_fields})


class DivergencePoint(Frozen):
    """The variance of the weights across replicas after one outer step."""

    outer_steps_taken: int
    step: int
    """Inner steps, mean over the nodes."""
    clock: TrainedTokens
    replica_divergence: float
    """Mean over the nodes' paired outer steps of that number."""
    learning_rate: float
    nodes: int
    """Nodes behind the mean."""


class RatePoint(Frozen):
    """Tokens per second of the swarm in a stretch of wall time (seconds since 1970, seconds)."""

    time: float
    """Its middle."""
    seconds: float
    """The seconds of it in which training was counted."""
    tokens_per_second: float


class LossPoint(Frozen):
    """A loss (nats per token) after so many trained tokens of the swarm."""

    clock: TrainedTokens
    loss: float


class NodeSummary(Frozen):
    """One node's part."""

    peer_id: str
    stage: int | None
    ended: Literal["target_reached", "interrupted", "failed", "died"]
    """How the node ended. `died`: it wrote no last event; its figures are those of its last account."""
    inner_steps: int
    tokens: int
    outer_steps: dict[str, int]
    """By kind: paired, no_partner, caught_up, aborted."""
    partners: dict[str, int]
    """Paired outer steps by partner, by name where known."""
    microbatches: Microbatches
    served: int
    refused: dict[str, int]
    """Refusals it gave, by reason, in all its processes."""
    busy_seconds: float
    """Time that its compute thread has worked, in all its processes."""
    worst_loop_lag_seconds: float


class Summary(Frozen):
    """A run in figures: what `summary.json` holds. Losses are in nats per token."""

    run_id: str
    run_name: str
    stages: int
    nodes: int
    died: list[str]
    """Nodes that wrote no last event."""
    tokens: int
    """Tokens trained, summed over all nodes that served stage 0, while they did. If none serves it at last, they are
    summed over the earliest stage."""
    seconds: float
    """From the first to the last of their inner steps, without the times in which the whole swarm was down."""
    tokens_per_second: float
    """Tokens a second over those seconds. The tokens of the first inner step, and of the first after each such time,
    were made before they begin, and are left out. It is therefore a little below `tokens` by `seconds`."""
    training_loss: float | None
    """Mean over the last 5 % of the trained tokens, weighted by tokens."""
    validation_loss: float | None
    """Mean over nodes of their last evaluation (final ones where there are any)."""
    validation_losses_by_source: dict[str, float]
    """The validation loss of each source of a mixture, as many as a run can have."""
    validation_loss_merged: float | None
    """The loss of the exported model, on the same windows; None if nothing was exported."""
    validation_losses: list[LossPoint]
    outer_steps_taken: dict[str, int]
    """By node: outer steps committed."""
    distinct_partners: dict[str, int]
    """By node: stage peers it has averaged with."""
    replica_divergence: list[DivergencePoint]
    microbatches: Microbatches
    """drawn, trained, dropped, held_at_end and requeued over stage 0; retried and repeated over all nodes."""
    bytes_sent: dict[str, dict[str, int]]
    """By node and kind, of all its processes."""
    per_node: dict[str, NodeSummary]

    def as_json(self) -> dict[str, JsonValue]:
        """Plain JSON values."""
        return self.model_dump(mode="json", by_alias=True)


def summarize_histories(histories: Sequence[NodeHistory], merged_loss: float | None = None) -> Summary:
    """The figures of a run from its nodes' histories. Nodes that died count with what they wrote."""
    started = next((history.started for history in histories if history.started), None)
    heads = token_counters(histories)
    tokens = sum(step.tokens for history in heads for step in history.inner)
    seconds, rate = _speed(heads)
    names = {history.started.peer_id: history.name for history in histories if history.started}
    return Summary(
        run_id=started.run_id if started else "",
        run_name=started.run_name if started else "",
        stages=started.stages if started else 0,
        nodes=len(histories),
        died=[history.name for history in histories if history.stopped is None],
        tokens=tokens,
        seconds=seconds,
        tokens_per_second=rate,
        training_loss=training_loss(heads),
        validation_loss=validation_loss(histories),
        validation_losses_by_source=validation_losses_by_source(histories),
        validation_loss_merged=merged_loss,
        validation_losses=validation_curve(histories),
        outer_steps_taken={history.name: len(history.outer) for history in histories},
        distinct_partners={history.name: len({step.partner for step in history.paired}) for history in histories},
        replica_divergence=divergence_curve(histories),
        microbatches=_totals(histories),
        bytes_sent={history.name: history.sent for history in histories},
        per_node={history.name: _node_summary(history, names) for history in histories},
    )


def token_counters(histories: Sequence[NodeHistory]) -> list[NodeHistory]:
    """The replicas whose tokens are the swarm's, each with those inner steps that count. All steps count that were
    taken at stage 0, or at the earliest stage that any node here serves at last. For one node alone all count, wherever
    it was."""
    stages = [history.stage for history in histories if history.stage is not None]
    if len(histories) == 1 or not stages:
        return list(histories)
    parts = [history.at(min(stages)) for history in histories]
    return [part for part in parts if part.inner]


def training_loss(heads: Sequence[NodeHistory]) -> float | None:
    """Mean loss over the last share of the trained tokens, weighted by tokens; None before the first inner step."""
    steps = [step for history in heads for step in history.inner if isfinite(step.loss)]
    if not steps:
        return None
    since = (1.0 - TRAINING_LOSS_SHARE) * max(step.clock for step in steps)
    late = [step for step in steps if step.clock >= since and step.tokens > 0]
    total = sum(step.tokens for step in late)
    return sum(step.loss * step.tokens for step in late) / total if total else None


def training_curve(heads: Sequence[NodeHistory]) -> list[LossPoint]:
    """Training loss of all first-stage replicas along the trained tokens, averaged by tokens in POINTS bins."""
    steps = [s for history in heads for s in history.inner if isfinite(s.loss) and s.tokens > 0]
    width = max((step.clock for step in steps), default=0.0) / POINTS
    if width <= 0.0:
        return []
    bins: dict[int, list[InnerStep]] = {}
    for step in steps:
        bins.setdefault(min(int(step.clock / width), POINTS - 1), []).append(step)
    return [
        LossPoint(
            clock=fmean(step.clock for step in rows),
            loss=sum(step.loss * step.tokens for step in rows) / sum(step.tokens for step in rows),
        )
        for _, rows in sorted(bins.items())
    ]


def validation_curve(histories: Iterable[NodeHistory]) -> list[LossPoint]:
    """All evaluations in the order of trained tokens."""
    rows = [evaluation for history in histories for evaluation in history.evaluations if isfinite(evaluation.loss)]
    return [LossPoint(clock=row.clock, loss=row.loss) for row in sorted(rows, key=lambda row: row.clock)]


def validation_curves(histories: Iterable[NodeHistory]) -> list[list[LossPoint]]:
    """The evaluations of each replica that took any: one line through all of them would go up and down between
    replicas, which is nobody's course."""
    return [curve for history in histories if (curve := validation_curve([history]))]


def validation_loss(histories: Sequence[NodeHistory]) -> float | None:
    """Mean over nodes of the last evaluation; where any node took its final one, only final ones count."""
    chosen = _last_evaluations(histories)
    return fmean(evaluation.loss for evaluation in chosen) if chosen else None


def validation_losses_by_source(histories: Sequence[NodeHistory]) -> dict[str, float]:
    """`validation_loss` of each source of a mixture, in the order in which the run has them."""
    losses: dict[str, list[float]] = {}
    for evaluation in _last_evaluations(histories):
        for each in evaluation.sources[:MOST_SOURCES]:
            losses.setdefault(each.source, []).append(each.loss)
    return {name: fmean(each) for name, each in losses.items()}


def _last_evaluations(histories: Sequence[NodeHistory]) -> list[Evaluation]:
    last = [history.evaluations[-1] for history in histories if history.evaluations]
    return [evaluation for evaluation in last if evaluation.final] or last


def divergence_curve(histories: Iterable[NodeHistory]) -> list[DivergencePoint]:
    """Replica divergence by outer step, averaged over the paired outer steps of all nodes. If neither of two replicas
    has trained since it averaged, as at the end of a run, their spread says nothing of the training."""
    by_round: dict[int, list[tuple[OuterStep, float]]] = {}
    for history in histories:
        for step in _after_training(history.outer):
            if step.kind == "paired" and step.replica_divergence is not None and isfinite(step.replica_divergence):
                by_round.setdefault(step.outer_steps_taken, []).append((step, step.replica_divergence))
    return [
        DivergencePoint(
            outer_steps_taken=number,
            step=round(fmean(step.step for step, _ in rows)),
            clock=fmean(step.clock for step, _ in rows),
            replica_divergence=fmean(spread for _, spread in rows),
            learning_rate=fmean(step.learning_rate for step, _ in rows),
            nodes=len(rows),
        )
        for number, rows in sorted(by_round.items())
    ]


def _after_training(steps: Iterable[OuterStep]) -> Iterator[OuterStep]:
    """The outer steps of a node that averaged new training: an inner step came since the last outer step."""
    last = None
    for step in steps:
        if step.step != last:
            yield step
        last = step.step


def throughput_curve(heads: Sequence[NodeHistory], points: int = 120) -> list[RatePoint]:
    """Tokens per second along wall time, within equal stretches, `points` at most and of a few steps each; their mean
    by `seconds` is the run's. It is 0 in those that lie within a time in which the whole swarm was down."""
    pairs = _counted(heads)
    points = max(1, min(points, len(pairs) // FEW_STEPS))
    if not pairs:
        return []
    begin, end = pairs[0][0].time, pairs[-1][1].time
    width = max((end - begin) / points, 1e-9)
    tokens, seconds = [0.0] * points, [0.0] * points
    for a, b in pairs:
        for index, share in _parts(a.time - begin, b.time - begin, width, points):
            tokens[index] += share * b.tokens
            seconds[index] += share * (b.time - a.time)
    return [
        RatePoint(
            time=begin + (index + 0.5) * width, seconds=each, tokens_per_second=tokens[index] / each if each else 0.0
        )
        for index, each in enumerate(seconds)
    ]


def _parts(begin: float, end: float, width: float, count: int) -> Iterator[tuple[int, float]]:
    """Which of `count` stretches from 0 on a time lies in, and which share of it in each."""
    first, last = (min(int(time / width), count - 1) for time in (begin, end))
    if first == last:
        yield first, 1.0
        return
    edges = [begin, *(index * width for index in range(first + 1, last + 1)), end]
    yield from ((first + at, (b - a) / (end - begin)) for at, (a, b) in enumerate(pairwise(edges)))


def _speed(heads: Sequence[NodeHistory]) -> tuple[float, float]:
    """Seconds of training and tokens per second."""
    pairs = _counted(heads)
    seconds = sum(b.time - a.time for a, b in pairs)
    return (seconds, sum(b.tokens for _, b in pairs) / seconds) if seconds > 0.0 else (0.0, 0.0)


def _counted(heads: Sequence[NodeHistory]) -> list[tuple[InnerStep, InnerStep]]:
    """Each inner step after the one before it: the first one's tokens were made before its time stamp. Times in
    which the whole swarm was down do not count. Such a time is a gap between steps in which a first-stage node
    started anew."""
    steps = sorted((step for history in heads for step in history.inner), key=lambda step: step.time)
    starts = [start for history in heads for start in history.starts[1:]]
    return [(a, b) for a, b in pairwise(steps) if not any(a.time < start <= b.time for start in starts)]


def _totals(histories: Sequence[NodeHistory]) -> Microbatches:
    everywhere = [Microbatches.of(history.account) for history in histories]
    heads = [Microbatches.of(account) for history in histories for account in history.books_at(0)]
    return Microbatches(
        drawn=sum(books.drawn for books in heads),
        trained=sum(books.trained for books in heads),
        dropped=sum(books.dropped for books in heads),
        held_at_end=sum(books.held_at_end for books in heads),
        requeued=sum(books.requeued for books in heads),
        retried=sum(books.retried for books in everywhere),
        repeated=sum(books.repeated for books in everywhere),
    )


def _node_summary(history: NodeHistory, names: Mapping[str, str]) -> NodeSummary:
    account = history.account
    partners = Counter(names.get(step.partner or "", step.partner or "") for step in history.paired)
    kinds = Counter[str](step.kind for step in history.outer)
    kinds["aborted"] = history.aborted
    return NodeSummary(
        peer_id=history.started.peer_id if history.started else "",
        stage=history.stage,
        ended=history.stopped.reason if history.stopped else "died",
        inner_steps=history.inner[-1].step if history.inner else 0,
        tokens=sum(step.tokens for step in history.inner),
        outer_steps=dict(sorted(kinds.items())),
        partners=dict(sorted(partners.items())),
        microbatches=Microbatches.of(account),
        served=account.served if account else 0,
        refused=summed(each.refused for each in history.of_processes),
        busy_seconds=sum(each.busy_seconds for each in history.of_processes),
        worst_loop_lag_seconds=history.worst_loop_lag_seconds,
    )
