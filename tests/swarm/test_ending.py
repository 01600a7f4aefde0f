"""How nodes learn that the run is over: by work of their own, and by origins that they have worked with."""

from __future__ import annotations

import asyncio

import pytest

from noloco_node.aio import Pulse
from noloco_node.config.run_spec import OuterSpec
from noloco_node.directory.clocks import DrawnBy, OriginsSeen
from noloco_node.directory.membership import Membership, OwnFigures
from noloco_node.directory.records import PeerState
from noloco_node.directory.signed_end import SignedEnd, end_word, near_from
from noloco_node.errors import ExitCode, UserError
from noloco_node.identity.peer_id import PeerId
from noloco_node.peers.scorecard import PeerStats
from noloco_node.placement.run_end import (
    BEGINNING_SECONDS,
    HELD_UP_GRACES,
    IDLE_GRACES,
    EndOfRun,
    RunVerdict,
    Sight,
    verdict,
)
from noloco_node.transport.memory import MemoryNetwork, MemoryTransport
from tests.inside import directory_of
from tests.memory_directory import MemoryDirectory, MemoryDirectoryHub
from tests.support import Clock, eventually
from tests.swarm.worlds import AllAnswer
from tests.worlds import micro_spec, peer_name, world

GRACE, TARGET, RECORD = 20.0, 64_000_000.0, 100_000.0
A, B, C = PeerId("origin-aaaa"), PeerId("origin-bbbb"), PeerId("origin-cccc")
OVER, ON, STALLED = RunVerdict.OVER, RunVerdict.GOES_ON, RunVerdict.STALLED
IDLE, HELD_UP = IDLE_GRACES * GRACE, HELD_UP_GRACES * GRACE


@pytest.mark.parametrize(
    ("sight", "found"),
    [
        (Sight(near=True, ended=False, idle=0.0, patience=IDLE), ON),
        (Sight(near=False, ended=True, idle=0.0, patience=IDLE), OVER),
        (Sight(near=True, ended=False, idle=IDLE - 1, patience=IDLE), ON),
        (Sight(near=True, ended=False, idle=IDLE + 1, patience=IDLE), OVER),
        (Sight(near=True, ended=False, idle=IDLE + 1, patience=HELD_UP), ON),
        (Sight(near=False, ended=False, idle=IDLE + 1, patience=IDLE), STALLED),
        (Sight(near=False, ended=False, idle=HELD_UP + 1, patience=HELD_UP), STALLED),
    ],
)
def test_what_a_replica_makes_of_what_it_sees(sight: Sight, found: RunVerdict) -> None:
    """Without work the time that it has decides, and how near the target it is; nothing is waited for without an
    end."""
    assert verdict(sight) is found


async def test_a_node_at_which_the_run_has_not_begun_waits_for_a_day() -> None:
    """The others may be started by hand, one after another."""
    swarm = Swarm(clock=0.0)
    assert await swarm.verdict(HELD_UP_GRACES + 1) is ON
    assert await swarm.verdict(BEGINNING_SECONDS / GRACE) is STALLED


async def test_a_node_that_comes_home_near_the_end_and_finds_nobody_waits_no_day() -> None:
    """It had left just before the end, and the others came to it. It waited three hours of a hunt (seed 1023)."""
    swarm = Swarm(clock=0.95 * TARGET)
    swarm.held_up = True
    assert await swarm.verdict(HELD_UP_GRACES - 1) is ON
    assert await swarm.verdict(2) is OVER


async def test_a_node_that_comes_home_beside_others_that_end_does_not_wait_for_more() -> None:
    """It waited an hour at a stage whose origins had died near the target (seed 78 of the hunts)."""
    swarm = Swarm(clock=0.95 * TARGET)
    swarm.held_up = True
    swarm.peer_stats.answered(A)
    await swarm.say(A, *FINISHED)
    assert await swarm.verdict(IDLE_GRACES - 1) is ON
    assert await swarm.verdict(2) is OVER


