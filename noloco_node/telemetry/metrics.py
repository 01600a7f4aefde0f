"""Prometheus metrics of one node, fed by the same events as its event file: one source of truth."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from threading import active_count

from prometheus_client import CollectorRegistry, Counter, Gauge, Info, ProcessCollector
from prometheus_client.exposition import choose_encoder

from noloco_node.telemetry.events import (
    Account,
    AnyEvent,
    CheckpointTaken,
    Doing,
    Evaluation,
    InnerStep,
    NodeMoved,
    NodeStarted,
    NodeStopped,
    OuterStep,
    P2pdRestarted,
    StateDownload,
)
from noloco_node.telemetry.web import Page

MICROBATCH_OUTCOMES = ("drawn", "trained", "dropped", "put_back", "retried", "repeated", "served")
"""Counts of `Account` that only ever rise."""


class Metrics:
    """One node's metrics in a registry of their own. Labels are bounded: no peer id ever is one."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self._last = _Totals()
        self._resumed = False
        self._speed = _Speed()
        self._identity: dict[str, str] = {}
        self._info = Info("noloco_node", "Version, stage and run of this node", registry=self.registry)
        self._up = self._gauge("noloco_up", "1 from the start until the node ends in order")
        self._parameters = self._gauge("noloco_stage_parameters", "Parameters of this node's stage")
        self._training_metrics()
        self._outer_metrics()
        self._traffic_metrics()
        self._checkpoints = self._counter("noloco_checkpoints_total", "Checkpoints by outcome", "outcome")
        self._checkpoint_held = self._counter(
            "noloco_checkpoint_held_seconds_total", "Time checkpoints held the compute thread"
        )
        self._checkpoint_time = self._gauge("noloco_checkpoint_seconds_since_1970", "When the last one was written")
        self._done: set[str] = set()
        self._watch_metrics()

    def _training_metrics(self) -> None:
        self._inner_steps = self._counter("noloco_inner_steps_total", "Inner steps taken")
        self._skipped = self._counter("noloco_skipped_steps_total", "Inner steps left out: gradient not finite")
        self._tokens = self._counter("noloco_tokens_total", "Tokens trained by this replica")
        self._clock = self._gauge("noloco_clock_tokens", "Clock of this replica, in swarm tokens")
        self._target = self._gauge("noloco_target_tokens", "Clock at which the run ends")
        self._training_loss = self._gauge("noloco_training_loss", "Loss of the last inner step, nats per token")
        self._validation_loss = self._gauge("noloco_validation_loss", "Last held-out loss, nats per token")
        self._learning_rate = self._gauge("noloco_learning_rate", "Inner learning rate")
        self._gradient_norm = self._gauge("noloco_gradient_norm", "Gradient norm of the stage before clipping")
        self._rate = self._gauge("noloco_tokens_per_second", "Tokens of this replica per second, running mean")

    def _outer_metrics(self) -> None:
        self._rounds = self._counter("noloco_outer_rounds_total", "Outer steps by kind", "kind")
        self._aborts = self._counter("noloco_outer_aborts_total", "Outer steps that came to nothing", "reason")
        self._spread = self._gauge("noloco_spread", "Estimated variance of the weights across replicas")
        self._difference = self._gauge("noloco_difference_norm", "Norm of the last difference to a partner")
        self._clipped = self._counter("noloco_clipped_exchanges_total", "Exchanges whose difference was clipped")
        self._exchange_seconds = self._counter("noloco_exchange_seconds_total", "Time from proposal to commit")
        self._held_seconds = self._counter("noloco_held_seconds_total", "Time exchanges held the compute thread")

    def _traffic_metrics(self) -> None:
        self._bytes = self._counter("noloco_bytes_total", "Bytes by kind and direction", "kind", "direction")
        self._refusals = self._counter("noloco_refusals_total", "Refusals given", "reason")
        self._microbatches = self._counter("noloco_microbatches_total", "Microbatches by outcome", "outcome")
        self._held = self._gauge("noloco_microbatches_held", "Drawn, and neither trained nor dropped yet")
        self._offences = self._counter("noloco_offences_total", "Offences of peers", "reason")
        self._bans = self._counter("noloco_bans_total", "Bans of peers by the offence that brought them", "reason")
        self._banned = self._gauge("noloco_banned_peers", "Peers that are banned here now")
        self._audits = self._counter(
            "noloco_audits_total", "Microbatches that several peers trained, by finding", "finding"
        )
        self._set_aside = self._gauge("noloco_set_aside_peers", "Next-stage peers that audits have gone against")
        self._bounded = self._counter("noloco_bounded_total", "What went beyond a bound on norms", "what")
        self._live = self._gauge("noloco_live_replicas", "Live nodes as this one sees them", "stage")
        self._missing = self._gauge("noloco_stage_missing", "1 while a stage has no replica and is waited for", "stage")
        self._moves = self._counter("noloco_moves_total", "Moves of this node to another stage", "why")
        self._p2pd_restarts = self._counter("noloco_p2pd_restarts_total", "Restarts of p2pd by cause", "cause")
        self._lag = self._gauge("noloco_event_loop_lag_seconds", "Worst event loop lag since the last account")
        self._busy = self._counter("noloco_busy_seconds_total", "Time the compute thread has worked")

    def _watch_metrics(self) -> None:
        self._doing = self._gauge("noloco_doing", "1 for what the node does now, 0 for what it did before", "what")
        self._waiting_since: float | None = None
        waiting = self._gauge("noloco_waiting_seconds", "How long the node has waited; 0: it does not")
        waiting.set_function(lambda: 0.0 if self._waiting_since is None else time.time() - self._waiting_since)
        self._downloaded = self._gauge("noloco_state_download_ratio", "Share of a fellow's state that has come")

    def _doing_now(self, event: Doing) -> None:
        for what in self._done | {event.what}:
            self._doing.labels(what).set(what == event.what)
        self._done.add(event.what)
        self._waiting_since = event.since if event.what.startswith("waiting") else None

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(name, help_text, labels, registry=self.registry)

    def _gauge(self, name: str, help_text: str, *labels: str) -> Gauge:
        return Gauge(name, help_text, labels, registry=self.registry)

    def observe(self, event: AnyEvent) -> None:
        """Take one event of this node in."""
        match event:
            case NodeStarted():
                self._up.set(1)
                self._parameters.set(event.parameters)
                self._resumed = event.resumed
                self._identity = {"version": event.version, "run_id": event.run_id}
                self._info.info({**self._identity, "stage": str(event.stage)})
            case NodeMoved():
                self._moves.labels(event.why).inc()
                self._parameters.set(event.parameters)
                self._info.info({**self._identity, "stage": str(event.stage)})
            case InnerStep():
                self._inner_step(event)
            case OuterStep():
                self._outer_step(event)
            case Evaluation():
                self._validation_loss.set(event.loss)
            case Account():
                self._account(event)
            case CheckpointTaken():
                self._checkpoint(event)
            case NodeStopped():
                self._up.set(0)
            case Doing():
                self._doing_now(event)
            case P2pdRestarted():
                self._p2pd_restarts.labels(event.cause).inc()
            case StateDownload():
                self._downloaded.set(event.received / event.total)
            case _:
                pass

    def page(self, headers: Mapping[str, str]) -> Page:
        """All metrics in the format of Prometheus that the request's `accept` asks for."""
        encode, content_type = choose_encoder(headers.get("accept", ""))
        return Page(encode(self.registry), content_type)

    def watch_process(self, loop: asyncio.AbstractEventLoop) -> None:
        """Count, whenever asked, the tasks of this loop, and threads, memory and open files of this process: what leaks
        shows there. Once."""
        ProcessCollector(registry=self.registry)
        self._gauge("noloco_tasks", "Tasks of the event loop").set_function(lambda: len(asyncio.all_tasks(loop)))
        self._gauge("noloco_threads", "Python threads of this process").set_function(active_count)

    def _inner_step(self, event: InnerStep) -> None:
        self._inner_steps.inc()
        self._skipped.inc(event.skipped)
        self._tokens.inc(event.tokens)
        self._clock.set(event.clock)
        self._training_loss.set(event.loss)
        self._learning_rate.set(event.learning_rate)
        self._gradient_norm.set(event.gradient_norm)
        self._rate.set(self._speed.after(event))

    def _outer_step(self, event: OuterStep) -> None:
        if event.kind == "aborted":
            self._aborts.labels(_bounded(event.reason)).inc()
            return
        self._rounds.labels(event.kind).inc()
        self._clipped.inc(event.clipped)
        self._exchange_seconds.inc(event.seconds)
        self._held_seconds.inc(event.held_seconds)
        if event.spread is not None:
            self._spread.set(event.spread)
        if event.difference_norm is not None:
            self._difference.set(event.difference_norm)

    def _account(self, event: Account) -> None:
        self._clock.set(event.clock)
        self._target.set(event.target)
        self._held.set(event.held_at_end)
        self._lag.set(event.loop_lag_seconds)
        for stage, count in enumerate(event.nodes_per_stage):
            self._live.labels(str(stage)).set(count)
            self._missing.labels(str(stage)).set(stage in event.missing_stages)
        rise = self._last.rise
        if self._resumed:  # what the books held at the start was counted in an earlier life
            self._resumed = False
            for outcome in MICROBATCH_OUTCOMES:
                rise("microbatches", outcome, getattr(event, outcome))
        self._busy.inc(rise("busy", "", event.busy_seconds))
        for outcome in MICROBATCH_OUTCOMES:
            self._microbatches.labels(outcome).inc(rise("microbatches", outcome, getattr(event, outcome)))
        for reason, count in event.refused.items():
            self._refusals.labels(_bounded(reason)).inc(rise("refused", reason, count))
        self._banned.set(event.strangers.banned_now)
        self._set_aside.set(event.strangers.set_aside_now)
        for family, counter, counts in (
            ("offences", self._offences, event.strangers.offences),
            ("bans", self._bans, event.strangers.bans),
            ("audits", self._audits, event.strangers.audits),
            ("bounded", self._bounded, event.strangers.bounded),
        ):
            for reason, count in counts.items():
                counter.labels(_bounded(reason)).inc(rise(family, reason, count))
        for direction, counts in (("sent", event.bytes_sent), ("received", event.bytes_received)):
            self._traffic(direction, counts)

    def _checkpoint(self, event: CheckpointTaken) -> None:
        self._checkpoints.labels("failed" if event.error else "written").inc()
        self._checkpoint_held.inc(event.held_seconds)
        if not event.error:
            self._checkpoint_time.set(event.time)

    def _traffic(self, direction: str, counts: Mapping[str, int]) -> None:
        for kind, count in counts.items():
            self._bytes.labels(kind, direction).inc(self._last.rise(direction, kind, count))


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


class _Speed:
    """Tokens per second as an exponential mean over about ten inner steps."""

    WEIGHT = 0.1

    def __init__(self) -> None:
        self._last_time: float | None = None
        self._seconds_per_token: float | None = None

    def after(self, step: InnerStep) -> float:
        """The mean with `step` in it; 0 before the second step."""
        before, self._last_time = self._last_time, step.time
        if before is not None and step.tokens > 0 and step.time > before:
            now = (step.time - before) / step.tokens
            old = now if self._seconds_per_token is None else self._seconds_per_token
            self._seconds_per_token = old + self.WEIGHT * (now - old)
        return 1.0 / self._seconds_per_token if self._seconds_per_token else 0.0
