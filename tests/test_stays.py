"""A node's start: one look at the directory is enough, and a node that begins alone beside named peers is told so.

It is also about a node that leaves for another stage and finds nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from noloco_node.aio import cancel_and_wait
from noloco_node.ambient import SOON_SECONDS
from noloco_node.bootstrap.hello import serve_hello
from noloco_node.bootstrap.spec_fetch import RunHasEnded
from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import LimitsSpec
from noloco_node.directory import membership
from noloco_node.directory.records import Directory, DirectoryView, PeerRecord, PeerState, look_for_others
from noloco_node.errors import ExitCode, UserError
from noloco_node.identity.addresses import peers_at
from noloco_node.identity.peer_id import PeerId
from noloco_node.node import stage_lifecycle as stays_module
from noloco_node.node.checkpointing import CheckpointKeeper
from noloco_node.node.first_state import BEGINS_THE_RUN, STARTS_ALONE, obtain_state
from noloco_node.node.replica import Replica
from noloco_node.node.stage_lifecycle import StageLifecycle
from noloco_node.placement.balancing import Move
from noloco_node.sizing.footprint import footprint_of
from noloco_node.sizing.traffic import line_needs
from noloco_node.state_transfer.donor_choice import NoDonor
from noloco_node.storage.checkpoint import CheckpointFolder
from noloco_node.transport.memory import MemoryNetwork, MemoryTransport
from tests.memory_directory import MemoryDirectory, MemoryDirectoryHub
from tests.support import eventually, one_turn
from tests.worlds import NAMED, World, micro_spec, peer_name, world

SECONDS = 0.05
SHORT = LimitsSpec(record_seconds=2.0)
JOINS = NodeSettings(in_flight=1, initial_peers=(NAMED,))


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that each look may take, as they are asked for."""
    found: list[float] = []

    async def look(directory: Directory, own: PeerId, seconds: float) -> DirectoryView:
        found.append(seconds)
        return await look_for_others(directory, own, seconds)

    for module in (stays_module, membership):
        monkeypatch.setattr(module, "look_for_others", look)
    monkeypatch.setattr(stays_module, "FIRST_LOOK_SECONDS", SECONDS)
    return found


@pytest.fixture
def asks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that does not answer at once is not asked again where a first state comes from."""
    for name in ("FIRST_LOOK_SECONDS", "DOUBT_SECONDS"):
        monkeypatch.setattr(f"noloco_node.node.first_state.{name}", 0.0)


@pytest.fixture
def checkpoints(tmp_path: Path) -> CheckpointFolder:
    """An empty folder of them."""
    return CheckpointFolder(tmp_path / "checkpoints", keep=1)


def stays_in(made: World, settings: NodeSettings) -> StageLifecycle:
    """Those of the world's first replica."""
    replica = made.replicas[0]
    transport = replica.context.transport
    return StageLifecycle(
        replica.context.spec, settings, footprint_of(replica.context.spec), transport, MemoryDirectory(made.hub)
    )


async def test_a_first_stage_is_one_that_the_line_bears_and_a_refused_node_is_waited_for_by_nobody() -> None:
    """Of four stages the middle ones send twice as much, and the last one the least. Who has named no line is not
    measured, and may come. A line that bears no stage, or has less than the run asks for, is refused before anything is
    announced or copied."""
    spec = micro_spec(stages=4)
    limits = spec.limits.model_copy(update={"least_uplink_mbit": 1e-9, "chunk_bytes": 4096})
    spec = spec.model_copy(update={"limits": limits})
    ends, middle = (line_needs(spec, footprint_of(spec))[stage].least_up for stage in (0, 1))
    assert middle > 1.5 * ends

    async def chosen(hub: MemoryDirectoryHub, up: float | None, seed: int = 0) -> int:
        transport, settings = MemoryTransport(MemoryNetwork(), peer_name(0, seed)), NodeSettings(uplink_mbit=up)
        try:
            stays = StageLifecycle(spec, settings, footprint_of(spec), transport, MemoryDirectory(hub))
            return await stays.first_stage(None)
        finally:
            await transport.close()

    for little, words in ((0.5 * ends, "too little for stage"), (1e-10, "asks its nodes for 1e-09")):
        hub = MemoryDirectoryHub(4)
        with pytest.raises(UserError, match=words) as refused:
            await chosen(hub, little)
        assert refused.value.exit_code is ExitCode.CONFIG
        assert not any(hub.rows)
    narrow = {await chosen(MemoryDirectoryHub(4), (ends + middle) / 2, seed) for seed in range(8)}
    assert narrow == {3}
    hub = MemoryDirectoryHub(4)
    assert await chosen(hub, None) == 0, "nobody is there yet"
    assert any(hub.rows)


