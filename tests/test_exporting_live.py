"""A model out of a run that is under way: the mean of what its nodes hold, even if nodes die or lie meanwhile."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from noloco_node import ambient
from noloco_node.bootstrap.hello import HeldOutLoss, Hello, serve_hello
from noloco_node.config.data_spec import NOT_READ
from noloco_node.config.run_spec import LimitsSpec
from noloco_node.directory.records import PeerState
from noloco_node.errors import ExitCode, UserError
from noloco_node.exporting import live
from noloco_node.exporting.gathered import Gathered, Reported, Shapes
from noloco_node.exporting.live import MOST_REPLICAS, Gatherer, reported_by
from noloco_node.exporting.sources import check_own_files
from noloco_node.exporting.write import export, mean_of
from noloco_node.identity.peer_id import PeerId
from noloco_node.model.export import load_exported
from noloco_node.model.stage import build_stage
from noloco_node.node.replica import Replica
from noloco_node.pipeline.evaluation import evaluate
from noloco_node.sizing.footprint import footprint_of
from noloco_node.state_transfer.backups import GivenCopy, StageCopies
from noloco_node.state_transfer.copies import of_one_mind
from noloco_node.training.layout import FlatLayout
from noloco_node.transport.memory import MemoryTransport
from tests.inside import directory_of
from tests.memory_directory import MemoryDirectory
from tests.support import files_up_to
from tests.worlds import IN_SUBSPACE, World, micro_spec, window_rows, world

LIMITS = LimitsSpec(record_seconds=5.0, chunk_bytes=4096, exchange_progress_seconds=5.0)
OUTSIDER = PeerId("one-who-looks-on")


async def nothing_happens(_: Replica) -> None:
    """Before a chunk is given."""


class Trained:
    """Replicas of two stages that give their weights, each moved on by as much as its number in its stage."""

    def __init__(self, made: World, copies: list[StageCopies]) -> None:
        self.made = made
        self.copies = copies
        self.paced: list[tuple[int, str]] = []
        self.given: list[Replica] = []
        """The giving replicas, chunk by chunk."""
        self.before_chunk: Callable[[Replica], Awaitable[None]] = nothing_happens

    async def pace(self, replica: Replica, size: int, reader: str) -> None:
        """What a donor's rate is asked."""
        self.paced.append((size, reader))
        self.given.append(replica)
        await self.before_chunk(replica)

    def gatherer(
        self, spool: Path, most: int = MOST_REPLICAS
    ) -> tuple[Gatherer, MemoryTransport, list[tuple[int, int]]]:
        """An onlooker, and what it is told."""
        transport, told = MemoryTransport(self.made.network, OUTSIDER), list[tuple[int, int]]()
        directory = MemoryDirectory(self.made.hub)
        spool.mkdir()
        rng, spec = random.Random(0), self.made.replicas[0].context.spec
        shapes, tell = Shapes(spec), lambda *has: told.append(has)
        return (Gatherer(spec, shapes, transport, directory, spool, tell, rng, pause=0.0, most=most), transport, told)

    async def gather(self, spool: Path, most: int = MOST_REPLICAS) -> Gathered:
        """What comes of it."""
        gatherer, transport, told = self.gatherer(spool, most)
        try:
            gathered = await gatherer.gather()
        finally:
            await transport.close()
        assert told[-1][0] == told[-1][1]
        return gathered


async def shifted(replica: Replica, shift: float) -> None:
    """Give it slow weights of its own."""
    _, slow = await replica.worker.slow_weights()
    await replica.worker.load_slow_weights(100.0, 1, slow + shift)


