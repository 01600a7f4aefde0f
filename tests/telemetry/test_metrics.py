"""Metrics say what the events say, at an address that is really served, with labels that cannot explode."""

from __future__ import annotations

import asyncio
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import pytest

from noloco_node.directory.store import NoRoom
from noloco_node.pipeline.messages import Meter
from noloco_node.sizing.devices import peak_of
from noloco_node.telemetry.events import Doing, NodeReassigned, OuterStep, P2pdRestarted, Warned
from noloco_node.telemetry.memory_limit import MemoryUse
from noloco_node.telemetry.metrics import HOP_SECONDS, TABLE, Metrics
from noloco_node.telemetry.of_node import free_bytes
from tests.telemetry import made_events as made


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    """The sample of that name and labels."""
    return metrics.registry.get_sample_value(name, labels)


def test_metrics_follow_the_events_of_a_whole_run() -> None:
    """Each figure after all events of one node."""
    metrics = Metrics()
    for event in (*made.node_events("s0-r0"), P2pdRestarted(cause="frozen", restarts=1)):
        metrics.observe(event)
    assert value(metrics, "noloco_p2pd_restarts_total", cause="frozen") == 1
    assert value(metrics, "noloco_inner_steps_total") == 60
    assert value(metrics, "noloco_tokens_total") == 60 * made.TOKENS
    assert value(metrics, "noloco_trained_tokens") == 60 * 2 * made.TOKENS
    assert value(metrics, "noloco_training_loss") == pytest.approx(made.loss_at(60 * 1024))
    assert value(metrics, "noloco_validation_loss") == pytest.approx(made.loss_at(60 * 1024) + 0.1)
    assert value(metrics, "noloco_outer_steps_total", kind="paired") == 6
    assert value(metrics, "noloco_replica_divergence") == made.SPREADS[-1]
    assert value(metrics, "noloco_microbatches_total", outcome="trained") == 58
    assert value(metrics, "noloco_microbatches_held") == 2
    assert value(metrics, "noloco_refusals_total", reason="busy") == 5
    assert value(metrics, "noloco_bytes_total", kind="exchange", direction="sent") == 500
    assert value(metrics, "noloco_bytes_total", kind="gradients", direction="received") == 900
    assert value(metrics, "noloco_live_replicas", stage="1") == 2
    assert value(metrics, "noloco_event_loop_lag_seconds") == 0.02
    assert value(metrics, "noloco_up") == 0


async def test_what_the_process_holds_is_counted_when_asked(tmp_path: Path) -> None:
    """Memory and descriptors, and one task more while one more runs: counted on the endpoint's thread as in a node."""
    metrics = Metrics()
    metrics.watch_process(
        asyncio.get_running_loop(), lambda: MemoryUse(1000, 400, "a test"), lambda: free_bytes(tmp_path)
    )

    async def tasks() -> float:
        return await asyncio.to_thread(value, metrics, "noloco_tasks") or 0.0

    before = await tasks()
    waiting = asyncio.create_task(asyncio.Event().wait())
    assert await tasks() == before + 1 >= 2
    waiting.cancel()
    assert (value(metrics, "noloco_threads") or 0) >= 1
    assert (value(metrics, "process_resident_memory_bytes") or 0) > 1e7
    assert (value(metrics, "process_open_fds") or 0) > 3
    assert value(metrics, "noloco_memory_limit_bytes") == 1000
    assert value(metrics, "noloco_memory_used_bytes") == 400
    assert value(metrics, "noloco_disk_free_bytes") == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.1)
    assert math.isnan(free_bytes(tmp_path / "gone")), "a folder that was removed under a node ends no scrape"


def test_exchanges_and_hops_are_spread_over_buckets() -> None:
    """Duration and payload of each paired step; hops as the node's own meter counted them, its beginnings aside."""
    metrics = Metrics()
    metrics.observe(made.started("s0-r0").model_copy(update={"codec": "int4"}))
    for seconds in (0.3, 0.4, 7.0):
        metrics.observe(made.outer_step(1, "s0-r1", seconds=seconds))
    metrics.observe(made.outer_step(1, None, kind="no_partner", seconds=0.1))
    meter = Meter(HOP_SECONDS)
    for seconds in (0.01, 0.02, 99.0):
        meter.add(seconds)
    metrics.observe(made.account(hop_seconds=meter.distribution()))
    for le, count in (("0.25", 0), ("0.5", 2), ("10.0", 3), ("+Inf", 3)):
        assert value(metrics, "noloco_outer_step_duration_seconds_bucket", le=le) == count
    assert value(metrics, "noloco_outer_step_bytes_sum", codec="int4", direction="sent") == 3 * 3_200_000
    for le, count in (("0.01", 1), ("0.025", 2), ("30.0", 2), ("+Inf", 3)):
        assert value(metrics, "noloco_hop_duration_seconds_bucket", le=le) == count
    assert value(metrics, "noloco_hop_duration_seconds_sum") == pytest.approx(99.03)