async def test_who_is_alone_waits_for_others_once(
    looks: list[float], caplog: pytest.LogCaptureFixture, checkpoints: CheckpointFolder
) -> None:
    """Before a stage is chosen, or else before the state is; then it starts from the seed with a warning."""
    async with world(micro_spec(stages=1), settings=JOINS) as made:
        assert await obtain_state(made.replicas[0], stays_in(made, JOINS), None, checkpoints) == "seed"
        assert looks == [SECONDS]
        assert [r.levelno for r in caplog.records if r.getMessage() == STARTS_ALONE] == [logging.WARNING]
    looks.clear()
    async with world(micro_spec(stages=1), settings=JOINS) as made:
        stays = stays_in(made, JOINS)
        await stays.look_around()
        assert await obtain_state(made.replicas[0], stays, None, checkpoints) == "seed"
        assert looks == [SECONDS, 0.0]
        assert await obtain_state(made.replicas[0], stays, None, checkpoints) == "seed"
        assert looks == [SECONDS, 0.0, SECONDS], "a later stay looks anew"


@pytest.mark.parametrize("aware", [False, True])
async def test_who_begins_a_run_beside_a_new_seed_is_not_warned(
    aware: bool, looks: list[float], caplog: pytest.LogCaptureFixture, checkpoints: CheckpointFolder
) -> None:
    """It is the order in which an owner starts them; a seed that has seen nodes at work says that there are others."""
    caplog.set_level(logging.INFO)
    async with world(micro_spec(stages=1), settings=JOINS) as made:
        (peer,) = peers_at(JOINS.initial_peers)
        seed = MemoryTransport(made.network, peer)
        serve_hello(seed, made.replicas[0].context.spec, lambda: None, over=lambda: False if aware else None)
        assert await obtain_state(made.replicas[0], stays_in(made, JOINS), None, checkpoints) == "seed"
        await seed.close()
    said = {STARTS_ALONE: logging.WARNING, BEGINS_THE_RUN: logging.INFO}
    found = {r.getMessage(): r.levelno for r in caplog.records if r.getMessage() in said}
    assert found == ({STARTS_ALONE: logging.WARNING} if aware else {BEGINS_THE_RUN: logging.INFO})
    assert looks == [SECONDS]


async def test_who_saw_others_looks_for_them_again(
    looks: list[float], caplog: pytest.LogCaptureFixture, checkpoints: CheckpointFolder
) -> None:
    """One failed look-up after a long build must not make it start alone; and nobody is warned of company."""
    async with world(micro_spec(stages=1), replicas=2, settings=JOINS) as made:
        await made.replicas[1].membership.announce(PeerState.JOINING)
        stays = stays_in(made, JOINS)
        await stays.look_around()
        assert await obtain_state(made.replicas[0], stays, None, checkpoints) == "seed"
        assert looks == [SECONDS, SECONDS]
        assert STARTS_ALONE not in caplog.text


async def test_who_joins_nobody_waits_for_nobody_and_is_not_warned(
    looks: list[float], caplog: pytest.LogCaptureFixture, checkpoints: CheckpointFolder
) -> None:
    """The first node of a run."""
    async with world(micro_spec(stages=1)) as made:
        assert await obtain_state(made.replicas[0], stays_in(made, NodeSettings()), None, checkpoints) == "seed"
    assert looks == [0.0]
    assert STARTS_ALONE not in caplog.text


