"""A node that has moved: what its metrics, its log and the summary say of it."""

from __future__ import annotations

import logging

from noloco_node.telemetry.events import NodeReassigned
from noloco_node.telemetry.logging import NodeLog, describe
from noloco_node.telemetry.metrics import Metrics
from tests.telemetry.made_events import account, started

MOVED = NodeReassigned(
    from_stage=0, stage=1, why="lost", origin="standby", clock=5e4, parameters=1_234, seconds=2.5, time=1100.0
)


def test_metrics_follow_a_move_and_name_the_stage_that_is_waited_for() -> None:
    """The gauge goes back when the stage is served again."""
    metrics = Metrics()
    value = metrics.registry.get_sample_value
    metrics.observe(started("s0-r0"))
    for missing in ([1], []):
        metrics.observe(account(missing_stages=missing))
        assert value("noloco_stage_missing", {"stage": "1"}) == float(1 in missing)
        assert value("noloco_stage_missing", {"stage": "0"}) == 0.0
    metrics.observe(MOVED)
    assert value("noloco_reassignments_total", {"why": "lost"}) == 1.0
    assert value("noloco_stage_parameters") == 1234.0
    info = {"version": "0.1.0", "run_id": "0123456789abcdef0123456789abcdef", "stage": "1", "device": ""}
    assert value("noloco_node_info", info) == 1.0


def test_the_log_says_where_it_went_and_with_which_weights() -> None:
    """From then on its lines bear the new stage."""
    log = NodeLog()
    log.observe(started("s0-r0"))
    log.observe(MOVED)
    assert " stage 1," in log.label
    level, line = describe(MOVED)
    assert level == logging.INFO
    assert "from stage 0 to stage 1" in line
    assert "a copy that a node of another stage kept" in line
