"""Every expression that a rule, a panel or a console shows. Each stands here once.

Nodes are scraped with the labels `run` and `node` where a local swarm names them (`targets.json`); elsewhere both are
empty, and `instance` tells nodes apart. Which stage a node serves is joined from `noloco_node_info`, since it may move.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Quiet = Literal["fault", "gpu", "peak", "join", "move"]
"""Why an expression may give nothing in a swarm that trains: no fault has happened, no GPU is there, the device's peak
is not known, nobody joined late, nobody moved."""


def _stage(expression: str) -> str:
    """Series of a node, with its stage."""
    return f"{expression} * on (job, instance) group_left (stage) noloco_node_info"


_KNOWN = "up and on (job, instance) last_over_time(noloco_up[1d])"
"""Whether a target answers; of those that have been nodes."""

_NOT_ENDED = f"{_KNOWN} unless on (run) (last_over_time(noloco:progress:ratio[1d]) >= 0.999)"

ORDINARY_REFUSALS = (
    "already_trained|busy|crossed|draining|lagging|not_counted|on_probation|relayed|too_early|unknown_exchange"
)
"""Part of every day: a full node, one that leaves or has just come, two that dial each other."""

RECORDED: Mapping[str, str] = {
    "noloco:stage_tokens:rate2m": f"sum by (run, stage) ({_stage('rate(noloco_tokens_total[2m])')})",
    "noloco:stage_replicas:count": f"count by (run, stage) ({_stage('noloco_up')} > 0)",
    "noloco:stage_served:nodes": "max by (run, stage) (noloco_live_replicas * (1 - noloco_stage_missing))",
    "noloco:clock_tokens:max": "max by (run) (noloco_clock_tokens)",
    "noloco:clock_tokens:rate2m": "max by (run) (deriv(noloco_clock_tokens[2m]))",
    "noloco:progress:ratio": "max by (run) (noloco_clock_tokens / noloco_target_tokens)",
    "noloco:spread:avg": "avg by (run) (noloco_spread)",
    "noloco:learning_rate:avg": "avg by (run) (noloco_learning_rate)",
    "noloco:outer_steps:rate5m": "sum by (run, kind) (rate(noloco_outer_rounds_total[5m]))",
    "noloco:outer_aborts:rate5m": "sum by (run, reason) (rate(noloco_outer_aborts_total[5m]))",
    "noloco:refusals:rate5m": "sum by (run, reason) (rate(noloco_refusals_total[5m]))",
}
"""Recording rules: what several panels and alerts of a whole swarm are made of."""

OF_SWARM: Mapping[str, str] = {
    "replicas": "noloco:stage_replicas:count",
    "served": "noloco:stage_served:nodes",
    "stage_speed": "noloco:stage_tokens:rate2m",
    "speed": "noloco:clock_tokens:rate2m",
    "progress": "noloco:progress:ratio",
    "seconds_left": (
        "clamp_min(max by (run) (noloco_target_tokens) - noloco:clock_tokens:max, 0) / (noloco:clock_tokens:rate2m > 0)"
    ),
    "training_loss": "avg by (run) (noloco_training_loss)",
    "validation_loss": "avg by (run) (noloco_validation_loss)",
    "spread": "noloco:spread:avg",
    "learning_rate": "noloco:learning_rate:avg",
    "spread_growth": "deriv(noloco:spread:avg[10m]) / (noloco:spread:avg > 0)",
    "rate_change": "deriv(noloco:learning_rate:avg[10m])",
    "clock_lag": "-(noloco_clock_tokens - on (run) group_left () max by (run) (noloco_clock_tokens))",
    "outer_steps": "noloco:outer_steps:rate5m",
    "outer_aborts": "noloco:outer_aborts:rate5m",
    "alone_share": (
        'sum by (run) (noloco:outer_steps:rate5m{kind="alone"}) / (sum by (run) (noloco:outer_steps:rate5m) > 0)'
    ),
    "exchange_p90": "histogram_quantile(0.9, sum by (run, le) (rate(noloco_exchange_duration_seconds_bucket[5m])))",
    "recovery_p90": "histogram_quantile(0.9, sum by (run, le) (increase(noloco_recovery_duration_seconds_bucket[1h])))",
    "hop_p50": "histogram_quantile(0.5, sum by (run, le) (rate(noloco_hop_duration_seconds_bucket[2m])))",
    "hop_p99": "histogram_quantile(0.99, sum by (run, le) (rate(noloco_hop_duration_seconds_bucket[2m])))",
    "microbatches": "sum by (run, outcome) (rate(noloco_microbatches_total[2m]))",
    "refusals": "noloco:refusals:rate5m",
    "odd_refusals": f'sum by (run, reason) (noloco:refusals:rate5m{{reason!~"{ORDINARY_REFUSALS}"}})',
    "traffic": "sum by (run, kind) (rate(noloco_bytes_total[2m]))",
    "payload": (
        "sum by (run, codec, direction) (rate(noloco_exchange_payload_bytes_sum[5m]))"
        " / (sum by (run, codec, direction) (rate(noloco_exchange_payload_bytes_count[5m])) > 0)"
    ),
    "device_share": "sum by (run, work) (rate(noloco_device_busy_seconds_total[2m]))",
    "offences": "sum by (run, reason) (increase(noloco_offences_total[15m]))",
    "bans": "sum by (run, reason) (increase(noloco_bans_total[15m]))",
    "audits": "sum by (run, finding) (increase(noloco_audits_total[15m]))",
    "moves": "sum by (run, why) (increase(noloco_moves_total[15m]))",
    "since_any_step": "time() - max by (run) (noloco_outer_last_timestamp_seconds)",
    "answering": f"sum by (run) ({_NOT_ENDED})",
    "no_progress": "sum by (run) (rate(noloco_tokens_total[2m]))",
}
"""Of all nodes of a run that are scraped."""

OF_SEEDS: Mapping[str, str] = {
    "seen_nodes": "max by (run, stage, state) (noloco_swarm_nodes)",
    "seen_claimed": "max by (run, stage) (noloco_swarm_claimed_nodes)",
    "seen_missing": "min by (run, stage) (noloco_swarm_stage_missing)",
    "seen_speed": "avg by (run) (noloco_swarm_tokens_per_second)",
    "seen_capacity": "avg by (run, stage) (noloco_swarm_capacity_tokens_per_second)",
    "seen_progress": "max by (run) (noloco_swarm_clock_tokens / noloco_swarm_target_tokens)",
    "seen_lag": "max by (run, stage) (noloco_swarm_stage_lag_tokens)",
    "seen_versions": "max by (run, version) (noloco_swarm_version_nodes)",
    "seen_joins": "max by (run) (increase(noloco_swarm_joins_total[15m]))",
    "seen_departures": "max by (run, how) (increase(noloco_swarm_departures_total[15m]))",
    "seen_moves": "max by (run) (increase(noloco_swarm_moves_total[15m]))",
}
"""Of whole swarms, as seeds see them: strangers' nodes included, which nobody can scrape."""