def test_idle_time_is_put_down_to_what_the_node_waited_for() -> None:
    """With microbatches of its own elsewhere, without any, and while a stage has no replica; busy time is none."""
    metrics, since = Metrics(), {"since": 0.0, "detail": "training"}
    metrics.observe(made.account(time=100.0, busy_seconds=10.0))
    metrics.observe(made.account(time=102.0, busy_seconds=11.5, in_hand=3))
    metrics.observe(made.account(time=104.0, busy_seconds=11.5, in_hand=0))
    metrics.observe(Doing.model_validate({"what": "waiting_for_peers", **since}))
    metrics.observe(made.account(time=110.0, busy_seconds=11.5))
    idle = [("answers", 0.5), ("microbatches", 2.0), ("no_replica", 6.0)]
    assert [(why, value(metrics, "noloco_device_idle_seconds_total", reason=why)) for why, _ in idle] == idle


def test_work_of_the_model_is_held_against_the_peak_of_its_device_where_that_is_known() -> None:
    """512 tokens a second of 2 MFLOP each on a device of 10 GFLOP/s, over the last minute; none without a peak."""
    known = {"flop_per_token": 2e6, "peak_flop_per_second": 1e10}
    for peak in (known, {"flop_per_token": 2e6}):
        metrics = Metrics()
        metrics.observe(made.started("s0-r0").model_copy(update=peak))
        for second in range(1, 200):
            metrics.observe(made.inner_step(second))
            metrics.observe(made.account(time=1000.0 + second))
        assert value(metrics, "noloco_model_flop_total") == pytest.approx(199 * 512 * 2e6)
        ratio = value(metrics, "noloco_model_flop_utilization_ratio")
        assert ratio == (pytest.approx(0.1024) if "peak_flop_per_second" in peak else None)


@pytest.mark.parametrize(
    ("device", "precision", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4e12),
        ("NVIDIA A10", "bf16", 125e12),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "fp32", 44.1e12),
        ("Tesla V100-PCIE-16GB", "fp32", 14e12),
        ("rtx 4090", "fp32", 82.6e12),
        ("AMD Instinct MI300X", "bf16", 1307.4e12),
        ("AMD Radeon RX 7900 XT", "bf16", 103e12),
        ("AMD Radeon RX 7900 GRE", "bf16", None),
        ("NVIDIA L40S", "bf16", 362e12),
        ("NVIDIA RTX 6000 Ada Generation", "fp32", 182.1e12),
        ("NVIDIA GeForce RTX 5070 Ti", "bf16", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("cpu", "fp32", None),
    ],
)
def test_the_peak_of_a_device_is_known_by_its_name_or_not_at_all(
    device: str, precision: str, peak: float | None
) -> None:
    """Kin have other names and other peaks."""
    assert peak_of(device, precision) == peak


def test_totals_of_accounts_become_rises_of_counters() -> None:
    """Two accounts with running totals do not add up to their sum."""
    metrics = Metrics()
    metrics.observe(made.account(drawn=10, refused={"busy": 2}, busy_by_work={"step": 1.0, "forward": 0.5}))
    metrics.observe(made.account(drawn=25, refused={"busy": 2, "draining": 1}, busy_by_work={"step": 1.5}))
    assert value(metrics, "noloco_microbatches_total", outcome="drawn") == 25
    assert value(metrics, "noloco_refusals_total", reason="busy") == 2
    assert value(metrics, "noloco_refusals_total", reason="draining") == 1
    assert value(metrics, "noloco_device_busy_seconds_total", work="step") == 1.5
    assert value(metrics, "noloco_device_busy_seconds_total", work="forward") == 0.5


