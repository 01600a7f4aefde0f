"""Newcomers are pulled before they pull: what an exchange with one changes, and when it begins to count."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from noloco_node import ambient
from noloco_node.config.run_spec import LimitsSpec, OuterSpec
from noloco_node.directory.records import PeerState
from noloco_node.identity.peer_id import PeerId
from noloco_node.node.first_state import become_current
from noloco_node.node.replica import Replica
from noloco_node.peers.partners import LOSS_TOLERANCE, PROBATION_ROUNDS, Meeting, ProbationStanding, RecentLoss, in_line
from noloco_node.peers.scorecard import PeerBook
from noloco_node.tallies import MOST_PEERS
from noloco_node.telemetry.events import OuterStep, ProbationEnded
from noloco_node.transport.errors import Refusal
from tests.support import eventually, one_turn
from tests.worlds import World, micro_spec, peer_name, run_ahead, virtually, world

OUTER = OuterSpec(inner_steps=2, min_inner_steps=1, codec="fp32")
OLD, NEW, OTHER = PeerId("veteran"), PeerId("newcomer"), PeerId("somebody else")
numbers = st.floats(allow_nan=True, allow_infinity=True)

pytestmark = pytest.mark.timeout(180)


# The decisions


def test_in_line_is_near_and_not_worse() -> None:
    """Distance within the bound; the loss at most a tenth above, where both are known."""
    assert in_line(Meeting(1.0, 1.0))
    assert not in_line(Meeting(1.01, 1.0))
    assert in_line(Meeting(1.0, 2.0, own_loss=1.09, stage_peer_loss=1.0))
    assert not in_line(Meeting(1.0, 2.0, own_loss=1.11, stage_peer_loss=1.0))
    assert in_line(Meeting(1.0, 2.0, own_loss=None, stage_peer_loss=1.0))
    assert in_line(Meeting(1.0, 2.0, own_loss=9.0, stage_peer_loss=None))


@given(numbers, numbers, st.none() | numbers, st.none() | numbers)
def test_nothing_beyond_the_bound_and_no_nan_is_in_line(
    difference: float, bound: float, own: float | None, stage_peer: float | None
) -> None:
    """Whatever the numbers: in line means that the difference is at most the bound, and the loss not too high."""
    if in_line(Meeting(difference, bound, own, stage_peer)):
        assert difference <= bound
        assert own is None or stage_peer is None or own <= LOSS_TOLERANCE * stage_peer


def standing(inner_steps: int = 5) -> tuple[ProbationStanding, list[tuple[str, int]]]:
    """A replica's view, and how its own probation ended."""
    endings: list[tuple[str, int]] = []
    return ProbationStanding(inner_steps, lambda reason, steps: endings.append((reason, steps))), endings


NEAR, FAR = Meeting(1.0, 2.0), Meeting(3.0, 2.0)


def test_a_probation_ends_at_the_first_meeting_in_line() -> None:
    """Not before, and only once."""
    own, endings = standing()
    own.begin(100)
    own.met(FAR, 103)
    assert own.newcomer
    own.met(NEAR, 107)
    own.met(NEAR, 110)
    assert not own.newcomer
    assert endings == [("in_line", 7)]


def test_a_probation_that_finds_no_line_ends_by_time() -> None:
    """Four outer steps' worth of inner steps, with or without meetings."""
    own, endings = standing(inner_steps=5)
    own.begin(100)
    for step in range(101, 120):
        own.met(FAR if step % 5 == 0 else None, step)
        assert own.newcomer
    own.met(None, 120)
    assert endings == [("time", 20)]


def test_time_ends_no_probation_soon_that_no_stage_peer_had_time_for() -> None:
    """It has copied what may be long past, and nobody has told it the time yet; but it does not wait for ever, for all
    may be newcomers. One meeting, and the usual time is enough."""
    own, endings = standing(inner_steps=5)
    own.begin(100)
    for step in range(101, 100 + PROBATION_ROUNDS * own.limit):
        own.met(None, step)
        assert own.newcomer
    own.met(None, 100 + PROBATION_ROUNDS * own.limit)
    assert endings == [("time", 80)]
    own.begin(500)
    own.met(None, 500 + 2 * own.limit)
    assert own.newcomer
    own.met(FAR, 501 + 2 * own.limit)
    assert endings[1:] == [("time", 41)]
    own.begin(600)
    own.met(None, 600 + own.limit)
    assert own.newcomer, "a meeting of an earlier life says nothing of this copy"


