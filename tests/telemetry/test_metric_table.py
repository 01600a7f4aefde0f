"""The table of metrics: what is documented is what is scraped, by Prometheus' conventions, and a running node feeds it.

After a change: `make metrics`, which copies `telemetry/metrics.md`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

from prometheus_client.parser import text_string_to_metric_families

from noloco_node.config.run_spec import LimitsSpec, OuterSpec
from noloco_node.telemetry.events import AnyEvent, WarningKind
from noloco_node.telemetry.metrics import SEED_TABLE, TABLE, TEXT, Metrics
from tests.worlds import micro_spec, run_to_the_end, world

QUICK = LimitsSpec(record_seconds=1, grace_seconds=0.5, chunk_bytes=16384)
PAGE = Path(__file__).parent.parent.parent / "docs" / "metrics.md"

OF_THE_DAEMON = {
    "noloco_node_info",
    "noloco_up",
    "noloco_stage_parameters",
    "noloco_state_download_ratio",
    "noloco_reassignments_total",
    "noloco_warnings_total",
    "noloco_nearby_bytes_total",
    "noloco_p2pd_restarts_total",
    "noloco_model_flop_total",
    "noloco_model_flop_utilization_ratio",
    "noloco_memory_limit_bytes",
    "noloco_memory_used_bytes",
    "noloco_disk_free_bytes",
    "noloco_tasks",
    "noloco_threads",
    "noloco_checkpoints_total",
    "noloco_checkpoint_held_seconds_total",
    "noloco_checkpoint_last_timestamp_seconds",
}
"""Fed by a whole node, beside its replica: here they stand still."""
MAY_BE_SILENT = {
    "noloco_inner_steps_skipped_total",
    "noloco_waiting_seconds",
    "noloco_stage_missing",
    "noloco_offences_total",
    "noloco_bans_total",
    "noloco_banned_peers",
    "noloco_set_aside_peers",
    "noloco_outer_aborts_total",
    "noloco_outer_steps_clipped_total",
    "noloco_refusals_total",
    "noloco_audits_total",
    "noloco_bounded_total",
    "noloco_directory_no_room_total",
    "noloco_microbatches_held",
    "noloco_microbatches_in_flight",
    "noloco_device_queue",
    "noloco_event_loop_lag_seconds",
    "noloco_device_memory_bytes",
}
"""At 0 or absent where nothing goes wrong, nothing is under way at the last look, and no GPU is there."""


def scraped(metrics: Metrics) -> dict[str, float]:
    """The largest value of each metric of the table, as a scraper reads it; a histogram's count."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(metrics.page({}).body.decode()):
        for sample in family.samples:
            name = sample.name.removesuffix("_count") if family.type == "histogram" else sample.name
            if name in TABLE:
                found[name] = max(found.get(name, 0.0), abs(sample.value))
    return found


def test_the_document_is_the_table() -> None:
    """To the letter, and no row of it is lost."""
    assert PAGE.read_text(encoding="utf-8") == TEXT, "run `make metrics`"
    assert len(TABLE) + len(SEED_TABLE) == TEXT.count("\n| `noloco_")


def test_a_metric_comes_from_a_field_that_the_event_has() -> None:
    """A name that is wrong in the table fails here, and not at a node's first such event."""
    events = {kind.model_fields["event"].default: kind for kind in get_args(get_args(AnyEvent)[0])}
    sources = [source.split(".") for metric in TABLE.values() for source in metric.sources]
    assert len(sources) > 35
    for event, *path in sources:
        kind: Any = events[event]
        for name in path:
            fields = {field.serialization_alias or own: field for own, field in kind.model_fields.items()}
            assert name in fields, (event, name)
            kind = fields[name].annotation
    assert set(TABLE["noloco_warnings_total"].known) == set(get_args(WarningKind))


def test_names_follow_prometheus_conventions() -> None:
    """Base units as suffixes, `_total` for counters alone, and no second metric of one name."""
    assert {metric.kind for metric in TABLE.values()} == {"counter", "gauge", "histogram", "info"}
    assert not TABLE.keys() & SEED_TABLE.keys()
    for name, metric in {**TABLE, **SEED_TABLE}.items():
        assert re.fullmatch(r"noloco_[a-z][a-z0-9_]*", name)
        assert name.endswith("_total") == (metric.kind == "counter"), name
        assert name.endswith("_info") == (metric.kind == "info"), name
        bare = name.removesuffix("_total")
        unit = metric.unit.partition(" ")[0]
        if unit in ("seconds", "bytes", "ratio"):
            assert bare.endswith(f"_{unit}"), name
        assert not bare.endswith(("_count", "_sum", "_bucket", "_ms", "_created")), name
        assert bool(metric.buckets) == (metric.kind == "histogram"), name
        assert list(metric.buckets) == sorted(set(metric.buckets)), name


OF_SHARED_TEXTS = {"noloco_text_blocks_total"}
OF_MIXTURES = {"noloco_validation_source_loss"}
OF_TEXTS_ON_A_DISK = {"noloco_data_wait_seconds_total"}


async def test_a_swarm_that_trains_feeds_every_metric_of_a_replica() -> None:
    """What a stage-0 node of a healthy swarm says, as a scraper reads it; nothing that is not in the table."""
    outer = OuterSpec(inner_steps=4, alpha=0.5, beta=0.7)
    async with world(micro_spec(steps=16, outer=outer, limits=QUICK), replicas=2) as made:
        await run_to_the_end(made)
        metrics = Metrics()
        for event in made.events[0]:
            metrics.observe(event)
        made.replicas[0].activity.say("training", "training")
        metrics.observe(made.events[0][-1])
    found = scraped(metrics)
    silent = {name for name in TABLE if not found.get(name)}
    elsewhere = OF_SHARED_TEXTS | OF_MIXTURES | OF_TEXTS_ON_A_DISK
    unknown = silent - OF_THE_DAEMON - MAY_BE_SILENT - elsewhere
    assert not unknown, (
        f"no event of a healthy swarm sets {unknown}: name them in MAY_BE_SILENT, or say when they are set"
    )
    body = metrics.page({"accept": "application/openmetrics-text"}).body.decode()
    assert "_created" not in body
    families = {line.split()[2] for line in body.splitlines() if line.startswith("# TYPE")}
    assert families <= {name.removesuffix("_total").removesuffix("_info") for name in TABLE}
