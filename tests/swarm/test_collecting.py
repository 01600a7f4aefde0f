"""Nobody ends without a model: a seed keeps what every stage's nodes gave last, and they may leave at once."""

from __future__ import annotations

import asyncio
import errno
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from noloco_node import ambient
from noloco_node.config.run_spec import RunSpec
from noloco_node.directory.records import PeerState
from noloco_node.exporting import collecting, live
from noloco_node.exporting.collecting import Collector
from noloco_node.exporting.folders import gather_folders
from noloco_node.exporting.gathered import far_behind
from noloco_node.identity.peer_id import PeerId
from noloco_node.model.cut import cut_model
from noloco_node.model.export import load_exported
from noloco_node.sizing.footprint import footprint_of
from noloco_node.state_transfer.backups import StageCopies
from noloco_node.state_transfer.copies import COPY_CHUNK, CopyManifest, CopyRequest, ask_for_copy, fetch_slow
from noloco_node.storage.weights import save_stage
from noloco_node.transport.calls import ask
from noloco_node.transport.errors import Refusal, Refused
from noloco_node.transport.interface import Transport
from noloco_node.transport.memory import MemoryTransport
from noloco_node.transport.messages import TensorSpec
from tests.memory_directory import MemoryDirectory
from tests.support import alongside, eventually, one_turn
from tests.test_exporting_live import OUTSIDER, Trained, mean_slow, same, shifted, trained


def collector_of(swarm: Trained, folder: Path) -> Collector:
    """The collector of a seed with this run folder."""
    transport = MemoryTransport(swarm.made.network, OUTSIDER)
    return Collector(swarm.made.replicas[0].context.spec, folder, transport, MemoryDirectory(swarm.made.hub))


async def test_a_seed_has_the_model_when_all_have_left_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It collects while they train, and says where the model is and what to do with it."""
    caplog.set_level(logging.INFO)
    async with trained() as swarm:
        collector = collector_of(swarm, tmp_path)
        await collector.collect(8)
        expected = await mean_slow(swarm.made, 0) | await mean_slow(swarm.made, 1)
        for replica in swarm.made.replicas:
            await replica.membership.announce(PeerState.GONE)
        await collector.collect(8)
    loaded = dict(torch.nn.Module.named_parameters(load_exported(tmp_path / "model")))
    assert same({name: value.detach() for name, value in loaded.items()}, expected)
    assert f"noloco-node generate {tmp_path / 'model'} --prompt TEXT" in caplog.text


async def test_a_seed_that_is_ended_before_it_has_made_the_model_makes_it_when_it_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All nodes had left meanwhile: what it had kept of every stage lay there, and no model was ever made of it. One
    that is whole is not made again."""

    def refuses() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def again() -> None:
        raise AssertionError("it was whole")

    monkeypatch.setattr(collecting, "LOOK_SECONDS", 0.01)
    async with trained() as swarm:
        ended = collector_of(swarm, tmp_path)
        monkeypatch.setattr(ended, "_write", refuses)
        await ended.collect(8)
        for replica in swarm.made.replicas:
            await replica.membership.announce(PeerState.GONE)
        await collector_of(swarm, tmp_path).follow(lambda: True)
        assert dict(torch.nn.Module.named_parameters(load_exported(tmp_path / "model")))
        later = collector_of(swarm, tmp_path)
        monkeypatch.setattr(later, "_write", again)
        await later.follow(lambda: True)


