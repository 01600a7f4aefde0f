"""What an outer step copies crosses beside the training on a device with memory of its own.

There is no GPU here, and on the processor a copy is over when it is begun. So streams of copies are made here that do
as a GPU's do: what is put on one happens when somebody waits for it, and not before.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from noloco_node.config.run_spec import OuterSpec
from noloco_node.training.host_copies import HostCopies
from tests.training.made_trainers import lone_worker, make_trainer
from tests.worlds import WINDOWS, micro_spec, window_batch

CPU = torch.device("cpu")


class LateStream:
    """Keeps what is put on it."""

    def __init__(self, _device: object = None) -> None:
        self.put = 0
        self.waiting: deque[Callable[[], object]] = deque()

    def wait_stream(self, other: LateStream) -> None:
        """What is put here from now on finds all that was put on the other one done. The device's own has nothing that
        waits; for it this is the moment."""
        if other.waiting and not isinstance(self, Prompt):
            raise AssertionError("a stream of copies waits for another one")
        other.run()

    def run(self, until: int | None = None) -> None:
        """Do what was put here, the first so many."""
        left = self.put - (self.put if until is None else until)
        while len(self.waiting) > left:
            self.waiting.popleft()()


class Prompt(LateStream):
    """The device's own: whatever it is given is done at once."""


class LateEvent:
    """See `torch.cuda.Event`."""

    def record(self, stream: LateStream) -> None:
        """The moment at which what is on the stream now is done."""
        self._stream, self._until = stream, stream.put

    def synchronize(self) -> None:
        """Wait for it."""
        self._stream.run(self._until)


class _Put(TorchDispatchMode):
    def __init__(self, stream: LateStream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ != "copy_":
            return func(*args, **(kwargs or {}))
        self._stream.put += 1
        self._stream.waiting.append(lambda: func(*args, **(kwargs or {})))
        return args[0]


class LateStreams:
    """A module of a device, as `torch.cuda` is one."""

    Stream = LateStream
    Event = LateEvent

    def __init__(self) -> None:
        self._own = Prompt()

    def current_stream(self, _device: object) -> LateStream:
        """The device's own."""
        return self._own

    @contextmanager
    def stream(self, stream: LateStream) -> Generator[None]:
        """What is copied in the block is put on the stream."""
        with _Put(stream):
            yield


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Callable[[], HostCopies]:
    """Makes copies to a device apart, whose streams are late."""

    def made() -> HostCopies:
        monkeypatch.setattr(torch, "get_device_module", lambda _device: LateStreams())
        return HostCopies(CPU, apart=True)

    return made


def test_the_training_goes_on_while_a_snapshot_crosses_and_changes_nothing_of_it(
    late: Callable[[], HostCopies],
) -> None:
    trainer = make_trainer(micro_spec(stages=1), 0)
    trainer.copies = late()
    trainer.loss(*window_batch(range(WINDOWS)))
    room, before = torch.zeros_like(trainer.master), trainer.master.clone()
    under_way = trainer.begin_copy(room, slice(None))
    trainer.loss(*window_batch(range(WINDOWS, 2 * WINDOWS)))
    assert not room.any(), "nobody has waited for it yet"
    trainer.step(1e-2)
    assert not torch.equal(trainer.master, before)
    assert under_way is not None
    under_way()
    assert torch.equal(room, before)


@pytest.mark.parametrize("change", ["an outer step", "another state"])
def test_nothing_else_changes_the_weights_under_a_snapshot(change: str, late: Callable[[], HostCopies]) -> None:
    trainer = make_trainer(micro_spec(stages=1), 0)
    trainer.copies = late()
    room, before = torch.zeros_like(trainer.master), trainer.master.clone()
    under_way = trainer.begin_copy(room, slice(None))
    if change == "an outer step":
        trainer.add_to_weights(torch.ones_like(room))
    else:
        trainer.load(torch.ones_like(room), trainer.optimizer_state())
    assert not torch.equal(trainer.master, before)
    assert under_way is not None
    under_way()
    assert torch.equal(room, before)


async def test_an_outer_step_by_copies_beside_the_training_is_bitwise_the_same(late: Callable[[], HostCopies]) -> None:
    outer = OuterSpec(inner_steps=2, alpha=0.5, beta=0.5)
    found: list[list[Tensor]] = []
    for apart in (False, True):
        async with lone_worker(micro_spec(stages=1, outer=outer)) as (worker, trainer, _):
            if apart:
                trainer.copies = late()
            for first in range(0, 3 * WINDOWS, WINDOWS):
                await worker.loss(*window_batch(range(first, first + WINDOWS)))
            snapshot = await worker.snapshot()
            taken = worker.outer.snapshot.clone()
            worker.outer.open(worker.outer.whole, members=1, weight=1.0)
            await worker.loss(*window_batch(range(WINDOWS)))
            await worker.commit(snapshot, scale=1.0, clock_shift=0.0, on_host=asyncio.to_thread)
            _, state = await worker.full_state()
            found.append([taken, *state.values()])
    assert all(torch.equal(here, beside) for here, beside in zip(*found, strict=True))


def test_what_is_brought_is_there_before_the_device_is_asked_to_use_it(late: Callable[[], HostCopies]) -> None:
    vector = torch.arange(4.0)
    assert torch.equal(late().bring(vector), vector)
