"""A stage that nobody serves any more: which node brings it back, from what, and what must never come of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest
import torch

from noloco_node import PROTOCOL_VERSION, ambient
from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import LimitsSpec, OuterSpec
from noloco_node.directory.records import PeerRecord, PeerState
from noloco_node.errors import ExitCode, UserError
from noloco_node.identity.peer_id import PeerId
from noloco_node.node import revival
from noloco_node.node.checkpointing import CheckpointKeeper
from noloco_node.node.first_state import become_current, obtain_state
from noloco_node.node.replica import Replica
from noloco_node.node.revival import first_weights, revive_if_lost
from noloco_node.node.stage_lifecycle import StageLifecycle
from noloco_node.peers.hop import REST_A_SECOND
from noloco_node.sizing.footprint import footprint_of
from noloco_node.state_transfer.backups import GivenCopy, StageCopies
from noloco_node.state_transfer.copies import (
    OPEN_COPY,
    CopyManifest,
    CopyRequest,
    StageCopy,
    goes_on,
    root_of_weights,
    sign_copy,
)
from noloco_node.state_transfer.fetch import SignedManifest
from noloco_node.storage.checkpoint import CheckpointFolder
from noloco_node.transport.calls import on
from noloco_node.transport.errors import Refusal, Refused
from noloco_node.transport.memory import Fault, FaultKind, MemoryNetwork, MemoryTransport
from noloco_node.transport.messages import Message
from tests.inside import served_by
from tests.memory_directory import MemoryDirectory
from tests.support import SkewedClock, alongside, eventually, one_turn
from tests.worlds import IN_SUBSPACE, World, micro_spec, peer_name, window_batch, world

BOUNDLESS = {"outer_rounds": 1 << 32, "source": "who-signed-it"}
FAULTS: dict[str, Callable[[PeerId], Fault]] = {
    "a lost piece of the copy": lambda own: Fault(FaultKind.LOSE_ANSWER, own, None, "copy.chunk", 1),
}
LIMITS = LimitsSpec(record_seconds=2.5, grace_seconds=2, chunk_bytes=4096, standby_seconds=0.2)


def copies_of(made: World, replica: Replica) -> StageCopies:
    """What the node of this replica keeps and gives."""
    transport = replica.context.transport
    copies = StageCopies(
        replica.context.spec, footprint_of(replica.context.spec).parameters, transport, random.Random(0)
    )
    copies.serve()
    return copies


@contextlib.asynccontextmanager
async def trained_world(
    keepers: int, giving: int = 4, limits: LimitsSpec = LIMITS, subspace: dict[str, object] | None = None
) -> AsyncIterator[tuple[World, list[Replica], list[StageCopies]]]:
    """Two stages of two replicas; all but the last are past an outer step and say that they train. The first `giving`
    of them give copies."""
    spec = micro_spec(outer=OuterSpec(inner_steps=2, min_inner_steps=1), limits=limits, subspace=subspace)
    async with world(spec.model_copy(update={"standby_copies": keepers}), replicas=2) as made:
        for replica in made.replicas[:-1]:
            replica.pipeline.open()
        for number in (0, 1) * 4:
            for replica in made.replicas[:-1]:  # each time anew: on a busy machine their records would end meanwhile
                await replica.membership.announce(PeerState.TRAINING)
            await made.replicas[number].membership.refresh()
            origin = made.replicas[number].pipeline.origin
            assert origin is not None
            assert await origin.train_one()
        for replica in made.replicas[:-1]:
            await replica.averaging.step_alone()
            await replica.membership.announce(PeerState.TRAINING)
        async with alongside(*(replica.membership.run() for replica in made.replicas[:2])):
            yield made, made.replicas, [copies_of(made, replica) for replica in made.replicas[:giving]]


async def keep_until_kept(made: World, keeper: int, giver: int, copies: list[StageCopies]) -> None:
    """Let one node take its copy from another, each guarding as in a running swarm, and then vanish from the giver."""
    async with alongside(
        *(copies[n].keep(made.replicas[n].membership, made.replicas[n].worker) for n in (keeper, giver))
    ):
        await made.replicas[keeper].membership.refresh()
        await eventually(lambda: copies[keeper].kept is not None, what="a copy is kept")


async def lose(made: World, number: int) -> None:
    """The record of a replica ends, as after its death."""
    await made.replicas[number].membership.announce(PeerState.GONE)


@pytest.mark.parametrize("subspace", [None, IN_SUBSPACE])
async def test_a_lost_stage_is_restored_from_the_copy_that_a_node_of_another_stage_keeps(
    subspace: dict[str, object] | None,
) -> None:
    """Slow weights up to half precision and the round are those of the copy; the clock is no later than that of the
    answering nodes. Fast weights equal the slow ones and all momenta are zero. The node that kept it may itself be the
    one that restores."""
    async with trained_world(keepers=1, subspace=subspace) as (made, (head, _, lost, newcomer), copies):
        await keep_until_kept(made, 0, 2, copies)
        _, slow = await lost.worker.slow_weights()
        head.standby_of = lambda: copies[0].standby_of  # pyright: ignore[reportPrivateUsage]
        await head.membership.announce(PeerState.TRAINING)
        await lose(made, 2)
        origin = await revive_if_lost(
            newcomer.context.spec, newcomer.membership, newcomer.worker, copies[3], peer_name(1, 1), confirmed=False
        )
        assert origin == "standby"
        progress, state = await newcomer.worker.joiner_state()
        assert torch.allclose(state["slow"], slow, rtol=1e-3, atol=1e-6)
        assert torch.equal(state["slow"], state["fast"])
        assert "momentum" not in state or not state["momentum"].any()
        assert not state["exp_avg"].any()
        await lost.worker.load_slow_weights(progress.clock, progress.outer_rounds, slow)
        inputs, labels = window_batch(range(4))
        sent = await head.worker.evaluate(inputs)
        before, after = [await each.worker.evaluate_loss(sent, labels, ids=inputs) for each in (lost, newcomer)]
        assert after == pytest.approx(before, rel=1e-4), "it computes what the lost one did"
        kept, answering = copies[0].kept, head.worker.progress.clock
        assert kept is not None
        assert kept.clock > answering, "so the bound is seen to hold"
        assert (progress.clock, progress.outer_rounds) == (answering, lost.worker.progress.outer_rounds)
        assert progress.clock > 0
        first = torch.zeros(slow.numel())
        assert await copies[0].newest(1, [], first) is copies[0].kept


@pytest.mark.parametrize("copy_is_newer", [False, True])
async def test_a_lost_stage_is_restored_from_the_newer_of_own_checkpoint_and_copy(
    tmp_path: Path, copy_is_newer: bool
) -> None:
    """The node that comes has served the stage before, and its checkpoint is on its disk: all momenta come back with
    it. A copy that is newer wins, an older one is not even fetched."""
    async with trained_world(keepers=1) as (made, (head, _, lost, newcomer), copies):
        folder = CheckpointFolder(tmp_path, keep=1)

        async def save() -> None:
            with CheckpointKeeper(lost, folder, lambda _: None, NodeSettings()) as keeper:
                await keeper.save()

        async def train() -> None:
            assert head.pipeline.origin is not None
            for _ in range(4):
                assert await head.pipeline.origin.train_one()

        if copy_is_newer:
            await save()
            await train()
        await keep_until_kept(made, 0, 2, copies)
        if not copy_is_newer:
            await train()
            await save()
        head.standby_of = lambda: copies[0].standby_of  # pyright: ignore[reportPrivateUsage]
        await head.membership.announce(PeerState.TRAINING)
        await lose(made, 2)
        sent = made.replicas[0].context.transport.traffic.sent["copy.chunk"]  # pyright: ignore[reportPrivateUsage]
        origin = await revive_if_lost(
            newcomer.context.spec,
            newcomer.membership,
            newcomer.worker,
            copies[3],
            peer_name(1, 1),
            confirmed=True,
            saved=lambda: folder.newest(newcomer.context.spec.run_id, 1),
        )
        assert origin == ("standby" if copy_is_newer else "checkpoint")
        again = made.replicas[0].context.transport.traffic.sent["copy.chunk"]  # pyright: ignore[reportPrivateUsage]
        assert (again > sent) == copy_is_newer
        if not copy_is_newer:
            before, after = await lost.worker.joiner_state(), await newcomer.worker.joiner_state()
            assert all(torch.equal(before[1][name], after[1][name]) for name in before[1])
            assert after[1]["exp_avg"].any()
            assert newcomer.worker.progress.clock == lost.worker.progress.clock > 0


@pytest.mark.parametrize(
    ("behind", "beside"),
    [
        (True, ""),
        (False, ""),
        (True, "a dead replica's record"),
        (True, "a lost piece of the copy"),
        (True, "a boundless round"),
    ],
)
async def test_who_comes_back_far_behind_to_a_lost_stage_takes_a_copy_that_is_further(
    tmp_path: Path, behind: bool, beside: str
) -> None:
    """It had gone on from its own checkpoint, whatever others kept: the run fell back by all that lay between. A
    directory that nobody has read yet, a record that nobody answers for, and one lost request change nothing. No copy
    brings rounds that nobody has seen."""
    async with trained_world(keepers=1, giving=3) as (made, (head, _, lost, newcomer), copies):
        await keep_until_kept(made, 0, 2, copies)
        _, slow = await lost.worker.slow_weights()
        _, first = await newcomer.worker.slow_weights()
        head.standby_of = lambda: copies[0].standby_of  # pyright: ignore[reportPrivateUsage]
        await head.membership.announce(PeerState.TRAINING)
        await lose(made, 2)
        kept = copies[0].kept
        assert kept is not None
        if beside in FAULTS:
            made.network.inject(FAULTS[beside](newcomer.context.transport.peer_id))
        if beside == "a boundless round":
            source = MemoryTransport(made.network, PeerId("who-signed-it"))
            copies[0].kept = sign_copy(source, kept.manifest.model_copy(update=BOUNDLESS), kept.weights)
            await source.close()
        if beside == "a dead replica's record":
            await MemoryDirectory(made.hub).publish(record_of(PeerId("dead-replica"), stage=1, clock=kept.clock), 60.0)
        old = first + 0.5 * (slow - first)
        await newcomer.worker.load_slow_weights(1.0, 1, old)
        spec, settings, transport = newcomer.context.spec, newcomer.context.settings, newcomer.context.transport
        stays = StageLifecycle(spec, settings, footprint_of(spec), transport, MemoryDirectory(made.hub))
        saved = -1e9 if behind else head.worker.progress.clock
        checkpoints = CheckpointFolder(tmp_path, 1)
        origin = await obtain_state(newcomer, stays, saved, checkpoints)
        assert origin == ("standby" if behind else "checkpoint")
        progress, now = await newcomer.worker.slow_weights()
        assert torch.allclose(now, slow if behind else old, rtol=1e-3, atol=1e-6)
        if behind:
            assert progress.clock == min(kept.clock, head.worker.progress.clock)
            assert progress.outer_rounds == 1


@pytest.mark.parametrize("older_on_disk", [False, True])
async def test_who_comes_back_far_behind_goes_on_from_its_checkpoint_where_nobody_kept_a_copy(
    tmp_path: Path, older_on_disk: bool
) -> None:
    """That holds also if its checkpoint cannot be read a second time. A full disk kept an older one than what this node
    resumed from memory: that older one took its place."""
    async with trained_world(keepers=0, giving=3) as (made, (_, _, _, newcomer), _):
        _, first = await newcomer.worker.slow_weights()
        await lose(made, 2)
        checkpoints = CheckpointFolder(tmp_path, 1)
        if older_on_disk:
            await newcomer.worker.load_slow_weights(0.5, 1, first + 0.5)
            with CheckpointKeeper(newcomer, checkpoints, lambda _: None, NodeSettings()) as keeper:
                await keeper.save()
        await newcomer.worker.load_slow_weights(1.0, 1, first + 1.0)
        spec, settings, transport = newcomer.context.spec, newcomer.context.settings, newcomer.context.transport
        stays = StageLifecycle(spec, settings, footprint_of(spec), transport, MemoryDirectory(made.hub))
        saved = -1e9
        assert await obtain_state(newcomer, stays, saved, checkpoints) == "checkpoint"
        progress, slow = await newcomer.worker.slow_weights()
        assert progress.clock == 1.0
        assert torch.equal(slow, first + 1.0)


async def test_a_checkpoint_of_other_sizes_is_no_copy_of_the_stage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is passed over, and said so; the seed stands."""
    async with trained_world(keepers=0) as (made, (_, _, lost, newcomer), copies):
        folder = CheckpointFolder(tmp_path, keep=1)
        with CheckpointKeeper(lost, folder, lambda _: None, NodeSettings()) as keeper:
            await keeper.save()
        found = folder.newest(lost.context.spec.run_id, 1)
        assert found is not None
        found.tensors["slow"] = found.tensors["slow"][:-1]
        await lose(made, 2)
        arguments = (newcomer.context.spec, newcomer.membership, newcomer.worker, copies[3], peer_name(1, 1))
        assert await revive_if_lost(*arguments, confirmed=True, saved=lambda: found) == "seed"
        assert "is not used: its tensors are not those of this stage" in caplog.text


