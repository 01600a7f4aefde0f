"""What a simulated crowd came to: figures over the time after the warm-up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from noloco_node.directory.buckets import PREFIX_BITS, Ints
from noloco_node.simulator.crowd import Crowd, CrowdMoment

CLASS_BITS = 4
CLASSES = 1 << CLASS_BITS
FEWEST_A_CELL = 5.0
"""The number of two classes says something if they are expected to have so many meetings."""
FITTED = 20
"""A table comes to its sums in so many turns."""


@dataclass(frozen=True, slots=True)
class CrowdFigures:
    """The figures of one size."""

    nodes: int
    """At the start."""
    stages: int
    seconds: float
    working: float
    """Share of the time that devices worked."""
    trained: float
    """Microbatches a second through all stages."""
    of_best: float
    """Share of what the same nodes could do, if they were divided over the stages at will and never waited."""
    alone: float
    """Share of outer steps taken alone."""
    outer_steps: float
    """The outer steps of a node in an hour."""
    contraction: float
    """Variance of the weights within a stage at the end, of that at the start."""
    contraction_expected: float
    """The contraction that the arithmetic gives for the same meetings, if nodes that meet had never met before."""
    evenness: float
    """The chi-square by degree of freedom of the table of meetings, beside chance: about 1 if all are equally likely to
    meet. Nodes are taken together by the first bits of their hash, as buckets are."""
    evenness_of_routes: float
    """The chi-square by degree of freedom of the table of microbatch senders and receivers, beside chance."""
    error: float
    """Relative rms error of the nodes' counts of their own stage."""
    node_bytes: dict[str, float]
    """Sent for each node in a second, by kind."""
    holder_bytes: dict[str, float]
    """What a node gives and takes as a holder of keys, a second: mean, highest of a hundred, highest."""
    lost: float
    """The share of sent microbatches that were lost with the node that had them, or could not be delivered."""
    joined_after: float | None
    """Median seconds until a newcomer served."""
    moves: float
    """Moves to another stage of a node in an hour."""
    refusals: dict[str, int]
    """Dials refused, by reason."""
    events: int
    trace: str


def unevenness(pairs: Ints, of: Ints, stage: Ints) -> float:
    """The chi-square by degree of freedom of a table of pairs, by class, beside what chance gives. `of` gives each
    node's class, `stage` its stage. NaN if there are too few pairs. Chance is taken stage by stage, for a class has
    more nodes in one than in another. Across all stages more meetings would seem more uneven, however even they are."""
    if not len(pairs):
        return float("nan")
    table, expected = np.zeros((CLASSES, CLASSES)), np.zeros((CLASSES, CLASSES))
    between = stage[pairs]
    for one, other in np.unique(between, axis=0):
        some = of[pairs[(between == (one, other)).all(1)]]
        found = np.bincount(CLASSES * some[:, 0] + some[:, 1], minlength=CLASSES**2).reshape(CLASSES, CLASSES)
        table += found
        expected += _by_chance(found, np.bincount(of[stage == one], minlength=CLASSES) if one == other else None)
    if expected.min() < FEWEST_A_CELL:
        return float("nan")
    return float(((table - expected) ** 2 / expected).sum() / (CLASSES - 1) ** 2)


def _by_chance(found: NDArray[np.int64], among: NDArray[np.int64] | None) -> NDArray[np.float64]:
    """A table with the same sums, in which nothing draws a class to another. Where pairs are drawn `among` so many
    nodes of each class, nobody meets itself."""
    weights = np.ones((CLASSES, CLASSES))
    if among is not None:
        np.fill_diagonal(weights, 1.0 - 1.0 / np.maximum(among, 1))
    for _ in range(FITTED):
        weights *= (found.sum(1) / np.maximum(weights.sum(1), 1e-9))[:, None]
        weights *= found.sum(0) / np.maximum(weights.sum(0), 1e-9)
    return weights


def _left(spread: float, at_first: float) -> float:
    """The share that is left of the spread at first; NaN if there was none, each stage having one node."""
    return spread / at_first if at_first else float("nan")


class CrowdRun:
    """Runs one crowd and takes its figures."""

    def __init__(self, crowd: Crowd) -> None:
        self.crowd = crowd
        self._many = len(crowd.nodes)

    def run(self, sample_seconds: float = 30.0, told: Callable[[float], None] = lambda _: None) -> CrowdFigures:
        """To the end; `told` gets the share that is done."""
        crowd, settings = self.crowd, self.crowd.settings
        spread = crowd.averaging.spread()
        crowd.agenda.after(settings.warm_up_seconds, self._begin)
        crowd.run(sample_seconds, told)
        span = [moment for moment in crowd.moments if moment.at > settings.warm_up_seconds]
        seconds = settings.seconds - settings.warm_up_seconds
        many = float(np.mean([moment.nodes for moment in span]))
        first, last = self._first, span[-1]
        paired, alone = last.paired - first.paired, last.alone - first.alone
        held = crowd.directory.holder_bytes() / seconds
        trained, best = _mean(span, "trained"), _mean(span, "best")
        joined = crowd.joined_after
        return CrowdFigures(
            nodes=self._many,
            stages=settings.work.stages,
            seconds=seconds,
            working=_mean(span, "working"),
            trained=trained,
            of_best=trained / best if best else float("nan"),
            alone=alone / max(1, alone + paired),
            outer_steps=(alone + paired) / many / seconds * 3600.0,
            contraction=_left(last.spread, spread[0]),
            contraction_expected=_left(last.expected, spread[1]),
            evenness=unevenness(crowd.averaging.meetings.rows, self._classes, self._stages),
            evenness_of_routes=unevenness(crowd.pipeline.routes.rows, self._classes, self._stages),
            error=_mean(span, "error"),
            node_bytes={kind: octets / seconds / many for kind, octets in sorted(crowd.nodes.sent.items())},
            holder_bytes={
                "mean": float(held.mean()),
                "of a hundred": float(np.quantile(held, 0.99)),
                "highest": float(held.max()),
            },
            lost=crowd.pipeline.lost / max(1, crowd.pipeline.hops),
            joined_after=float(np.median(joined)) if joined else None,
            moves=(last.moves - first.moves) / many / seconds * 3600.0,
            refusals=dict(sorted(crowd.averaging.refusals.items())),
            events=crowd.agenda.happened,
            trace=crowd.nodes.trace,
        )

    def _begin(self) -> None:
        """The warm-up is over: count anew."""
        crowd = self.crowd
        self._first = crowd.moment()
        crowd.nodes.sent.clear()
        crowd.directory.forget_bytes()
        crowd.averaging.meetings.clear()
        crowd.averaging.refusals.clear()
        crowd.pipeline.keep_routes = True
        crowd.pipeline.lost = crowd.pipeline.hops = 0
        crowd.joined_after.clear()

    @property
    def _classes(self) -> Ints:
        return self.crowd.nodes.prefix[: len(self.crowd.nodes)] >> (PREFIX_BITS - CLASS_BITS)

    @property
    def _stages(self) -> Ints:
        return self.crowd.nodes.stage_row[: len(self.crowd.nodes)]


def _mean(span: Sequence[CrowdMoment], name: str) -> float:
    return float(np.mean([asdict(moment)[name] for moment in span]))
