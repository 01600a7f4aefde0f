"""Checkpoints of a replica: of one moment, exact, beside the training, and no disk's trouble ends it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import resource
import signal
import subprocess
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import torch

from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import OuterSpec, RunSpec
from noloco_node.data.sampler import SamplerPosition, WindowSampler
from noloco_node.data.samples import Samples
from noloco_node.document_marks import BEGINS, inputs_and_labels
from noloco_node.errors import ExitCode, UserError
from noloco_node.model.export import evaluate_model, export_model, load_exported
from noloco_node.model.stage import build_stage
from noloco_node.node.checkpointing import HELD_SHARE, CheckpointKeeper, is_due, too_slow_to_leave
from noloco_node.node.replica import Replica
from noloco_node.outer import CodecName
from noloco_node.pipeline.messages import Ledger, Sample
from noloco_node.storage.checkpoint import (
    Checkpoint,
    CheckpointFolder,
    KeptStanding,
    Written,
    held_name,
    read_checkpoint,
)
from noloco_node.telemetry.events import Account, AnyEvent, CheckpointTaken, EventFile, InnerStep, read_events
from noloco_node.training.compute_thread import ComputeThread
from noloco_node.training.frozen_state import FrozenState
from noloco_node.training.placing import on_its_device
from noloco_node.transport.memory import MemoryNetwork, MemoryTransport
from tests.memory_directory import MemoryDirectory, MemoryDirectoryHub
from tests.outer.card import NAME, OnCard
from tests.support import eventually
from tests.telemetry.made_events import account
from tests.training.apart import apart_from_the_host
from tests.training.made_trainers import checkpoint_of
from tests.worlds import (
    IN_SUBSPACE,
    LENGTH,
    MICROBATCH,
    VOCABULARY,
    WINDOWS,
    micro_spec,
    peer_name,
    run_to_the_end,
    trainer_of,
    window_rows,
    world,
)

OUTER = OuterSpec(inner_steps=2, alpha=0.5, beta=0.5, codec="fp16")
COUNT = 23
"""Windows of the text: a pass ends within a few microbatches."""


@dataclass
class Node:
    """One replica of a run of one stage, its keeper, and what happened."""

    replica: Replica
    keeper: CheckpointKeeper
    walk: WindowSampler
    drawn: list[list[int]] = field(default_factory=list[list[int]])
    events: list[AnyEvent] = field(default_factory=list[AnyEvent])

    async def train(self, microbatches: int) -> None:
        """Carry so many microbatches through; every fifth is followed by an outer step alone."""
        assert self.replica.pipeline.origin is not None
        for _ in range(microbatches):
            assert await self.replica.pipeline.origin.train_one()
            if self.replica.pipeline.ledger.trained % 5 == 0:
                await self.replica.averaging.step_alone()

    async def whole(self) -> tuple[object, dict[str, torch.Tensor]]:
        """Everything, to compare."""
        state = await checkpoint_of(self.replica.worker)
        books = (state.progress, state.credit, state.tokens_accumulated, state.loss_accumulated, self.walk.position)
        return (*books, self.replica.pipeline.ledger, self.replica.context.rng.getstate()), state.tensors


@contextlib.asynccontextmanager
async def lone_node(
    spec: RunSpec,
    folder: CheckpointFolder,
    saved: Checkpoint | None = None,
    *,
    leave_seconds: float = 600.0,
    device: str = "cpu",
) -> AsyncIterator[Node]:
    """A node in memory on its own compute thread, from the seed or from a checkpoint; its text has COUNT windows."""
    drawn, events = list[list[int]](), list[AnyEvent]()
    begin = saved.standing.walk if saved else SamplerPosition()
    assert isinstance(begin, SamplerPosition)
    walk = WindowSampler(COUNT, 7, "peer", begin)

    async def draw() -> torch.Tensor:
        drawn.append(walk.take(WINDOWS))
        return window_rows(drawn[-1])

    settings = NodeSettings(
        device=device,
        in_flight=1,
        checkpoint_outer_steps=2,
        checkpoint_seconds=0.0,
        leave_seconds=leave_seconds,
        drain_seconds=1e-6,
    )
    samples = Samples(draw, window_rows(range(10**6, 10**6 + 4)), lambda: walk.position)
    thread, transport = ComputeThread(), MemoryTransport(MemoryNetwork(), peer_name(0, 0))
    try:
        directory, stage = MemoryDirectory(MemoryDirectoryHub(1)), build_stage(spec.model, 0)
        placed = await on_its_device(spec, settings, stage, thread)
        replica = Replica(spec, settings, placed, transport, directory, thread, samples=samples, emit=events.append)
        with CheckpointKeeper(replica, folder, events.append, settings) as keeper:
            if saved is not None:
                await keeper.resume(saved)
            replica.serve()
            yield Node(replica, keeper, walk, drawn, events)
    finally:
        await transport.close()
        await thread.close()


@pytest.mark.parametrize(
    ("momentum", "codec", "optimizer", "subspace"),
    [("averaged", "int8", "muon", IN_SUBSPACE), ("local", "int8", "adamw", None), ("averaged", "sign", "adamw", None)],
)
async def test_a_node_that_was_interrupted_goes_on_bitwise_as_one_that_was_not(
    tmp_path: Path, momentum: str, codec: CodecName, optimizer: str, subspace: dict[str, object] | None
) -> None:
    """Weights, slow weights, momentum, trail, optimizer, the half-gathered gradient, clock, counts, books, data
    position across the end of a pass, and the random generator."""
    outer = OUTER.model_copy(update={"momentum": momentum, "codec": codec})
    inner: dict[str, object] = {"global_batch_tokens": 150, "optimizer": optimizer}
    spec = micro_spec(stages=1, layers=1, outer=outer, inner=inner, subspace=subspace)
    folder = CheckpointFolder(tmp_path / "checkpoints", keep=2)
    async with lone_node(spec, folder) as steady:
        await steady.train(11)
        steady.replica.context.rng.random()
        await steady.keeper.save()
        assert steady.replica.worker.progress.outer_rounds == 2
        until = len(steady.drawn)
        await steady.train(13)
        expected, tensors = await steady.whole()
    saved = folder.newest(spec.run_id, 0)
    assert saved is not None
    assert saved.standing.tokens_accumulated == MICROBATCH, "the checkpoint lies between two inner steps"
    assert saved.standing.credit == 40.0, "and earlier ones took more than their share"
    async with lone_node(spec, folder, saved) as resumed:
        await resumed.train(13)
        books, resumed_tensors = await resumed.whole()
    assert resumed.drawn == steady.drawn[until:]
    assert books == expected
    assert resumed_tensors.keys() == tensors.keys()
    assert all(torch.equal(tensors[name], resumed_tensors[name]) for name in tensors)
    assert int(tensors["optimizer_steps"]) == 10
    losses = [[e.loss for e in node.events if isinstance(e, InnerStep)][-4:] for node in (steady, resumed)]
    assert losses[0] == losses[1]


async def test_a_device_apart_saves_goes_on_and_gives_a_model_as_the_processor_does(tmp_path: Path) -> None:
    """Through inner and outer steps, a checkpoint between two of them, another life, and an export. No tensor of the
    host meets one of the device, and all numbers are the same."""
    spec = micro_spec(stages=1, layers=2, outer=OUTER, inner={"global_batch_tokens": 150})
    inputs, labels = inputs_and_labels(window_rows(range(4)))
    lives: list[dict[str, torch.Tensor]] = []
    with apart_from_the_host():
        for device in ("cpu", NAME):
            folder, out = CheckpointFolder(tmp_path / device, keep=2), tmp_path / f"export-{device}"
            async with lone_node(spec, folder, device=device) as node:
                await node.train(6)
                await node.keeper.save()
            saved = folder.newest(spec.run_id, 0)
            assert saved is not None
            assert saved.standing.tokens_accumulated
            async with lone_node(spec, folder, saved, device=device) as resumed:
                await resumed.train(5)
                worker = resumed.replica.worker
                assert isinstance(trainer_of(worker).master, OnCard) is (device == NAME)
                _, fast = await worker.named_weights()
                export_model(spec.model, {resumed.replica.full_names[name]: fast[name] for name in fast}, out, "none")
                loss, (_, state) = await worker.evaluate_loss(inputs, labels), await resumed.whole()
            assert evaluate_model(load_exported(out), [(inputs, labels)]) == pytest.approx(loss / labels.numel(), 1e-5)
            lives.append({**state, "loss": torch.tensor(loss)})
    processors, devices = lives
    assert processors.keys() == devices.keys()
    assert all(type(value) is torch.Tensor and torch.equal(value, processors[name]) for name, value in devices.items())


async def test_a_node_that_pauses_again_and_again_holds_no_sample_twice(tmp_path: Path) -> None:
    """Its books live through a pause, and its checkpoint has the same samples: they doubled with every night."""
    spec = micro_spec(stages=1, layers=1, outer=OUTER)
    folder = CheckpointFolder(tmp_path / "checkpoints", keep=2)
    async with lone_node(spec, folder) as node:
        await node.train(3)
        ledger = node.replica.pipeline.ledger
        ledger.waiting.append(Sample(window_rows((3, 1)), 2))
        for _ in range(3):
            await node.keeper.save()
            saved = folder.newest(spec.run_id, 0)
            assert saved is not None
            await node.keeper.resume(saved)
        assert len(ledger.waiting) == 1


async def test_a_checkpoint_is_of_one_moment_while_three_microbatches_are_under_way(tmp_path: Path) -> None:
    """It is taken at any time on a running swarm, on both stages. The tokens in the weights and the gradient are those
    of the samples that the books call trained. The samples held are the rest of those drawn."""
    spec = micro_spec(steps=8, microbatches_a_step=3, outer=OUTER)
    settings = NodeSettings(in_flight=3, checkpoint_outer_steps=1, checkpoint_seconds=0.0, drain_seconds=1)
    async with world(spec, settings=settings) as made:
        folders = [CheckpointFolder(tmp_path / str(stage), keep=1000) for stage in range(2)]
        with contextlib.ExitStack() as stack:
            keepers = [
                stack.enter_context(CheckpointKeeper(replica, folder, events.append, settings))
                for replica, folder, events in zip(made.replicas, folders, made.events, strict=True)
            ]

            async def keep_saving() -> None:
                while True:
                    await asyncio.gather(*(keeper.save() for keeper in keepers))

            saving = asyncio.create_task(keep_saving())
            await run_to_the_end(made)
            saving.cancel()
            for keeper in keepers:
                await keeper.save()
        found = [list(all_of(folder, spec)) for folder in folders]
    assert min(map(len, found)) >= 10
    for checkpoint in found[0]:
        standing = checkpoint.standing
        ledger = standing.ledger
        assert ledger["drawn"] == ledger["trained"] + ledger["dropped"] + len(standing.held)
        assert standing.progress.tokens + standing.tokens_accumulated == ledger["trained"] * MICROBATCH
        drawn = [window_rows(batch) for batch in made.drawn[0].batches[: ledger["drawn"]]]
        windows = [checkpoint.tensors[held_name(number)] for number in range(len(standing.held))]
        assert all(any(torch.equal(rows, batch) for batch in drawn) for rows in windows)
    assert max(len(checkpoint.standing.held) for checkpoint in found[0]) > 1
    for standing in (checkpoint.standing for checkpoint in found[1]):
        assert standing.held == ()
        assert standing.progress.tokens + standing.tokens_accumulated >= standing.ledger["served"] * MICROBATCH


def all_of(folder: CheckpointFolder, spec: RunSpec) -> Iterator[Checkpoint]:
    """Every checkpoint of a folder."""
    for path in sorted(folder.path.iterdir()):
        yield read_checkpoint(path, spec.run_id, None)


async def test_a_checkpoint_of_a_later_stage_keeps_what_is_left_from_stage_0(tmp_path: Path) -> None:
    """A node that moved on, and was ended there, returns to stage 0 with its samples and its place in the text."""
    spec, settings = micro_spec(stages=2, outer=OUTER), NodeSettings()
    folder = CheckpointFolder(tmp_path / "checkpoints", keep=2)
    windows = window_rows((3, 1))
    left = Ledger(drawn=5, trained=4, waiting=deque([Sample(windows, 2)]), walk=SamplerPosition(epoch=1, offset=2))
    ledger = Ledger()
    thread, transport = ComputeThread(), MemoryTransport(MemoryNetwork(), peer_name(1, 0))
    try:
        for books, saved in ((left, False), (ledger, True)):
            directory, stage = MemoryDirectory(MemoryDirectoryHub(2)), build_stage(spec.model, 1)
            events = list[AnyEvent]()
            placed = await on_its_device(spec, settings, stage, thread)
            replica = Replica(
                spec, settings, placed, transport, directory, thread, samples=None, emit=events.append, ledger=books
            )
            with CheckpointKeeper(replica, folder, events.append, settings) as keeper:
                if saved:
                    checkpoint = folder.newest(spec.run_id, 1)
                    assert checkpoint is not None
                    await keeper.resume(checkpoint)
                else:
                    await keeper.save()
            replica.close()
    finally:
        await transport.close()
        await thread.close()
    assert (ledger.drawn, ledger.trained, ledger.walk) == (5, 4, left.walk)
    (sample,) = ledger.waiting
    assert sample.requeues == 2
    assert torch.equal(sample.windows, windows)


async def test_samples_under_way_are_trained_first_in_the_next_life(tmp_path: Path) -> None:
    """What was drawn and not trained at the checkpoint is neither lost nor drawn again; the account closes."""
    spec = micro_spec(stages=1, outer=OUTER)
    folder = CheckpointFolder(tmp_path / "checkpoints", keep=2)
    async with lone_node(spec, folder) as node:
        assert node.replica.pipeline.origin is not None
        await node.train(2)
        node.replica.pipeline.ledger.waiting.extend([await node.replica.pipeline.origin._draw_new() for _ in range(2)])  # pyright: ignore[reportPrivateUsage]
        await node.keeper.save()
    saved = folder.newest(spec.run_id, 0)
    assert saved is not None
    async with lone_node(spec, folder, saved) as resumed:
        assert resumed.replica.pipeline.origin is not None
        assert resumed.replica.pipeline.origin.held == 2
        await resumed.train(3)
        ledger = resumed.replica.pipeline.ledger
        assert (ledger.drawn, ledger.trained, resumed.replica.pipeline.origin.held) == (5, 5, 0)
        assert len(resumed.drawn) == 1
    every = [window for batch in node.drawn + resumed.drawn for window in batch]
    assert sorted(every) == sorted(WindowSampler(COUNT, 7, "peer").take(5 * WINDOWS))


async def test_held_samples_keep_where_documents_begin(tmp_path: Path) -> None:
    """With attention that ends at documents; a run without such marks takes none."""
    plain = micro_spec(stages=1, outer=OUTER)
    marked = plain.model_copy(update={"data": plain.data.model_copy(update={"attention": "document"})})
    rows = window_rows((3, 1))
    rows[:, 5] |= BEGINS
    for spec in (marked, plain):
        folder = CheckpointFolder(tmp_path / spec.run_id, keep=2)
        async with lone_node(spec, folder) as node:
            node.replica.pipeline.ledger.waiting.append(Sample(rows))
            await node.keeper.save()
        saved = folder.newest(spec.run_id, 0)
        assert saved is not None
        refused = contextlib.nullcontext() if spec is marked else pytest.raises(UserError, match="outside the vocab")
        with refused:
            async with lone_node(spec, folder, saved) as resumed:
                (sample,) = resumed.replica.pipeline.ledger.waiting
                assert torch.equal(sample.windows, rows)
                await resumed.train(1)


async def test_samples_that_no_text_could_have_given_are_not_taken_up(tmp_path: Path) -> None:
    """Whatever their seal, they would end the node on its first step."""
    spec, folder = micro_spec(stages=1, outer=OUTER), CheckpointFolder(tmp_path / "checkpoints", keep=2)
    async with lone_node(spec, folder) as node:
        for rows, words in (
            (torch.zeros(2, 3, dtype=torch.int32), "windows of"),
            (torch.zeros(1000, LENGTH + 1, dtype=torch.int32), "windows of"),
            (torch.full((1, LENGTH + 1), VOCABULARY, dtype=torch.int32), "outside the vocabulary"),
            (torch.full((1, LENGTH + 1), -1, dtype=torch.int32), "outside the vocabulary"),
            (torch.zeros(LENGTH + 1), "no windows"),
        ):
            waiting = node.replica.pipeline.ledger.waiting
            waiting.clear()
            waiting.append(Sample(rows))
            await node.keeper.save()
            saved = folder.newest(spec.run_id, 0)
            assert saved is not None
            with pytest.raises(UserError, match=words) as caught:
                await node.keeper.resume(saved)
            assert caught.value.exit_code is ExitCode.RUN_FOLDER


async def test_checkpoints_come_by_themselves_every_few_rounds_and_the_last_ones_stay(tmp_path: Path) -> None:
    """While the replica runs; their events tell what they held up and how long the disk took."""
    spec = micro_spec(stages=1, steps=1_000_000, outer=OUTER)
    folder = CheckpointFolder(tmp_path / "checkpoints", keep=2)
    async with lone_node(spec, folder) as node:

        def taken() -> list[CheckpointTaken]:
            return [event for event in node.events if isinstance(event, CheckpointTaken)]

        keeping, training = asyncio.create_task(node.keeper.run()), asyncio.create_task(node.replica.run())
        await eventually(lambda: len(taken()) >= 3, 60, "three were taken")
        node.replica.stop.set()
        await training
        keeping.cancel()
        await asyncio.wait((keeping,))
        by_itself = taken()
        await node.keeper.save()  # it comes after a write that the cancellation may have left under way
    last = node.events[-1]
    assert all(not event.error and event.held_seconds < event.seconds and event.size > 10_000 for event in by_itself)
    rounds = [event.outer_steps_taken for event in by_itself]
    assert all(later - earlier >= 2 for earlier, later in itertools.pairwise(rounds))
    kept = sorted(path.name for path in folder.path.iterdir())
    assert isinstance(last, CheckpointTaken)
    assert kept[-1] == Path(last.path or "").name
    assert len(kept) == 2


@pytest.mark.parametrize(
    ("rounds", "seconds", "held", "due"),
    [
        (5, 60.0, 0.01, True),
        (4, 600.0, 0.01, False),
        (50, 59.0, 0.01, False),
        (5, 60.0, 1.0, False),
        (5, 1.0 / HELD_SHARE, 1.0, True),
    ],
)
def test_when_a_checkpoint_is_due(rounds: int, seconds: float, held: float, due: bool) -> None:
    """Every so many rounds, not more often than every so many seconds, and more rarely where a snapshot takes long."""
    assert is_due(rounds=rounds, seconds=seconds, held_seconds=held, every_rounds=5, at_least_seconds=60.0) is due


async def test_a_checkpoint_of_another_shape_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    """One that an incompatible version wrote under the same run id."""
    spec = micro_spec(stages=1)
    folder = CheckpointFolder(tmp_path / "checkpoints", keep=2)
    async with lone_node(spec, folder) as node:
        await node.train(2)
        await node.keeper.save()
        saved = folder.newest(spec.run_id, 0)
        assert saved is not None
        cut = Checkpoint(saved.path, saved.standing, {n: t[:-1] if t.dim() else t for n, t in saved.tensors.items()})
        before = (await node.whole())[1]
        with pytest.raises(UserError, match="cannot be gone on from") as caught:
            await node.keeper.resume(cut)
        assert caught.value.exit_code is ExitCode.RUN_FOLDER
        after = (await node.whole())[1]
    assert all(torch.equal(before[name], after[name]) for name in before)


Trouble = Callable[[Path], contextlib.AbstractContextManager[None]]


def left_half_written(folder: Path) -> list[Path]:
    """Temporary folders of writes that came to nothing."""
    return list(folder.rglob("*.partial"))


@contextlib.contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """A file system of 64 KiB; it gets room at the end of the block."""
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True)
    if done.returncode:
        pytest.skip("mounting a small file system needs root")
    yield
    subprocess.run(["mount", "-o", "remount,size=64m", str(folder)], check=True)


@contextlib.contextmanager
def small_quota(_folder: Path) -> Iterator[None]:
    """No file of this process may grow beyond 64 KiB until the end of the block; as a quota does it, for anyone."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)