async def test_who_brings_a_stage_back_waits_no_day_for_the_run_to_begin(tmp_path: Path) -> None:
    """A hunt left two nodes for three stages (seed 5023). Nothing had been trained at the one that was begun again, and
    so its node waited for others that are started by hand."""
    async with trained_world(keepers=0, giving=3) as (made, (_, _, _, newcomer), _):
        await lose(made, 2)
        spec, settings, transport = newcomer.context.spec, newcomer.context.settings, newcomer.context.transport
        stays = StageLifecycle(spec, settings, footprint_of(spec), transport, MemoryDirectory(made.hub))
        assert not newcomer.end.begun
        assert await obtain_state(newcomer, stays, None, CheckpointFolder(tmp_path, 1)) == "seed"
        assert newcomer.end.begun


async def test_without_a_copy_and_without_the_first_weights_nothing_is_made_up() -> None:
    """A node without the folder that the run began with leaves a lost stage to one that has it."""
    async with trained_world(keepers=0) as (made, (_, _, _, newcomer), copies):
        model = newcomer.context.spec.model.model_copy(update={"fingerprint": "weights-" + "0" * 32})
        spec = newcomer.context.spec.model_copy(update={"model": model})
        await lose(made, 2)
        with pytest.raises(UserError, match="this node has no folder of those weights") as raised:
            await revive_if_lost(spec, newcomer.membership, newcomer.worker, copies[3], peer_name(1, 1), confirmed=True)
        assert raised.value.exit_code is ExitCode.NO_STATE_SOURCE