def test_who_has_waited_for_a_stage_does_not_give_up_when_it_is_served_again() -> None:
    """It gave up within the second: all that it had waited was more than it waits where every stage is served."""
    swarm = Swarm(stage=0, clock=0.2 * TARGET)
    swarm.trained = swarm.time.now

    def after(graces: float, *, held_up: bool) -> RunVerdict:
        swarm.held_up = held_up
        for _ in range(int(4 * graces)):  # so often it looks
            swarm.time.now += GRACE / 4
            swarm.end.look()
        return verdict(swarm.end.look())

    assert after(2 * IDLE_GRACES, held_up=True) is ON
    assert after(IDLE_GRACES - 1, held_up=False) is ON
    assert after(1, held_up=True) is ON
    assert after(IDLE_GRACES - 1, held_up=False) is ON
    assert after(2, held_up=False) is STALLED


def test_a_node_that_stood_still_after_its_stage_was_served_again_does_not_give_up_as_it_wakes() -> None:
    """A lid that is closed says nothing of the others: not of how long they have served the stage either."""
    swarm = Swarm(stage=0, clock=0.2 * TARGET)
    swarm.trained = swarm.time.now
    swarm.held_up = True
    for _ in range(int(8 * IDLE_GRACES)):
        swarm.time.now += GRACE / 4
        swarm.end.look()
    swarm.held_up = False
    swarm.end.look()
    swarm.time.now += (IDLE_GRACES + 1) * GRACE
    assert verdict(swarm.end.look()) is ON


@pytest.mark.parametrize(("max_lag", "near"), [(0.001, 0.999), (0.3, 0.7), (2.0, 0.5)])
def test_how_near_the_end_is_near(max_lag: float, near: float) -> None:
    """The lag that clocks may have, and never more than half."""
    assert near_from(TARGET, max_lag * TARGET) == pytest.approx(near * TARGET)


@pytest.mark.parametrize(("clock", "found"), [(0.95, ON), (0.985, ON), (0.995, OVER)])
async def test_origins_that_die_in_the_last_days_of_a_month_end_it_for_nobody(clock: float, found: RunVerdict) -> None:
    """The only node of stage 0 was killed at 98 %. 20 s later those of stage 1 had left as at the run's end, and the
    user that started it again found nobody."""
    swarm = Swarm(clock=clock * TARGET, max_lag=0.01 * TARGET)
    await swarm.say(A, PeerState.TRAINING)
    swarm.work(A)
    swarm.hub.rows[0].pop(A)
    swarm.held_up = True
    assert await swarm.verdict(IDLE_GRACES + 1) is found


class Swarm:
    """Origins A, B and C of stage 0, and a node of stage 1 or 0 that looks at them; time stands still."""

    def __init__(self, *, stage: int = 1, clock: float = TARGET, max_lag: float = 0.1 * TARGET) -> None:
        self.time, self.clock, self.trained = Clock(), clock, 0.0
        self.hub = MemoryDirectoryHub(2, self.time)
        self.origins = {name: self.member(name, 0) for name in (A, B, C)}
        self.watcher = self.member(PeerId("watcher-wwww"), stage)
        self.peer_stats = PeerStats(self.time)
        self.seen = OriginsSeen(self.time)
        self.held_up = False
        transport = MemoryTransport(MemoryNetwork(), PeerId("watcher-wwww"))
        spec = micro_spec(inner={"target_tokens": int(TARGET)}, outer=OuterSpec(max_lag_tokens=int(max_lag)))
        self.signed = SignedEnd(transport, directory_of(self.watcher), spec)
        self.clocks = dict.fromkeys((A, B, C), clock)
        self.end = EndOfRun(
            PeerId("watcher-wwww"),
            self.watcher,
            self.peer_stats,
            self.seen if stage else None,
            self.signed,
            clock=lambda: self.clock,
            last_trained=lambda: self.trained,
            held_up=lambda: self.held_up,
            target=TARGET,
            max_lag=max_lag,
            grace=GRACE,
            now=self.time,
        )

    def member(self, name: PeerId, stage: int) -> Membership:
        def figures() -> OwnFigures:
            return OwnFigures(self.clocks[name] if name in self.origins else 0.0, 1.0, 0)

        return Membership(MemoryDirectory(self.hub), AllAnswer(), name, stage, 2, RECORD, figures, lambda: None)

    async def say(self, name: PeerId, *states: PeerState) -> None:
        for state in states:
            await self.origins[name].announce(state)

    def work(self, *names: PeerId, sender: PeerId | None = None, tokens: int = 64) -> None:
        """Microbatches of these origins are trained here now."""
        self.trained = self.time()
        for name in names:
            drawn = DrawnBy(name, self.clocks[name])
            self.seen.saw(drawn, sender or name, tokens=tokens, own_clock=self.clock)

    async def verdict(self, graces: float = 0.0) -> RunVerdict:
        """After so much time, looking about as often as a node does."""
        until = self.time.now + graces * GRACE
        while True:
            await self.watcher.refresh()
            found = verdict(self.end.look())
            if self.time.now >= until:
                return found
            self.time.now = min(until, self.time.now + GRACE / 2)