@pytest.fixture
def unmounted(tmp_path: Path) -> Iterator[Path]:
    """A folder on which something may be mounted; it is not any more at the end."""
    folder = tmp_path / "disk"
    folder.mkdir()
    yield folder
    subprocess.run(["umount", str(folder)], capture_output=True)


@pytest.mark.parametrize(("trouble", "cause"), [(full_disk, "No space left"), (small_quota, "File too large")])
async def test_a_disk_that_refuses_is_named_once_and_training_goes_on(
    unmounted: Path, trouble: Trouble, cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    """There is a warning with path and cause, every try is an event, and nothing is left of it. When the disk takes
    them again, one line says so, and the next trouble is named again."""
    caplog.set_level(logging.INFO, logger="noloco_node")
    spec = micro_spec(stages=1, outer=OUTER)
    folder = CheckpointFolder(unmounted / "checkpoints", keep=2)
    async with lone_node(spec, folder) as node:
        with trouble(unmounted):
            for _ in range(3):
                await node.train(2)
                await node.keeper.save()
            tried = [event for event in node.events if isinstance(event, CheckpointTaken)]
            assert [cause in event.error for event in tried] == [True] * 3
            assert left_half_written(unmounted) == []
            assert node.keeper.failing
        assert folder.newest(spec.run_id, 0) is None
        await node.keeper.save()
        assert not node.keeper.failing
        assert folder.newest(spec.run_id, 0) is not None
        assert node.replica.pipeline.ledger.trained == 6
    lines = [record.getMessage() for record in caplog.records]
    warnings = [line for line in lines if "no checkpoint can be written" in line]
    assert len(warnings) == 1
    assert str(folder.path) in warnings[0]
    assert cause in warnings[0]
    assert sum("again" in line for line in lines) == 1


@pytest.mark.parametrize(("leave_seconds", "warnings"), [(1e-5, 1), (600.0, 0)])
async def test_a_disk_too_slow_for_a_last_checkpoint_is_named_while_there_is_time(
    tmp_path: Path, leave_seconds: float, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, with the setting: at the node's end it would be too late."""
    async with lone_node(
        micro_spec(stages=1, outer=OUTER), CheckpointFolder(tmp_path, 2), leave_seconds=leave_seconds
    ) as node:
        for _ in range(2):
            await node.keeper.save()
    lines = [record.getMessage() for record in caplog.records]
    assert sum("the last one would be lost" in line for line in lines) == warnings


def test_a_node_needs_twice_a_checkpoint_and_its_drain_to_leave() -> None:
    """A checkpoint, and the weights, which are less than another."""
    assert not too_slow_to_leave(297.0, 600.0, 5.0)
    assert too_slow_to_leave(298.0, 600.0, 5.0)


async def test_a_checkpoint_needs_no_memory_for_a_copy(tmp_path: Path) -> None:
    """A limit on the address space, as batch systems set it, leaves half as much as a checkpoint is large."""
    spec = micro_spec(stages=1, layers=4, outer=OUTER)
    wide = {**spec.model.config, "hidden_size": 512, "intermediate_size": 1024}
    spec = spec.model_copy(update={"model": spec.model.model_copy(update={"config": wide})})
    folder = CheckpointFolder(tmp_path / "checkpoints", keep=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    async with lone_node(spec, folder) as node:
        await node.train(2)
        resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + (80 << 20), hard))
        try:
            await node.keeper.save()
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        [taken] = [event for event in node.events if isinstance(event, CheckpointTaken)]
        assert (taken.error, taken.size > 2 * (80 << 20)) == ("", True)
        assert folder.newest(spec.run_id, 0) is not None


async def test_a_full_disk_costs_events_and_never_a_torn_line(
    unmounted: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The diary of a node lies on the same disk: lines are lost whole, with one warning, and it goes on afterwards."""
    path = unmounted / "events.jsonl"
    with full_disk(unmounted):
        file = EventFile(path)
        for step in range(2000):
            file.write(account(drawn=step))
        kept = read_events(path)
        assert 10 < len(kept) < 1000
    file.write(account(drawn=5000))
    file.close()
    steps = [event.drawn for event in read_events(path) if isinstance(event, Account)]
    assert steps == [*range(len(kept)), 5000]
    assert sum("events are lost" in record.getMessage() for record in caplog.records) == 1


async def test_a_second_signal_does_not_wait_for_the_disk(tmp_path: Path) -> None:
    """A save that is cancelled while the disk is at work leaves at once, and so does the keeper."""
    spec = micro_spec(stages=1, outer=OUTER)
    release, begun = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    class Slow(CheckpointFolder):
        def write(
            self, standing: KeptStanding, tensors: Mapping[str, torch.Tensor], state: FrozenState | None = None
        ) -> Written:
            loop.call_soon_threadsafe(begun.set)
            asyncio.run_coroutine_threadsafe(release.wait(), loop).result(20)
            return super().write(standing, tensors, state)

    folder = Slow(tmp_path / "checkpoints", keep=2)
    async with lone_node(spec, folder) as node:
        await node.train(2)
        saving = asyncio.create_task(node.keeper.save())
        await begun.wait()
        saving.cancel()
        await asyncio.wait((saving,), timeout=60)
        assert saving.cancelled()
    assert folder.newest(spec.run_id, 0) is None
    release.set()
    await eventually(lambda: folder.newest(spec.run_id, 0), what="the write that was under way came to its end")