async def test_nothing_is_revived_where_a_stage_peer_serves_or_comes_into_sight_in_time() -> None:
    """One look that finds nobody is not enough."""
    async with trained_world(keepers=0) as (made, (_, _, stage_peer, newcomer), copies):
        arguments = (newcomer.context.spec, newcomer.membership, newcomer.worker, copies[3], peer_name(1, 1))
        assert await revive_if_lost(*arguments, confirmed=False) is None
        assert await revive_if_lost(*arguments, confirmed=True) is None
        row = made.hub.rows[1].pop(peer_name(1, 0))
        await newcomer.membership.refresh()
        assert newcomer.membership.stage_peers() == []
        reviving = asyncio.create_task(revive_if_lost(*arguments, confirmed=False))
        await one_turn()
        assert not reviving.done()
        made.hub.rows[1][peer_name(1, 0)] = row
        stage_peer.membership.state = PeerState.TRAINING
        heartbeat = asyncio.create_task(stage_peer.membership.run())
        assert await reviving is None
        heartbeat.cancel()


async def test_of_two_that_come_to_a_lost_stage_one_restores_and_the_other_waits_for_it() -> None:
    """The one with the smaller peer id does; the other becomes its copy."""
    async with trained_world(keepers=0) as (_, (_, _, first, second), copies):
        for replica in (first, second):
            await replica.membership.announce(PeerState.JOINING)
        waiting = asyncio.create_task(
            revive_if_lost(
                second.context.spec, second.membership, second.worker, copies[3], peer_name(1, 1), confirmed=True
            )
        )
        origin = await revive_if_lost(
            first.context.spec, first.membership, first.worker, copies[2], peer_name(1, 0), confirmed=True
        )
        assert origin == "seed"
        assert not waiting.done()
        first.donor.open()
        await first.membership.announce(PeerState.TRAINING)
        async with alongside(first.membership.run()):
            assert await waiting is None
            assert await become_current(second) == peer_name(1, 0)


