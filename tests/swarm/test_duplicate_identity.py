"""Two nodes with one identity that met at no start, since neither can be dialled: both are told."""

from __future__ import annotations

import pytest

from noloco_node.directory.membership import Membership, OwnFigures
from noloco_node.directory.records import PeerState
from noloco_node.identity.peer_id import PeerId
from noloco_node.peers.scorecard import PeerStats
from noloco_node.placement.arrival import Arrival
from tests.memory_directory import MemoryDirectory, MemoryDirectoryHub
from tests.support import one_turn

COPIED, LIFE = PeerId("12D3KooW-of-a-copied-folder"), 60.0


class Days:
    """A directory whose time a test moves, and lives of one identity in it."""

    def __init__(self) -> None:
        self.now = 1e6
        self.hub = MemoryDirectoryHub(2, lambda: self.now)

    async def begins(self, stage: int = 0) -> Membership:
        figures = OwnFigures(clock=0.0, tokens_per_second=1.0, outer_rounds=0)
        directory, known = MemoryDirectory(self.hub), PeerStats()
        life = Membership(directory, known, COPIED, stage, 2, LIFE, lambda: figures, lambda: None)
        await life.announce(PeerState.TRAINING)
        return life

    async def pass_by(self, *lives: Membership, renewals: int = 12) -> None:
        """Each of them renews its record in turn, and looks."""
        for _ in range(renewals):
            for life in lives:
                self.now += LIFE / 3 / len(lives)
                await life.announce(PeerState.TRAINING)
            for life in lives:
                await life.refresh()


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("later", [0.01, 20.0])
async def test_two_lives_of_one_identity_find_out_about_each_other(stage: int, later: float) -> None:
    """At one stage, or at two: where each chooses its stage, they may differ."""
    days = Days()
    one = await days.begins()
    days.now += later
    two = await days.begins(stage)
    await days.pass_by(one, two)
    found = [life.twin.seen.is_set() for life in (one, two)]
    assert any(found) if stage == 0 else all(found)


@pytest.mark.parametrize("farewell", [PeerState.GONE, PeerState.DRAINING, None])
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("away", [0.0, 30.0])
async def test_an_earlier_life_is_no_twin(farewell: PeerState | None, stage: int, away: float) -> None:
    """An earlier stay at another stage is none either: whether it said farewell, or was killed."""
    days = Days()
    earlier = await days.begins()
    await days.pass_by(earlier)
    if farewell is not None:
        await earlier.announce(farewell)
    days.now += away
    life = await days.begins(stage)
    await days.pass_by(life)
    assert not life.twin.seen.is_set()


async def test_one_record_of_a_life_whose_clock_was_ahead_is_no_twin() -> None:
    days = Days()
    days.now += 250.0
    await days.begins(stage=1)
    days.now -= 250.0
    life = await days.begins()
    await days.pass_by(life)
    assert not life.twin.seen.is_set()


@pytest.mark.parametrize("trains", [True, False])
async def test_what_a_node_says_of_where_it_goes_is_no_twins_word(trains: bool) -> None:
    """It trains and thinks again and again about a move that it does not make, or waits long for its first state. What
    it says then is numbered apart, and it was told to remove its own key."""
    days = Days()
    directory, known, figures = MemoryDirectory(days.hub), PeerStats(), OwnFigures(0.0, 1.0, 0)
    life = Membership(directory, known, COPIED, 0, 2, LIFE, lambda: figures, lambda: None)
    arrival = Arrival(directory, COPIED, LIFE, known, one_turn)
    for _ in range(12):
        days.now += LIFE / 3
        if trains:
            await life.announce(PeerState.TRAINING)
            assert not await arrival.confirmed(1, (1.0, 1.0), lambda _: False)
        else:
            async with arrival.announced(0):
                await life.refresh()
        await life.refresh()
    assert not life.twin.seen.is_set()