FINISHED = (PeerState.TRAINING, PeerState.FINISHING, PeerState.DRAINING, PeerState.GONE)
STOPPED = (PeerState.TRAINING, PeerState.DRAINING, PeerState.GONE)


@pytest.mark.parametrize(
    ("a", "b", "found"),
    [
        (FINISHED[:2], (), OVER),
        (FINISHED[:3], (), OVER),
        (FINISHED, (), OVER),
        (FINISHED, STOPPED, OVER),
        (FINISHED, FINISHED[:1], ON),
        (STOPPED, (), ON),
        (STOPPED[:2], STOPPED, ON),
    ],
)
async def test_the_run_is_over_at_once_when_an_origin_was_at_its_end_and_none_trains(
    a: tuple[PeerState, ...], b: tuple[PeerState, ...], found: RunVerdict
) -> None:
    """That holds however far it has left meanwhile: a reader every two seconds misses what passes in one."""
    swarm = Swarm()
    for name, course in ((A, a), (B, b)):
        await swarm.say(name, *course)
        if course:
            swarm.work(name)
    assert await swarm.verdict() is found


async def test_a_later_stage_whose_clock_lags_ends_with_the_origins_it_has_worked_with() -> None:
    """A stage that was restored has a clock of its own."""
    swarm = Swarm(clock=100.0)
    swarm.clocks[A] = 0.99 * TARGET
    await swarm.say(A, *FINISHED)
    assert await swarm.verdict() is ON
    swarm.work(A)
    assert await swarm.verdict() is OVER


@pytest.mark.parametrize(
    ("b", "clock", "graces", "found"),
    [
        (FINISHED, TARGET, 0, OVER),
        (FINISHED, 0.3 * TARGET, 0, ON),
        (STOPPED, TARGET, 5, ON),
        (FINISHED[:1], TARGET, 5, ON),
    ],
)
async def test_a_replica_that_got_no_work_of_late_ends_after_its_origins(
    b: tuple[PeerState, ...], clock: float, graces: float, found: RunVerdict
) -> None:
    """Set aside, or never chosen: its own clock stands where it last trained. The word of one origin of two is not
    enough."""
    swarm = Swarm(clock=100.0)
    await swarm.say(A, PeerState.TRAINING)
    await swarm.say(B, PeerState.TRAINING)
    swarm.work(A, B)
    assert await swarm.verdict(2) is ON
    swarm.clocks[A] = swarm.clocks[B] = clock
    await swarm.say(A, *FINISHED)
    await swarm.say(B, *b)
    assert await swarm.verdict(graces) is found


async def test_records_behind_which_nobody_works_neither_end_a_run_nor_keep_it_going() -> None:
    """Ghosts, and a process that answers for as many keys as it likes."""
    swarm = Swarm(clock=320.0)
    await swarm.say(A, PeerState.TRAINING)
    swarm.work(A)
    await swarm.say(B, *FINISHED[:2])
    swarm.peer_stats.answered(B)
    assert await swarm.verdict() is ON
    swarm.clock = swarm.clocks[A] = TARGET
    await swarm.say(C, PeerState.TRAINING)
    swarm.peer_stats.answered(C)
    swarm.work(A)
    assert await swarm.verdict() is ON
    await swarm.say(A, PeerState.FINISHING)
    assert await swarm.verdict() is OVER


