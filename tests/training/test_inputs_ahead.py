"""What the next call needs is sent to the device while this one is worked on, and is there before it is used.

There is no GPU here, and on the processor nothing need be sent: see `late_streams`.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from noloco_node.training.compute_thread import MOST_AHEAD, ComputeThread, Priority
from noloco_node.training.host_copies import HostCopies
from noloco_node.training.placing import outer_of
from noloco_node.training.stage_worker import StageWorker
from noloco_node.training.trainer import ForwardContext
from tests.support import eventually
from tests.training.late_streams import CPU, late_copies
from tests.training.made_trainers import make_trainer
from tests.training.test_compute_thread import held
from tests.worlds import WINDOWS, micro_spec, window_batch


async def carried(thread: ComputeThread, copies: HostCopies | None) -> list[Tensor]:
    """Three microbatches through the first of two stages, asked for while the device is busy: what came of them."""
    spec = micro_spec()
    trainer = make_trainer(spec, 0)
    if copies is not None:
        trainer.copies = copies
    worker = StageWorker(spec, trainer, outer_of(spec, trainer), thread, lambda _: None)
    inputs, labels = zip(*(window_batch(range(at, at + WINDOWS)) for at in range(0, 3 * WINDOWS, WINDOWS)), strict=True)
    passages = [ForwardContext() for _ in inputs]
    async with held(thread):
        asked = [asyncio.create_task(worker.forward(*each)) for each in zip(inputs, passages, strict=True)]
        await eventually(lambda: thread.waiting == 3 and (copies is None or copies.coming > 0), what="one is sent")
    outputs = await asyncio.gather(*asked)
    tokens = labels[0].numel()
    async with held(thread):
        back = [
            asyncio.create_task(worker.backward(passage, output.sign(), 2.0 * tokens, tokens))
            for passage, output in zip(passages, outputs, strict=True)
        ]
        await eventually(lambda: thread.waiting == 3 and (copies is None or copies.coming > 0), what="one is sent")
    await asyncio.gather(*back)
    return [*outputs, trainer.gradient, trainer.master]


async def test_what_comes_ahead_is_there_before_anything_is_computed_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """By streams that are late the same comes out, bit for bit."""
    copies, _ = late_copies(monkeypatch)
    found: list[list[Tensor]] = []
    for beside in (None, copies):
        thread = ComputeThread()
        found.append(await carried(thread, beside))
        await thread.close()
    assert all(torch.equal(plain, ahead) for plain, ahead in zip(*found, strict=True))
    assert copies.coming == 0


async def test_the_next_call_is_sent_for_whoever_overtakes_and_never_more_than_a_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the order in which they will be taken; what is sent is not used up while others pass by."""
    copies, _ = late_copies(monkeypatch)
    thread = ComputeThread()
    order: list[str] = []

    def ask(priority: Priority, name: str) -> asyncio.Task[None]:
        wanted = torch.zeros(4)
        return asyncio.create_task(
            thread.run(priority, lambda: order.append(name + "+" * copies.coming), ahead=copies.ahead(wanted))
        )

    async with held(thread):
        asked = [ask(Priority.DRAW, "draw"), ask(Priority.DRAW, "another")]
        await eventually(lambda: thread.waiting == 2 and copies.coming == 1, what="the draw that is next is sent")
        asked += [ask(Priority.FORWARD, "forward")]
        await eventually(lambda: copies.coming == 2, what="what overtook it is sent")
        asked += [ask(Priority.BACKWARD, "backward")]
        await eventually(lambda: thread.waiting == 4, what="all wait")
        await asyncio.sleep(0.05)
        assert copies.coming == MOST_AHEAD == 2
    await asyncio.gather(*asked)
    assert [name.rstrip("+") for name in order] == ["backward", "forward", "draw", "another"]
    await eventually(lambda: copies.coming == 0, what="nothing is left")
    await thread.close()
    assert not [each for each in threading.enumerate() if each.name in ("compute", "copies")]


async def test_a_call_that_is_cancelled_gives_its_memory_back_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is sent for it any more."""
    copies, _ = late_copies(monkeypatch)
    thread, wanted = ComputeThread(), torch.zeros(4)
    ahead = copies.ahead(wanted)
    assert ahead is not None
    async with held(thread):
        asked = asyncio.create_task(thread.run(Priority.FORWARD, lambda: None, ahead=ahead))
        await eventually(lambda: copies.coming == 1, what="it is sent")
        asked.cancel()
        await asyncio.wait((asked,))
        assert copies.coming == 0
        ahead.begin()
        assert copies.coming == 0
    await thread.close()


def test_what_is_not_wanted_any_more_when_it_is_sent_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller may cancel its call in between, on another thread."""
    copies, _ = late_copies(monkeypatch)
    ahead, empty = copies.ahead(torch.zeros(4)), torch.empty
    assert ahead is not None

    def cancelled_meanwhile(*size: Any, **kind: Any) -> Tensor:
        ahead.forget()
        return empty(*size, **kind)

    monkeypatch.setattr(torch, "empty", cancelled_meanwhile)
    ahead.begin()
    assert copies.coming == 0


def test_memory_is_used_anew_only_after_it_was_read_and_the_copy_waits_for_no_computation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What comes has memory of its own stream, and that stream waits for the last read, not for the device."""
    copies, streams = late_copies(monkeypatch)
    coming = streams.made[0]
    source = torch.arange(4.0)
    first = copies.ahead(source)
    assert first is not None
    first.begin()
    source.zero_()
    assert coming.waiting, "it is on its way"
    assert not coming.waited
    assert torch.equal(copies.to_device(source, torch.float32), torch.arange(4.0)), "as it was when it was sent"
    second = copies.to_device(torch.ones(4), torch.float32)
    memory = {each.data_ptr() for each in coming.made}
    assert len(memory) == 2, "the memory is of the stream that brings it"
    assert second.data_ptr() not in memory, "and what is kept is not"
    assert [event.stream for event in coming.waited] == [streams.own], "for the moment at which the first was read"


@pytest.mark.parametrize("refusal", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_what_the_device_does_not_take_now_is_left_to_its_call(
    refusal: type[RuntimeError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may find memory, or say so. Of the host's that is never paged out there may be none, and CUDA says that by
    an error of another kind."""
    copies, _ = late_copies(monkeypatch)
    ahead = copies.ahead(torch.zeros(4))
    assert ahead is not None

    def full(*_size: object, **_kind: object) -> None:
        raise refusal("out of memory")

    monkeypatch.setattr(torch, "empty", full)
    ahead.begin()
    assert copies.coming == 0


def test_no_other_device_is_set_up_by_what_crosses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread's own device is the first one unless it says otherwise; torch goes back to it as it leaves a stream."""
    copies, streams = late_copies(monkeypatch)
    there = copies.to_device(torch.ones(4), torch.float32)
    copies.to_host(there)
    copies.bring(there)
    copies.begin_to_host(torch.zeros(4), there)
    assert streams.strayed == 0


async def test_on_the_processor_nothing_is_sent_and_no_thread_is_made_for_it() -> None:
    """It costs nothing there."""
    assert HostCopies(CPU).ahead(torch.zeros(4)) is None
    thread = ComputeThread()
    await carried(thread, None)
    assert not [each for each in threading.enumerate() if each.name == "copies"]
    await thread.close()
