"""Where a device's time goes as a node trains on it: a part of `benchmarks.gpu`.

Calls go by `StageWorker` and its thread as a node's do: some wait for their turn while one is worked on, so that their
inputs come ahead, and an outer step is taken beside them, snapshot, arithmetic and commit, without a
partner.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch._C._profiler import _ExperimentalConfig  # pyright: ignore[reportPrivateUsage]
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_waits import random_batch
from noloco_node.config.run_spec import RunSpec
from noloco_node.errors import ExitCode, UserError
from noloco_node.model.stage import build_stage
from noloco_node.training.compute_device import finish
from noloco_node.training.compute_thread import ComputeThread
from noloco_node.training.placing import place_stage
from noloco_node.training.stage_worker import InnerReport, StageWorker

UNDER_WAY = 4
"""Calls asked for at a time: one is worked on, the others wait."""


@dataclass
class Course:
    """What was done while it was traced."""

    seconds: float = 0.0
    microbatches: int = 0
    inner_steps: int = 0
    outer_steps: int = 0
    held_seconds: float = 0.0
    """For which outer steps kept the device from training."""
    fewest_waiting: int = UNDER_WAY
    """Calls that waited for their turn when another one was asked for."""


async def traced(run: RunSpec, device: str, trace: Path | None) -> tuple[dict[str, float | None], Course]:
    """Shares of the time of some microbatches, inner and outer steps of a whole model as one stage, and the course.

    UserError (FAILURE) where the trace cannot be written.
    """
    thread, steps = ComputeThread(), list[InnerReport]()
    placed = await place_stage(run, build_stage(run.model, 0), thread, device=device, wire_dtype=torch.float32)
    worker = StageWorker(run, placed.trainer, placed.outer, thread, steps.append)
    microbatches = run.inner.global_batch_tokens // random_batch(run)[1].numel()
    kinds = [ProfilerActivity.CPU, *_activities(torch.device(device))]
    try:
        await _train(worker, run, microbatches)  # allocators and what compiles itself are set up
        finish(torch.device(device))
        steps.clear()
        with profile(activities=kinds, experimental_config=_ExperimentalConfig(profile_all_threads=True)) as profiler:
            began = time.perf_counter()
            course = await _train(worker, run, microbatches)
            finish(torch.device(device))
            course.seconds = time.perf_counter() - began
    finally:
        await thread.close()
    course.inner_steps = len(steps)
    if trace is not None:
        _write(profiler, trace)
    return shares_of(cast(Any, profiler.events()), course.seconds), course


def _activities(device: torch.device) -> list[ProfilerActivity]:
    """What torch's profiler tells of a device: nothing of the processor and of Apple's."""
    told = {"cuda": ProfilerActivity.CUDA, "xpu": ProfilerActivity.XPU}
    return [told[device.type]] if device.type in told else []


async def _train(worker: StageWorker, run: RunSpec, microbatches: int) -> Course:
    """So many microbatches at the least, until an outer step has come to its end beside them."""
    course, exchange = Course(), asyncio.create_task(_outer_step(worker))

    async def draws() -> None:
        while course.microbatches < microbatches or not exchange.done():
            course.microbatches += 1
            inputs, labels = random_batch(run)
            if course.microbatches > UNDER_WAY:
                course.fewest_waiting = min(course.fewest_waiting, worker.queued)
            await worker.loss(inputs, labels, draw=True)

    await asyncio.gather(*(draws() for _ in range(UNDER_WAY)))
    course.held_seconds = await exchange
    course.outer_steps = 1
    return course


async def _outer_step(worker: StageWorker) -> float:
    """Without a partner: for how long it kept the device from training."""
    snapshot = await worker.snapshot()
    worker.outer.open(members=1, weight=1.0)
    commit = await worker.commit(snapshot, scale=1.0, clock_shift=0.0)
    return snapshot.held_seconds + commit.held_seconds


def _write(profiler: profile, trace: Path) -> None:
    """Kineto tells nobody but its log that it cannot write."""
    trace.unlink(missing_ok=True)
    profiler.export_chrome_trace(str(trace))
    if not trace.is_file() or not trace.stat().st_size:
        raise UserError(ExitCode.FAILURE, f"--trace: {str(trace)!r} was not written", "name another place")


def shares_of(events: Sequence[Any], seconds: float) -> dict[str, float | None]:
    """Of so many seconds, by what the profiler tells of the device: computing, copies to the host and from it, and
    these beside computing. None where nothing is told of it."""
    told = [each for each in events if str(each.device_type).endswith(("CUDA", "XPU"))]
    if not told:
        return {"computing": None, "copying": None, "copying beside computing": None}
    copies, kernels = list[tuple[float, float]](), list[tuple[float, float]]()
    for each in told:
        span = (each.time_range.start, each.time_range.end)
        (copies if each.name.startswith(("Memcpy HtoD", "Memcpy DtoH")) else kernels).append(span)
    both = length_of(copies) + length_of(kernels) - length_of([*copies, *kernels])
    parts = {"computing": length_of(kernels), "copying": length_of(copies), "copying beside computing": both}
    return {name: 1e-6 * part / seconds for name, part in parts.items()}


def length_of(spans: Sequence[tuple[float, float]]) -> float:
    """Of their union."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