async def test_one_origin_that_says_finished_ends_nobody_while_another_trains() -> None:
    """As long as work comes, however long; and the records of those that finished may be forgotten meanwhile."""
    swarm = Swarm()
    for name, course in ((A, FINISHED), (B, FINISHED[:1])):
        await swarm.say(name, *course)
        swarm.work(name)
    for _ in range(2 * IDLE_GRACES):
        swarm.work(B)
        assert await swarm.verdict(1) is ON
    assert await swarm.verdict(IDLE_GRACES + 1) is OVER


async def test_most_origins_need_not_wait_long_for_the_last() -> None:
    """Two of three have finished: the third has the time of who gets no work, though its microbatches still come."""
    swarm = Swarm()
    for name, course in ((A, FINISHED), (B, FINISHED), (C, FINISHED[:1])):
        await swarm.say(name, *course)
        swarm.work(name, tokens=6_400)
    found = [ON]
    while found[-1] is ON and len(found) < 2 * IDLE_GRACES:
        swarm.work(C)
        found.append(await swarm.verdict(1))
    assert found[-1] is OVER
    assert len(found) == IDLE_GRACES + 2


async def test_one_sender_is_one_voice_however_many_origins_it_names() -> None:
    """On a deep stage the sender of microbatches says which origin drew them."""
    swarm = Swarm()
    honest, liar = PeerId("sender-honest"), PeerId("sender-liar")
    await swarm.say(A, PeerState.TRAINING)
    for name in (B, C):
        await swarm.say(name, *FINISHED)
    for _ in range(2 * IDLE_GRACES):
        swarm.work(A, sender=honest, tokens=128)
        swarm.work(B, C, sender=liar)
        assert await swarm.verdict(1) is ON


@pytest.mark.parametrize("finished", [True, False])
async def test_a_share_of_the_work_decides_and_not_a_number_of_names(finished: bool) -> None:
    """Near the end, two keys with a fortieth of the work stand beside one honest origin. Their word that they have
    finished ends nobody while its microbatches come. Their word that they train keeps nobody when it has finished."""
    swarm = Swarm()
    for name, ends in ((A, not finished), (B, finished), (C, finished)):
        await swarm.say(name, *FINISHED[: 2 if ends else 1])
    swarm.work(A, tokens=6_400)
    found = ON
    for _ in range(2 * IDLE_GRACES):
        swarm.work(B, C, tokens=8)
        swarm.work(*[A] if finished else [], tokens=624)
        found = await swarm.verdict(1)
    assert found is (ON if finished else OVER)


@pytest.mark.parametrize(("clock", "found"), [(0.95 * TARGET, OVER), (320.0, STALLED)])
async def test_an_origin_that_is_cut_off_ends_near_the_target_and_complains_far_from_it(
    clock: float, found: RunVerdict
) -> None:
    """Its own training has stood still; that another has finished is no word for it."""
    swarm = Swarm(stage=0, clock=clock)
    await swarm.watcher.announce(PeerState.TRAINING)
    swarm.trained = swarm.time()
    swarm.peer_stats.worked(A)
    await swarm.say(A, *FINISHED)
    assert await swarm.verdict(IDLE_GRACES - 1) is ON
    assert await swarm.verdict(2) is found


@pytest.mark.parametrize(
    ("clock", "finished", "found"), [(0.95, False, OVER), (0.6, True, OVER), (0.6, False, ON), (0.3, True, ON)]
)
async def test_near_the_target_nobody_waits_an_hour_for_a_lost_stage(
    clock: float, finished: bool, found: RunVerdict
) -> None:
    """The others may have come to the end. In a short run it is near from half-way on if a peer that trained with it
    has said so; else a laptop that slept would end a run that has only lost its origins."""
    swarm = Swarm(stage=0, clock=clock * TARGET, max_lag=TARGET)
    swarm.trained, swarm.held_up = swarm.time(), True
    swarm.peer_stats.worked(A)
    await swarm.say(A, *(FINISHED if finished else STOPPED))
    assert await swarm.verdict(IDLE_GRACES - 1) is ON
    assert await swarm.verdict(2) is found


