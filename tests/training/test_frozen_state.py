"""A state that is read piece by piece is of one moment, whatever changes meanwhile, and holds nobody for long."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from noloco_node.config.run_spec import OuterSpec
from noloco_node.training import frozen_state
from noloco_node.training.frozen_state import FrozenState, Thawed
from noloco_node.training.stage_worker import StageWorker
from tests.support import eventually
from tests.training.late_streams import late_copies
from tests.training.made_trainers import checkpoint_of, lone_worker
from tests.worlds import LENGTH, WINDOWS, micro_spec, window_batch

OUTER = OuterSpec(inner_steps=2, alpha=0.5, beta=0.5)
SMALL = 1000
"""Numbers of a piece, so that a stage of the tiny model is many."""


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every vector is read in many pieces."""
    monkeypatch.setattr(frozen_state, "PIECE", SMALL)


def frozen(vector: Tensor) -> FrozenState:
    """A state of one vector on the host."""
    state = FrozenState()
    state.freeze({"fast": [(0, vector)]}, lambda piece: piece)
    return state


def joined(pieces: Iterator[tuple[str, int, Tensor]], size: int) -> Tensor:
    """What was read of one vector."""
    room = torch.full((size,), float("nan"))
    for _, start, piece in pieces:
        room[start : start + len(piece)] = piece
    return room


async def outer_step(worker: StageWorker) -> None:
    """A step alone."""
    snapshot = await worker.snapshot()
    worker.outer.open(members=1, weight=1.0)
    await worker.commit(snapshot, scale=1.0, clock_shift=0.0, on_host=asyncio.to_thread)


async def test_a_checkpoint_read_while_the_training_goes_on_is_of_one_moment() -> None:
    """Microbatches, an inner step and an outer one come between its first piece and the others; bit by bit it is what
    a copy taken at once would have been."""
    spec = micro_spec(stages=1, outer=OUTER, inner={"global_batch_tokens": 2 * WINDOWS * LENGTH})
    async with lone_worker(spec) as (worker, _, reports):
        for first in range(0, 3 * WINDOWS, WINDOWS):
            await worker.loss(*window_batch(range(first, first + WINDOWS)))
        before = await checkpoint_of(worker)
        assert "gradient" in before.tensors
        async with worker.frozen() as state:
            pieces = state.pieces()
            room = {name: torch.zeros(shape, dtype=dtype) for name, (dtype, shape) in state.sizes.items()}
            name, _, piece = next(pieces)
            room[name].copy_(piece)
            next_one = next(pieces)
            taken = asyncio.create_task(worker.loss(*window_batch(range(WINDOWS))))
            name, start, piece = next_one
            room[name][start : start + len(piece)] = piece
            for name, start, piece in pieces:
                (room[name][start : start + len(piece)] if piece.dim() else room[name]).copy_(piece)
                await asyncio.sleep(0)
            await taken
            await outer_step(worker)
        assert len(reports) == 2
        assert (state.progress, state.tokens_accumulated) == (before.progress, before.tokens_accumulated)
        assert room.keys() == before.tensors.keys()
        assert all(torch.equal(room[name], tensor) for name, tensor in before.tensors.items())


async def test_an_outer_step_is_in_a_state_as_a_whole_or_not_at_all() -> None:
    """It is worked out in φ's own memory beside the training. A state that is asked for then comes after it."""
    spec = micro_spec(stages=1, outer=OUTER)
    async with lone_worker(spec) as (worker, _, _):
        await worker.loss(*window_batch(range(WINDOWS)))
        snapshot = await worker.snapshot()
        worker.outer.open(members=1, weight=1.0)
        worked_out, go_on = threading.Event(), threading.Event()

        async def slowly(work: Callable[[], object]) -> object:
            found = await asyncio.to_thread(work)
            worked_out.set()
            await asyncio.to_thread(go_on.wait, 20.0)
            return found

        commit = asyncio.create_task(worker.commit(snapshot, scale=1.0, clock_shift=0.0, on_host=slowly))  # pyright: ignore
        await asyncio.to_thread(worked_out.wait, 20.0)
        asked = asyncio.create_task(worker.joiner_state())
        await asyncio.sleep(0)
        go_on.set()
        (progress, state), _ = await asyncio.gather(asked, commit)
        assert progress.outer_rounds == 1
        assert torch.equal(state["slow"], worker.outer.slow)
        torch.testing.assert_close(state["fast"], state["slow"], rtol=0, atol=1e-6)


