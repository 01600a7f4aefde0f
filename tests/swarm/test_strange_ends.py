"""Ghosts, hung origins and late comers at a run's end and its beginning: whole replicas, in memory.

A ghost is a record of a key with no node behind it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest

from noloco_node import PROTOCOL_VERSION
from noloco_node.bootstrap.hello import serve_hello
from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import LimitsSpec, OuterSpec, PipelineSpec, RunSpec
from noloco_node.directory.records import PeerRecord, PeerState
from noloco_node.errors import ExitCode, UserError
from noloco_node.identity.addresses import parse_address
from noloco_node.identity.peer_id import PeerId
from noloco_node.node import first_state
from noloco_node.node.first_state import FirstState, become_current
from noloco_node.node.replica import Replica
from noloco_node.simulator.links import Links, PlainWay
from noloco_node.simulator.loop import in_virtual_time
from noloco_node.simulator.node import SimulatedDevice
from noloco_node.state_transfer import donor_choice as late_join
from noloco_node.tallies import Doubling
from noloco_node.training.compute_thread import Priority
from noloco_node.transport.errors import Refusal, Refused
from noloco_node.transport.memory import Fault, FaultKind, MemoryTransport
from tests.memory_directory import MemoryDirectory
from tests.support import alongside, eventually
from tests.worlds import NAMED, World, micro_spec, peer_name, virtually, world

GRACE = 0.3
LIMITS = LimitsSpec(record_seconds=1.0, grace_seconds=GRACE, chunk_bytes=16384, exchange_progress_seconds=0.5)
QUICK = PipelineSpec(budget_seconds=0.5, progress_seconds=0.2)
JOINS = NodeSettings(in_flight=1, drain_seconds=1, initial_peers=(NAMED,))
OUTER = OuterSpec(inner_steps=4, min_inner_steps=1)


DEVICE_SECONDS = {Priority.STEP: 0.002, Priority.BACKWARD: 0.02, Priority.FORWARD: 0.01, Priority.DRAW: 0.001}
"""What a modelled device takes for each kind of work."""


def short_run(**changes: object) -> RunSpec:
    """A run of a fraction of a second."""
    settings: dict[str, object] = {
        "stages": 2,
        "layers": 2,
        "steps": 30,
        "limits": LIMITS,
        "pipeline": QUICK,
        "outer": OUTER,
    }
    return micro_spec(**(settings | changes))  # pyright: ignore[reportArgumentType]


async def haunt(made: World, state: PeerState, *, name: str = "ghost-gggg", **says: object) -> None:
    """Put a ghost's record into the directory."""
    figures: dict[str, object] = {
        "clock": 320.0,
        "outer_steps_taken": 1,
        "sequence": 1,
        "protocol": PROTOCOL_VERSION,
        "version": "0",
    }
    record = PeerRecord.model_validate({"peer_id": name, "stage": 0, "state": state, **figures, **says})
    await MemoryDirectory(made.hub).publish(record, 3600.0)


async def past_the_first_round(origin: Replica) -> None:
    """It has trained, has taken an outer step and gives its state to newcomers."""
    assert origin.pipeline.origin is not None
    for _ in range(3):
        await origin.pipeline.origin.train_one()
    await origin.averaging.step_alone()
    origin.donor.open()


@asynccontextmanager
async def lives(*replicas: Replica) -> AsyncIterator[list[asyncio.Task[None]]]:
    """They run; those that still do are cancelled at the end of the block."""
    async with alongside(*(replica.run() for replica in replicas)) as tasks:
        yield tasks


async def ended(tasks: list[asyncio.Task[None]], within: float) -> None:
    """All of them end in time, in order."""
    async with asyncio.timeout(within):
        await asyncio.gather(*tasks)


async def never(*_: object, **__: object) -> None:
    """A device that hangs."""
    await asyncio.Event().wait()


@pytest.mark.parametrize("origins", [1, 3])
def test_an_origin_whose_device_hangs_does_not_keep_the_others(origins: int) -> None:
    """The others reach the target, and with the later stage end in order; where it is the only one, the later stage
    gives up, saying why."""
    in_virtual_time(lambda: _beside_a_device_that_hangs(origins), seed=origins)


def test_who_has_trained_only_for_an_origin_that_hangs_ends_when_others_have_left_as_at_the_end() -> None:
    """Each origin sends to one later replica alone: of the origin that finishes it has trained nothing."""
    alone = QUICK.model_copy(update={"routing": "fixed"})
    in_virtual_time(lambda: _beside_a_device_that_hangs(2, short_run(steps=60, pipeline=alone)))


