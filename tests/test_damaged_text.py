"""A shard of the text that turns out to be damaged: the user finds it wherever they look."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from noloco_node.diagnostics.status import status_lines
from noloco_node.report.figures import faults
from noloco_node.report.folder import read_folder
from noloco_node.telemetry.events import Account, EventFile, Warned
from noloco_node.telemetry.logging import describe
from noloco_node.telemetry.metrics import Metrics
from tests.telemetry import made_events
from tests.worlds import micro_spec, world

DETAIL = "the rest of '04.jsonl.gz' is passed over (1 so far), and training goes on with other text: it is cut off"
WARNED = Warned(time=1060.0, what="text_damaged", detail=DETAIL)


async def test_the_books_warn_of_each_shard_that_could_not_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the next account; not again with the one after it."""
    told = [[DETAIL], list[str]()]
    async with world(micro_spec()) as made:
        head = made.replicas[0]
        samples = head.pipeline._samples
        assert samples is not None
        monkeypatch.setattr(head.pipeline, "_samples", replace(samples, passed_over=lambda: told.pop(0)))
        head.books.write()
        head.books.write()
    found = [event for event in made.events[0] if isinstance(event, (Warned, Account))]
    assert [type(event) for event in found] == [Warned, Account, Account]
    assert found[0].model_copy(update={"time": WARNED.time}) == WARNED


def test_it_stands_in_the_log_the_metrics_the_status_and_the_report(tmp_path: Path) -> None:
    """It stands there for this life of the node; another warning after it does not hide it."""
    assert describe(WARNED) == (logging.WARNING, DETAIL)
    metrics = Metrics()
    metrics.observe(WARNED)
    assert metrics.registry.get_sample_value("noloco_warnings_total", {"what": "text_damaged"}) == 1.0
    diary = EventFile(tmp_path / "events.jsonl")
    later = Warned(time=1070.0, what="memory_short", detail="another")
    for event in (made_events.started("s0-r0"), made_events.inner_step(60), WARNED, later):
        diary.write(event)
    assert f"  text              2 min ago: {DETAIL}" in status_lines(tmp_path, 1180.0)
    told = read_folder(tmp_path, 1180.0)
    assert [(row.what, row.times) for row in faults(told) if "text" in row.what] == [
        ("shards of the text passed over", 1)
    ]
    assert DETAIL in [moment.text for chronicle in told.chronicles for moment in chronicle.moments]
    diary.write(made_events.started("s0-r0").model_copy(update={"time": 1100.0}))
    diary.close()
    assert not any("passed over" in line for line in status_lines(tmp_path, 1180.0))
