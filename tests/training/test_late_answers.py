"""The device is given call n + 1 before anybody waits for what call n gives, and all comes back as it did.

There is no GPU here: see `late_streams`. What is put on a stream of copies there happens when somebody waits for it.
"""

from __future__ import annotations

import asyncio
import itertools
import threading

import pytest
import torch
from torch import Tensor

from noloco_node import ambient
from noloco_node.errors import UserError
from noloco_node.training.compute_thread import ComputeThread, Priority
from noloco_node.training.host_copies import HostCopies, UnderWay
from noloco_node.training.placing import outer_of
from noloco_node.training.stage_worker import StageWorker
from noloco_node.training.trainer import ForwardContext, MicrobatchNotFinite
from tests.support import eventually
from tests.training.late_streams import LateEvent, late_copies
from tests.training.made_trainers import make_trainer
from tests.worlds import WINDOWS, micro_spec, window_batch

Batch = tuple[Tensor, Tensor]


def batches(count: int) -> list[Batch]:
    """Inputs and labels."""
    return [window_batch(range(at, at + WINDOWS)) for at in range(0, count * WINDOWS, WINDOWS)]


@pytest.fixture
def arriving(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """As often as it is released an answer arrives."""
    arrives, synchronize = threading.Semaphore(0), LateEvent.synchronize

    def waits(event: LateEvent) -> None:
        if threading.current_thread().name == "answers":
            assert arrives.acquire(timeout=10)
        synchronize(event)

    monkeypatch.setattr(LateEvent, "synchronize", waits)
    return arrives


async def test_the_next_call_is_given_to_the_device_before_the_last_one_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, arriving: threading.Semaphore
) -> None:
    """And none beyond that one; what more comes in between, and is more urgent, goes first."""
    copies, _ = late_copies(monkeypatch)
    spec, thread = micro_spec(), ComputeThread()
    trainer = make_trainer(spec, 0)
    trainer.copies = copies
    given, number = list[int](), itertools.count()
    forward = trainer.forward

    def giving(inputs: Tensor, passage: ForwardContext) -> Tensor:
        outputs = forward(inputs, passage)
        given.append(next(number))
        return outputs

    monkeypatch.setattr(trainer, "forward", giving)
    worker = StageWorker(spec, trainer, outer_of(spec, trainer), thread, lambda _: None)
    asked = [asyncio.create_task(worker.forward(inputs, ForwardContext())) for inputs, _ in batches(4)]
    await eventually(lambda: len(given) == 2, what="two are given, and none has been waited for")
    assert not any(task.done() for task in asked)
    assert copies.waits == 0
    urgent = asyncio.create_task(thread.run(Priority.STEP, lambda: given.append(-1)))
    await eventually(lambda: thread.waiting == 3, what="two and the urgent one wait")
    arriving.release()
    await asked[0]
    await eventually(lambda: given == [0, 1, -1, 2], what="the third is given once the first is there")
    assert not any(task.done() for task in (*asked[1:], urgent)), "in the order in which they were taken"
    arriving.release(3)
    await asyncio.gather(*asked, urgent)
    await thread.close()
    assert not [each for each in threading.enumerate() if each.name in ("compute", "answers")]


async def trained(copies: HostCopies | None) -> list[Tensor]:
    """What three microbatches bring of a last stage, which steps meanwhile, and its weights afterwards."""
    spec = micro_spec()
    trainer, thread = make_trainer(spec, 1), ComputeThread()
    trainer.copies = copies or trainer.copies
    worker = StageWorker(spec, trainer, outer_of(spec, trainer), thread, lambda _: None)
    hidden = trainer.layout.entries[0].shape[-1]
    found: list[Tensor] = []
    for number, (_, labels) in enumerate(batches(3)):
        inputs = torch.randn(*labels.shape, hidden, generator=torch.Generator().manual_seed(number))
        result = await worker.loss(inputs, labels, source="peer")
        assert result.input_gradient is not None
        found += [result.input_gradient.clone(), torch.tensor(result.loss_sum)]
    await thread.close()
    assert worker.progress.steps > 0
    return [*found, trainer.master.clone()]


