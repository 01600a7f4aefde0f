"""Prometheus metrics of one node, fed by the same events as its event file: one source of truth. `metrics.md` beside
this has a row for each, which is shown as a page, too."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import accumulate
from operator import attrgetter
from threading import active_count
from typing import cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector
from prometheus_client import disable_created_metrics as without_time_of_creation
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.exposition import choose_encoder

from noloco_node import ambient
from noloco_node.telemetry.events import (
    MICROBATCH_OUTCOMES,
    Account,
    AnyEvent,
    CheckpointTaken,
    Distribution,
    Doing,
    Evaluation,
    InnerStep,
    NodeReassigned,
    NodeStarted,
    NodeStopped,
    OuterStep,
    StateDownload,
)
from noloco_node.telemetry.history import Utilization
from noloco_node.telemetry.memory_limit import MemoryUse
from noloco_node.telemetry.web import Page

without_time_of_creation()

TEXT = files("noloco_node.telemetry").joinpath("metrics.md").read_text(encoding="utf-8")
SEED = "# Metrics of a seed"
"""Below this heading stand the metrics of a seed that knows its run: the whole swarm, as far as its nodes answer."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `unit` is Prometheus' base unit, or what is counted."""

    name: str
    """The name as it is scraped; that of a histogram without `_bucket`, `_sum` and `_count`."""
    kind: str
    """`counter`, `gauge`, `histogram` or `info`."""
    unit: str
    help: str
    labels: tuple[str, ...]
    buckets: tuple[float, ...]
    """Upper bounds, of a histogram."""
    known: tuple[str, ...]
    """Values of its one label that are there from the start, at 0, so that the first rise is one."""
    sources: tuple[str, ...]
    """The events and the fields that it is made of: `inner_step.loss`. Empty where more than that is done."""


def _rows(text: str) -> Iterator[Metric]:
    for line in text.splitlines():
        if line.startswith("| `"):
            name, kind, unit, labels, sources, meaning = (cell.strip() for cell in line.strip("|").split(" | "))
            kind, _, bounds = kind.partition(": ")
            yield Metric(
                name=name.strip("`"),
                kind=kind,
                unit=unit.strip("–"),
                help=meaning,
                labels=tuple(re.findall(r"`(\w+)`", labels)),
                buckets=tuple(map(float, bounds.split(", "))) if bounds else (),
                known=tuple(filter(None, labels.partition(": ")[2].split(", "))),
                sources=tuple(re.findall(r"`([\w.]+)`", sources)),
            )


_OF_A_NODE, _, _OF_A_SEED = TEXT.partition(SEED)
TABLE: dict[str, Metric] = {metric.name: metric for metric in _rows(_OF_A_NODE)}
SEED_TABLE: dict[str, Metric] = {metric.name: metric for metric in _rows(_OF_A_SEED)}
HOP_SECONDS = TABLE["noloco_hop_duration_seconds"].buckets


def exposition(registry: CollectorRegistry, headers: Mapping[str, str]) -> Page:
    """All of a registry in the format of Prometheus that the request's `accept` asks for."""
    encode, content_type = choose_encoder(headers.get("accept", ""))
    return Page(encode(registry), content_type)