async def test_a_copy_is_taken_from_who_is_there_however_many_records_say_that_they_train() -> None:
    """Of a crowd of records nobody would answer, and the copy would grow old; nor do they speak for a stage's life."""
    async with trained_world(keepers=1) as (made, replicas, copies):
        for number in range(200):
            say = {"peer_id": f"ghost-{number:08d}", "stage": 1, "state": PeerState.TRAINING, "sequence": 1}
            record = PeerRecord.model_validate(say | {"protocol": PROTOCOL_VERSION, "version": "0"})
            await MemoryDirectory(made.hub).publish(record, 3600.0)
        async with alongside(copies[2].keep(replicas[2].membership, replicas[2].worker)):
            await replicas[2].membership.announce(PeerState.TRAINING)
            await replicas[0].membership.refresh()
            assert await copies[0].renew(replicas[0].membership)  # pyright: ignore[reportPrivateUsage]


async def test_a_young_swarm_needs_no_revival() -> None:
    """Before the first outer step the seeded weights are everybody's."""
    async with world(micro_spec(limits=LIMITS), replicas=1) as made:
        await made.replicas[0].membership.announce(PeerState.TRAINING)
        later = made.replicas[1]
        copies = copies_of(made, later)
        assert (
            await revive_if_lost(
                later.context.spec, later.membership, later.worker, copies, peer_name(1, 0), confirmed=True
            )
            is None
        )


def copy_of(made: World, signer: PeerId, weights: torch.Tensor, clock: float) -> StageCopy:
    """A copy of stage 1 that `signer` signs."""
    transport = made.network.find(peer_name(0, 0), signer)
    manifest = CopyManifest(
        source=signer,
        run=made.replicas[0].context.spec.run_id,
        stage=1,
        clock=clock,
        outer_rounds=int(clock),
        size=weights.numel(),
        root=root_of_weights(weights.half()),
    )
    return sign_copy(transport, manifest, weights.half())