@pytest.mark.parametrize(
    ("clock", "course", "worked", "found"),
    [
        (0.6 * TARGET, FINISHED, True, True),
        (0.6 * TARGET, STOPPED, True, False),
        (0.6 * TARGET, FINISHED, False, False),
        (0.3 * TARGET, FINISHED, True, False),
        (0.95 * TARGET, STOPPED, True, True),
    ],
)
@pytest.mark.parametrize("moved_from", [0, 1])
async def test_a_stage_that_empties_at_the_runs_end_is_not_lost(
    clock: float, course: tuple[PeerState, ...], worked: bool, found: bool, moved_from: int
) -> None:
    """Who has trained with this node leaves as at the end, whatever stage it had moved from before; or the run stands
    in its last tenth, and no origin trains. Else a node goes there to bring it back."""
    swarm, leaver = Swarm(clock=clock, max_lag=TARGET), PeerId("leaver-llll")
    if worked:
        swarm.peer_stats.worked(leaver)
    for stage, states in ((moved_from, STOPPED), (1 - moved_from, course)):
        there = swarm.member(leaver, stage)
        for state in states:
            await there.announce(state)
    await swarm.watcher.refresh()
    assert swarm.end.in_sight() is found
    swarm.hub.rows[0].pop(leaver)
    await swarm.watcher.refresh()
    assert swarm.end.in_sight() is found, "records of those that have left are soon forgotten"


@pytest.mark.parametrize(("near", "found"), [(True, OVER), (False, ON)])
async def test_who_takes_a_lost_first_stage_over_near_the_end_goes_by_what_it_knew_before(
    near: bool, found: RunVerdict
) -> None:
    """It begins the stage anew at a clock of 0, which tells nothing of the others. They left as at the run's end, and
    it waited an hour for them."""
    swarm = Swarm(stage=0, clock=0.0)
    swarm.end.came_near_the_end = near
    swarm.end.came_late = swarm.held_up = True
    assert await swarm.verdict(IDLE_GRACES + 1) is found


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize(("words", "found"), [((A, B), OVER), ((A,), ON), ((), ON)])
async def test_a_laptop_that_slept_through_the_end_learns_it_from_any_peer_as_it_wakes(
    stage: int, words: tuple[PeerId, ...], found: RunVerdict
) -> None:
    """It fell asleep at a third of the run, and every record of the others is gone. It waited an hour for them, and
    left with an error. What less than half of the origins have signed is no end."""
    swarm = Swarm(stage=stage, clock=TARGET / 3)
    for name in (A, B):
        await swarm.say(name, PeerState.TRAINING)
        swarm.peer_stats.worked(name)
    swarm.work(A, B)
    assert await swarm.verdict() is ON
    for name in words:
        swarm.clocks[name] = TARGET
        await swarm.say(name, *FINISHED)
    kept = [end_word(swarm.hub.rows[0][name]) for name in words]
    for name in (A, B):
        swarm.hub.rows[0].pop(name)
    swarm.time.now += 100 * GRACE
    swarm.held_up = True
    assert await swarm.verdict() is ON
    swarm.signed.take(kept)
    assert await swarm.verdict(1.5) is found


@pytest.mark.parametrize(("share", "slept", "found"), [(0.6, True, OVER), (0.6, False, ON), (0.4, True, ON)])
async def test_who_wakes_near_the_end_of_a_short_run_and_finds_nobody_ends_in_order(
    share: float, slept: bool, found: RunVerdict
) -> None:
    """All had left while it slept, and nobody was there to ask. It waited an hour, and failed (hunt seed 5100)."""
    swarm = Swarm(stage=0, clock=share * TARGET, max_lag=TARGET)
    await swarm.say(A, PeerState.TRAINING)
    swarm.peer_stats.worked(A)
    swarm.trained = swarm.time()
    assert await swarm.verdict() is ON
    swarm.hub.rows[0].pop(A)
    swarm.time.now += 38 * GRACE if slept else 0.0
    swarm.trained = swarm.time()  # what was under way before
    swarm.held_up = True
    assert await swarm.verdict(IDLE_GRACES + 1) is found