async def test_who_trains_knows_that_the_run_goes_on_and_nobody_else_does() -> None:
    """Of two that came home to an ended run the second asked the first, which was still on its way. It did not say that
    the run is over, so that the seed, which did, was no majority, and both began the run again."""
    async with world(micro_spec(stages=1)) as made:
        stays, replica = stays_in(made, NodeSettings()), made.replicas[0]
        assert stays.over is None
        beside = asyncio.create_task(stays.accompany(replica))
        await one_turn()
        for state in (PeerState.JOINING, PeerState.TRAINING, PeerState.FINISHING):
            await replica.membership.announce(state)
            assert stays.over is (False if state is PeerState.TRAINING else None)
        await replica.membership.announce(PeerState.TRAINING)
        await cancel_and_wait([beside])
        assert stays.over is None
        stays.signed.ended = True
        assert stays.over


async def test_a_look_ends_with_the_first_other_node_and_the_own_former_record_is_none() -> None:
    """What this node left in the directory before it was restarted must not be taken for company."""
    async with world(micro_spec(stages=2)) as made:
        own, other = made.replicas
        await own.membership.announce(PeerState.TRAINING)
        looking = asyncio.create_task(look_for_others(MemoryDirectory(made.hub), peer_name(0, 0), 60.0))
        await asyncio.wait((looking,), timeout=3 * SOON_SECONDS)
        assert not looking.done()
        await other.membership.announce(PeerState.JOINING)
        async with asyncio.timeout(50.0):
            view = await looking
        assert [list(rows) for rows in view.stages] == [[], [peer_name(1, 0)]]


async def test_a_move_that_is_given_up_is_taken_back() -> None:
    """A node that is told to end while it leaves for another stage must not be waited for there."""
    async with world(micro_spec(stages=2)) as made:
        stays = stays_in(made, NodeSettings())
        arrival = stays.arrival  # pyright: ignore[reportPrivateUsage]
        stays.move = Move(1, "lost")
        assert await arrival.confirmed(1, (1.0, 1.0), lambda _: True)
        assert made.hub.rows[1][peer_name(0, 0)].record.state is PeerState.JOINING
        await stays.give_up_move()
        assert made.hub.rows[1][peer_name(0, 0)].record.state is PeerState.GONE
        assert stays.move is None


async def test_who_goes_back_in_vain_is_waited_for_no_longer() -> None:
    """Nobody gave it the state: others must not take the stage for one that somebody is on the way to."""
    async with world(micro_spec(stages=2)) as made:
        stays = stays_in(made, NodeSettings())
        stays.move = Move(1, "poor")
        async with stays.arriving(stays.departs()):
            pass
        assert made.hub.rows[1][peer_name(0, 0)].record.state is PeerState.JOINING
        assert await stays.back() == 0
        assert made.hub.rows[1][peer_name(0, 0)].record.state is PeerState.GONE


class Hindered(MemoryDirectory):
    """Something happens while its node says that it comes to a stage."""

    def __init__(self, hub: MemoryDirectoryHub, happens: Callable[[], Awaitable[None]]) -> None:
        super().__init__(hub)
        self._happens = happens

    async def publish(self, record: PeerRecord, life: float) -> bool:
        """See `MemoryDirectory.publish`."""
        if record.state is PeerState.JOINING:
            await self._happens()
        return await super().publish(record, life)


