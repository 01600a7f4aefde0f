"""What an outer step copies crosses beside the training on a device with memory of its own.

There is no GPU here, and on the processor a copy is over when it is begun: see `late_streams`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from noloco_node.config.run_spec import OuterSpec
from noloco_node.training import host_copies
from noloco_node.training.host_copies import HostCopies
from noloco_node.training.stage_trainer import StageTrainer
from tests.training.late_streams import late_copies
from tests.training.made_trainers import lone_worker, make_trainer, moments_of
from tests.worlds import WINDOWS, micro_spec, window_batch


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Callable[[], HostCopies]:
    """Makes copies to a device apart, whose streams are late."""
    return lambda: late_copies(monkeypatch)[0]


def room_for(trainer: StageTrainer) -> Tensor:
    """Room on the host for all weights."""
    return trainer.copies.room(trainer.master.shape, torch.float32)


def test_the_training_goes_on_while_a_snapshot_crosses_and_changes_nothing_of_it(
    late: Callable[[], HostCopies],
) -> None:
    trainer = make_trainer(micro_spec(stages=1), 0)
    trainer.copies = late()
    trainer.loss(*window_batch(range(WINDOWS)))
    room, before = room_for(trainer), trainer.master.clone()
    under_way = trainer.begin_copy(room)
    trainer.loss(*window_batch(range(WINDOWS, 2 * WINDOWS)))
    assert room.isnan().all(), "nobody has waited for it yet"
    trainer.step(1e-2)
    assert not torch.equal(trainer.master, before)
    assert under_way is not None
    under_way()
    assert torch.equal(room, before)


@pytest.mark.parametrize("change", ["an outer step", "another state"])
def test_nothing_else_changes_the_weights_under_a_snapshot(change: str, late: Callable[[], HostCopies]) -> None:
    trainer = make_trainer(micro_spec(stages=1), 0)
    trainer.copies = late()
    room, before = room_for(trainer), trainer.master.clone()
    under_way = trainer.begin_copy(room)
    if change == "an outer step":
        trainer.add_to_weights(torch.ones_like(room))
    else:
        trainer.load(torch.ones_like(room), moments_of(trainer))
    assert not torch.equal(trainer.master, before)
    assert under_way is not None
    under_way()
    assert torch.equal(room, before)


@pytest.mark.parametrize("precision", ["fp32", "bf16-pure"])
def test_a_snapshot_that_was_given_up_does_not_land_in_the_next_one(
    precision: str, late: Callable[[], HostCopies]
) -> None:
    """A thread that is late may get to it only then."""
    trainer = make_trainer(micro_spec(stages=1, inner={"precision": precision}), 0)
    trainer.copies = late()
    trainer.loss(*window_batch(range(WINDOWS)))
    room = room_for(trainer)
    given_up = trainer.begin_copy(room)
    trainer.step(1e-2)
    under_way = trainer.begin_copy(room)
    assert given_up is not None
    assert under_way is not None
    under_way()
    given_up()
    assert torch.equal(room, trainer.master.float())


async def test_an_outer_step_by_copies_beside_the_training_is_bitwise_the_same(late: Callable[[], HostCopies]) -> None:
    outer = OuterSpec(inner_steps=2, alpha=0.5, beta=0.5)
    found: list[list[Tensor]] = []
    for apart in (False, True):
        async with lone_worker(micro_spec(stages=1, outer=outer), late() if apart else None) as (worker, _, _):
            for first in range(0, 3 * WINDOWS, WINDOWS):
                await worker.loss(*window_batch(range(first, first + WINDOWS)))
            snapshot = await worker.snapshot()
            taken = worker.outer.snapshot.clone()
            worker.outer.open(members=1, weight=1.0)
            await worker.loss(*window_batch(range(WINDOWS)))
            await worker.commit(snapshot, scale=1.0, clock_shift=0.0, on_host=asyncio.to_thread)
            _, state = await worker.joiner_state()
            found.append([taken, *state.values()])
    assert all(torch.equal(here, beside) for here, beside in zip(*found, strict=True))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
async def test_a_state_that_is_taken_over_crosses_in_pieces_by_memory_that_is_never_paged_out(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All vectors of it, one piece at a time: a driver copies from other memory at a fraction of the pace."""
    monkeypatch.setattr(host_copies, "PIECE", 1000)
    copies, streams = late_copies(monkeypatch)
    spec = micro_spec(stages=1, inner={"optimizer": optimizer})
    async with lone_worker(spec, copies) as (worker, trainer, _):
        sizes = {name: shape for name, (_, shape) in worker.state_sizes().items() if shape}
        state = {name: torch.rand(shape) for name, shape in sizes.items()} | {"optimizer_steps": torch.tensor(3)}
        await worker.load_full_state(1024.0, 1, state)
        assert sum(copy.to.numel() for copy in streams.copies) == trainer.layout.size + sum(
            trainer.moment_sizes.values()
        )
        assert max(copy.to.numel() for copy in streams.copies) == 1000
        assert streams.held == 0
        trainer.load_gradient(state["fast"], 8, 1.0)
        assert torch.equal(trainer.gradient, state["fast"])
        _, found = await worker.joiner_state()
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


async def test_what_an_outer_step_holds_a_device_for_is_told_by_the_devices_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the host takes to give it its work says nothing; and the thread that keeps it at work does not wait."""
    copies, streams = late_copies(monkeypatch)
    async with lone_worker(micro_spec(stages=1), copies) as (worker, trainer, _):
        add = trainer.add_to_weights

        def takes_its_time(correction: Tensor) -> None:
            add(correction)
            streams.own.worked += 250.0

        monkeypatch.setattr(trainer, "add_to_weights", takes_its_time)
        snapshot = await worker.snapshot()
        worker.outer.open(members=1, weight=1.0)
        commit = await worker.commit(snapshot, scale=1.0, clock_shift=0.0)
    assert commit.held_seconds == pytest.approx(0.25)
    assert "compute" not in [name for event in streams.timed for name in event.waiters]


async def test_what_an_outer_step_needs_crosses_twice_and_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The snapshot crosses, and the correction before the thread that computes is asked for it. Both go from memory
    that is never paged out, and neither as a copy that its thread makes itself."""
    copies, streams = late_copies(monkeypatch)
    async with lone_worker(micro_spec(stages=1), copies) as (worker, trainer, _):
        snapshot = await worker.snapshot()
        worker.outer.open(members=1, weight=1.0)
        await worker.commit(snapshot, scale=1.0, clock_shift=0.0, on_host=asyncio.to_thread)
        long = [copy for copy in streams.copies if copy.to.numel() == trainer.layout.size]
        room, weights = worker.outer.snapshot.data_ptr(), trainer.master.data_ptr()
    away, back = long
    assert (away.to.data_ptr(), away.source.data_ptr(), back.source.data_ptr()) == (room, weights, room)
    assert away.stream is back.stream
    assert streams.held == 0


def test_what_is_brought_is_there_before_the_device_is_asked_to_use_it(late: Callable[[], HostCopies]) -> None:
    copies = late()
    vector = copies.room(torch.Size((4,)), torch.float32).copy_(torch.arange(4.0))
    assert torch.equal(copies.bring(vector), vector)