async def test_orphans_end_near_the_target_and_complain_far_from_it() -> None:
    """Their origin was stopped before the run's end, or hangs while its records say that it trains."""
    for clock, course, graces, found in (
        (TARGET, STOPPED, IDLE_GRACES - 1, ON),
        (TARGET, STOPPED, IDLE_GRACES + 1, OVER),
        (320.0, STOPPED, IDLE_GRACES - 1, ON),
        (320.0, STOPPED, IDLE_GRACES + 1, STALLED),
        (320.0, STOPPED[:1], IDLE_GRACES + 1, STALLED),
    ):
        swarm = Swarm(clock=clock, max_lag=0.01 * TARGET)
        await swarm.say(A, *course)
        swarm.work(A)
        assert await swarm.verdict(graces) is found


async def test_a_node_that_gets_nothing_stays_while_the_clocks_of_its_origins_move() -> None:
    """The others pass it over, for whatever reason: the run goes on all the same."""
    swarm = Swarm(clock=320.0)
    await swarm.say(A, PeerState.TRAINING)
    swarm.work(A)
    for _ in range(3 * IDLE_GRACES):
        swarm.clocks[A] += 64
        swarm.peer_stats.answered(A)
        await swarm.say(A, PeerState.TRAINING)
        assert await swarm.verdict(1) is ON


async def test_time_in_which_this_process_stood_still_counts_for_nothing() -> None:
    """A suspended laptop, a stopped container."""
    swarm = Swarm(clock=320.0)
    await swarm.say(A, PeerState.TRAINING)
    swarm.work(A)
    assert await swarm.verdict(1) is ON
    swarm.time.now += 100 * IDLE_GRACES * GRACE
    assert await swarm.verdict(IDLE_GRACES - 2) is ON
    assert await swarm.verdict(3) is STALLED


async def test_who_gives_up_says_why_and_what_to_do() -> None:
    """With the exit code of peers that are out of reach."""
    swarm = Swarm(clock=320.0)
    swarm.end.came_late = True
    await swarm.verdict(IDLE_GRACES + 1)
    with pytest.raises(UserError, match="nothing has been trained here for 3") as raised:
        await swarm.end.wait(asyncio.Event(), Pulse())
    assert raised.value.exit_code is ExitCode.PEERS_UNREACHABLE
    assert "checkpoint" in raised.value.remedy


async def test_who_gives_up_for_a_lost_stage_says_which_and_how_many_nodes_are_left() -> None:
    """One for two stages: somebody else must come, and nothing is wrong with this node."""
    swarm = Swarm(clock=320.0)
    swarm.end.came_late = swarm.held_up = True
    await swarm.verdict(HELD_UP_GRACES + 1)
    waited = r"a stage has no replica \(0\), and 1 of the 2 nodes that it takes are there"
    with pytest.raises(UserError, match=waited):
        await swarm.end.wait(asyncio.Event(), Pulse())


async def test_who_is_told_to_stop_does_not_say_that_the_run_is_over() -> None:
    """Neither an origin nor a replica of the last stage; and the latter goes on when the only origin leaves."""
    async with world(micro_spec(steps=1_000_000)) as made, asyncio.TaskGroup() as group:
        origin, last = made.replicas
        lives = [group.create_task(replica.run()) for replica in (origin, last)]
        for replica, life in zip((origin, last), lives, strict=True):
            await eventually(lambda: last.worker.progress.steps > 3, what="both train")
            assert not life.done()
            replica.stop.set()
            await asyncio.wait_for(life, 30)
            row = made.hub.rows[replica.stage][peer_name(replica.stage, 0)]
            assert row.record.state is PeerState.GONE
            assert not row.record.finished


async def test_a_record_heard_before_the_run_began_ends_nothing_later_on() -> None:
    """All nodes of a new run have not begun: one free key that says `finished` must not end them half-way."""
    swarm = Swarm(clock=0.0, max_lag=0.5 * TARGET)
    swarm.peer_stats.answered(B)
    await swarm.say(B, *FINISHED[:2])
    assert await swarm.verdict(1) is ON
    swarm.clock = swarm.clocks[A] = 0.6 * TARGET
    await swarm.say(A, PeerState.TRAINING)
    swarm.work(A)
    assert not swarm.end.in_sight()
    await swarm.say(A, *STOPPED[1:])
    swarm.held_up = True
    assert await swarm.verdict(IDLE_GRACES + 1) is ON
