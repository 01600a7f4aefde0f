"""A device without memory for more: what is asked for is refused, nothing is lost, and the weights go on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from noloco_node.config.run_spec import OuterSpec
from noloco_node.errors import ExitCode
from noloco_node.process_memory import NoMemory, refused_memory
from noloco_node.training import trainer as trainers
from noloco_node.training.compute_thread import STARVED_CALLS, STARVED_SECONDS, ComputeThread, Priority, Starving
from noloco_node.training.inner_optimizer import InnerOptimizer
from noloco_node.training.layout import FlatLayout
from noloco_node.training.trainer import ForwardContext, VersionStore
from tests.training.late_streams import late_copies
from tests.training.made_trainers import lone_worker, make_trainer
from tests.worlds import WINDOWS, micro_spec, window_batch


class Device:
    """Refuses what a store of versions asks for while it is `full`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = False
        self.refused = 0
        empty = torch.empty

        def allocated(size: object, *given: Any, **more: Any) -> torch.Tensor:
            if self.full and isinstance(size, int):  # all else is asked for by a shape
                self.refused += 1
                refuses()
            return empty(size, *given, **more)  # pyright: ignore

        monkeypatch.setattr(torch, "empty", allocated)


def stored() -> tuple[VersionStore, FlatLayout]:
    """A store without a version, and what its weights look like."""
    layout = FlatLayout.of({"matrix": torch.zeros(3, 2), "vector": torch.zeros(4)})
    return VersionStore(layout, torch.float32), layout


def test_who_has_no_memory_for_new_weights_finishes_with_the_old_ones_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A microbatch under way keeps the weights of its forward, and new ones are refused. The step is in the first that
    is taken after it: to the bit as where there is memory."""
    device, spec = Device(monkeypatch), micro_spec(stages=2)
    tokens, _ = window_batch(range(WINDOWS))
    found: list[torch.Tensor] = []
    for full in (False, True):
        trainer = make_trainer(spec, 0)
        under_way, refused = ForwardContext(), ForwardContext()
        gradient = torch.full_like(trainer.forward(tokens, under_way), 1e-3)
        trainer.load_gradient(torch.ones_like(trainer.gradient), 8, 16.0)
        device.full = full
        trainer.step(1e-3)
        if full:
            for _ in range(2):
                with pytest.raises(torch.OutOfMemoryError):
                    trainer.forward(tokens, refused)
            assert device.refused == 3
        trainer.backward(under_way, gradient, 8.0, tokens.numel())
        found += [trainer.forward(tokens, refused), trainer.gradient.clone(), trainer.master.clone()]
        assert trainer.versions.live == 1
    assert all(torch.equal(before, after) for before, after in zip(found[:3], found[3:], strict=True))
    assert torch.equal(trainer.versions.current.flat, trainer.master)


def test_the_first_weights_of_all_are_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them there is nothing to go on with."""
    device, store, layout = Device(monkeypatch), *stored()
    device.full = True
    with pytest.raises(torch.OutOfMemoryError):
        store.publish(torch.zeros(layout.size))


def test_no_inner_step_asks_for_memory() -> None:
    """Adam's state is there from the start on: a device that has none left for it says so then."""
    _, layout = stored()
    master, gradient = torch.ones(layout.size), torch.ones(layout.size)
    optimizer = InnerOptimizer(layout, master, gradient, micro_spec().inner)
    states = [dict(state) for state in optimizer.torch.state.values()]
    assert [sorted(state) for state in states] == [["exp_avg", "exp_avg_sq", "step"]] * 2
    optimizer.step(1e-3)
    for before, after in zip(states, optimizer.torch.state.values(), strict=True):
        assert {name: tensor.data_ptr() for name, tensor in before.items()} == {
            name: tensor.data_ptr() for name, tensor in after.items()
        }
    assert int(optimizer.state()["optimizer_steps"]) == 1