def test_whoever_was_there_first_counts_and_whoever_comes_later_does_not() -> None:
    """Founders of a run, and everybody that a late joiner finds, were there; after that one exchange in line, or time,
    makes a stage peer count. A peer that hides from the directory is not known, and so it is new."""
    own, _ = standing(inner_steps=5)
    own.look([OLD], 0, outer_rounds=0)
    own.look([OLD], 9, outer_rounds=0)
    own.look([OTHER], 10, outer_rounds=1)
    assert own.counts(OLD, 11)
    assert own.counts(OTHER, 11)
    own.look([OLD, NEW], 12, outer_rounds=1)
    hidden = PeerId("never in the directory")
    assert not own.counts(NEW, 12)
    assert not own.counts(hidden, 12)
    own.measured(NEW, FAR)
    assert not own.counts(NEW, 20)
    own.measured(NEW, NEAR)
    assert own.counts(NEW, 20)
    assert not own.counts(hidden, 12 + own.limit), "time counts for who is in the directory"


def test_a_partition_makes_no_newcomers() -> None:
    """A peer that was known and vanished for a time counts as before."""
    own, _ = standing()
    own.look([OLD], 0, outer_rounds=0)
    own.look([], 50, outer_rounds=9)
    own.look([OLD], 200, outer_rounds=9)
    assert own.counts(OLD, 200)


def test_a_crowd_of_strangers_does_not_push_out_those_who_live() -> None:
    """Memory is bounded, and the peers seen last are forgotten last."""
    book = PeerBook()
    own = ProbationStanding(10, lambda *_: None, book)
    own.look([OLD], 0, outer_rounds=1)
    for number in range(MOST_PEERS + 100):
        own.counts(PeerId(f"stranger-{number}"), 3)
        own.look([OLD], 3, outer_rounds=1)
    assert own.counts(OLD, 4)
    assert len(list(book.partners)) == 1


def test_whom_to_dial() -> None:
    """A veteran dials no newcomer, declared or not; a newcomer dials everybody that does not say it is one."""
    own, _ = standing()
    own.look([OLD], 0, outer_rounds=1)
    stage_peers = [OLD, NEW, OTHER]
    assert own.partners(stage_peers, {OTHER}, 5) == [OLD]
    own.begin(5)
    assert own.partners(stage_peers, {OTHER}, 5) == [OLD, NEW]


def test_the_recent_loss_is_weighted_by_tokens_and_forgets() -> None:
    """None before the first step; steps without tokens say nothing."""
    loss = RecentLoss()
    loss.add(math.nan, 0)
    assert loss.mean is None
    loss.add(4.0, 1)
    loss.add(1.0, 3)
    assert loss.mean == 1.75
    for _ in range(100):
        loss.add(2.0, 5)
    assert loss.mean == 2.0


# On the exchange


@contextlib.asynccontextmanager
async def veterans_and_newcomer() -> AsyncIterator[tuple[World, list[Replica]]]:
    """Replicas that have trained and can be dialled; the last one has just come and says so, all others are settled."""
    limits = LimitsSpec(chunk_bytes=4096, exchange_progress_seconds=2, record_seconds=20, grace_seconds=1)
    spec = micro_spec(stages=1, outer=OUTER, limits=limits)
    async with world(spec, replicas=2) as made, asyncio.TaskGroup() as group:
        running = [group.create_task(replica.averaging.run()) for replica in made.replicas]
        for replica in made.replicas:
            replica.averaging.open()
            assert replica.pipeline.origin is not None
            for _ in range(4):
                await replica.pipeline.origin.train_one()
        await one_turn()  # inner steps are reported to the loop from another thread
        for replica in made.replicas[:-1]:
            replica.averaging.standing.look(
                [r.context.transport.peer_id for r in made.replicas[:-1]], 4, outer_rounds=1
            )
        made.replicas[-1].averaging.standing.begin(4)
        yield made, made.replicas
        for task in running:
            task.cancel()


