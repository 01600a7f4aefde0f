"""Drawn schedules of faults on swarms of which each node sees a part.

Buckets have 8 records in place of 64, so that 40 to 56 nodes lie at levels 1 to 3. The shrunk constants are the
directory's alone; all else is as it is.
"""

from __future__ import annotations

import pytest

from noloco_node.directory import buckets, sampled_view
from noloco_node.directory.records import DirectoryView
from noloco_node.directory.sampled_view import SampledView
from noloco_node.simulator.faults import KINDS, draw
from noloco_node.simulator.hunt import carry_out

RECORDS = 8


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (buckets, sampled_view):
        monkeypatch.setattr(module, "TARGET", RECORDS)
        monkeypatch.setattr(module, "CROWDED", 2 * RECORDS)


@pytest.fixture
def largest_scales(small_buckets: None, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """For how many each peer that a node saw stood at most, at each of its looks."""
    scales: list[float] = []
    view = SampledView.view

    def watched(self: SampledView, now: float) -> DirectoryView:
        seen = view(self, now)
        scales.append(max(scale.each for scale in seen.scales))
        return seen

    monkeypatch.setattr(SampledView, "view", watched)
    return scales


@pytest.mark.long
@pytest.mark.parametrize("seed", range(70000, 70006))
def test_no_schedule_of_faults_breaks_an_invariant_where_each_sees_a_part(
    seed: int, largest_scales: list[float]
) -> None:
    """Each takes a minute. Some stage is seen in part for some of the run, or this shows nothing."""
    outcome = carry_out(draw(seed, 40, 60, KINDS))
    assert outcome.breaches == ()
    assert any(outcome.fired)
    assert sum(scale > 1.5 for scale in largest_scales) > len(largest_scales) / 8