async def test_what_arrives_late_is_what_came_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last bit; a wait for the numbers that decide something, and one a step, are left."""
    plain = await trained(None)
    copies, streams = late_copies(monkeypatch)
    late = await trained(copies)
    assert all(torch.equal(one, other) for one, other in zip(plain, late, strict=True))
    assert streams.held == 0


async def test_a_state_is_frozen_after_the_books_know_of_all_that_is_in_it(
    monkeypatch: pytest.MonkeyPatch, arriving: threading.Semaphore
) -> None:
    """A gradient that counts already is told of before the state is given away, though its answer is on its way."""
    copies, streams = late_copies(monkeypatch)
    told: list[str] = []
    spec, thread = micro_spec(), ComputeThread()
    trainer = make_trainer(spec, 0)
    trainer.copies = copies
    worker = StageWorker(spec, trainer, outer_of(spec, trainer), thread, lambda _: None)

    async def microbatch() -> None:
        await worker.forward(batches(1)[0][0], ForwardContext())
        told.append("microbatch")

    async def state() -> None:
        async with worker.frozen("slow"):
            told.append("state")

    first = asyncio.create_task(microbatch())
    await eventually(lambda: thread.busy_seconds == 0.0 and thread.waiting == 0 and streams.copies, what="it is given")
    second = asyncio.create_task(state())
    await eventually(lambda: thread.waiting == 0, what="the state is taken")
    arriving.release()
    await asyncio.gather(first, second)
    await thread.close()
    assert told == ["microbatch", "state"]


async def test_activations_that_do_not_fit_are_found_as_they_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller learns of it, and the next one is carried."""
    copies, _ = late_copies(monkeypatch)
    spec, thread = micro_spec(), ComputeThread()
    trainer = make_trainer(spec, 0)
    trainer.copies = copies
    worker = StageWorker(spec, trainer, outer_of(spec, trainer), thread, lambda _: None)
    inputs, _ = batches(1)[0]
    await worker.forward(inputs, ForwardContext())
    flat = trainer.versions.current.flat
    kept = flat.clone()
    flat.fill_(torch.inf)
    with pytest.raises(MicrobatchNotFinite, match="do not fit"):
        await worker.forward(inputs, ForwardContext())
    flat.copy_(kept)
    await worker.forward(inputs, ForwardContext())
    await thread.close()


async def test_a_device_that_is_lost_as_an_answer_comes_is_lost() -> None:
    """CUDA says of what was queued when somebody waits."""
    thread = ComputeThread()

    def lost() -> None:
        raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    with pytest.raises(UserError, match="answers nothing any more"):
        await thread.run(Priority.FORWARD, lambda: UnderWay(None, (lost,)))
    with pytest.raises(UserError):
        await thread.ends_when_lost()
    await thread.close()


async def test_time_in_which_two_calls_run_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the beginning of the first to the arrival of the last, and not what lies between work."""
    now, arrives = 0.0, threading.Event()
    monkeypatch.setattr(ambient, "monotonic", lambda: now)

    def passes(seconds: float) -> None:
        nonlocal now
        now += seconds

    def arrive() -> None:
        assert arrives.wait(10)
        passes(20.0)

    def works() -> UnderWay[None]:
        passes(5.0)
        return UnderWay(None, (arrive,))

    thread = ComputeThread()
    first = asyncio.create_task(thread.run(Priority.FORWARD, works))
    await eventually(lambda: now == 5.0, what="the first is given to the device")
    second = asyncio.create_task(thread.run(Priority.BACKWARD, lambda: passes(1.0)))
    await eventually(lambda: now == 6.0, what="the second is worked on while the first is on its way")
    arrives.set()
    await asyncio.gather(first, second)
    assert thread.busy_seconds == 26.0, "the second lies within the first"
    passes(100.0)
    await thread.run(Priority.STEP, lambda: passes(2.0))
    await thread.close()
    assert thread.busy_seconds == 28.0
    assert thread.busy_by_work == {"step": 2.0, "backward": 0.0, "forward": 26.0, "draw": 0.0}