@contextlib.asynccontextmanager
async def trained(replicas: int = 2, subspace: dict[str, object] | None = None) -> AsyncIterator[Trained]:
    """A swarm in memory that says that it trains, whose nodes keep and give copies."""
    spec = micro_spec(limits=LIMITS, subspace=subspace)
    async with world(spec, replicas=replicas) as made:
        sizes, copies = footprint_of(spec).parameters, list[StageCopies]()
        swarm = Trained(made, copies)
        async with asyncio.TaskGroup() as group:
            tasks: list[asyncio.Task[None]] = []
            for number, replica in enumerate(made.replicas):
                await shifted(replica, 1.0 + 0.1 * (number % replicas))
                await replica.membership.announce(PeerState.TRAINING)
                copies.append(StageCopies(spec, sizes, replica.context.transport, random.Random(0)))
                copies[-1].serve()
                keeping = copies[-1].keep(replica.membership, replica.worker, partial(swarm.pace, replica))
                tasks.append(group.create_task(keeping))
            await asyncio.sleep(0)
            yield swarm
            for task in tasks:
                task.cancel()


async def mean_slow(made: World, stage: int, leave_out: tuple[int, ...] = ()) -> dict[str, Tensor]:
    """What the replicas of a stage hold, averaged, by local name."""
    states: list[dict[str, Tensor]] = []
    for number, replica in enumerate(made.replicas):
        if replica.stage == stage and number not in leave_out:
            slow, _ = await replica.worker.named_weights()
            states.append({replica.full_names[name]: value for name, value in slow.items()})
    return {name: torch.stack([state[name].double() for state in states]).mean(0).float() for name in states[0]}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Equal but for the last bit of fp32: half precision would not do."""
    return one.keys() == other.keys() and all(
        torch.allclose(one[name], other[name], rtol=1e-6, atol=1e-7) for name in one
    )


async def test_an_export_of_a_live_run_is_the_mean_of_its_replicas_in_full_precision(tmp_path: Path) -> None:
    """Each is asked once, at its donor's pace; nobody sees a record of the onlooker; plain transformers loads it."""
    async with trained() as swarm:
        gathered = await swarm.gather(tmp_path / "spool")
        expected = await mean_slow(swarm.made, 0) | await mean_slow(swarm.made, 1)
        await swarm.made.replicas[0].membership.refresh()
        view = directory_of(swarm.made.replicas[0].membership).view
        assert OUTSIDER not in {record.peer_id for stage in (0, 1) for record in view.live(stage, 0.0)}
    assert {stage: len(found) for stage, found in gathered.replicas.items()} == {0: 2, 1: 2}
    sizes = footprint_of(gathered.run).parameters
    assert sum(size for size, _ in swarm.paced) == 2 * 4 * sum(sizes)
    assert {reader for _, reader in swarm.paced} == {OUTSIDER}
    exported = export(gathered, tmp_path / "out", lambda _: None)
    loaded = dict(torch.nn.Module.named_parameters(load_exported(tmp_path / "out")))
    assert same({name: value.detach() for name, value in loaded.items()}, expected)
    assert exported.parameters == sum(sizes)


@pytest.mark.parametrize("subspace", [None, IN_SUBSPACE])
async def test_the_export_loses_what_the_swarm_measures_at_the_same_weights(
    tmp_path: Path, subspace: dict[str, object] | None
) -> None:
    """The replicas of a stage hold the same and stand still, as at the end of a rate that comes to nothing. The
    evaluation through the swarm, whichever way it goes, and transformers on the folder differ by rounding alone. What
    they differ by under way is thus that they are of other weights."""
    rows = window_rows(range(10**6, 10**6 + 8))
    async with trained(subspace=subspace) as swarm:
        heads = [replica for replica in swarm.made.replicas if replica.stage == 0]
        for replica in swarm.made.replicas:
            parameters = dict(build_stage(replica.context.spec.model, replica.stage).named_parameters())
            first = FlatLayout.of(parameters).flatten(parameters)
            noise = 0.05 * torch.randn(first.shape, generator=torch.Generator().manual_seed(replica.stage))
            await replica.worker.load_slow_weights(100.0, 1, first + noise)
            replica.pipeline.open()
        origins = [head.pipeline.origin for head in heads if head.pipeline.origin is not None]
        for head in heads:
            await head.membership.refresh()
        sums = [(await evaluate(origin, rows, 4))[0] for origin in origins]
        export(await swarm.gather(tmp_path / "spool"), tmp_path / "out", lambda _: None)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        alone = float(model(rows.long(), labels=rows.long()).loss)
    assert len(sums) == 2
    assert [loss / tokens for loss, tokens in sums] == pytest.approx([alone, alone], abs=1e-4)


