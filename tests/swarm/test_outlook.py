"""What a joiner is told of the swarm's progress follows from the directory's live records."""

from __future__ import annotations

import pytest

from noloco_node.directory.records import DirectoryView, LiveRecord, PeerState
from noloco_node.directory.summary import outlook_of
from noloco_node.identity.peer_id import PeerId
from tests.worlds import record_of

TRAINING, JOINING = PeerState.TRAINING, PeerState.JOINING


def view(*stages: list[tuple[PeerState, float, float, float]]) -> DirectoryView:
    """For each stage its records as (state, clock, tokens per second, expiry)."""
    return DirectoryView(
        tuple(
            {
                PeerId(f"peer-{stage}-number-{i}"): LiveRecord(
                    record_of(f"peer-{stage}-number-{i}", stage, state, clock=clock, tokens_per_second=speed), expires
                )
                for i, (state, clock, speed, expires) in enumerate(rows)
            }
            for stage, rows in enumerate(stages)
        )
    )


def test_time_to_go_is_the_rest_over_the_speed_of_the_first_stage() -> None:
    """A later stage trains the same tokens again; joining and dead records train nothing."""
    found = outlook_of(
        view(
            [(TRAINING, 400.0, 3.0, 9.0), (TRAINING, 400.0, 2.0, 9.0), (JOINING, 0.0, 9.0, 9.0)],
            [(TRAINING, 400.0, 7.0, 9.0), (TRAINING, 0.0, 7.0, 1.0)],
        ),
        5.0,
        1000,
    )
    assert (found.clock, found.replicas, found.tokens_per_second) == (400.0, (3, 1), 5.0)
    assert found.seconds_left == pytest.approx(120.0)


def test_one_false_clock_among_several_moves_nothing() -> None:
    """The median bears it."""
    rows = [(TRAINING, clock, 1.0, 9.0) for clock in (400.0, 410.0, 1e18)]
    assert outlook_of(view(rows), 5.0, 1000).clock == 410.0


@pytest.mark.parametrize(
    "stages",
    [[[], []], [[(TRAINING, 5.0, 1.0, 9.0)], []], [[(TRAINING, 5.0, 0.0, 9.0)], [(TRAINING, 5.0, 1.0, 9.0)]]],
    ids=["nobody", "a stage is empty", "nobody knows its speed"],
)
def test_without_a_speed_or_with_an_empty_stage_there_is_no_time(
    stages: list[list[tuple[PeerState, float, float, float]]],
) -> None:
    """Unknown is not zero."""
    assert outlook_of(view(*stages), 5.0, 1000).seconds_left is None


def test_a_swarm_past_its_target_has_nothing_to_go() -> None:
    """Clocks overshoot a little."""
    assert outlook_of(view([(TRAINING, 1001.0, 1.0, 9.0)]), 5.0, 1000).seconds_left == 0.0
