"""Prometheus metrics of one node, fed by the same events as its event file: one source of truth."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from threading import active_count

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector
from prometheus_client import disable_created_metrics as without_time_of_creation
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.exposition import choose_encoder

from noloco_node import ambient
from noloco_node.telemetry.events import (
    Account,
    AnyEvent,
    CheckpointTaken,
    Distribution,
    Doing,
    Evaluation,
    InnerStep,
    NodeMoved,
    NodeStarted,
    NodeStopped,
    OuterStep,
    P2pdRestarted,
    StateDownload,
    Warned,
)
from noloco_node.telemetry.memory_limit import MemoryUse
from noloco_node.telemetry.metric_table import BLOCK_OUTCOMES, TABLE, Metric
from noloco_node.telemetry.utilization import Utilization
from noloco_node.telemetry.web import Page

MICROBATCH_OUTCOMES = ("drawn", "trained", "dropped", "put_back", "retried", "repeated", "served")
"""These counts of `Account` only ever rise."""

without_time_of_creation()


def exposition(registry: CollectorRegistry, headers: Mapping[str, str]) -> Page:
    """All of a registry in the format of Prometheus that the request's `accept` asks for."""
    encode, content_type = choose_encoder(headers.get("accept", ""))
    return Page(encode(registry), content_type)