async def rescues(
    made: World, monkeypatch: pytest.MonkeyPatch, happens: Callable[[], Awaitable[None]]
) -> StageLifecycle:
    """The stays of one of two replicas of stage 0, whose next stage nobody serves, after it has set out for it
    while that `happens`."""
    monkeypatch.setattr(stays_module, "REFRESH_SECONDS", 0.02)
    monkeypatch.setattr("noloco_node.placement.balancing.RESCUE_SLOT_SECONDS", 0.02)
    replica, tried = made.replicas[0], list[PeerState]()

    async def noted() -> None:
        tried.append(replica.membership.state)
        await happens()

    transport = replica.context.transport
    settings, spec = NodeSettings(reassign="always"), replica.context.spec
    directory = Hindered(made.hub, noted)
    stays = StageLifecycle(spec, settings, footprint_of(spec), transport, directory)
    for each in made.replicas[:2]:
        await each.membership.announce(PeerState.TRAINING)
    beside = [asyncio.create_task(each.participants[0].run()) for each in made.replicas[:2]]

    async def looks() -> None:
        while True:
            await directory.refresh()
            await asyncio.sleep(stays_module.REFRESH_SECONDS)

    beside += [asyncio.create_task(stays.accompany(replica)), asyncio.create_task(looks())]
    await eventually(lambda: tried or stays.move, 30, "it sets out")
    await eventually(lambda: stays.move or made.hub.rows[1][peer_name(0, 0)].record.state is PeerState.GONE, 30)
    await cancel_and_wait(beside)
    return stays