def test_what_an_earlier_life_counted_is_not_counted_again() -> None:
    """The books of a node that went on from a checkpoint begin where they were; its counters begin at 0."""
    metrics = Metrics()
    metrics.observe(made.started("s0-r0").model_copy(update={"origin": "checkpoint", "resumed": True}))
    for drawn in (100, 107):
        metrics.observe(made.account(drawn=drawn))
    assert value(metrics, "noloco_microbatches_total", outcome="drawn") == 7


def test_checkpoints_are_counted_by_outcome() -> None:
    """Written and failed ones, what they held up, and when the last one was good."""
    metrics = Metrics()
    for error in ("", "No space left on device", ""):
        metrics.observe(made.checkpoint(error))
    assert value(metrics, "noloco_checkpoints_total", outcome="written") == 2
    assert value(metrics, "noloco_checkpoints_total", outcome="failed") == 1
    assert value(metrics, "noloco_checkpoint_held_seconds_total") == pytest.approx(0.03)
    assert value(metrics, "noloco_checkpoint_last_timestamp_seconds") == 1000.0


def test_no_free_text_and_no_peer_id_becomes_a_label() -> None:
    """Reasons are cut to their leading word: strangers cannot make time series here."""
    metrics = Metrics()
    metrics.observe(made.started("s0-r0"))
    for number in range(50):
        peer = f"12D3KooW{number}"
        metrics.observe(made.outer_step(1, peer, kind="aborted", reason=f"busy: peer {peer} is full"))
        metrics.observe(made.outer_step(1, peer, kind="aborted", reason=f"{peer} went away"))
        metrics.observe(made.outer_step(1, peer))
    assert value(metrics, "noloco_outer_aborts_total", reason="busy") == 50
    assert value(metrics, "noloco_outer_aborts_total", reason="other") == 50
    labels = {text for family in metrics.registry.collect() for row in family.samples for text in row.labels.values()}
    assert not [text for text in labels if "12D3" in text]


def test_the_page_is_in_the_format_that_is_asked_for() -> None:
    """Prometheus' text, or OpenMetrics."""
    metrics = Metrics()
    metrics.observe(made.inner_step(1))
    plain = metrics.page({})
    assert b"noloco_inner_steps_total 1.0" in plain.body
    assert plain.content_type.startswith("text/plain")
    assert metrics.page({"accept": "application/openmetrics-text; version=1.0.0"}).body.endswith(b"# EOF\n")


def test_metrics_follow_a_move_and_name_the_stage_that_is_waited_for() -> None:
    """The gauge goes back when the stage is served again."""
    metrics, moved = Metrics(), made.moved(time=1100.0, from_stage=0, stage=1)
    value = metrics.registry.get_sample_value
    metrics.observe(made.started("s0-r0"))
    for missing in ([1], []):
        metrics.observe(made.account(missing_stages=missing))
        assert value("noloco_stage_missing", {"stage": "1"}) == float(1 in missing)
        assert value("noloco_stage_missing", {"stage": "0"}) == 0.0
    metrics.observe(moved)
    assert value("noloco_reassignments_total", {"why": "lost"}) == 1.0
    assert value("noloco_stage_parameters") == 1.0
    info = {"version": "0.1.0", "run_id": "0123456789abcdef0123456789abcdef", "stage": "1", "device": ""}
    assert value("noloco_node_info", info) == 1.0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("noloco_checkpoints_total", ("written", "failed")),
        ("noloco_outer_steps_total", get_args(OuterStep.model_fields["kind"].annotation)),
        ("noloco_reassignments_total", get_args(NodeReassigned.model_fields["why"].annotation)),
        ("noloco_p2pd_restarts_total", get_args(P2pdRestarted.model_fields["cause"].annotation)),
        ("noloco_directory_no_room_total", tuple(NoRoom)),
        ("noloco_warnings_total", get_args(Warned.model_fields["what"].annotation)),
    ],
)
def test_the_first_rise_of_a_counter_is_a_rise(name: str, said: Sequence[str]) -> None:
    """What can only be one of a few things is there at 0 from the start: Prometheus sees no rise in what appears."""
    metric = TABLE[name]
    assert {*metric.known, "aborted"} == {*said, "aborted"}
    assert {value(Metrics(), name, **{metric.labels[0]: each}) for each in metric.known} == {0.0}
