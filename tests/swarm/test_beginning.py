"""Own checkpoint, a stage peer's state, or the seed: the precedence, without a swarm."""

from __future__ import annotations

from unittest.mock import ANY

import pytest

from noloco_node.directory.records import DirectoryView, LiveRecord, PeerRecord, PeerState
from noloco_node.identity.peer_id import PeerId
from noloco_node.placement.arrival import BEGINNINGS, Beginning, is_left_behind, where_to_begin
from tests.worlds import record_of

MAX_LAG = 1000
T, F, J = PeerState.TRAINING, PeerState.FINISHING, PeerState.JOINING


def record(stage: int, clock: float, state: PeerState = T, rounds: int = 5, name: str = "") -> PeerRecord:
    """A live record of another node."""
    return record_of(name or f"other-peer-{stage}-{clock:.0f}", stage, state, clock=clock, outer_steps_taken=rounds)


@pytest.mark.parametrize(
    ("own", "others", "source", "words"),
    [
        (None, [], "seed", "nobody else answers"),
        (None, [record(0, 0.0, rounds=0), record(1, 50.0, rounds=0)], "seed", "past the first outer step"),
        (None, [record(0, 5000.0)], "peer", "no checkpoint here"),
        (None, [record(1, 5000.0)], "peer", "no checkpoint here"),
        (None, [record(0, 5000.0, F)], "nowhere", "nobody trains"),
        (5000.0, [], "checkpoint", "nobody else answers"),
        (5000.0, [record(0, 0.0, rounds=0)], "checkpoint", "past the first outer step"),
        (5000.0, [record(0, 6000.0)], "checkpoint", "1,000 tokens beyond it, 1,000 are allowed"),
        (5000.0, [record(0, 6001.0)], "peer", "1,001 tokens beyond the checkpoint, 1,000 are allowed"),
        (5000.0, [record(0, 3000.0)], "checkpoint", "0 tokens beyond it"),
        (5000.0, [record(0, 5100.0), record(0, 5200.0), record(0, 9e9)], "checkpoint", "200 tokens"),
        (5000.0, [record(1, 9000.0)], "checkpoint", "no other node has stage 0"),
        (5000.0, [record(1, 5500.0)], "checkpoint", "500 tokens beyond it"),
        (5000.0, [record(0, 5100.0, F)], "checkpoint", "100 tokens"),
        (5000.0, [record(0, 9000.0, F)], "nowhere", "nobody trains"),
        (None, [record(0, 0.0, J, rounds=0)], "seed", "past the first outer step"),
        (None, [record(0, 5000.0, F), record(0, 0.0, J, rounds=0)], "peer", "no checkpoint here"),
        (5000.0, [record(0, 6000.0), record(0, 0.0, J, rounds=0)], "checkpoint", "1,000 tokens beyond it"),
    ],
)
def test_where_to_begin(own: float | None, others: list[PeerRecord], source: str, words: str) -> None:
    """Own checkpoint within max_lag of the stage peers' median clock, else a stage peer's state, else the seed."""
    found = where_to_begin(own, others, 0, MAX_LAG)
    assert found.source == source
    assert words in found.why
    assert source == "nowhere" or source in BEGINNINGS


@pytest.mark.parametrize(
    ("own", "others", "source"),
    [
        (5000.0, [], "nowhere"),
        (None, [], "nowhere"),
        (5000.0, [record(0, 9000.0, PeerState.FINISHING)], "nowhere"),
        (5000.0, [record(1, 9000.0).model_copy(update={"finished": True})], "nowhere"),
        (5000.0, [record(1, 5000.0)], "checkpoint"),
        (5000.0, [record(1, 0.0, J, rounds=0)], "nowhere"),
        (5000.0, [record(1, 0.0, J, rounds=0), record(0, 5000.0)], "checkpoint"),
        (None, [record(0, 5000.0)], "peer"),
    ],
)
def test_who_knows_that_the_run_is_over_begins_only_beside_others_that_go_on(
    own: float | None, others: list[PeerRecord], source: str
) -> None:
    """A node that came back after the end, with a checkpoint or with its weights saved, began the run again. It made
    those that remembered the end forget it. So did two that came home at once, by what each said of the other."""
    assert where_to_begin(own, others, 0, MAX_LAG, over="so it is").source == source
    assert where_to_begin(own, others, 0, MAX_LAG, joined=False, over="so it is").source != "nowhere"


def test_one_of_several_that_claims_to_be_ahead_is_doubted() -> None:
    """Its state is asked for all the same; but if it gives none the run has only just begun. A node that has joined
    nobody does not depend on anyone either."""
    liar, fresh = record(0, 9000.0, F, rounds=1), [record(1, 0.0, rounds=0), record(1, 5.0, rounds=0)]
    assert where_to_begin(None, [liar, *fresh], 0, MAX_LAG) == Beginning("peer", ANY, doubtful=True)
    assert where_to_begin(None, [liar, fresh[0]], 0, MAX_LAG).doubtful
    assert where_to_begin(None, [liar], 0, MAX_LAG, joined=False) == Beginning("peer", ANY, doubtful=True)
    assert not where_to_begin(None, [record(0, 9000.0), *fresh[:1], record(0, 9001.0)], 0, MAX_LAG).doubtful


def test_whether_the_run_has_just_begun_is_for_those_to_say_that_a_joiner_was_told_to_join() -> None:
    """Any number of others may answer and claim what they like; where no node that it was told to join serves a stage,
    all are believed."""
    liars = [record(0, 9000.0 + each, rounds=1) for each in range(50)]
    named = record(1, 5.0, rounds=0)
    assert where_to_begin(None, [*liars, named], 0, MAX_LAG, entrances=[named.peer_id]).doubtful
    assert not where_to_begin(None, [*liars, named], 0, MAX_LAG, entrances=["a-seed-without-a-stage"]).doubtful
    fresh = [record(1, float(each), rounds=0) for each in range(50)]
    ahead = record(1, 9000.0)
    assert not where_to_begin(None, [*fresh, ahead], 0, MAX_LAG, entrances=[ahead.peer_id]).doubtful


def test_a_node_that_comes_back_does_not_count_itself() -> None:
    """Its former life's record is still in the directory, and does not stand for another node."""
    names = (PeerId("peer-other"), PeerId("peer-itself"))
    rows = [{name: LiveRecord(record(stage, 1.0, name=name), 100.0)} for stage, name in enumerate(names)]
    view = DirectoryView(tuple(rows))
    left = view.without(names[1])
    assert not left.live(1, 50.0)
    assert left.live(0, 50.0)


@pytest.mark.parametrize(
    ("others", "found"),
    [
        ([], False),
        ([record(1, 6001.0)], True),
        ([record(1, 6000.0)], False),
        ([record(1, 9000.0, rounds=0)], False),
        ([record(1, 9000.0, J)], False),
        ([record(1, 9000.0), record(0, 5000.0)], False),
        ([record(1, 9000.0), record(2, 5000.0), record(1, 5000.0)], False),
    ],
)
def test_whose_checkpoint_is_left_behind_at_a_stage_that_nobody_serves(others: list[PeerRecord], found: bool) -> None:
    """A run that was at 27 % went on at 7: a node that came back with an old checkpoint did not ask for keepers of a
    copy."""
    assert is_left_behind(5000.0, others, 0, MAX_LAG) is found