class Metrics:
    """One node's metrics (`metric_table`) in a registry of their own. Labels are bounded: no peer id ever is one."""

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
            case "info":
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
        match event:
            case NodeStarted():
                self._started(event)
            case NodeMoved():
                self._add("noloco_moves_total", 1, event.why)
                self._stands_at(event.stage, event.parameters, event.flop_per_token)
            case InnerStep():
                self._inner_step(event)
            case OuterStep():
                self._outer_step(event)
            case Evaluation():
                self._set("noloco_validation_loss", event.loss)
                for each in event.sources:
                    self._set("noloco_validation_source_loss", each.loss, each.source)
            case Account():
                self._account(event)
            case CheckpointTaken():
                self._checkpoint(event)
            case NodeStopped():
                self._set("noloco_up", 0)
            case Doing():
                self._doing_now(event)
            case P2pdRestarted():
                self._add("noloco_p2pd_restarts_total", 1, event.cause)
            case StateDownload():
                self._set("noloco_state_download_ratio", event.received / event.total)
            case Warned():
                self._add("noloco_warnings_total", 1, event.what)
            case _:
                pass

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

    def _started(self, event: NodeStarted) -> None:
        self._set("noloco_up", 1)
        self._resumed, self._codec = event.resumed, event.codec
        self._identity = {"version": event.version, "run_id": event.run_id, "device": event.device}
        self._utilization.peak = event.peak_flop_per_second
        self._stands_at(event.stage, event.parameters, event.flop_per_token)

    def _stands_at(self, stage: int, parameters: int, flop_per_token: float) -> None:
        self._set("noloco_stage_parameters", parameters)
        self._utilization.flop_per_token = flop_per_token
        self._info.info({**self._identity, "stage": str(stage)})

    def _doing_now(self, event: Doing) -> None:
        for what in self._done | {event.what}:
            self._set("noloco_doing", what == event.what, what)
        self._done.add(event.what)
        self._waiting_since = event.since if event.what.startswith("waiting") else None
        self._utilization.doing = event.what

    def _inner_step(self, event: InnerStep) -> None:
        self._add("noloco_inner_steps_total", 1)
        self._add("noloco_inner_steps_skipped_total", event.skipped)
        self._add("noloco_tokens_total", event.tokens)
        self._add("noloco_model_flop_total", self._utilization.step(event.tokens))
        self._set("noloco_clock_tokens", event.clock)
        self._set("noloco_training_loss", event.loss)
        self._set("noloco_learning_rate", event.learning_rate)
        self._set("noloco_gradient_norm", event.gradient_norm)

    def _outer_step(self, event: OuterStep) -> None:
        if event.kind == "aborted":
            self._add("noloco_outer_aborts_total", 1, _bounded(event.reason))
            return
        self._add("noloco_outer_rounds_total", 1, event.kind)
        self._add("noloco_clipped_exchanges_total", event.clipped)
        self._add("noloco_exchange_held_seconds_total", event.held_seconds)
        self._set("noloco_outer_last_timestamp_seconds", event.time)
        if event.kind == "paired":
            self._histograms["noloco_exchange_duration_seconds"].observe(event.seconds)
            payload = self._histograms["noloco_exchange_payload_bytes"]
            payload.labels(self._codec, "sent").observe(event.bytes_sent)
            payload.labels(self._codec, "received").observe(event.bytes_received)
        if event.spread is not None:
            self._set("noloco_spread", event.spread)
        if event.difference_norm is not None:
            self._set("noloco_difference_norm", event.difference_norm)

    def _account(self, event: Account) -> None:
        self._set("noloco_clock_tokens", event.clock)
        self._set("noloco_target_tokens", event.target)
        self._set("noloco_microbatches_held", event.held_at_end)
        self._set("noloco_microbatches_in_flight", event.in_hand)
        self._set("noloco_device_queue", event.queued)
        self._set("noloco_event_loop_lag_seconds", event.loop_lag_seconds)
        self._set("noloco_directory_records", event.directory_records)
        self._set("noloco_directory_age_seconds", event.directory_age_seconds)
        self._set("noloco_banned_peers", event.strangers.banned_now)
        self._set("noloco_set_aside_peers", event.strangers.set_aside_now)
        for what, count in event.device_memory.items():
            self._set("noloco_device_memory_bytes", count, what)
        for stage, count in enumerate(event.nodes_per_stage):
            self._set("noloco_live_replicas", count, str(stage))
            self._set("noloco_stage_missing", stage in event.missing_stages, str(stage))
        self._hops.told = event.hop_seconds or self._hops.told
        self._use_of_device(event)
        self._counts(event)

    def _use_of_device(self, event: Account) -> None:
        """A node that moved has another replica's books, but the same compute thread."""
        for work, seconds in event.busy_by_work.items():
            self._add("noloco_device_busy_seconds_total", self._last.rise("busy", work, seconds), work)
        idle = self._utilization.account(event)
        if idle is not None:
            self._add("noloco_device_idle_seconds_total", idle.seconds, idle.reason)
        if self._utilization.ratio is not None:
            self._set("noloco_model_flop_utilization_ratio", self._utilization.ratio)

    def _counts(self, event: Account) -> None:
        rise = self._last.rise
        if self._resumed:  # what the books held at the start was counted in an earlier life
            self._resumed = False
            for outcome in MICROBATCH_OUTCOMES:
                rise("microbatches", outcome, getattr(event, outcome))
        for outcome in MICROBATCH_OUTCOMES:
            self._add("noloco_microbatches_total", rise("microbatches", outcome, getattr(event, outcome)), outcome)
        self._add("noloco_data_wait_seconds_total", rise("data", "", event.data_wait_seconds))
        for outcome in BLOCK_OUTCOMES:
            self._add("noloco_text_blocks_total", rise("blocks", outcome, event.text_slots.get(outcome, 0)), outcome)
        repeated = event.text_slots.get("repeated", 0)
        self._add("noloco_text_repeated_windows_total", rise("blocks", "repeated", repeated))
        strangers = event.strangers
        for name, counts in (
            ("noloco_refusals_total", event.refused),
            ("noloco_offences_total", strangers.offences),
            ("noloco_bans_total", strangers.bans),
            ("noloco_audits_total", strangers.audits),
            ("noloco_bounded_total", strangers.bounded),
            ("noloco_directory_no_room_total", strangers.no_room),
        ):
            for reason, count in counts.items():
                self._add(name, rise(name, reason, count), _bounded(reason))
        for direction, traffic in (("sent", event.bytes_sent), ("received", event.bytes_received)):
            for kind, count in traffic.items():
                self._add("noloco_bytes_total", rise(direction, kind, count), kind, direction)

    def _checkpoint(self, event: CheckpointTaken) -> None:
        self._add("noloco_checkpoints_total", 1, "failed" if event.error else "written")
        self._add("noloco_checkpoint_held_seconds_total", event.held_seconds)
        if not event.error:
            self._set("noloco_checkpoint_last_timestamp_seconds", event.time)


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
