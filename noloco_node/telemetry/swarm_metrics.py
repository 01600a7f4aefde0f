"""A seed's pages, read only: Prometheus metrics of the whole swarm, its picture for a browser, the same as JSON.

All are made from what was seen last, whenever they are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from noloco_node import __version__, ambient
from noloco_node.aio import Heartbeat
from noloco_node.telemetry.metrics import SEED_TABLE, exposition
from noloco_node.telemetry.node_pages import StatePage, liveness
from noloco_node.telemetry.swarm_state import Middle, SwarmDocument, SwarmView, document
from noloco_node.telemetry.web import Page, PageMaker, state_page

_Rows = list[tuple[tuple[str, ...], float]]
"""Values of labels, and the value."""


class SwarmMetrics:
    """All of `SEED_TABLE`. `view` gives what was seen last, `records` counts those held, `age` is that of the last look
    in seconds; called on whatever thread asks."""

    def __init__(
        self, view: Callable[[], SwarmView | None], records: Callable[[], int], age: Callable[[], float | None]
    ) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._view = view
        self._records = records
        self._age = age
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def page(self, headers: Mapping[str, str]) -> Page:
        """All of them, as the request asks for them."""
        return exposition(self.registry, headers)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        view, age = self._view(), self._age()
        rows: dict[str, _Rows] = {
            "noloco_seed_info": [((__version__, view.run_id if view else ""), 1.0)],
            "noloco_seed_records": [((), self._records())],
            "noloco_seed_look_age_seconds": [] if age is None else [((), age)],
        }
        if view is not None:
            rows |= rows_of(view)
        for name, values in rows.items():
            if values:
                yield _family(name, values)


def rows_of(view: SwarmView) -> dict[str, _Rows]:
    """The rows of each metric of the swarm: as many as the run has stages, times states; none grows with peers."""
    stages = [(str(number), stage) for number, stage in enumerate(view.stages)]
    speed = view.tokens_per_second if view.speed_from == "progress" else None
    return {
        "noloco_swarm_nodes": [((n, state), count) for n, stage in stages for state, count in stage.nodes.items()],
        "noloco_swarm_unreachable_nodes": [((n,), stage.unreachable) for n, stage in stages],
        "noloco_swarm_stage_missing": [((n,), float(stage.missing)) for n, stage in stages],
        "noloco_swarm_capacity_tokens_per_second": [((n,), stage.capacity) for n, stage in stages],
        "noloco_swarm_stage_trained_tokens": [((n,), s.clock) for n, s in stages if s.clock is not None],
        "noloco_swarm_stage_lag_tokens": [((n,), s.lag) for n, s in stages if s.lag is not None],
        "noloco_swarm_version_nodes": [((version,), count) for version, count in view.versions.items()],
        "noloco_swarm_trained_tokens": [((), view.clock)],
        "noloco_swarm_target_tokens": [((), view.target)],
        "noloco_swarm_tokens_per_second": [] if speed is None else [((), speed)],
        "noloco_swarm_training_loss": _of(view.training_loss),
        "noloco_swarm_validation_loss": _of(view.validation_loss),
        "noloco_swarm_replica_divergence": [
            ((n,), s.replica_divergence.value) for n, s in stages if s.replica_divergence is not None
        ],
        "noloco_swarm_over": [((), float(view.over))],
        "noloco_swarm_joins_total": [((), view.joins)],
        "noloco_swarm_departures_total": [(("left",), view.left), (("lost",), view.lost)],
        "noloco_swarm_reassignments_total": [((), view.reassignments)],
    }


def _of(middle: Middle | None) -> _Rows:
    return [] if middle is None else [((), middle.value)]


def _family(name: str, rows: _Rows) -> Metric:
    metric = SEED_TABLE[name]
    match metric.kind:
        case "counter":
            family = CounterMetricFamily(name, metric.help, labels=metric.labels)
        case "info":
            info = InfoMetricFamily(name.removesuffix("_info"), metric.help, labels=())
            info.add_metric((), dict(zip(metric.labels, rows[0][0], strict=True)))
            return info
        case _:
            family = GaugeMetricFamily(name, metric.help, labels=metric.labels)
    for labels, value in rows:
        family.add_metric(labels, float(value))
    return family


class SwarmPages:
    """Answers for `WebServer`, on its thread; `saw` is called on the seed's own."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat
        self._since = ambient.wall()
        self._view: SwarmView | None = None
        self._seen_at: float | None = None
        self.shown = StatePage(
            "nodes", "tokens_per_second", "trained_tokens", "training_loss", "validation_loss", "replica_divergence"
        )
        self._evaluated: Middle | None = None
        self._metrics = SwarmMetrics(lambda: self._view, lambda: self.records(), lambda: self._age)
        self.records: Callable[[], int] = lambda: 0
        """How many records the seed holds."""
        self.detail = "starting: not in the network yet"
        """What the seed does, in one line, where there is no swarm to show."""

    def saw(self, view: SwarmView) -> None:
        """The swarm was looked at."""
        self._view, self._seen_at, curves = view, ambient.monotonic(), self.shown.curves
        curves["nodes"].add(view.time, view.present)
        curves["trained_tokens"].add(view.time, view.clock)
        if view.speed_from == "progress" and view.tokens_per_second is not None:
            curves["tokens_per_second"].add(view.time, view.tokens_per_second)
        for name in ("training_loss", "validation_loss", "replica_divergence"):
            middle: Middle | None = getattr(view, name)
            # Held-out losses are few: each is a point of its own.
            if middle is not None and (name != "validation_loss" or middle != self._evaluated):
                curves[name].add(view.time, middle.value)
        self._evaluated = view.validation_loss

    def answers(self) -> dict[str, PageMaker]:
        """By path."""
        page = state_page()
        return {
            "/": lambda _: page,
            "/metrics": self._metrics.page,
            "/healthz": liveness(self._heartbeat),
            "/api/state": lambda _: self.shown.page(self._document),
        }

    @property
    def _age(self) -> float | None:
        return None if self._seen_at is None else ambient.monotonic() - self._seen_at

    def _document(self) -> SwarmDocument:
        """The swarm, and the seed that shows it."""
        view = self._view
        seed = {
            "version": __version__,
            "uptime_seconds": ambient.wall() - self._since,
            "records": self.records(),
            "event_loop_age_seconds": self._heartbeat.age,
            "look_age_seconds": self._age,
            "detail": self.detail,
        }
        if view is None:
            return {"time": ambient.wall(), "state": "no_swarm", "seed": seed}
        return document(view) | {"seed": seed}