async def test_a_replicas_copy_is_of_one_moment_however_long_it_takes(tmp_path: Path) -> None:
    """An outer step between any two chunks moves nothing in it; its clock is that of the moment at which it was asked
    for. The replica's own weights go on."""
    before: dict[PeerId, tuple[float, Tensor]] = {}

    async def goes_on(replica: Replica) -> None:
        progress, slow = await replica.worker.slow_weights()
        before.setdefault(replica.context.transport.peer_id, (progress.clock, slow))
        await replica.worker.load_slow_weights(progress.clock + 64.0, progress.outer_rounds + 1, slow + 0.5)

    async with trained() as swarm:
        swarm.before_chunk = goes_on
        gathered = await swarm.gather(tmp_path / "spool")
        moved = [(await replica.worker.slow_weights())[0].clock for replica in swarm.made.replicas]
    shapes = Shapes(gathered.run)
    taken = [copy for copies in gathered.replicas.values() for copy in copies]
    assert len(taken) == len(before) == 4
    for copy in taken:
        clock, slow = before[PeerId(copy.peer)]
        assert copy.clock == clock == 100.0
        assert same(dict(copy.load()), dict(shapes.unflattened(copy.stage, slow, "")))
    assert min(moved) > 100.0 + 2 * 64.0, "several outer steps came between"


async def test_a_donor_that_dies_is_left_out_or_replaced(tmp_path: Path) -> None:
    """One of a stage does not answer any more: the others are the model."""
    async with trained(replicas=3) as swarm:
        dead = swarm.made.replicas[0]
        await dead.context.transport.close()
        gathered = await swarm.gather(tmp_path / "spool")
        stage = dead.stage
        expected = await mean_slow(swarm.made, stage, leave_out=(0,))
    assert len(gathered.replicas[stage]) == 2
    assert same(mean_of(gathered.replicas[stage]), expected)
    assert {len(found) for number, found in gathered.replicas.items() if number != stage} == {3}


async def test_a_donor_that_dies_within_its_copy_is_replaced(tmp_path: Path) -> None:
    """After a few of its chunks: another one of its stage is asked, and nothing of the dead one's is in the model."""
    dead: list[Replica] = []

    async def dies(replica: Replica) -> None:
        if swarm.given.count(replica) == 3 and not dead:
            dead.append(replica)
            await replica.context.transport.close()

    async with trained(replicas=3) as swarm:
        swarm.before_chunk = dies
        gathered = await swarm.gather(tmp_path / "spool", most=1)
        (died,) = dead
        (taken,) = gathered.replicas[died.stage]
        (other,) = [r for r in swarm.made.replicas if r.context.transport.peer_id == taken.peer]
        others = tuple(number for number, replica in enumerate(swarm.made.replicas) if replica is not other)
        expected = await mean_slow(swarm.made, died.stage, leave_out=others)
    assert other is not died
    assert same(dict(taken.load()), expected)