async def _beside_a_device_that_hangs(origins: int, spec: RunSpec | None = None) -> None:
    device, run = partial(SimulatedDevice, DEVICE_SECONDS.__getitem__), spec or short_run(steps=40)
    async with world(run, origins, device=device, carrier=Links(PlainWay(lambda *_: 0.005))) as made:
        hung, target = made.replicas[0], made.replicas[0].context.spec.inner.target_tokens
        async with lives(*made.replicas) as tasks:
            await eventually(lambda: hung.worker.progress.clock > 0.8 * target, what="it is near the end")
            hung.worker.forward = never  # type: ignore[method-assign,assignment]
            if origins > 1:
                await ended(tasks[1:], 30)
                return
            with pytest.raises(UserError) as raised:
                await flat(tasks[1], 30)
            assert raised.value.exit_code is ExitCode.PEERS_UNREACHABLE


async def flat(task: asyncio.Task[None], within: float) -> None:
    """Await a replica's life; what ends it comes alone."""
    try:
        await asyncio.wait_for(asyncio.shield(task), within)
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None


@virtually
async def test_an_origin_that_is_cut_off_near_the_end_learns_that_the_run_is_over() -> None:
    """From all peers, but not from the directory. The others end, and so does it."""
    async with world(short_run(steps=60), replicas=2) as made:
        lost, own = made.replicas[0], peer_name(0, 0)
        target = lost.context.spec.inner.target_tokens
        async with lives(*made.replicas) as tasks:
            await eventually(lambda: lost.worker.progress.clock > 0.92 * target, what="it is near the end")
            for side in (Fault(FaultKind.UNREACHABLE, source=own), Fault(FaultKind.UNREACHABLE, target=own)):
                made.network.inject(side)
            await ended(tasks[1:], 60)
            await ended(tasks[:1], 60)


@pytest.mark.parametrize("state", [PeerState.FINISHING, PeerState.TRAINING])
@virtually
async def test_a_ghosts_record_keeps_no_run_from_starting(state: PeerState) -> None:
    """A joiner of a fresh node that answers begins as it did, whatever a ghost's record says. So does the fresh node
    itself."""
    async with world(short_run(), replicas=2, settings=JOINS) as made:
        first, second = made.replicas[:2]
        await haunt(made, state, finished=state is PeerState.FINISHING)
        await first.membership.announce(PeerState.TRAINING)
        assert await become_current(second) is None