def record_of(
    keeper: PeerId,
    *,
    standby_of: int | None = None,
    clock: float = 0.0,
    stage: int = 0,
    state: PeerState = PeerState.TRAINING,
) -> PeerRecord:
    """The record of a node that says that it keeps a copy, or serves a stage."""
    return PeerRecord(
        peer_id=keeper,
        stage=stage,
        state=state,
        clock=clock,
        tokens_per_second=1.0,
        outer_steps_taken=1,
        protocol=PROTOCOL_VERSION,
        version="0",
        sequence=1,
        standby_of=standby_of,
    )


@contextlib.asynccontextmanager
async def keepers(
    held: Sequence[tuple[str, float, str]], giving: list[StageCopies] | None = None
) -> AsyncIterator[tuple[StageCopies, list[PeerRecord], World]]:
    """A rescuer's copies, and the records of keepers: each gives weights of a kind with a clock, signed by a source.
    `giving` is filled with the keepers' own copies.

    `sound` and `sound too` are near each other, `hostile` is like neither."""
    spec = micro_spec(limits=LIMITS).model_copy(update={"standby_copies": 1})
    async with world(spec) as made:
        size = footprint_of(spec).parameters[1]
        first, way = torch.zeros(size), torch.randn(size, generator=torch.Generator().manual_seed(1))
        kinds = {"sound": way, "sound too": way + 0.1 * torch.randn(size), "hostile": torch.randn(size)}
        records: list[PeerRecord] = []
        transports: list[MemoryTransport] = []
        for kind, clock, source in held:
            if source not in made.network.transports:
                transports.append(MemoryTransport(made.network, PeerId(source)))
            keeper = PeerId(f"keeper-number-{len(records)}")
            transports.append(MemoryTransport(made.network, keeper))
            copies = StageCopies(spec, footprint_of(spec).parameters, transports[-1], random.Random(0))
            copies.kept = copy_of(made, PeerId(source), first + kinds[kind], clock)
            copies.serve()
            records.append(record_of(keeper, standby_of=1, clock=clock))
            if giving is not None:
                giving.append(copies)
        try:
            yield copies_of(made, made.replicas[0]), records, made
        finally:
            for transport in transports:
                await transport.close()


SOURCES = ("source-number-one", "source-number-two", "source-number-three")


