"""The short form of the chaos suite: real daemons, each fault shown to have fired, every demand held."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.lab import Lab
from tests.chaos.report import Verdict, markdown, write_report
from tests.chaos.scenarios import SCENARIOS

WITH_THE_TESTS = ("kills", "hostile")
"""Real daemons are killed in `tests/test_local_swarm.py` and `tests/daemons` as well, nodes that freeze or lie are in
the schedules in virtual time (`tests/hunt`). Others take longer, need root, or only say something after minutes: `make
chaos` runs all."""


@pytest.mark.daemons
@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", WITH_THE_TESTS)
async def test_a_scenario_holds(name: str, tmp_path: Path, temporary: Path) -> None:
    """Every demand of the scenario, after faults that took effect."""
    verdict = await SCENARIOS[name](Lab(tmp_path, seed=0, long=False))
    assert verdict.passed, verdict.complaint()


def test_a_verdict_without_a_fault_that_fired_does_not_pass(tmp_path: Path) -> None:
    """A verdict with nothing demanded does not pass either; the report says which demand failed."""
    verdict = Verdict("made up")
    assert not verdict.passed
    verdict.demand("all is well", held=True, found="it is")
    assert not verdict.passed
    verdict.fault(1.0, "kill -9 of somebody", "")
    assert not verdict.passed
    assert "did not fire" in verdict.complaint()
    verdict.faults.clear()
    verdict.fault(1.0, "kill -9 of somebody", "it died")
    assert verdict.passed
    verdict.demand("nothing is lost", held=False, found="3 samples")
    assert not verdict.passed
    assert "nothing is lost: 3 samples" in verdict.complaint()
    assert "**not held**: nothing is lost (3 samples)" in markdown([verdict], "made up")
    write_report(tmp_path, [verdict], "made up", {"seed": 0})
    assert '"passed": false' in (tmp_path / "report.json").read_text()
