"""The alerts: an expression's value, the condition on it, and how long it must hold. docs/operations.md has a section
for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from deploy.monitoring.expressions import EXPRESSIONS


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert."""

    name: str
    shows: str
    """Name of its expression; the condition is put behind it."""
    condition: str
    lasts: str
    """How long the condition must hold."""
    severity: Literal["page", "ticket"]
    """`page`: the run loses time now; `ticket`: look within a day."""
    summary: str

    @property
    def expression(self) -> str:
        """What Prometheus evaluates."""
        return f"({EXPRESSIONS[self.shows]}) {self.condition}"


ALERTS = (
    Alert(
        "NolocoStageWithoutReplicas",
        "served",
        "< 1",
        "15s",
        "page",
        "No node serves stage {{ $labels.stage }} of run {{ $labels.run }}: microbatches wait for it",
    ),
    Alert(
        "NolocoStageUnanswered",
        "seen_missing",
        "> 0",
        "30s",
        "page",
        "No node that answers the seeds of run {{ $labels.run }} serves stage {{ $labels.stage }}",
    ),
    Alert(
        "NolocoSwarmStalled",
        "no_progress",
        "== 0",
        "3m",
        "page",
        "No node of run {{ $labels.run }} has trained a token for five minutes",
    ),
    Alert(
        "NolocoSwarmGone",
        "answering",
        "< 1",
        "1m",
        "page",
        "None of the nodes of run {{ $labels.run }} that were scraped answers any more",
    ),
    Alert(
        "NolocoNodeDown",
        "gone",
        "== 0",
        "1m",
        "ticket",
        "{{ $labels.node }} ({{ $labels.instance }}) does not answer Prometheus",
    ),
    Alert(
        "NolocoNodeWaits",
        "waiting",
        "> 300",
        "1m",
        "ticket",
        "{{ $labels.node }} ({{ $labels.instance }}) has waited for {{ $value | humanizeDuration }}",
    ),
    Alert(
        "NolocoSpreadRising",
        "spread_growth",
        f"> 0.2 / 600 and on (run) {EXPRESSIONS['rate_change']} < 0",
        "10m",
        "ticket",
        "Replicas of run {{ $labels.run }} drift apart while the learning rate falls",
    ),
    Alert(
        "NolocoOuterStepsMissing",
        "rounds_overdue",
        "> 5 and on (run, node, job, instance) time() - noloco_outer_last_timestamp_seconds > 60",
        "1m",
        "ticket",
        "{{ $labels.node }} ({{ $labels.instance }}) has taken no outer step for {{ $value | humanize }} rounds",
    ),
    Alert(
        "NolocoOuterStepsAlone",
        "alone_share",
        "> 0.5",
        "15m",
        "ticket",
        "{{ $value | humanizePercentage }} of the outer steps of run {{ $labels.run }} find no partner",
    ),
    Alert(
        "NolocoRefusals",
        "odd_refusals",
        "> 0.1",
        "5m",
        "ticket",
        "Nodes of run {{ $labels.run }} refuse calls as {{ $labels.reason }}, {{ $value | humanize }} a second",
    ),
    Alert(
        "NolocoStepsSkipped",
        "skipped_share",
        "> 0.05",
        "5m",
        "ticket",
        "{{ $labels.node }} ({{ $labels.instance }}) leaves out {{ $value | humanizePercentage }} of its inner steps",
    ),
    Alert(
        "NolocoLoopLag",
        "loop_lag",
        "> 1",
        "2m",
        "ticket",
        "The event loop of {{ $labels.node }} ({{ $labels.instance }}) is late by {{ $value | humanizeDuration }}",
    ),
    Alert(
        "NolocoDataWaits",
        "data_wait_share",
        "> 0.1",
        "5m",
        "ticket",
        "{{ $labels.node }} ({{ $labels.instance }}) waits for its text {{ $value | humanizePercentage }} of the time",
    ),
    Alert(
        "NolocoMemoryShort",
        "memory_share",
        "> 0.9",
        "1m",
        "page",
        "{{ $labels.node }} ({{ $labels.instance }}) is at {{ $value | humanizePercentage }} of its memory limit",
    ),
    Alert(
        "NolocoDiskShort",
        "disk_free",
        "< 1e9 + 72 * noloco_stage_parameters",
        "5m",
        "ticket",
        "The disk of {{ $labels.node }} ({{ $labels.instance }}) has {{ $value | humanize1024 }}B left",
    ),
    Alert(
        "NolocoFilesShort",
        "files_share",
        "> 0.8",
        "5m",
        "ticket",
        "{{ $labels.node }} ({{ $labels.instance }}) is at {{ $value | humanizePercentage }} of its open files",
    ),
    Alert(
        "NolocoCheckpointFailed",
        "checkpoints_failed",
        "> 0",
        "0s",
        "ticket",
        "{{ $labels.node }} ({{ $labels.instance }}) could not write a checkpoint",
    ),
    Alert(
        "NolocoDirectoryStale",
        "directory_age",
        "> 120",
        "2m",
        "ticket",
        "{{ $labels.node }} ({{ $labels.instance }}) has not read the directory for {{ $value | humanizeDuration }}",
    ),
    Alert(
        "NolocoP2pdRestarts",
        "p2pd_restarts",
        "> 2",
        "0s",
        "ticket",
        "p2pd of {{ $labels.node }} ({{ $labels.instance }}) was started again {{ $value | humanize }} times",
    ),
)