@pytest.mark.parametrize(
    ("held", "worked", "taken"),
    [
        pytest.param([("sound", 5, 0), ("hostile", 1e9, 1)], (0,), 5, id="who has worked comes before any claim"),
        pytest.param([("sound", 5, 0), ("sound too", 6, 1), ("hostile", 1e9, 2)], (), 6, id="of three the odd one out"),
        pytest.param([("hostile", 1e9, 2)], (), 1e9, id="one alone where nothing else offers"),
        pytest.param([("hostile", 9, 2), ("sound", 9, 2), ("sound too", 5, 0)], (), 5, id="who signs two is out"),
    ],
)
async def test_a_lost_stage_is_not_taken_from_the_stranger_that_claims_most(
    held: list[tuple[str, float, int]], worked: tuple[int, ...], taken: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Sources whose work was seen come first; strangers' copies must bear each other out; one alone is said loudly."""
    async with keepers([(kind, clock, SOURCES[source]) for kind, clock, source in held]) as (copies, records, made):
        for source in worked:
            made.replicas[0].context.transport.peer_stats.worked(PeerId(SOURCES[source]))
        first = torch.zeros(footprint_of(made.replicas[0].context.spec).parameters[1])
        copy = await copies.newest(1, records, first)
        assert copy is not None
        assert copy.clock == taken
        assert ("FROM A STRANGER'S COPY ALONE" in caplog.text) is (not worked and taken != 6)


async def test_a_keeper_cannot_bait_with_the_word_of_a_source_that_works(caplog: pytest.LogCaptureFixture) -> None:
    """It showed what an honest source had signed, was asked a second time, and then gave weights of its own: they were
    taken without a warning, as those of a source that has worked."""
    giving: list[StageCopies] = []
    async with keepers([("sound", 5, SOURCES[0]), ("hostile", 1e9, SOURCES[1])], giving) as (copies, records, made):
        made.replicas[0].context.transport.peer_stats.worked(PeerId(SOURCES[0]))
        baiting, genuine = giving[0], giving[0].kept
        assert genuine is not None
        shows = iter([genuine.offer])

        async def open_copy(_peer: PeerId, _request: CopyRequest) -> SignedManifest:
            offer = next(shows, None)
            baiting.kept = giving[1].kept
            assert baiting.kept is not None
            return offer or baiting.kept.offer

        transport = made.network.find(made.replicas[0].context.transport.peer_id, PeerId("keeper-number-0"))
        served_by(transport).pop(OPEN_COPY.name)
        on(transport, OPEN_COPY, open_copy)
        assert await copies.newest(1, records[:1], torch.zeros(genuine.manifest.size)) is None
    assert "could not take the copy" in caplog.text


@pytest.mark.parametrize(
    ("length", "cosine", "times", "found"),
    [
        pytest.param(5.2, 0.77, 8.0, True, id="a run at its end beside a checkpoint at an eighth of it"),
        pytest.param(5.2, 0.77, 1.0, False, id="as far at the same clock"),
        pytest.param(1.0, 1.0, 1.0, True, id="the same"),
        pytest.param(0.25, 1.0, 2.0, False, id="thrown back"),
        pytest.param(3.95, 0.15, 2.0, False, id="elsewhere"),
        pytest.param(-1.0, 1.0, 2.0, False, id="the other way"),
    ],
)
def test_what_goes_on_from_a_checkpoint(length: float, cosine: float, times: float, found: bool) -> None:
    """A copy may be the further from the first weights the longer it was trained, and lies in about that direction."""
    first = torch.randn(4000, generator=torch.Generator().manual_seed(1))
    way, across = torch.zeros(4000), torch.zeros(4000)
    way[:2000], across[2000:] = 1.0, 1.0
    copy = first + length * (cosine * way + math.sqrt(1.0 - cosine**2) * across)
    assert goes_on(copy, first + way, first, times) is found


@pytest.mark.parametrize("worked", [True, False])
async def test_a_guard_gives_its_copy_up_for_none_that_is_far_behind(worked: bool) -> None:
    """A key that answers and says it trains the lost stage had its first weights put in the place of what was left."""
    async with trained_world(keepers=1, giving=3) as (made, (head, _, lost, _), copies):
        await keep_until_kept(made, 0, 2, copies)
        kept = copies[0].kept
        assert kept is not None
        far = kept.clock + 1e9
        copies[0].kept = StageCopy(kept.manifest.model_copy(update={"clock": far}), kept.offer, kept.weights)
        giver = lost.context.transport.peer_id
        if worked:
            head.context.transport.peer_stats.worked(giver)
        else:
            head.context.transport.peer_stats.of(giver).worked_at = -math.inf
        async with alongside(copies[2].keep(lost.membership, lost.worker)):
            await one_turn()
            assert await copies[0].renew(head.membership) is worked
            assert copies[0].kept is not None
            assert (copies[0].kept.clock == far) is not worked


async def test_the_first_weights_of_a_stage_are_those_that_a_replica_begins_with() -> None:
    """It is built anew, for a replica that has others already."""
    async with world(micro_spec()) as made:
        for replica in made.replicas:
            _, begun = await replica.worker.slow_weights()
            assert torch.equal(await first_weights(replica.context.spec, replica.stage)(), begun)


async def test_a_strangers_copy_is_taken_only_where_it_is_like_what_this_node_has_itself() -> None:
    """An own copy or checkpoint is evidence: what has gone on from it is taken, anything else is not."""
    async with keepers([("hostile", 1e9, SOURCES[1]), ("sound too", 6, SOURCES[0])]) as (copies, records, made):
        size = footprint_of(made.replicas[0].context.spec).parameters[1]
        sound = torch.randn(size, generator=torch.Generator().manual_seed(1))
        copy = await copies.newest(1, records, torch.zeros(size), beyond=2.0, own=0.5 * sound)
        assert copy is not None
        assert copy.clock == 6
        assert await copies.newest(1, records[:1], torch.zeros(size), beyond=2.0, own=0.5 * sound) is None


async def test_a_copy_whose_weights_or_manifest_were_changed_is_an_offence() -> None:
    """A peer that hands a copy on can change nothing of it."""
    giving: list[StageCopies] = []
    async with keepers([("sound", 5, SOURCES[0]), ("sound", 5, SOURCES[0])], giving) as (copies, records, made):
        kept = [each.kept for each in giving]
        assert kept[0] is not None
        assert kept[1] is not None
        kept[0].weights[3] += 1.0
        text = kept[1].offer.manifest
        kept[1].offer = kept[1].offer.model_copy(update={"manifest": text.replace('"clock":5', '"clock":9')})
        assert await copies.newest(1, records, torch.zeros(kept[0].weights.numel())) is None
        conduct = made.replicas[0].context.transport.conduct
        assert conduct.offences == {"bad_answer": 2}


async def test_a_copy_is_found_by_its_content_and_not_by_what_its_source_named_it() -> None:
    """A source says of its copy all that a keeper says of its own. A node that asks the keeper still gets what it asked
    for, and has no reason to hold an honest node's weights for forged."""
    async with keepers([]) as (asking, _, made):
        keeper = made.replicas[1]
        copies = copies_of(made, keeper)
        async with alongside(copies.keep(keeper.membership, keeper.worker)):
            await one_turn()
            record = record_of(keeper.context.transport.peer_id, standby_of=0)  # pyright: ignore[reportPrivateUsage]
            own = await asking.newest(1, [record.model_copy(update={"standby_of": 1})], torch.zeros(1), own=None)
            assert own is not None
            size = footprint_of(keeper.context.spec).parameters[0]
            weights = torch.randn(size).half()
            named = {"source": SOURCES[0], "stage": 0, "size": size, "root": root_of_weights(weights)}
            source = MemoryTransport(made.network, PeerId(SOURCES[0]))
            copies.kept = sign_copy(source, own.manifest.model_copy(update=named), weights)
            copy = await asking.newest(0, [record], torch.zeros(size))
            await source.close()
            assert copy is not None
            assert torch.equal(copy.weights, weights)
            assert not made.replicas[0].context.transport.conduct.offences  # pyright: ignore[reportPrivateUsage]


async def test_copies_are_given_to_the_run_only_and_a_poisoned_one_is_not_taken() -> None:
    """Another run, another stage and an unknown copy are refused with their reasons; NaN is not kept."""
    async with trained_world(keepers=1) as (made, (head, _, tail, _), copies):
        async with alongside(copies[2].keep(tail.membership, tail.worker)):
            await one_turn()

            async def ask(method: str, **header: object) -> Message:
                request = {"run": head.context.spec.run_id, "stage": 1, **header}
                return await head.context.transport.call(  # pyright: ignore[reportPrivateUsage]
                    peer_name(1, 0), method, Message(request), timeout=5, progress=5, max_answer_bytes=1 << 20
                )

            for method, header, reason in (
                ("copy.open", {"run": "another"}, Refusal.WRONG_RUN),
                ("copy.open", {"stage": 0}, Refusal.WRONG_STAGE),
                ("copy.chunk", {"root": "none such"}, Refusal.UNKNOWN_SNAPSHOT),
            ):
                with pytest.raises(Refused) as refused:
                    await ask(method, **header)
                assert refused.value.reason is reason
            name = json.loads((await ask("copy.open")).header["manifest"])["root"]
            with pytest.raises(Refused) as refused:
                await ask("copy.chunk", root=name, index=10**6)
            assert refused.value.reason is Refusal.MALFORMED
        tail.worker.outer.slow[7] = float("nan")
        await head.membership.refresh()
        async with alongside(*(copies[n].keep(made.replicas[n].membership, made.replicas[n].worker) for n in (0, 2))):
            conduct = head.context.transport.conduct
            await eventually(lambda: conduct.offences["bad_answer"] > 0, what="who gave NaN has offended")
        assert copies[0].kept is None


async def test_who_says_that_it_comes_to_a_lost_stage_and_never_does_is_not_waited_for_without_an_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has the smaller peer id and answers, and would have been waited for as long as it liked."""
    monkeypatch.setattr(revival, "WHOLE_SECONDS", 0.0)
    async with trained_world(keepers=0) as (_, (_, _, first, second), copies):
        for replica in (first, second):
            await replica.membership.announce(PeerState.JOINING)
        async with asyncio.timeout(60):
            origin = await revive_if_lost(
                second.context.spec, second.membership, second.worker, copies[3], peer_name(1, 1), confirmed=True
            )
        assert origin == "seed"


GIVER = PeerId("giver-number-one")


async def test_a_chunk_asked_for_each_minute_keeps_no_copy_young(monkeypatch: pytest.MonkeyPatch) -> None:
    """One key reads a chunk of the copy every 50 s: another that opens one gets a copy that is a minute old at most. A
    reader that has begun may end, and nobody else gets chunks of an old one."""
    clock = SkewedClock()
    monkeypatch.setattr(ambient, "monotonic", clock.monotonic)
    limits = LIMITS.model_copy(
        update={"standby_seconds": 120.0, "record_seconds": 20.0}
    )  # as long as it takes, and more
    async with trained_world(keepers=1, limits=limits) as (made, (_, _, tail, _), _):
        spec = tail.context.spec
        giver = MemoryTransport(made.network, GIVER)
        giving = StageCopies(spec, footprint_of(tail.context.spec).parameters, giver, random.Random(0))
        giving.serve()
        async with alongside(giving.keep(tail.membership, tail.worker)):
            await one_turn()
            holder, other = (MemoryTransport(made.network, PeerId(name)) for name in ("holder", "other"))

            async def ask(asking: MemoryTransport, method: str, **header: object) -> Message:
                request = {"run": spec.run_id, "stage": 1, **header}
                return await asking.call(
                    GIVER, method, Message(request), timeout=5, progress=5, max_answer_bytes=1 << 20
                )

            async def opened(asking: MemoryTransport) -> CopyManifest:
                return CopyManifest.model_validate_json((await ask(asking, "copy.open")).header["manifest"])

            first = await opened(holder)
            for turn in range(4):
                with contextlib.suppress(Refused):
                    await ask(holder, "copy.chunk", root=first.root, index=min(turn, 1))
                clock.ahead += 50.0
                tail.worker.outer.slow[0] += 1.0
            newer = await opened(other)
            assert newer.root != first.root
            with pytest.raises(Refused) as refused:
                await ask(other, "copy.chunk", root=first.root, index=0)
            assert refused.value.reason is Refusal.UNKNOWN_SNAPSHOT
        for each in (holder, other, giver):
            await each.close()


def test_a_large_stages_copy_is_held_until_a_home_line_has_carried_it() -> None:
    """A stage of `consumer-24gb` in half precision, over 20 Mbit/s, with the keeper's pauses: half an hour. It was let
    go of after a quarter, each time, and no stage of that size ever had a copy to begin anew from."""
    spec, size, chunk = micro_spec(limits=LimitsSpec()), 561_560_960, 1 << 20
    transport, keeper = MemoryTransport(MemoryNetwork(), PeerId(SOURCES[0])), PeerId("keeper")
    given = StageCopies(spec, [size], transport, random.Random(0))._given["fp16"]  # pyright: ignore[reportPrivateUsage]
    manifest = CopyManifest(
        source=SOURCES[0], run=spec.run_id, stage=0, clock=1.0, outer_rounds=1, size=size, root="0" * 64
    )
    given.add(sign_copy(transport, manifest, torch.zeros(1)), keeper, 0.0, 0.0)
    now, each = 0.0, chunk // 2
    for at in range(0, size, each):
        now += (1.0 + REST_A_SECOND) * 8 * chunk / 20e6
        given.tend(now)
        assert given.asked(manifest.root, keeper, at, at + each, now) is not None, now
    assert 1700.0 < now < 1900.0


def test_who_had_begun_reads_on_and_an_old_copy_goes_to_nobody_new() -> None:
    """Reading is asking for weights beyond those before. A reader that asks for none in a minute has ended, and one
    that goes on for a quarter of an hour is not waited for."""
    given, readers = GivenCopy(60.0, 60.0, 900.0), [PeerId(f"guard-{n}") for n in range(5)]
    transport = MemoryTransport(MemoryNetwork(), PeerId(SOURCES[0]))
    copies = list[StageCopy]()
    for number in range(2):
        weights = torch.full((1000,), float(number)).half()
        manifest = CopyManifest(
            source=SOURCES[0],
            run=micro_spec().run_id,
            stage=1,
            clock=number,
            outer_rounds=number,
            size=1000,
            root=root_of_weights(weights),
        )
        copies.append(sign_copy(transport, manifest, weights))
    roots = [copy.manifest.root for copy in copies]
    given.add(copies[0], readers[0], 0.0, 0.0)
    assert given.asked(roots[0], readers[0], 0, 1, 50.0) is copies[0]
    assert given.fresh(readers[1], 59.0) is copies[0]
    assert given.fresh(readers[2], 61.0) is None
    assert not given.room(61.0)
    at = 0
    for now in range(100, 960, 50):
        at += 1
        assert given.asked(roots[0], readers[0], at, at + 1, float(now)) is copies[0]
        assert given.asked(roots[0], readers[3], at, at + 1, float(now)) is None, "an old one goes to nobody new"
        assert not given.room(float(now)), "memory for one"
    assert given.room(961.0), "a quarter of an hour is over"
    given.add(copies[1], readers[2], 961.0, 961.0)
    assert given.asked(roots[0], readers[0], at + 1, at + 2, 962.0) is None
    assert given.asked(roots[1], readers[2], 5, 6, 970.0) is copies[1]
    assert given.asked(roots[1], readers[4], 0, 1000, 1000.0) is copies[1]
    assert given.fresh(readers[4], 1020.0) is copies[1], "one for all who come within its time"
    given.asked(roots[1], readers[2], 5, 6, 1025.0)  # the same again
    assert given.reading(1031.0) == {readers[4]}, "the other asked for nothing new"
    given.tend(1081.0)
    assert given.room(1081.0)
    given.add(copies[0], readers[0], 1100.0, 1100.0)
    given.asked(roots[0], readers[0], 5, 1000, 1140.0)
    assert given.fresh(readers[0], 1150.0) is copies[0]
    assert not given.room(1161.0), "it reads anew"
    for now in (1162.0, 1163.0):
        assert given.asked(roots[0], readers[0], 5, 1000, now) is copies[0], "the link broke, and it asks once more"
    assert given.room(1164.0), "nobody waits for one that has asked for all"