class Metrics:
    """One node's metrics in a registry of their own. Labels are bounded: no peer id ever is one."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self._last = _Totals()
        self._resumed = False
        self._utilization = Utilization()
        self._codec = ""
        self._done: set[str] = set()
        self._waiting_since: float | None = None
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        self._shown: set[str] = set()
        self._identity: dict[str, str] = {}
        self._hops = _Told(TABLE["noloco_hop_duration_seconds"])
        for metric in TABLE.values():
            self._make(metric)
        self._ask(
            "noloco_waiting_seconds",
            lambda: 0.0 if self._waiting_since is None else ambient.wall() - self._waiting_since,
        )
        self._set("noloco_up", 0)

    def _make(self, metric: Metric) -> None:
        name, text, labels, registry = metric.name, metric.help, metric.labels, self.registry
        match metric.kind:
            case "counter":
                counter = self._counters[name] = Counter(name, text, labels, registry=registry)
                for value in metric.known:
                    counter.labels(value)
            case "gauge":
                self._gauges[name] = Gauge(name, text, labels, registry=registry if labels else None)
            case "histogram" if name == self._hops.metric.name:
                registry.register(self._hops)
            case "histogram":
                self._histograms[name] = Histogram(name, text, labels, buckets=metric.buckets, registry=registry)
            case _:
                self._info = Info(name.removesuffix("_info"), text, registry=registry)

    def _set(self, name: str, value: float, *labels: str) -> None:
        gauge = self._gauges[name]
        self._show(name)
        (gauge.labels(*labels) if labels else gauge).set(value)

    def _ask(self, name: str, value: Callable[[], float]) -> None:
        """Its value is found out whenever it is scraped."""
        self._gauges[name].set_function(value)
        self._show(name)

    def _show(self, name: str) -> None:
        """What is not known yet is not scraped as 0."""
        if not TABLE[name].labels and name not in self._shown:
            self._shown.add(name)
            self.registry.register(self._gauges[name])

    def _add(self, name: str, rise: float, *labels: str) -> None:
        counter = self._counters[name]
        (counter.labels(*labels) if labels else counter).inc(rise)

    def observe(self, event: AnyEvent) -> None:
        """Take one event of this node in."""
        if not (isinstance(event, OuterStep) and event.kind == "aborted"):
            for metric, path in _FED_BY.get(event.event, ()):
                self._feed(metric, attrgetter(path)(event) if path else 1, total=isinstance(event, Account))
        if isinstance(event, InnerStep | Account):
            self._set("noloco_trained_tokens", event.clock)
        match event:
            case NodeStarted():
                self._set("noloco_up", 1)
                self._resumed, self._codec = event.resumed, event.codec
                self._identity = {"version": event.version, "run_id": event.run_id, "device": event.device}
                self._utilization.peak = event.peak_flop_per_second
                self._stands_at(event.stage, event.flop_per_token)
            case NodeReassigned():
                self._stands_at(event.stage, event.flop_per_token)
            case InnerStep():
                self._add("noloco_model_flop_total", self._utilization.step(event.tokens))
            case OuterStep():
                self._outer_step(event)
            case Evaluation():
                for each in event.sources:
                    self._set("noloco_validation_source_loss", each.loss, each.source)
            case Account():
                self._account(event)
            case CheckpointTaken():
                self._add("noloco_checkpoints_total", 1, "failed" if event.error else "written")
                self._add("noloco_checkpoint_held_seconds_total", event.held_seconds)
                if not event.error:
                    self._set("noloco_checkpoint_last_timestamp_seconds", event.time)
            case NodeStopped():
                self._set("noloco_up", 0)
            case Doing():
                self._doing_now(event)
            case StateDownload():
                self._set("noloco_state_download_ratio", event.received / event.total)
            case _:
                pass

    def _feed(self, metric: Metric, value: object, *, total: bool) -> None:
        """Take a field of an event over, as the table says. Where it is a `total`, a counter takes the rise."""
        name = metric.name
        for key, label, number in _parts(value):
            labels = [] if label is None else [label]
            if metric.kind == "gauge":
                self._set(name, number, *labels)
            else:
                self._add(name, self._last.rise(name, key, number) if total else number, *labels)

    def page(self, headers: Mapping[str, str]) -> Page:
        """All metrics, as the request asks for them."""
        return exposition(self.registry, headers)

    def watch_process(
        self, loop: asyncio.AbstractEventLoop, memory: Callable[[], MemoryUse], free_disk: Callable[[], float]
    ) -> None:
        """Count, whenever asked, this loop's tasks, and the threads, memory and open files of this process: what leaks
        shows there. Also count what is left of its memory and of its disk. Call it once."""
        ProcessCollector(registry=self.registry)
        self._ask("noloco_tasks", lambda: len(asyncio.all_tasks(loop)))
        self._ask("noloco_threads", active_count)
        self._ask("noloco_memory_limit_bytes", lambda: memory().limit)
        self._ask("noloco_memory_used_bytes", lambda: memory().used)
        self._ask("noloco_disk_free_bytes", free_disk)

    def _stands_at(self, stage: int, flop_per_token: float) -> None:
        self._utilization.flop_per_token = flop_per_token
        self._info.info({**self._identity, "stage": str(stage)})

    def _doing_now(self, event: Doing) -> None:
        for what in self._done | {event.what}:
            self._set("noloco_doing", what == event.what, what)
        self._done.add(event.what)
        self._waiting_since = event.since if event.what.startswith("waiting") else None
        self._utilization.doing = event.what

    def _outer_step(self, event: OuterStep) -> None:
        if event.kind == "aborted":
            self._add("noloco_outer_aborts_total", 1, _bounded(event.reason))
        elif event.kind == "paired":
            self._histograms["noloco_outer_step_duration_seconds"].observe(event.seconds)
            payload = self._histograms["noloco_outer_step_bytes"]
            payload.labels(self._codec, "sent").observe(event.bytes_sent)
            payload.labels(self._codec, "received").observe(event.bytes_received)

    def _account(self, event: Account) -> None:
        for stage in range(len(event.nodes_per_stage)):
            self._set("noloco_stage_missing", stage in event.missing_stages, str(stage))
        self._hops.told = event.hop_seconds or self._hops.told
        idle = self._utilization.account(event)
        if idle is not None:
            self._add("noloco_device_idle_seconds_total", idle.seconds, idle.reason)
        if self._utilization.ratio is not None:
            self._set("noloco_model_flop_utilization_ratio", self._utilization.ratio)
        self._counts(event)

    def _counts(self, event: Account) -> None:
        rise = self._last.rise
        if self._resumed:  # what the books held at the start was counted in an earlier life
            self._resumed = False
            for outcome in MICROBATCH_OUTCOMES:
                rise("microbatches", outcome, getattr(event, outcome))
        for outcome in MICROBATCH_OUTCOMES:
            self._add("noloco_microbatches_total", rise("microbatches", outcome, getattr(event, outcome)), outcome)
        for outcome in TABLE["noloco_text_blocks_total"].known:
            self._add("noloco_text_blocks_total", rise("blocks", outcome, event.text_slots.get(outcome, 0)), outcome)
        for direction, traffic in (("sent", event.bytes_sent), ("received", event.bytes_received)):
            for kind, count in traffic.items():
                self._add("noloco_bytes_total", rise(direction, kind, count), kind, direction)


class _Told:
    """A histogram whose counts are kept elsewhere (`Meter`), and passed on now and then."""

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self.told = Distribution(bounds=metric.buckets, counts=(0,) * (len(metric.buckets) + 1), sum=0.0)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Called by the registry."""
        told = self.told
        bounds = [*(str(bound) for bound in told.bounds), "+Inf"]
        counts = [float(count) for count in accumulate(told.counts)]
        family = HistogramMetricFamily(self.metric.name, self.metric.help)
        family.add_metric([], list(zip(bounds, counts, strict=True)), told.sum)
        yield family


