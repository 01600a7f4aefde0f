"""Every metric of a node, and of a seed: name, type, unit, labels and meaning. `docs/metrics.md` is made from this."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from noloco_node.telemetry.warning_kinds import WarningKind

_Kind = Literal["counter", "gauge", "histogram", "info"]

HOP_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""The bounds of the buckets of `noloco_hop_duration_seconds`."""
EXCHANGE_SECONDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
WARNINGS: tuple[str, ...] = get_args(WarningKind)
ROUNDS = ("paired", "alone", "caught_up")
BLOCK_OUTCOMES = ("claimed", "finished", "given_back", "yielded")
NO_ROOM = ("signer", "places", "bringer", "checks")
PAYLOAD_BYTES = (1e4, 1e5, 1e6, 1e7, 3e7, 1e8, 3e8, 1e9, 3e9, 1e10)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `unit` is Prometheus' base unit, or what is counted."""

    name: str
    """The name as it is scraped; that of a histogram without `_bucket`, `_sum` and `_count`."""
    kind: _Kind
    unit: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds, of a histogram."""
    known: tuple[str, ...] = ()
    """Values of its one label that are there from the start, at 0, so that the first rise is one."""


def _info(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, "info", "", text, labels)


def _counter(name: str, unit: str, text: str, *labels: str, known: tuple[str, ...] = ()) -> Metric:
    return Metric(name, "counter", unit, text, labels, known=known)


def _gauge(name: str, unit: str, text: str, *labels: str) -> Metric:
    return Metric(name, "gauge", unit, text, labels)


def _histogram(name: str, unit: str, text: str, buckets: tuple[float, ...], *labels: str) -> Metric:
    return Metric(name, "histogram", unit, text, labels, buckets)


GROUPS: dict[str, tuple[Metric, ...]] = {
    "The node": (
        _info("noloco_node_info", "Version, run and stage of this node", "version", "run_id", "stage", "device"),
        _gauge("noloco_up", "1 or 0", "1 from the start until the node ends in order"),
        _gauge("noloco_stage_parameters", "parameters", "Parameters of this node's stage"),
        _gauge("noloco_doing", "1 or 0", "1 for what the node does now, 0 for what it did before", "what"),
        _gauge("noloco_waiting_seconds", "seconds", "How long the node has waited; 0: it does not"),
        _gauge("noloco_state_download_ratio", "ratio", "Share of a stage peer's state that has come"),
        _counter("noloco_moves_total", "moves", "Moves of this node to another stage", "why", known=("poor", "lost")),
        _counter(
            "noloco_warnings_total", "warnings", "Warnings for the user that runs the node", "what", known=WARNINGS
        ),
    ),
    "Training": (
        _counter("noloco_inner_steps_total", "inner steps", "Inner steps taken"),
        _counter("noloco_inner_steps_skipped_total", "inner steps", "Inner steps left out: gradient not finite"),
        _counter("noloco_tokens_total", "tokens", "Tokens trained by this replica"),
        _gauge("noloco_clock_tokens", "tokens", "Clock of this replica, in swarm tokens"),
        _gauge("noloco_target_tokens", "tokens", "Clock at which the run ends"),
        _gauge("noloco_training_loss", "nats/token", "Loss of the last inner step"),
        _gauge("noloco_validation_loss", "nats/token", "Last held-out loss"),
        _gauge("noloco_validation_source_loss", "nats/token", "Last held-out loss by source of a mixture", "source"),
        _gauge("noloco_learning_rate", "1", "Inner learning rate"),
        _gauge("noloco_gradient_norm", "1", "Gradient norm of the stage before clipping"),
        _counter("noloco_data_wait_seconds_total", "seconds", "Time stage 0 waited for windows of its text"),
        _counter(
            "noloco_text_blocks_total", "blocks", "Blocks of a shared text by outcome", "outcome", known=BLOCK_OUTCOMES
        ),
        _counter(
            "noloco_text_repeated_windows_total", "windows", "Read here, then left to a replica that reads them too"
        ),
    ),
    "Microbatches": (
        _counter("noloco_microbatches_total", "microbatches", "Microbatches by outcome", "outcome"),
        _gauge("noloco_microbatches_held", "microbatches", "Drawn, and neither trained nor dropped yet"),
        _gauge("noloco_microbatches_in_flight", "microbatches", "In this node's hands: own on stage 0, else others'"),
        _histogram("noloco_hop_duration_seconds", "seconds", "From sending a microbatch to its answer", HOP_SECONDS),
        _counter("noloco_refusals_total", "refusals", "Refusals given", "reason"),
    ),
    "Outer steps": (
        _counter("noloco_outer_rounds_total", "outer steps", "Outer steps by kind", "kind", known=ROUNDS),
        _counter(
            "noloco_outer_aborts_total", "outer steps", "Outer steps that came to nothing, by what failed", "reason"
        ),
        _gauge("noloco_outer_last_timestamp_seconds", "seconds since 1970", "When the last one was committed"),
        _gauge("noloco_spread", "1", "Estimated variance of the weights across replicas, per weight"),
        _gauge("noloco_difference_norm", "1", "Norm of the last difference to a partner"),
        _counter("noloco_clipped_exchanges_total", "exchanges", "Exchanges whose difference was clipped"),
        _histogram(
            "noloco_exchange_duration_seconds", "seconds", "From proposal to commit, of paired steps", EXCHANGE_SECONDS
        ),
        _histogram(
            "noloco_exchange_payload_bytes",
            "bytes",
            "What a paired step sent and received",
            PAYLOAD_BYTES,
            "codec",
            "direction",
        ),
        _counter("noloco_exchange_held_seconds_total", "seconds", "Time outer steps held the device"),
    ),
    "Peers": (
        _gauge("noloco_live_replicas", "nodes", "Live nodes as this one sees them", "stage"),
        _gauge("noloco_stage_missing", "1 or 0", "1 while a stage has no replica and is waited for", "stage"),
        _gauge("noloco_directory_records", "records", "Live records of other nodes in the directory"),
        _counter(
            "noloco_directory_no_room_total",
            "records",
            "Records of others that had no room here, or gave way, by what was full",
            "reason",
            known=NO_ROOM,
        ),
        _gauge("noloco_directory_age_seconds", "seconds", "Since the directory was last read"),
        _counter("noloco_bytes_total", "bytes", "Traffic by what it carries and direction", "kind", "direction"),
        _counter("noloco_offences_total", "offences", "Offences of peers", "reason"),
        _counter("noloco_bans_total", "bans", "Bans of peers by the offence that brought them", "reason"),
        _gauge("noloco_banned_peers", "peers", "Peers that are banned here now"),
        _counter("noloco_audits_total", "microbatches", "Audited microbatches, and peers found to lean", "finding"),
        _gauge("noloco_set_aside_peers", "peers", "Next-stage peers that audits have gone against"),
        _counter("noloco_bounded_total", "microbatches", "What went beyond a bound on norms or losses", "what"),
        _counter(
            "noloco_p2pd_restarts_total", "restarts", "Restarts of p2pd by cause", "cause", known=("died", "frozen")
        ),
    ),
    "Device and machine": (
        _counter("noloco_device_busy_seconds_total", "seconds", "Time the compute thread has worked", "work"),
        _counter("noloco_device_idle_seconds_total", "seconds", "Time it has not, by what it waited for", "reason"),
        _gauge("noloco_device_queue", "calls", "Calls that wait for the device"),
        _counter("noloco_model_flop_total", "FLOP", "Work of the model on trained tokens: 6 a weight, and attention"),
        _gauge("noloco_model_flop_utilization_ratio", "ratio", "Model FLOP/s over the peak (MFU), if that is known"),
        _gauge("noloco_device_memory_bytes", "bytes", "Memory of a GPU: allocated, reserved, free, total", "what"),
        _gauge("noloco_memory_limit_bytes", "bytes", "What this process may have of the machine's memory"),
        _gauge("noloco_memory_used_bytes", "bytes", "What is used of that limit, file cache that can go aside"),
        _gauge("noloco_disk_free_bytes", "bytes", "What this node may still write on the disk of its run folder"),
        _gauge("noloco_event_loop_lag_seconds", "seconds", "Worst event loop lag since the last account"),
        _gauge("noloco_tasks", "tasks", "Tasks of the event loop"),
        _gauge("noloco_threads", "threads", "Python threads of this process"),
    ),
    "Checkpoints": (
        _counter(
            "noloco_checkpoints_total", "checkpoints", "Checkpoints by outcome", "outcome", known=("written", "failed")
        ),
        _counter("noloco_checkpoint_held_seconds_total", "seconds", "Time checkpoints held the device"),
        _gauge("noloco_checkpoint_last_timestamp_seconds", "seconds since 1970", "When the last one was written"),
    ),
}

SEED_GROUPS: dict[str, tuple[Metric, ...]] = {
    "The seed": (
        _info("noloco_seed_info", "Version of the seed, and the run that it shows", "version", "run_id"),
        _gauge("noloco_seed_records", "records", "Signed records that it holds, of whatever run"),
        _gauge("noloco_seed_look_age_seconds", "seconds", "Since it last looked at the swarm"),
    ),
    "The swarm": (
        _gauge("noloco_swarm_nodes", "nodes", "Nodes that answer, by what they say they do", "stage", "state"),
        _gauge("noloco_swarm_claimed_nodes", "nodes", "Live records of peers that do not answer", "stage"),
        _gauge("noloco_swarm_stage_missing", "1 or 0", "1 while no node that answers serves a stage", "stage"),
        _gauge(
            "noloco_swarm_capacity_tokens_per_second",
            "tokens/second",
            "What the nodes that serve a stage say they could train, nobody's word above 8 median nodes",
            "stage",
        ),
        _gauge("noloco_swarm_stage_clock_tokens", "tokens", "Median clock of the nodes that serve a stage", "stage"),
        _gauge("noloco_swarm_stage_lag_tokens", "tokens", "Last node of a stage, behind the swarm's clock", "stage"),
        _gauge("noloco_swarm_version_nodes", "nodes", "Nodes that answer, by version: 8 names, and other", "version"),
        _gauge("noloco_swarm_clock_tokens", "tokens", "The swarm's clock: the median of the first stage's nodes"),
        _gauge("noloco_swarm_target_tokens", "tokens", "Clock at which the run ends"),
        _gauge("noloco_swarm_tokens_per_second", "tokens/second", "Of the whole swarm, by the motion of its clocks"),
        _gauge("noloco_swarm_training_loss", "nats/token", "Median of what the last stage's nodes say"),
        _gauge("noloco_swarm_validation_loss", "nats/token", "Median of what the first stage's nodes say"),
        _gauge("noloco_swarm_spread", "squared weight", "Variance across replicas, median of what they say", "stage"),
        _gauge("noloco_swarm_over", "1 or 0", "1 once the run has come to its end"),
        _counter("noloco_swarm_joins_total", "nodes", "Nodes that came, those found at the first look included"),
        _counter("noloco_swarm_departures_total", "nodes", "Nodes that went, with a farewell or without", "how"),
        _counter("noloco_swarm_moves_total", "moves", "Moves of nodes to another stage"),
    ),
}
"""The metrics of a seed that knows its run: the whole swarm, as far as its nodes answer. Nothing there is scraped from
a node."""

TABLE: dict[str, Metric] = {metric.name: metric for group in GROUPS.values() for metric in group}
SEED_TABLE: dict[str, Metric] = {metric.name: metric for group in SEED_GROUPS.values() for metric in group}


def markdown() -> str:
    """The table as a document."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Metrics of a node"
    yield ""
    yield "`--metrics-port N` serves them at `/metrics`, in the formats of Prometheus and OpenMetrics."
    yield "This page is made from `telemetry/metric_table.py`; after a change there: `make metrics`."
    yield ""
    yield "Labels are bounded: none is a peer, an address or a free text. Counters begin at 0 with the process,"
    yield "also by those values of a label that are named here. All else that has labels, and gauges, appear with their"
    yield "first value; most change every two seconds."
    yield from _rows(GROUPS)
    yield from ("", "# Metrics of a seed", "")
    yield "`noloco-node seed --metrics-port N` shows a whole swarm, strangers' nodes included, from the directory and"
    yield "from what its nodes answer. `stage` is one of the run's stages, `state` what a node says of itself, `how` is"
    yield "`left` or `lost`. Of the swarm there is nothing where the seed knows no run, and before its first look."
    yield from _rows(SEED_GROUPS)
    yield from ("", "## Of the process", "")
    yield "Of nodes and seeds alike:"
    yield "`process_cpu_seconds_total`, `process_resident_memory_bytes`, `process_virtual_memory_bytes`,"
    yield "`process_open_fds`, `process_max_fds`, `process_start_time_seconds`, as other clients have them."


def _rows(groups: Mapping[str, Sequence[Metric]]) -> Iterator[str]:
    for title, metrics in groups.items():
        yield from ("", f"## {title}", "", "| name | type | unit | labels | meaning |", "|---|---|---|---|---|")
        for metric in metrics:
            labels = ", ".join(f"`{label}`" for label in metric.labels) or "–"
            bounds = f"; buckets up to {', '.join(f'{b:g}' for b in metric.buckets)}" if metric.buckets else ""
            known = f": {', '.join(metric.known)}" if metric.known else ""
            meaning = metric.help + known + bounds
            yield f"| `{metric.name}` | {metric.kind} | {metric.unit or '–'} | {labels} | {meaning} |"