@pytest.mark.parametrize("stage", [0, 1])
@virtually
async def test_who_comes_after_the_end_is_told_so(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds the last record of the node that it was told to join, and nobody. It neither starts from the seed nor
    waits for ever."""
    monkeypatch.setattr(first_state, "FIRST_LOOK_SECONDS", 0.05)
    async with world(short_run(), settings=JOINS) as made:
        await haunt(made, PeerState.GONE, name=parse_address(NAMED).peer, finished=True)
        with pytest.raises(UserError) as raised:
            await become_current(made.replicas[stage])
        assert raised.value.exit_code is ExitCode.NO_STATE_SOURCE
        assert "end" in raised.value.message
        assert "initial peers" in raised.value.remedy


@virtually
async def test_a_ghost_that_says_it_has_finished_keeps_no_run_from_being_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """One record of a free key turned everybody away that joined a new run by its seed alone."""
    monkeypatch.setattr(first_state, "FIRST_LOOK_SECONDS", 0.05)
    async with world(short_run(), settings=JOINS) as made:
        await haunt(made, PeerState.GONE, finished=True)
        assert await become_current(made.replicas[0]) is None


@virtually
async def test_two_that_come_after_the_end_are_no_run_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answers the other, and both were told to join a node that has finished and left."""
    monkeypatch.setattr(first_state, "FIRST_LOOK_SECONDS", 0.05)
    async with world(short_run(), replicas=2, settings=JOINS) as made:
        await haunt(made, PeerState.GONE, name=parse_address(NAMED).peer, finished=True)
        late = made.replicas[:2]
        for replica in late:
            await replica.membership.announce(PeerState.JOINING)
        for replica in late:
            with pytest.raises(UserError) as raised:
                await become_current(replica)
            assert raised.value.exit_code is ExitCode.NO_STATE_SOURCE


@pytest.mark.parametrize("lost", range(1, 5))
@virtually
async def test_a_joiner_on_a_link_that_loses_requests_asks_again(lost: int) -> None:
    """The lost ones may ask for peers that are there, or for what a peer can give."""
    limits = LIMITS.model_copy(update={"record_seconds": 20.0})
    async with world(short_run(stages=1, limits=limits), replicas=2, settings=JOINS) as made:
        veteran, joiner = made.replicas
        await past_the_first_round(veteran)
        await veteran.membership.announce(PeerState.TRAINING)
        made.network.inject(Fault(FaultKind.LOSE_REQUEST, source=peer_name(0, 1), times=lost))
        assert await become_current(joiner) == peer_name(0, 0)


@virtually
async def test_a_stranger_that_answers_and_claims_to_be_ahead_keeps_no_run_from_starting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It says that its stage is past its first round, and gives no state. Another node that answers has just begun."""
    monkeypatch.setattr(late_join, "AWAY_PAUSES", Doubling(0.001, 0.1))
    async with world(short_run(), replicas=2, settings=JOINS) as made:
        stranger, joiner, other = made.replicas[0], made.replicas[1], made.replicas[2]
        await haunt(made, PeerState.FINISHING, name=peer_name(0, 0), finished=True)
        assert not stranger.donor.accepting
        await other.membership.announce(PeerState.TRAINING)
        assert await become_current(joiner) is None


@pytest.mark.parametrize("busy", [False, True], ids=["silent", "busy"])
@virtually
async def test_most_of_those_that_answer_may_claim_to_be_ahead_and_keep_no_run_from_starting(
    monkeypatch: pytest.MonkeyPatch, busy: bool
) -> None:
    """Two keys at the joiner's stage say that it is past its first round, and give nothing or are busy for ever. The
    one node that it was told to join has just begun."""
    monkeypatch.setattr(late_join, "AWAY_PAUSES", Doubling(0.001, 0.1))
    monkeypatch.setattr(late_join, "BUSY_PAUSE_SECONDS", (0.001, 0.001))
    monkeypatch.setattr(first_state, "DOUBT_SECONDS", 0.05)
    async with world(short_run(), replicas=3, settings=JOINS) as made:
        joiner, other = made.replicas[0], made.replicas[3]
        for stranger in made.replicas[1:3]:
            await haunt(made, PeerState.TRAINING, name=stranger.context.transport.peer_id)
            if busy:
                stranger.donor.open()
            stranger.donor.refuse_relayed = refuses  # type: ignore[method-assign]
        await other.membership.announce(PeerState.TRAINING)
        entered = FirstState(joiner, [other.context.transport.peer_id])
        assert await asyncio.wait_for(entered.take(None), 60) is None


@pytest.mark.parametrize(
    "knows", ["the seed", "the seed, of none that it knows", "the seed, beside a new one", "itself", "nobody"]
)
@virtually
async def test_a_node_that_comes_back_when_the_run_is_over_does_not_begin_it_again(knows: str) -> None:
    """Its seed remembers the end, or it has come to it itself; another seed that has begun in a new folder knows
    nothing. If neither is so it goes on from its checkpoint. It does so also if no origin that it has worked with
    has signed the end, whatever the seed was made to believe."""
    async with world(short_run(), replicas=1, settings=JOINS) as made:
        back = made.replicas[0]
        seed = MemoryTransport(made.network, PeerId("seed-of-the-run"))
        serve_hello(seed, back.context.spec, lambda: None, over=lambda: "the seed" in knows)
        new = MemoryTransport(made.network, PeerId("seed-in-a-new-folder"))
        serve_hello(new, back.context.spec, lambda: None, over=lambda: None)
        entrances = [seed.peer_id, new.peer_id] if "new" in knows else [seed.peer_id]
        if knows == "the seed, of none that it knows":
            back.signed.origins[PeerId("origin-worked-with")] = 0.0
        back.signed.ended = knows == "itself"
        entered = FirstState(back, entrances)
        if knows in ("nobody", "the seed, of none that it knows"):
            assert await entered.take(5000.0) is None
        else:
            with pytest.raises(UserError, match="has come to its end: ") as caught:
                await entered.take(5000.0)
            assert caught.value.exit_code is ExitCode.NO_STATE_SOURCE
        for entrance in (seed, new):
            await entrance.close()


async def refuses(_: object) -> None:
    """A donor that is always busy."""
    raise Refused(Refusal.BUSY, "an older snapshot is being read")
