"""The short form of the chaos suite: real daemons, each fault shown to have fired, every demand held. Its instruments
measure what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from noloco_node.launch.local_swarm import Observer, SwarmNode
from tests.chaos.lab import Lab
from tests.chaos.observe import rate, seconds_to_recover
from tests.chaos.report import Verdict, markdown, write_report
from tests.chaos.scenarios import SCENARIOS
from tests.chaos.vitals import Vitals, growths
from tests.telemetry import made_events as made

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


def _node(*tokens_at: tuple[float, int]) -> SwarmNode:
    node = SwarmNode("s0-n0", 0, Path("nowhere"), Observer())
    node.events += [made.inner_step(1, time=time, tokens=tokens) for time, tokens in tokens_at]
    return node


def test_throughput_and_recovery_follow_from_the_events() -> None:
    """A hundred tokens a second, nothing for four seconds, then a hundred again."""
    node = _node(*((float(second), 100) for second in range(20) if not 10 <= second < 14))
    assert rate([node], 0, 10) == 100
    assert seconds_to_recover([node], 10.0, 20.0, wanted=90) == pytest.approx(3.25)
    assert seconds_to_recover([node], 10.0, 16.0, wanted=90) is None


def test_what_creeps_is_not_flat() -> None:
    """One descriptor a look is a leak; a fixed number is none, and what warms up at first is forgiven."""
    steady = [Vitals(time, 100 + 50 * (time > 2), 40, 10, 30, 50, 20) for time in range(50)]
    assert all(growth.flat for growth in growths(steady))
    leaking = [Vitals(time, 100, 40 + time, 10, 30, 50, 20) for time in range(50)]
    assert [growth.name for growth in growths(leaking) if not growth.flat] == ["descriptors"]