async def test_a_paused_node_is_not_asked_and_not_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of a run a seed warned ten times that one would not give its weights: it leaves, it said."""
    monkeypatch.setattr(collecting, "LOOK_SECONDS", 0.01)
    async with trained() as swarm:
        paused, *others = swarm.made.replicas
        paused.rested, swarm.copies[0].gives = True, False
        await paused.membership.announce(PeerState.DRAINING)
        for replica in others:
            await replica.membership.announce(PeerState.GONE)
        await asyncio.wait_for(collector_of(swarm, tmp_path).follow(lambda: True), 20)
    assert "is not to be had" not in caplog.text


async def test_a_replica_that_went_on_to_newer_weights_meanwhile_is_asked_for_these(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of a run a seed warned that it was not to be had, and came back for it later."""
    asked, fetch = list[PeerId](), live.fetch_slow

    async def fetch_late(spec: RunSpec, stage: int, transport: Transport, donor: PeerId, *rest: Any) -> CopyManifest:
        asked.append(donor)
        if asked.count(donor) == 1:
            rest[1](1)
            raise Refused(Refusal.UNKNOWN_SNAPSHOT)
        return await fetch(spec, stage, transport, donor, *rest)

    monkeypatch.setattr(live, "fetch_slow", fetch_late)
    async with trained() as swarm:
        await collector_of(swarm, tmp_path).collect(8)
    assert len(asked) == 2 * len(set(asked)) > 0
    assert dict(torch.nn.Module.named_parameters(load_exported(tmp_path / "model")))
    assert "is not to be had" not in caplog.text


async def test_a_node_waits_at_its_end_for_a_collector_that_lacks_its_last_weights(tmp_path: Path) -> None:
    """It waited for its whole grace time where these had been collected already, since they were not new."""
    patience = 60.0
    async with trained() as swarm:
        collector = collector_of(swarm, tmp_path)
        await collector.collect(8)
        for copies in swarm.copies:
            await asyncio.wait_for(copies.hand_over(patience), 20)
        await shifted(swarm.made.replicas[0], 0.5)
        ends = [asyncio.create_task(copies.hand_over(patience)) for copies in swarm.copies]
        await asyncio.wait_for(asyncio.gather(*ends[1:]), 20)
        assert not ends[0].done()
        await collector.collect(8)
        await asyncio.wait_for(ends[0], 20)


