"""What a node keeps a device at beside its own work: a part of `benchmarks.gpu`.

Calls wait for their turn by `StageWorker` and its thread, as on a node. Beside them another thread computes in Python,
an exchange is worked out, or the stage's state is read, given and taken over. First: whether what crosses meanwhile is
whole, on a device that is behind with its work.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu_checks import Say
from benchmarks.gpu_trace import UNDER_WAY
from benchmarks.gpu_waits import random_batch
from benchmarks.host_time import busy_python
from noloco_node import ambient
from noloco_node.config.run_spec import RunSpec
from noloco_node.model.stage import build_stage
from noloco_node.outer.replica import OuterReplica
from noloco_node.training.compute_device import finish
from noloco_node.training.compute_thread import ComputeThread
from noloco_node.training.host_copies import HostCopies
from noloco_node.training.placing import place_stage
from noloco_node.training.stage_worker import InnerReport, StageWorker

SWITCHES = (5e-3, 5e-4)
"""Seconds after which Python changes threads: its own, and a tenth."""
THREADS = (1, 8)
"""Of torch on the host, for the arithmetic of an exchange."""
BEHIND = 1024
"""Rows of the matrices whose products keep a device from what is asked of it next."""

Beside = Callable[[], Awaitable[dict[str, float]]]


def what_crosses(device: str, size: int, tries: int, say: Say) -> None:
    """Copies of `size` numbers, again and again: ahead from another thread, taken or forgotten; to the host as they are
    worked out; and a snapshot under which the weights change, also without what guards it: that one may be spoilt."""
    where = torch.device(device)
    copies, chance = HostCopies(where), random.Random(0)
    matrix: Tensor = torch.ones(BEHIND, BEHIND, device=where)

    def behind() -> None:
        for _ in range(0 if where.type == "cpu" else chance.randrange(8)):
            torch.mm(matrix, matrix)

    taken: list[Tensor] = []
    wanted: list[float] = []
    for number in range(tries):
        source = torch.full((size,), float(number))
        ahead = copies.ahead(source)
        if ahead is not None:
            sender = threading.Thread(target=ahead.begin)
            sender.start()
            sender.join(None if chance.random() < 0.7 else 0.0)
            if chance.random() < 0.2:
                ahead.forget()
                sender.join()
                continue
            sender.join()
        behind()
        taken.append(copies.to_device(source, torch.float32).mean())
        wanted.append(float(number))
    wrong = sum(float(here) != number for here, number in zip(taken, wanted, strict=True))
    say("inputs ahead", taken=len(taken), wrong=wrong, left=copies.coming, ok=not wrong and not copies.coming)
    wrong = 0
    for number in range(tries):
        behind()
        wrong += not bool((copies.to_host(torch.full((size,), float(number), device=where))[0] == number).all())
    say("to the host", wrong=wrong, ok=not wrong)
    for guarded in (True, False):
        weights = torch.zeros(16 * size, device=where)
        room = copies.room(weights.shape, weights.dtype)
        finish(where)
        crossed = copies.begin_to_host(room, weights)
        if guarded:
            copies.before_writing()
        weights.fill_(1.0)
        if crossed is not None:
            crossed()
        spoilt = float(room.count_nonzero()) / len(room)
        say("snapshot", guarded=guarded, spoilt=spoilt, ok=not (guarded and spoilt))


class Training:
    """A whole model as one stage, by its worker."""

    def __init__(self, run: RunSpec, device: str, worker: StageWorker) -> None:
        self._batch, self._device = random_batch(run), torch.device(device)
        self.worker = worker

    async def rate(self, seconds: float, beside: Beside | None = None) -> dict[str, float]:
        """Tokens a second, the share of the time that the device's thread works, and what came of the work `beside`:
        until that is done, and so many seconds at the least."""
        count, began, busy = 0, time.perf_counter(), self.worker.busy_seconds
        other = None if beside is None else asyncio.ensure_future(beside())

        async def draws() -> None:
            nonlocal count
            while time.perf_counter() - began < seconds or (other is not None and not other.done()):
                await self.worker.loss(*(each.clone() for each in self._batch), draw=True)
                count += 1

        await asyncio.gather(*(draws() for _ in range(UNDER_WAY)))
        finish(self._device)
        took = time.perf_counter() - began
        found = {"tokens_per_second": count * self._batch[1].numel() / took}
        return {**found, "busy": (self.worker.busy_seconds - busy) / took, **(await other if other is not None else {})}


@asynccontextmanager
async def training(run: RunSpec, device: str) -> AsyncGenerator[Training]:
    """It is set up, and has trained a little."""
    thread, steps = ComputeThread(), list[InnerReport]()
    try:
        placed = await place_stage(run, build_stage(run.model, 0), thread, device=device, wire_dtype=torch.float32)
        made = Training(run, device, StageWorker(run, placed.trainer, placed.outer, thread, steps.append))
        await made.rate(0.5)
        yield made
    finally:
        await thread.close()


async def by_the_worker(run: RunSpec, device: str, seconds: float, say: Say) -> None:
    """Alone, beside a busy thread of Python, and beside a whole exchange."""
    async with training(run, device) as made:
        say("alone", **await made.rate(seconds))
        for switch in SWITCHES:
            with busy_python(switch):
                say("beside busy Python", switch_s=switch, **await made.rate(seconds))
        for threads in THREADS:
            torch.set_num_threads(threads)
            say("beside an exchange", threads=threads, **await made.rate(seconds, partial(outer_step, made.worker)))
        torch.set_num_threads(1)


async def outer_step(worker: StageWorker, *, alone: bool = False) -> dict[str, float]:
    """An outer step with a partner that has the same weights, or alone: how long it takes and holds the device."""
    began = time.perf_counter()
    snapshot = await worker.snapshot()
    crossed = time.perf_counter()
    if alone:
        worker.outer.open(members=1, weight=1.0)
    else:
        await ambient.elsewhere(with_itself, worker.outer)
    worked_out = time.perf_counter()
    commit = await worker.commit(snapshot, scale=1.0, clock_shift=0.0)
    return {
        "step_s": time.perf_counter() - began,
        "snapshot_s": crossed - began,
        "arithmetic_s": worked_out - crossed,
        "snapshot_held_s": snapshot.held_seconds,
        "commit_held_s": commit.held_seconds,
    }


def with_itself(outer: OuterReplica) -> None:
    """The arithmetic of an exchange up to its commit, with a partner that sends the same."""
    outer.open(members=2, weight=1.0, exchange="itself")
    sketch = outer.sketch()
    outer.agree([sketch] if outer.codec.modulo else [])
    for index in range(outer.chunks):
        outer.add_chunk(index, outer.encoded_chunk(index).clone())


async def states(run: RunSpec, device: str, say: Say) -> None:
    """How long an outer step alone, a checkpoint that is read, and a state that is given and taken over hold the
    device; each beside microbatches, but the last."""
    async with training(run, device) as made:
        worker = made.worker
        size = worker.outer.size
        say("outer step alone", weights=size, **await made.rate(0.0, partial(outer_step, worker, alone=True)))

        async def read() -> dict[str, float]:
            began = time.perf_counter()
            async with worker.frozen() as state:
                await ambient.elsewhere(state.collect)
            return {"took_s": time.perf_counter() - began, "held_ns_a_weight": 1e9 * state.held_seconds / size}

        say("checkpoint", weights=size, **await made.rate(0.0, read))
        began = time.perf_counter()
        progress, state = await worker.joiner_state()
        given = time.perf_counter()
        await worker.load_full_state(progress.clock, progress.outer_rounds, state)
        say("joiner", weights=size, given_s=given - began, taken_over_s=time.perf_counter() - given)