async def test_an_outer_step_without_memory_for_its_correction_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is brought a piece at a time, while the device waits."""
    found: list[torch.Tensor] = []
    spec = micro_spec(stages=1, outer=OuterSpec(inner_steps=2, alpha=0.5, beta=0.5))
    for full in (False, True):
        copies, streams = late_copies(monkeypatch)
        async with lone_worker(spec, copies) as (worker, trainer, _):
            snapshot = await worker.snapshot()
            worker.outer.open(members=1, weight=1.0)
            await worker.loss(*window_batch(range(WINDOWS)))
            before = len(streams.copies)
            with monkeypatch.context() as patched:
                if full:
                    patched.setattr(torch, "empty_like", refuses)
                    patched.setattr(trainers, "PIECE", 1000)
                await worker.commit(snapshot, scale=1.0, clock_shift=0.0, on_host=asyncio.to_thread)
            assert len(streams.copies) - before == (0 if full else 1)
            found.append(trainer.master.clone())
    assert torch.equal(*found)


def refuses(*_: object, **__: object) -> torch.Tensor:
    """As torch where a device has no memory."""
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB")


def test_weights_of_two_bytes_cross_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that widens them on its way takes four bytes a weight of the device's memory: they are made wider here."""
    copies, streams = late_copies(monkeypatch)
    source, room = torch.randn(1000).to(torch.bfloat16), torch.zeros(1000)
    under_way = copies.begin_to_host(room, source)
    assert under_way is not None
    under_way()
    assert torch.equal(room, source.float())
    assert [copy.to.dtype for copy in streams.copies] == [torch.bfloat16]


async def test_refused_memory_has_one_name_whoever_refuses_it() -> None:
    """The machine or a device, for a call of any kind; and the thread goes on."""

    def fails(error: Exception) -> None:
        raise error

    thread = ComputeThread()
    cuda = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nGPU 0 has")
    handle = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
    amd = RuntimeError("CUDA error: HIPBLAS_STATUS_NOT_INITIALIZED when calling `hipblasCreate(handle)`")
    intel = RuntimeError("level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)")
    machine = MemoryError(), RuntimeError("[enforce fail] can't allocate memory: you tried")
    for error in (cuda, handle, amd, intel, *machine):
        with pytest.raises(NoMemory) as refused:
            await thread.run(Priority.FORWARD, partial(fails, error))
        assert str(refused.value) == (str(error).partition("\n")[0] or "MemoryError")
        assert refused_memory(refused.value) is refused.value, "also to who catches it further up"
    with pytest.raises(RuntimeError, match="shapes") as other:
        await thread.run(Priority.FORWARD, partial(fails, RuntimeError("shapes do not fit")))
    assert not isinstance(other.value, NoMemory)
    assert await thread.run(Priority.FORWARD, lambda: 5) == 5
    await thread.close()


@pytest.mark.parametrize(
    ("calls", "apart", "ends"),
    [
        (STARVED_CALLS, STARVED_SECONDS / (STARVED_CALLS - 1), True),
        (STARVED_CALLS - 1, STARVED_SECONDS, False),
        (10 * STARVED_CALLS, STARVED_SECONDS / (10 * STARVED_CALLS), False),
    ],
)
def test_a_device_that_has_had_no_memory_for_long_is_of_no_use(
    calls: int, apart: float, ends: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither a few calls far apart nor many within a moment say so. Said once, as a warning; a step is no microbatch.
    Whether forwards find memory says nothing of the way back, which takes more."""
    starving, refused = Starving(), NoMemory("CUDA out of memory")
    with caplog.at_level(logging.WARNING):
        for number in range(calls - 1):
            assert starving.after(Priority.BACKWARD, refused, number * apart) is None
            assert starving.after(Priority.FORWARD, None, number * apart) is None
            assert starving.after(Priority.STEP, refused, number * apart) is None
        why = starving.after(Priority.BACKWARD, refused, (calls - 1) * apart)
    assert (why is not None) == ends
    if why is not None:
        assert why.exit_code is ExitCode.CHECK_FAILED
        assert "no memory for a microbatch for 60 s (CUDA out of memory)" in why.message
        assert "node.in_flight" in why.remedy
    assert caplog.text.count("no memory for a microbatch now") == 1


def test_a_call_that_finds_memory_ends_the_row() -> None:
    """One that fails for another reason neither ends nor lengthens it."""
    starving, refused = Starving(), NoMemory("CUDA out of memory")
    for number in range(20 * STARVED_CALLS):
        error: Callable[[], Exception | None] = (lambda: None) if number % STARVED_CALLS == 7 else (lambda: refused)
        assert starving.after(Priority.DRAW, error(), number * STARVED_SECONDS) is None
    for number in range(STARVED_CALLS - 1):
        assert starving.after(Priority.DRAW, refused, number * STARVED_SECONDS) is None
        assert starving.after(Priority.DRAW, ValueError("of another kind"), number * STARVED_SECONDS) is None
    assert starving.after(Priority.DRAW, refused, STARVED_CALLS * STARVED_SECONDS) is not None