def _parts(value: object) -> Iterator[tuple[str, str | None, float]]:
    """The key, the label and the number of each series that a field of an event makes. A word counts once, a list is by
    its places."""
    if isinstance(value, str):
        yield value, _bounded(value), 1.0
    elif isinstance(value, Mapping):
        yield from ((name, _bounded(name), float(one)) for name, one in cast("Mapping[str, float]", value).items())
    elif isinstance(value, Sequence):
        yield from ((str(at), str(at), float(one)) for at, one in enumerate(cast("Sequence[float]", value)))
    elif value is not None:
        yield "", None, float(cast("float", value))


def _fed_by() -> dict[str, list[tuple[Metric, str]]]:
    made: dict[str, list[tuple[Metric, str]]] = {}
    for metric in TABLE.values():
        for source in metric.sources:
            event, _, path = source.partition(".")
            made.setdefault(event, []).append((metric, path))
    return made


_FED_BY = _fed_by()
"""The metrics that are fields of an event, and which fields, by event."""


def _bounded(reason: str) -> str:
    """A reason as a label: its leading word, so that no free text makes a new time series."""
    word = re.match(r"[a-z_]{1,40}", reason)
    return word.group() if word else "other"


class _Totals:
    """Accounts carry totals, Prometheus counters take rises."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], float] = {}

    def rise(self, family: str, label: str, total: float) -> float:
        """By how much `total` exceeds the last one; a total never falls."""
        before = self._seen.get((family, label), 0.0)
        self._seen[family, label] = total
        return max(0.0, total - before)
