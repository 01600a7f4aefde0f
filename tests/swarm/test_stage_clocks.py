"""A later stage's clock stays with stage 0's: a pipeline without devices or messages, with the real books and counts.

Whole replicas do the same in `test_origins_seen`.
"""

from __future__ import annotations

import pytest

from noloco_node.identity.peer_id import PeerId
from noloco_node.training.progress import SLOWEST_PACE, tied_pace
from tests.swarm.stage_clocks import INNER_STEPS, Pipeline, mean


@pytest.mark.parametrize(("replicas", "in_flight"), [(1, 4), (2, 1), (3, 3), (4, 2)])
def test_every_stage_of_eight_is_within_three_percent_of_the_first(replicas: int, in_flight: int) -> None:
    """150 steps, of which the lag that is allowed is a quarter. By the last words of the origins, some of them many
    steps old, later stages ended at 0.87 to 0.95 of stage 0."""
    made = Pipeline(8, replicas, in_flight=in_flight)
    made.run()
    first, *others = made.clocks()
    assert all(abs(clock - first) < 0.03 for clock in others), (first, others)


@pytest.mark.parametrize("speeds", [(1.0, 2.0, 5.0, 10.0), (1.0, 1.0, 1.0, 16.0), (1.0, 1.0, 1.0, 0.0625)])
def test_replicas_of_very_different_speed_stay_with_the_origins(speeds: tuple[float, ...]) -> None:
    """One of four at each later stage does many times the work of another. Clocks thus differ between two outer steps
    by a part of the allowed lag. Their mean stays within two and a half in a hundred."""
    made = Pipeline(3, 4, steps=600)
    for stage in made.stages[1:]:
        for node, speed in zip(stage, speeds, strict=True):
            node.speed = speed
    made.run()
    first, *others = made.clocks()
    assert all(abs(clock - first) < 0.025 for clock in others), (first, others)


@pytest.mark.parametrize(("every", "most"), [(3 * INNER_STEPS, 0.3), (INNER_STEPS, 0.4), (INNER_STEPS // 2, 0.5)])
def test_a_partner_that_says_it_is_far_ahead_moves_a_later_stage_by_a_part_of_the_lag(every: int, most: float) -> None:
    """It does so at two stages of four replicas, to each once in three outer windows, in one, or in half of one. By the
    median of the directory alone clocks run 1.6, 3.6 and 6.8 times as fast as the training. Now they are ahead by
    `most` of the allowed lag, however long the run."""
    made = Pipeline(3, 4, steps=300)
    made.swayed = {1: every, 2: every}
    made.run()
    first, *others = made.clocks()
    assert all(0.0 <= clock - first < most * made.lag / made.target for clock in others), (first, others)


def test_stage_peers_of_one_that_hangs_are_held_back_though_it_is_counted() -> None:
    """One of three at the last stage, from the start, and it leaves the count never: untied, the others ended at one
    and a half of the target. They end ahead by less than a quarter of the lag that is allowed."""
    made = Pipeline(2, 3)
    hung = made.stages[1].pop(0)
    made.run()
    first, last = made.clocks()
    assert hung.progress.clock == 0.0
    assert 0.0 <= last - first < 0.25 * made.lag / made.target


def test_copies_that_a_stage_trains_more_than_it_should_move_its_clock_little() -> None:
    """A fifth of its work twice: untied, 1.2 of the target."""
    made = Pipeline(3, 2)
    for node in made.stages[2]:
        node.copies = 1.2
    made.run()
    first, _, last = made.clocks()
    assert 0.0 <= last - first < 0.06


def test_three_keys_with_a_fortieth_of_the_work_do_not_move_a_stage() -> None:
    """Beside two honest origins; each voice weighs what was trained of it. By voices they had the majority, and the
    clock ended at its bounds, half or one and a half times the target."""
    for times in (0.0, 1e9):
        made = Pipeline(2, 2)
        made.spoken = [(PeerId(f"liar-{n}"), 10, times) for n in range(3)]
        made.run()
        first, second = made.clocks()
        assert abs(second - first) < 0.04, "not further than by what was trained of them"


def test_with_most_of_the_work_a_stage_goes_by_their_word_within_the_bounds() -> None:
    """What remains: it is not their names that count."""
    made = Pipeline(2, 2)
    made.spoken = [(PeerId("liar"), 4_000, 0.0)]
    made.run()
    assert made.stages[1][0].seen.lead() is not None
    assert tied_pace(made.stages[1][0].seen.lead(), made.lag) == SLOWEST_PACE


@pytest.mark.parametrize("inner_steps", [3, 8])
def test_a_liar_with_a_quarter_of_the_work_moves_a_later_clock_by_a_part_of_the_lag(inner_steps: int) -> None:
    """Not by more than a third of it on average, whichever way it lies, and nobody's word moves it at all where nobody
    lies."""
    leads: dict[float | None, float] = {}
    for times in (None, 0.0, 1e9):
        made = Pipeline(2, 4, steps=200, inner_steps=inner_steps)
        made.spoken = [] if times is None else [(PeerId("liar"), 1000 / 3, times)]
        made.run()
        leads[times] = mean(lead for (lead,) in made.leads[len(made.leads) // 2 :])
    assert abs(leads[None]) < 0.06
    assert -0.1 < leads[0.0] < 0.3
    assert leads[None] < leads[1e9] < 0.33