async def test_the_last_chunk_may_be_asked_for_once_more_when_its_giver_trains_no_more() -> None:
    """A giver takes a copy for collected as it gives the last chunk, and leaves. If the link broke under that, the
    reader was told that it leaves, and had nothing. Nobody begins to read then, and a pause lets go of it all."""
    async with trained() as swarm:
        replica, reader = swarm.made.replicas[0], MemoryTransport(swarm.made.network, OUTSIDER)
        spec, giver = replica.context.spec, PeerId("giver-number-one")
        sizes = footprint_of(spec).parameters
        copies, size = StageCopies(spec, sizes, MemoryTransport(swarm.made.network, giver), random.Random(0)), sizes[0]
        copies.serve()
        async with alongside(copies.keep(replica.membership, replica.worker)):
            await one_turn()
            manifest = await fetch_slow(spec, 0, reader, giver, torch.empty(size), lambda _: None)
        last = (size - 1) // (spec.limits.chunk_bytes // 4)
        request = CopyRequest(run=spec.run_id, stage=0, root=manifest.root, index=last, precision="fp32")
        part = torch.empty(size - last * (spec.limits.chunk_bytes // 4))
        answer = await ask(reader, giver, COPY_CHUNK, request, specs=(TensorSpec.of(part),), seconds=5.0)
        assert torch.equal(answer.tensors[0], (await replica.worker.slow_weights())[1][-len(part) :])
        with pytest.raises(Refused, match="draining"):
            await ask_for_copy(spec, 0, reader, giver, size, precision="fp32", seconds=5.0)
        copies.let_go()
        with pytest.raises(Refused, match="unknown_snapshot"):
            await ask(reader, giver, COPY_CHUNK, request, specs=(TensorSpec.of(part),), seconds=5.0)


async def test_a_model_outlives_stages_that_are_of_another_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The nodes of one stage had left, and another gave far newer weights. What was made of both, and worth nothing,
    took the place of the run's model."""
    async with trained(1) as swarm:
        collector, spec = collector_of(swarm, tmp_path), swarm.made.replicas[0].context.spec
        await collector.collect(8)
        before = {file.name: file.read_bytes() for file in collector.model.iterdir()}
        cut, slow = cut_model(spec.model)[0], await mean_slow(swarm.made, 0)
        newer = {name: value + 0.5 for name, value in slow.items()}
        folder = collector.collected / "stage-0" / "one-that-went-on"
        save_stage(folder, run_id=spec.run_id, cut=cut, clock=1e9, outer_rounds=0, slow=newer)
        await collector.collect(8, beside=True)
    assert {file.name: file.read_bytes() for file in collector.model.iterdir()} == before
    assert "the model stays as it was for now" in caplog.text


async def test_a_disk_that_refuses_ends_no_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The error went through to the seed, which ended. A flash drive that knows no second name of a file keeps what it
    has of a replica that has left."""

    def refuses(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    async with trained() as swarm:
        collector = collector_of(swarm, tmp_path)
        collector.collected.write_text("a file is in the way")
        await collector.collect(8)
        assert "the run's model is not collected" in caplog.text
        collector.collected.unlink()
        await collector.collect(8)
        await swarm.made.of_stage(0)[1].membership.announce(PeerState.GONE)
        monkeypatch.setattr(collecting.os, "link", refuses)
        await collector.collect(8, beside=True)
    kept = {folder.name for folder in (collector.collected / "stage-0").iterdir()}
    assert kept == {replica.context.transport.peer_id for replica in swarm.made.of_stage(0)}
    assert len(gather_folders([collector.collected], None).replicas[0]) == 2


def test_stages_of_different_times_are_told() -> None:
    """A seed had one stage of the end beside one of the begin, and called that the run's model."""
    assert far_behind({0: 253_952.0, 1: 8_192.0}, 65_536.0) == [1]
    assert far_behind({0: 253_952.0, 1: 249_856.0}, 65_536.0) == []


async def test_what_a_collector_does_by_itself_costs_nodes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries that load for half a minute made the pause after it ten minutes long."""
    now = 0.0
    async with trained() as swarm:
        collector = collector_of(swarm, tmp_path)

        def written() -> None:
            nonlocal now
            now += 30.0

        monkeypatch.setattr(collector, "_write", written)
        clock = ambient.monotonic
        monkeypatch.setattr(collecting.ambient, "monotonic", lambda: clock() + now)
        await collector.collect(8)
    assert now == 30.0
    assert collector.rest(30.0) < 300.0


async def test_one_record_that_says_the_end_has_come_asks_for_few_collections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody may write one, and the nodes give their weights at every collection."""
    monkeypatch.setattr(collecting, "LOOK_SECONDS", 0.001)
    looks, asked = 0, list[int]()

    def over() -> bool:
        nonlocal looks
        looks += 1
        return False

    async def counted(most: int, *, beside: bool = False) -> None:
        del beside
        asked.append(most)

    async with trained() as swarm:
        await swarm.made.replicas[0].membership.announce(PeerState.FINISHING)
        collector = collector_of(swarm, tmp_path)
        monkeypatch.setattr(collector, "collect", counted)
        await asyncio.sleep(0)
        following = asyncio.create_task(collector.follow(over))
        await eventually(lambda: looks > 60, 20, "many looks")
        following.cancel()
    assert 1 <= len(asked) <= collecting.LAST_COLLECTIONS + 2, "an ordinary one gives one more back"


async def test_others_that_have_read_push_no_collector_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A node waited at its end for the last four readers of its weights: four exports, and it left before the seed."""
    caplog.set_level(logging.INFO)
    async with trained(1) as swarm:
        replica = swarm.made.replicas[0]
        spec, giver = replica.context.spec, replica.context.transport.peer_id
        await collector_of(swarm, tmp_path).collect(8)
        for number in range(4):
            reader = MemoryTransport(swarm.made.network, PeerId(f"one-who-reads-{number}"))
            await fetch_slow(spec, 0, reader, giver, torch.empty(footprint_of(spec).parameters[0]), lambda _: None)
        await shifted(replica, 0.5)
        await swarm.copies[0].hand_over(0.0)
    assert OUTSIDER in caplog.text.partition("have not taken the last weights")[2]
