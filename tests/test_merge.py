"""Which saved replicas become the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from noloco_node.exporting.gathered import SavedReplica, agreeing, final_weights, in_time
from noloco_node.model.cut import StageCut
from noloco_node.storage.weights import save_stage

CUT = StageCut(index=1, stages=2, first_layer=2, end_layer=4)


def saved(folder: Path, clock: float) -> SavedReplica:
    """A replica as it left its weights."""
    weights = {"model.norm.weight": torch.full((3,), clock)}
    save_stage(folder, run_id="ab" * 16, cut=CUT, clock=clock, outer_rounds=1, slow=weights)
    return final_weights(folder)


def test_a_replica_that_left_early_or_came_too_late_is_no_part_of_the_model(tmp_path: Path) -> None:
    """Stage peers further apart than max_lag do not average either; the furthest is always there."""
    clocks = (1000.0, 901.0, 899.0, 0.0)
    replicas = [saved(tmp_path / str(clock), clock) for clock in clocks]
    assert [replica.clock for replica in in_time(replicas, 100, 2000)] == [1000.0, 901.0]
    assert in_time(replicas[3:], 100, 2000) == replicas[3:]


def test_a_clock_beyond_the_runs_end_counts_as_its_end(tmp_path: Path) -> None:
    """One folder that says any clock leaves none of a run that has ended out."""
    replicas = [saved(tmp_path / str(clock), clock) for clock in (1000.0, 1004.0, 1e15)]
    assert in_time(replicas, 100, 1000) == replicas


@pytest.mark.parametrize(
    ("clocks", "near", "found"),
    [
        ([900.0, 1e15, 1000.0, 950.0], 950.0, [0, 2, 3]),
        ([900.0, 0.0, 1000.0], 950.0, [0, 2]),
        ([1e15, 1000.0], 990.0, [1]),
        ([0.0, 1000.0], 990.0, [1]),
        ([0.0, 50.0, 500.0, 550.0], 540.0, [2, 3]),
        ([7.0], 1e15, [0]),
        ([], 1.0, []),
    ],
)
def test_the_largest_set_of_clocks_that_agree(clocks: list[float], near: float, found: list[int]) -> None:
    """No single clock decides, however large or small; where sets are as large, the rest of the swarm does."""
    assert agreeing(clocks, 100.0, near) == found