async def checkpoint_state(replica: Replica) -> tuple[object, dict[str, torch.Tensor]]:
    return await replica.worker.joiner_state()


def same(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> bool:
    """Bitwise, every tensor."""
    return all(torch.equal(before[name], after[name]) for name in before)


async def weighed(veteran: Replica) -> None:
    """Wait until the veteran has closed the exchange."""
    await eventually(lambda: not veteran.averaging.under_way, what="the exchange is closed")


async def test_a_newcomer_is_pulled_half_way_and_the_veteran_stays_as_it_is() -> None:
    """Bitwise: weights, momentum, Adam, clock, counts. So the mean over the veterans stays as it is, too. The newcomer
    commits the textbook step of a pair with equal token weights."""
    async with veterans_and_newcomer() as (_, (veteran, newcomer)):
        (progress, before), (_, own) = [await checkpoint_state(r) for r in (veteran, newcomer)]
        assert await newcomer.averaging.dial(peer_name(0, 0))
        await weighed(veteran)
        after_progress, after = await checkpoint_state(veteran)
        assert same(before, after)
        assert after_progress == progress
        _, pulled = await checkpoint_state(newcomer)
        expected = (own["fast"] + before["fast"]) / 2  # alpha 0, beta 1, gamma 1: the mean of the fast weights
        assert (pulled["fast"] - expected).abs().max() < 1e-6
        assert (own["fast"] - expected).abs().max() > 1e-4


@pytest.mark.parametrize("on_probation", [True, False])
async def test_a_newcomer_is_told_the_time_where_another_is_told_that_it_lags(on_probation: bool) -> None:
    """What it copied was long on its way: ten times max_lag. The exchange is weightless, so this harms nobody, and it
    takes over the veteran's clock whole. A peer that is no newcomer is sent to copy a state."""
    async with veterans_and_newcomer() as (_, (veteran, other)):
        shift = 10.0 * veteran.context.spec.max_lag_tokens
        await run_ahead(veteran, shift)
        for replica in (veteran, other):
            await replica.membership.announce(PeerState.TRAINING)
        for replica in (veteran, other):
            await replica.membership.refresh()
        if not on_probation:
            other.averaging.standing.met(NEAR, 4)
        taken = await other.averaging.dial(peer_name(0, 0))
        assert taken == on_probation
        own, ahead = other.worker.progress.clock, veteran.worker.progress.clock
        assert own == ahead if on_probation else own == ahead - shift
        assert other.averaging.side.catch_up_from == (None if on_probation else peer_name(0, 0))


async def test_a_newcomer_in_line_counts_in_the_next_exchange() -> None:
    """Its own probation ends, which it says in an event; the veteran has measured it too, and now both move."""
    async with veterans_and_newcomer() as (made, (veteran, newcomer)):
        assert await newcomer.averaging.dial(peer_name(0, 0))
        await weighed(veteran)
        ended = [e for e in made.events[1] if isinstance(e, ProbationEnded)]
        assert [(e.reason, e.steps) for e in ended] == [("in_line", 0)]
        assert veteran.averaging.standing.counts(peer_name(0, 1), 5)
        assert newcomer.pipeline.origin is not None
        for _ in range(2):
            await newcomer.pipeline.origin.train_one()
        states = [(await checkpoint_state(r))[1] for r in (veteran, newcomer)]
        assert await newcomer.averaging.dial(peer_name(0, 0))
        await eventually(
            lambda: [e for e in made.events[0] if isinstance(e, OuterStep) and e.kind == "paired"], what="both move"
        )
        after = [(await checkpoint_state(r))[1] for r in (veteran, newcomer)]
        assert (after[0]["fast"] - after[1]["fast"]).abs().max() < 1e-6, "both stand at their (token-weighted) mean"
        assert not same(states[0], after[0])


async def test_a_peer_that_does_not_say_it_is_new_moves_nobody_either() -> None:
    """The veteran has never seen it before: what it claims does not matter."""
    async with veterans_and_newcomer() as (_, (veteran, liar)):
        liar.averaging.standing.met(None, 1 << 30)
        assert not liar.averaging.standing.newcomer
        _, before = await checkpoint_state(veteran)
        assert await liar.averaging.dial(peer_name(0, 0))
        await weighed(veteran)
        assert same(before, (await checkpoint_state(veteran))[1])


async def test_a_newcomer_that_is_far_away_stays_on_probation() -> None:
    """Weights that have nothing to do with its stage peers': neither side counts it, and the veteran is as it was."""
    async with veterans_and_newcomer() as (_, (veteran, newcomer)):
        state = (await checkpoint_state(newcomer))[1]
        generator = torch.Generator().manual_seed(1)
        state["fast"] = state["fast"] + torch.randn(state["fast"].shape, generator=generator)
        await newcomer.worker.load_full_state(newcomer.worker.progress.clock, 1, state)
        _, before = await checkpoint_state(veteran)
        assert await newcomer.averaging.dial(peer_name(0, 0))
        await weighed(veteran)
        assert same(before, (await checkpoint_state(veteran))[1])
        assert newcomer.averaging.standing.newcomer
        assert not veteran.averaging.standing.counts(peer_name(0, 1), 5)


async def test_a_newcomer_is_not_dialled_and_a_veteran_is_not_dialled_by_newcomers_without_end() -> None:
    """A dialler of it gets `on_probation`; newcomers get `too_early` for nineteen times as long as the last exchange
    with one took."""
    async with veterans_and_newcomer() as (_, (veteran, newcomer)):
        assert not await veteran.averaging.dial(peer_name(0, 1))
        assert newcomer.context.transport.refusals_given[Refusal.ON_PROBATION] == 1
        assert await newcomer.averaging.dial(peer_name(0, 0))
        await weighed(veteran)
        newcomer.averaging.standing.begin(4)
        assert not await newcomer.averaging.dial(peer_name(0, 0))
        assert veteran.context.transport.refusals_given[Refusal.TOO_EARLY] == 1
        await eventually(lambda: veteran.averaging.side.partners.may_give(ambient.monotonic()))
        assert await newcomer.averaging.dial(peer_name(0, 0))


@virtually
async def test_a_joiner_of_a_running_swarm_ends_its_probation_by_itself() -> None:
    """Two veterans train and average. The third copies one of them, is on probation, says so in the directory, meets a
    veteran, counts, and is averaged with from both sides."""
    limits = LimitsSpec(chunk_bytes=16384, exchange_progress_seconds=5, record_seconds=3, grace_seconds=1)
    outer = OUTER.model_copy(update={"max_lag_tokens": 1_000_000})
    spec = micro_spec(stages=1, layers=2, steps=100_000, outer=outer, limits=limits)
    async with world(spec, replicas=3) as made, asyncio.TaskGroup() as group:
        tasks = [group.create_task(replica.run()) for replica in made.replicas[:2]]
        await eventually(lambda: all(r.worker.progress.outer_rounds > 2 for r in made.replicas[:2]), 60, "rounds")
        for veteran in made.replicas[:2]:  # their records may be older than their rounds
            await veteran.membership.announce(PeerState.TRAINING)
        joiner = made.replicas[2]
        assert await become_current(joiner) in (peer_name(0, 0), peer_name(0, 1))
        assert joiner.averaging.standing.newcomer
        await joiner.membership.announce(PeerState.TRAINING)
        await made.replicas[0].membership.refresh()
        assert made.replicas[0].membership.newcomers() == {peer_name(0, 2)}
        told_by = made.replicas[0].membership
        assert len(told_by.recorded_clocks()) == len(told_by.stage_peer_clocks()) == 1, (
            "a newcomer tells nobody the time"
        )
        tasks.append(group.create_task(joiner.run()))
        ended = await eventually(lambda: [e for e in made.events[2] if isinstance(e, ProbationEnded)], 60, "it counts")
        assert ended[0].steps <= PROBATION_ROUNDS * joiner.averaging.standing.limit

        def met_by_veterans() -> bool:
            steps = [e for events in made.events[:2] for e in events if isinstance(e, OuterStep)]
            return any(e.kind == "paired" and e.partner == peer_name(0, 2) for e in steps)

        await eventually(met_by_veterans, 60, "a veteran has averaged with it")
        await eventually(lambda: not made.replicas[0].membership.newcomers(), what="its record says so")
        for replica in made.replicas:
            replica.stop.set()
        await asyncio.wait(tasks, timeout=20)
