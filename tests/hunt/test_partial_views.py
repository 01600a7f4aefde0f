"""Drawn schedules of faults on swarms of which each node sees a part.

Buckets have 8 records in place of 64, so that 40 to 56 nodes lie at levels 1 to 3. The shrunk constants are the
directory's alone; all else is as it is.
"""

from __future__ import annotations

import pytest

from noloco_node.directory import buckets, far_stages, sampled_view
from noloco_node.directory.buckets import Place
from noloco_node.directory.records import DirectoryView
from noloco_node.directory.sampled_view import SampledView
from noloco_node.simulator.faults import KINDS, draw
from noloco_node.simulator.hunt import carry_out

RECORDS, FEW = 8, 2
STAGES = 5


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (buckets, sampled_view):
        monkeypatch.setattr(module, "TARGET", RECORDS)
        monkeypatch.setattr(module, "CROWDED", 2 * RECORDS)
    monkeypatch.setattr(far_stages, "MOST_ROWS", FEW)
    monkeypatch.setattr(sampled_view, "PLACES", RECORDS)
    monkeypatch.setattr(sampled_view, "KNOWN_PLACES", RECORDS // 2)
    monkeypatch.setattr(sampled_view, "WHOLE", 2 * RECORDS)


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
@pytest.mark.parametrize("seed", range(71001, 71004))
def test_no_schedule_of_faults_breaks_an_invariant_where_each_knows_a_few_of_most_stages(
    seed: int, small_buckets: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five stages of 8 to 12, of which a node deals with two."""
    few = list[bool]()
    to_read = SampledView.to_read

    def watched(self: SampledView, now: float) -> list[Place]:
        places = to_read(self, now)
        few.extend(self.followed_at(place) is not None for place in places)
        return places

    monkeypatch.setattr(SampledView, "to_read", watched)
    drawn = draw(seed, 40, 60, KINDS)
    replicas = tuple((drawn.nodes + stage) // STAGES for stage in range(STAGES))
    outcome = carry_out(drawn.model_copy(update={"replicas": replicas}))
    assert outcome.breaches == ()
    assert any(outcome.fired)
    assert sum(few) > len(few) / 100


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