OF_NODE: Mapping[str, str] = {
    "reachable": _KNOWN,
    "gone": _NOT_ENDED,
    "doing": "noloco_doing > 0",
    "waiting": "noloco_waiting_seconds",
    "download": "noloco_state_download_ratio",
    "node_speed": "rate(noloco_tokens_total[2m])",
    "node_loss": "noloco_training_loss",
    "gradient_norm": "noloco_gradient_norm",
    "skipped_share": "rate(noloco_inner_steps_skipped_total[10m]) / (rate(noloco_inner_steps_total[10m]) > 0)",
    "node_clock": "noloco_clock_tokens",
    "seen": "noloco_live_replicas",
    "missing": "noloco_stage_missing",
    "held": "noloco_microbatches_held",
    "in_flight": "noloco_microbatches_in_flight",
    "outcomes": "rate(noloco_microbatches_total[2m])",
    "node_hop_p90": (
        "histogram_quantile(0.9, sum by (instance, node, le) (rate(noloco_hop_duration_seconds_bucket[2m])))"
    ),
    "node_refusals": "rate(noloco_refusals_total[5m])",
    "rounds": "rate(noloco_outer_rounds_total[5m])",
    "rounds_overdue": (
        "(time() - noloco_outer_last_timestamp_seconds)"
        " / on (run, node, job, instance) ((time() - process_start_time_seconds)"
        " / on (run, node, job, instance) (sum by (run, node, job, instance) (noloco_outer_rounds_total) > 5))"
    ),
    "difference_norm": "noloco_difference_norm",
    "clipped": "rate(noloco_clipped_exchanges_total[5m])",
    "exchange_held_share": "rate(noloco_exchange_held_seconds_total[5m])",
    "node_traffic": "rate(noloco_bytes_total[2m])",
    "busy_share": "rate(noloco_device_busy_seconds_total[2m])",
    "idle_share": "rate(noloco_device_idle_seconds_total[2m])",
    "queue": "noloco_device_queue",
    "flop": "rate(noloco_model_flop_total[2m])",
    "utilization": "noloco_model_flop_utilization_ratio",
    "data_wait_share": "rate(noloco_data_wait_seconds_total[5m])",
    "device_memory": "noloco_device_memory_bytes",
    "memory_share": "noloco_memory_used_bytes / noloco_memory_limit_bytes",
    "disk_free": "noloco_disk_free_bytes",
    "recovering": "noloco_recovering_seconds",
    "resident": "process_resident_memory_bytes",
    "cpu_share": "rate(process_cpu_seconds_total[2m])",
    "files_share": "process_open_fds / process_max_fds",
    "loop_lag": "avg_over_time(noloco_event_loop_lag_seconds[1m])",
    "tasks": "noloco_tasks",
    "threads": "noloco_threads",
    "directory_records": "noloco_directory_records",
    "no_room": "increase(noloco_directory_no_room_total[15m])",
    "directory_age": "noloco_directory_age_seconds",
    "node_offences": "increase(noloco_offences_total[15m])",
    "banned": "noloco_banned_peers",
    "set_aside": "noloco_set_aside_peers",
    "bounded": "increase(noloco_bounded_total[15m])",
    "p2pd_restarts": "increase(noloco_p2pd_restarts_total[15m])",
    "warnings": "increase(noloco_warnings_total[15m])",
    "checkpoints": "increase(noloco_checkpoints_total[15m])",
    "checkpoints_failed": 'increase(noloco_checkpoints_total{outcome="failed"}[15m])',
    "checkpoint_age": "time() - noloco_checkpoint_last_timestamp_seconds",
    "checkpoint_held_share": "rate(noloco_checkpoint_held_seconds_total[5m])",
}
"""Of each node."""

QUIET: Mapping[str, Quiet] = {
    "outer_aborts": "fault",
    "odd_refusals": "fault",
    "refusals": "fault",
    "node_refusals": "fault",
    "offences": "fault",
    "node_offences": "fault",
    "bans": "fault",
    "audits": "fault",
    "recovery_p90": "fault",
    "download": "join",
    "utilization": "peak",
    "device_memory": "gpu",
}
"""Those that may give nothing while a swarm trains, and why. All others must give series then (`make dashboards`)."""

EXPRESSIONS: Mapping[str, str] = {**OF_SWARM, **OF_SEEDS, **OF_NODE}