async def test_a_donor_that_lets_its_chunks_drip_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of thousands came just before its deadline, so that one free key kept a seed for days from every weight."""
    monkeypatch.setattr(live, "LEAST_LATE_SECONDS", 0.1)
    never = asyncio.Event()

    async def drips(replica: Replica) -> None:
        if replica is swarm.made.replicas[0] and swarm.given.count(replica) > 2:
            await never.wait()

    async with trained(replicas=3) as swarm:
        swarm.before_chunk = drips
        began = ambient.monotonic()
        gathered = await swarm.gather(tmp_path / "spool")
        assert ambient.monotonic() - began < 40.0, "three tries of one chunk take a minute"
        never.set()
        expected = await mean_slow(swarm.made, 0, leave_out=(0,))
    assert {stage: len(found) for stage, found in gathered.replicas.items()} == {0: 2, 1: 3}
    assert same(mean_of(gathered.replicas[0]), expected)


async def test_one_replica_that_says_any_clock_is_no_part_of_the_model(tmp_path: Path) -> None:
    """Its weights may be worse than they look: it was the whole of its stage, and the three honest ones were none."""
    async with trained(replicas=4) as swarm:
        liar = swarm.made.replicas[1]
        _, slow = await liar.worker.slow_weights()
        await liar.worker.load_slow_weights(1e15, 1, slow)
        gathered = await swarm.gather(tmp_path / "spool")
        expected = await mean_slow(swarm.made, liar.stage, leave_out=(1,))
    kept = gathered.kept()
    assert {stage: len(found) for stage, found in kept.items()} == {0: 3, 1: 4}
    assert same(mean_of(kept[liar.stage]), expected)
    assert gathered.clock == 100.0


async def test_one_that_is_leaving_gives_where_its_stage_has_no_other(tmp_path: Path) -> None:
    """Otherwise those that stay are asked, and they alone."""
    async with trained() as swarm:
        leaving, alone, gone = swarm.made.replicas[0], swarm.made.replicas[2], swarm.made.replicas[3]
        await leaving.membership.announce(PeerState.DRAINING)
        await alone.membership.announce(PeerState.DRAINING)
        await gone.membership.announce(PeerState.GONE)
        gathered = await swarm.gather(tmp_path / "spool")
        asked = {one.peer for found in gathered.replicas.values() for one in found}
        assert asked == {swarm.made.replicas[1].context.transport.peer_id, alone.context.transport.peer_id}


async def test_what_the_swarm_has_measured_comes_with_the_weights(tmp_path: Path) -> None:
    """The median of what its nodes of stage 0 say; it stands in the card, beside what the model is worth."""
    async with trained(replicas=3) as swarm:
        spec = swarm.made.replicas[0].context.spec
        for number, replica in enumerate(swarm.made.replicas[:3]):
            said = HeldOutLoss(loss=2.0 + number, clock=1000.0 + number)
            swarm.made.hellos[number]()
            serve_hello(replica.context.transport, spec, lambda: 0, held_out=lambda said=said: said)
        gathered = await swarm.gather(tmp_path / "spool")
    assert gathered.reported == Reported(3.0, 1001.0)
    export(gathered, tmp_path / "out", lambda _: None)
    assert "3.0000 nats per token at 1,001 tokens" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")


def test_a_report_is_moved_by_no_minority() -> None:
    """Nodes that have measured nothing, one that lies about its loss, one about its clock, and one far behind."""
    hello = Hello(run="", name="", protocol=1, version="1", stage=0)

    def says(*pairs: tuple[float, float]) -> list[Hello]:
        losses = [HeldOutLoss(loss=loss, clock=clock) for loss, clock in pairs]
        return [hello, *(hello.model_copy(update={"held_out": each}) for each in losses)]

    assert reported_by(says(), 100.0) is None
    honest = [(2.0, 950.0), (2.1, 1000.0)]
    assert reported_by(says(*honest), 100.0) == Reported(2.0, 950.0)
    for lie in ((0.0, 1000.0), (99.0, 1000.0), (0.0, 1e18), (5.0, 0.0)):
        found = reported_by(says(*honest, lie), 100.0)
        assert found in (Reported(2.0, 950.0), Reported(2.1, 1000.0)), lie


class KeptBusy(GivenCopy):
    """A peer that broke off has the only place until it was asked for this often."""

    refusals = 10

    def room(self, now: float) -> bool:
        self.refusals -= 1
        return self.refusals < 0 and super().room(now)


async def test_a_stage_whose_only_donor_is_busy_is_waited_for(tmp_path: Path) -> None:
    """A user that broke an export off and begins it anew finds its former self in the donor's only place for a
    minute."""
    async with trained(replicas=1) as swarm:
        swarm.copies[0]._given["fp32"] = busy = KeptBusy(30.0, 5.0, 900.0)
        gathered = await swarm.gather(tmp_path / "spool")
    assert {stage: len(found) for stage, found in gathered.replicas.items()} == {0: 1, 1: 1}
    assert busy.refusals < 0


async def test_a_stage_that_gives_nothing_is_named(tmp_path: Path) -> None:
    """After a few looks, with the exit code of missing donors."""
    async with trained(replicas=1) as swarm:
        await swarm.made.replicas[1].membership.announce(PeerState.GONE)
        swarm.made.replicas[0].rested = True
        await swarm.made.replicas[0].membership.announce(PeerState.DRAINING)
        gatherer, transport, _ = swarm.gatherer(tmp_path / "spool")
        with pytest.raises(UserError, match="gave its weights; nodes of stage 0 are paused") as caught:
            await gatherer.gather()
        await transport.close()
    assert caught.value.exit_code is ExitCode.NO_STATE_SOURCE
    assert "stages 0 and 1" in caught.value.message


async def test_a_full_disk_ends_it_with_a_remedy(tmp_path: Path) -> None:
    """Before a byte is written to a map that would end the process."""
    async with trained() as swarm:
        gatherer, transport, _ = swarm.gatherer(tmp_path / "spool")
        with pytest.raises(UserError) as caught, files_up_to(16 << 10):
            await gatherer.gather()
        await transport.close()
    assert caught.value.exit_code is ExitCode.RUN_FOLDER
    assert "File too large" in caught.value.message


def test_a_live_run_chooses_no_tokenizer_among_the_files_of_who_exports_it(tmp_path: Path) -> None:
    """It would be read here and go out with the model: only with the word of the exporting user."""
    spec = micro_spec()
    run = spec.model_copy(update={"data": spec.data.model_copy(update={"tokenizer": str(tmp_path)})})
    options = argparse.Namespace(config=None, set=[])
    check_own_files(spec, options, reads_text=False)
    with pytest.raises(UserError) as caught:
        check_own_files(run, options, reads_text=False)
    assert caught.value.exit_code is ExitCode.CONFIG
    text = spec.model_copy(update={"data": spec.data.model_copy(update={"source": "text", "path": NOT_READ})})
    with pytest.raises(UserError, match="path is not set") as caught:
        check_own_files(text, options, reads_text=True)
    assert "stage" not in caught.value.remedy
    options.set = [f"run.data.tokenizer={tmp_path}"]
    check_own_files(run, options, reads_text=False)


def test_of_three_the_odd_one_out_is_no_part_of_the_model() -> None:
    """A poisoned copy, a negated and an inflated one; two alone are both taken, and so are young ones."""
    first, draw = torch.zeros(4096), torch.Generator().manual_seed(0)
    way = torch.randn(4096, generator=draw)
    near = [way + 0.1 * torch.randn(4096, generator=draw) for _ in range(2)]
    across = torch.randn(4096, generator=draw)
    for odd in (across, -way, 100.0 * way, way + 3.8 * across, way + across, way + 0.5 * across):
        assert of_one_mind([near[0], odd, near[1]], first) == [0, 2]
        assert of_one_mind([near[0], odd], first) == [0, 1]
    assert of_one_mind([first, first.clone(), first.clone()], first) == [0, 1, 2]


def test_replicas_that_differ_as_much_as_they_have_come_are_all_taken() -> None:
    """As in a young run; noise of four times their way is none of them, and two that agree outvote nobody."""
    first, draw = torch.zeros(4096), torch.Generator().manual_seed(0)
    young = [torch.randn(4096, generator=draw) for _ in range(4)]
    assert of_one_mind(young, first) == [0, 1, 2, 3]
    loud = young[0] + 3.8 * torch.randn(4096, generator=draw)
    assert of_one_mind([*young, loud], first) == [0, 1, 2, 3]
    assert of_one_mind([*young[:3], loud, loud.clone()], first) == [0, 1, 2]