def test_what_is_changed_is_copied_before_and_no_more_than_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what is beyond it the change waits until the reader has come so far."""
    monkeypatch.setattr(frozen_state, "SPARE_BYTES", 2 * 4 * SMALL)
    vector = torch.arange(5.0 * SMALL)
    before, state, free = vector.clone(), frozen(vector), threading.Event()

    def change() -> None:
        state.free({"fast"})
        free.set()
        vector.zero_()

    pieces = state.pieces()
    _, start, first = next(pieces)
    found = torch.zeros(5 * SMALL)
    found[start : start + SMALL] = first
    changing = threading.Thread(target=change)
    changing.start()
    assert not free.wait(0.05), "two pieces of four may be copied"
    for _, start, piece in pieces:
        found[start : start + SMALL] = piece
    changing.join()
    assert torch.equal(found, before)
    assert not vector.any()
    assert state.held_seconds > 0.04


def test_a_reader_that_has_failed_is_not_waited_for() -> None:
    """A disk that is full breaks off each checkpoint, and the training stood still for two minutes each time."""
    vector = torch.arange(3.0 * SMALL)
    state, free = frozen(vector), threading.Event()
    pieces = state.pieces()
    next(pieces)

    def change() -> None:
        state.free({"fast"})
        free.set()

    changing = threading.Thread(target=change)
    changing.start()
    assert not free.wait(0.05), "a reader that is on its way is"
    pieces.close()  # pyright: ignore
    state.leave_alone()
    assert free.wait(10.0)
    changing.join()
    assert state.thawed
    assert state.held_seconds > 0.04


def test_what_is_changed_before_it_was_read_crosses_by_memory_that_is_never_paged_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The training stands still until a device has given it, and a copy to other memory takes several times as long."""
    copies, streams = late_copies(monkeypatch)
    there, state = torch.arange(2.0 * SMALL), FrozenState()
    state.freeze({"fast": [(0, there)]}, copies.piece_to_host)
    state.free({"fast"})
    there.zero_()
    assert torch.equal(state.collect()["fast"], torch.arange(2.0 * SMALL))
    assert [copy.pinned and copy.non_blocking for copy in streams.copies] == [True, True]


def test_a_reader_that_hangs_is_told_that_it_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The training goes on, and nothing is taken for a state that is none."""
    monkeypatch.setattr(frozen_state, "PATIENCE_SECONDS", 0.0)
    state = frozen(torch.ones(3 * SMALL))
    pieces = state.pieces()
    next(pieces)
    state.free({"fast"})
    assert state.thawed
    with pytest.raises(Thawed):
        next(pieces)


class Refused(torch.Tensor):
    """A vector of which no copy finds memory."""

    def to(self, *_arguments: object, **_named: object) -> Tensor:
        raise MemoryError


def test_where_there_is_no_memory_for_a_piece_the_reader_fails_and_not_the_training() -> None:
    """The change is not refused."""
    state = frozen(torch.ones(3 * SMALL).as_subclass(Refused))
    pieces = state.pieces()
    state.free({"fast"})
    with pytest.raises(Thawed):
        next(pieces)


async def test_a_reader_that_nobody_waits_for_any_more_goes_on_until_something_changes() -> None:
    """As the write of a node that leaves does; it holds nobody."""
    async with lone_worker(micro_spec(stages=1)) as (worker, trainer, _):
        ends: list[bool] = []
        for changes in (False, True):
            async with worker.frozen("fast") as state:
                pieces = state.pieces()
                next(pieces)
            if changes:
                await worker.load_full_state(0.0, 0, (await worker.joiner_state())[1])
            try:
                joined(pieces, trainer.layout.size)
                ends.append(True)
            except Thawed:
                ends.append(False)
        assert ends == [True, False]


async def test_a_state_that_nobody_took_holds_nobody() -> None:
    """Whoever asked for it was cancelled while the device was busy."""
    async with lone_worker(micro_spec(stages=1)) as (worker, _, _):
        block = worker.frozen()
        asking = asyncio.ensure_future(block.__aenter__())
        await asyncio.sleep(0)
        asking.cancel()
        await eventually(asking.done)
        await worker.load_full_state(0.0, 0, (await worker.joiner_state())[1])