@pytest.mark.parametrize("told", ["the run has ended", "to leave"])
async def test_a_node_that_ends_as_it_sets_out_for_another_stage_ends(
    told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It saves what it has, which one that only moves does not, and nobody waits for it there."""
    async with world(micro_spec(stages=2, limits=SHORT), replicas=2) as made:
        replica = made.replicas[0]

        async def ends() -> None:
            if told == "to leave":
                replica.stop.set()
            else:
                await replica.membership.announce(PeerState.FINISHING)

        stays = await rescues(made, monkeypatch, ends)
        assert stays.move is None
        assert replica.stop.is_set() is (told == "to leave")
        assert made.hub.rows[1][peer_name(0, 0)].record.state is PeerState.GONE


async def test_a_clock_that_is_set_back_puts_no_rescue_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """By an hour, after the stage was first seen empty: how long ago that was another clock says."""
    async with world(micro_spec(stages=2, limits=SHORT), replicas=2) as made:
        now = made.hub.now

        async def nothing() -> None:
            return

        asyncio.get_running_loop().call_later(0.2, setattr, made.hub, "now", lambda: now() - 3600.0)
        stays = await rescues(made, monkeypatch, nothing)
        assert stays.move == Move(1, "lost")


async def leave(stays: StageLifecycle, replica: Replica, clock: float) -> None:
    """A stay that ends at this clock, for another stage."""
    replica.begins_late()
    progress, weights = await replica.worker.slow_weights()
    await replica.worker.load_slow_weights(clock, progress.outer_rounds, weights)
    beside = asyncio.create_task(stays.accompany(replica))
    await one_turn()
    await cancel_and_wait((beside,))
    stays.move = Move(1, "lost")


@pytest.mark.parametrize("saved", [False, True])
async def test_who_finds_nobody_after_a_move_knows_that_the_run_had_begun(
    saved: bool, checkpoints: CheckpointFolder
) -> None:
    """It goes on from its checkpoint of the stage, if it has one. A hunt's node took the run for one whose nodes are
    started by hand, and waited for them for a day."""
    async with world(micro_spec(stages=2, limits=SHORT), replicas=2) as made:
        stays, (leaver, newcomer) = stays_in(made, NodeSettings()), made.replicas[:2]
        await leave(stays, leaver, 64.0)
        if saved:
            with CheckpointKeeper(leaver, checkpoints, lambda _: None, NodeSettings()) as keeper:
                await keeper.save()
        assert stays.departs() == 1
        assert await obtain_state(newcomer, stays, None, checkpoints) == ("checkpoint" if saved else "seed")
        assert newcomer.end.begun
        assert newcomer.worker.progress.clock == (64.0 if saved else 0.0)


@pytest.mark.usefixtures("asks_once")
@pytest.mark.parametrize("rounds", [0, 3])
async def test_who_joined_a_run_that_was_under_way_and_finds_nobody_any_more_knows_that_it_had_begun(
    rounds: int, checkpoints: CheckpointFolder, looks: list[float]
) -> None:
    """It took the run for one whose nodes are started by hand, and would have waited for them for a day. Nodes that
    have not averaged yet may be such."""
    async with world(micro_spec(stages=2, limits=SHORT), replicas=2, settings=JOINS) as made:
        stays, (newcomer, other) = stays_in(made, JOINS), made.replicas[:2]
        progress, weights = await other.worker.slow_weights()
        await other.worker.load_slow_weights(progress.clock, rounds, weights)
        other.pipeline.open()
        await other.membership.announce(PeerState.TRAINING)
        await stays.look_around()
        await other.membership.announce(PeerState.GONE)
        assert await obtain_state(newcomer, stays, None, checkpoints) == "seed"
        assert newcomer.end.begun == (rounds > 0)
        assert looks


@pytest.mark.usefixtures("asks_once")
@pytest.mark.parametrize(
    ("share", "last", "ended"), [(0.95, "finishing", True), (0.95, "training", False), (0.3, "finishing", False)]
)
async def test_who_comes_as_all_leave_at_the_end_hears_of_the_end_whoever_still_answers(
    share: float, last: str, ended: bool, checkpoints: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stage peer was gone before it gave its state, and had said nothing of the end. Replicas of the last stage
    answered still, and said that they were finishing. It was told that nobody gave a state, and to try again."""
    async with world(micro_spec(stages=2, limits=SHORT), replicas=2, settings=JOINS) as made:
        newcomer, donor = made.of_stage(0)
        others = [donor, *made.of_stage(1)]
        for other in others:
            _, weights = await other.worker.slow_weights()
            await other.worker.load_slow_weights(share * other.context.spec.inner.target_tokens, 3, weights)
            other.pipeline.open()
            await other.membership.announce(PeerState.TRAINING)

        async def all_leave(donors: Callable[[], Awaitable[object]], _patience: float) -> None:
            await donor.context.transport.close()
            for other in made.of_stage(1):
                await other.membership.announce(PeerState(last))
            for _ in range(2):
                newcomer.context.transport.peer_stats.silent(donor.context.transport.peer_id)
            await donors()
            raise NoDonor({donor.context.transport.peer_id: "is not there"})

        monkeypatch.setattr(newcomer.copier, "copy_best", all_leave)
        with pytest.raises(UserError, match="come to its end: it was near" if ended else "gave its state"):
            await obtain_state(newcomer, stays_in(made, JOINS), None, checkpoints)


@pytest.mark.usefixtures("asks_once")
@pytest.mark.parametrize("share", [0.3, 0.95])
async def test_whose_way_to_another_stage_is_as_long_as_the_run_ends_in_order(
    share: float, checkpoints: CheckpointFolder
) -> None:
    """Where it had left near the end itself; else its knowledge of the end sends it back."""
    async with world(micro_spec(stages=2, limits=SHORT), replicas=2, settings=JOINS) as made:
        stays, (mover, other) = stays_in(made, NodeSettings()), made.replicas[:2]
        await leave(stays, mover, share * mover.context.spec.inner.target_tokens)
        assert stays.departs() == 1
        mover.signed.ended = True
        for state in (PeerState.FINISHING, PeerState.GONE):
            await other.membership.announce(state)
        ends = pytest.raises(RunHasEnded) if share > 0.9 else contextlib.nullcontext()
        with ends:
            async with stays.arriving(1):
                assert await obtain_state(mover, stays, None, checkpoints) is None
        if share < 0.9:
            assert await stays.back() == 0
        assert made.hub.rows[1][peer_name(0, 0)].record.state is PeerState.GONE


@pytest.mark.usefixtures("asks_once")
async def test_who_left_near_the_end_and_finds_nobody_begins_no_stage_anew(checkpoints: CheckpointFolder) -> None:
    """Over a slow link it came to its new stage when even the records of the others were gone."""
    async with world(micro_spec(stages=2, limits=SHORT), replicas=2, settings=JOINS) as made:
        stays, mover = stays_in(made, NodeSettings()), made.replicas[0]
        await leave(stays, mover, 0.95 * mover.context.spec.inner.target_tokens)
        assert stays.departs() == 1
        with pytest.raises(RunHasEnded, match="nobody that answers trains any more"):
            await obtain_state(mover, stays, None, checkpoints)
