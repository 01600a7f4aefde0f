"""Whether a stage on a device is right, before anybody asks how quick it is: a part of `benchmarks.gpu`."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_waits import random_batch
from noloco_node.config.run_spec import RunSpec
from noloco_node.model.stage import build_stage
from noloco_node.process_memory import NoMemory
from noloco_node.training.compute_device import free_cached_memory, memory_of_device
from noloco_node.training.compute_thread import attempt
from noloco_node.training.stage_trainer import StageTrainer
from noloco_node.training.trainer import ForwardContext

Say = Callable[..., None]
"""Writes a figure down: what it is of, and its values by name."""
BACKWARDS = ("keep", "recompute", "checkpoint")
CLOSE = 1e-4
"""Gradients in fp32 differ by this part of their norm at most, wherever they are computed."""
LEFT = (1 << 32, 1 << 30, 1 << 28, 1 << 26)
"""Bytes that are left on a device for a microbatch, one after the other."""
LEFT_FIRST = (1 << 21, 1 << 24, 1 << 26)
"""Bytes that are left for the first product of a process."""


def trainer_of(run: RunSpec, stage: int, device: str) -> StageTrainer:
    """A stage with the run's first weights, whose activations travel in fp32."""
    return StageTrainer(build_stage(run.model, stage), run.inner, device=device, wire_dtype=torch.float32)


def exact(config: Callable[..., RunSpec], device: str, say: Say) -> None:
    """Gradients and weights in fp32 by each backward against the processor's, twice the same, and two stages against
    one. `config` gives a small model with these settings."""
    for backward in BACKWARDS:
        run = config("run.model.stages=1", "run.inner.precision=fp32", f"run.inner.backward={backward}")
        found = [_trained(run, where) for where in ("cpu", device, device)]
        gaps = [_gap(there, here) for here, there in zip(found[0], found[1], strict=True)]
        same = all(torch.equal(one, other) for one, other in zip(found[1], found[2], strict=True))
        say(backward, gradient_gap=gaps[0], weights_gap=gaps[1], twice_the_same=same, ok=gaps[0] < CLOSE)
    one, two = (config(f"run.model.stages={stages}", "run.inner.precision=fp32") for stages in (1, 2))
    whole = trainer_of(one, 0, device)
    ids, labels = random_batch(one)
    first, last = (trainer_of(two, stage, device) for stage in (0, 1))
    passage = ForwardContext()
    result = last.loss(first.forward(ids, passage), labels)
    assert result.input_gradient is not None
    first.backward(passage, result.input_gradient, result.loss_sum, result.tokens)
    loss = whole.loss(ids, labels).loss_sum
    norms = [float(torch.linalg.vector_norm(each.gradient)) for each in (whole, first, last)]  # pyright: ignore
    gap = abs(sum(norm**2 for norm in norms[1:]) ** 0.5 / norms[0] - 1)
    say("two stages", loss_gap=abs(result.loss_sum / loss - 1), norm_gap=gap, ok=gap < CLOSE)


def _trained(run: RunSpec, device: str) -> tuple[Tensor, Tensor]:
    """The gradient of a microbatch, and the weights after its step, on the host."""
    trainer = trainer_of(run, 0, device)
    trainer.loss(*random_batch(run))
    gradient = trainer.gradient.to("cpu", copy=True)
    trainer.step(1e-3)
    return gradient, trainer.master.to("cpu", copy=True)


def _gap(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def without_memory(run: RunSpec, device: str, say: Say, left: Iterator[int] | None = None) -> None:
    """A device that others fill: microbatches are refused by NoMemory, what they held is free, and training goes on."""
    where = torch.device(device)
    if not memory_of_device(where):
        say("out of memory", left_out="the device has no memory of its own")
        return
    trainer = trainer_of(run, 0, device)
    batch = random_batch(run)
    trainer.loss(*batch)
    for room in left or iter(LEFT):
        free_cached_memory(device)
        taken: Any = torch.empty(max(0, memory_of_device(where)["free"] - room), dtype=torch.uint8, device=where)
        before = memory_of_device(where)["allocated"]
        _, error = attempt(lambda: trainer.loss(*batch))
        gc.collect()
        kept = memory_of_device(where)["allocated"] - before
        del taken
        free_cached_memory(device)
        _, after = attempt(lambda: trainer.loss(*batch))
        ok = isinstance(error, NoMemory | None) and after is None
        say("out of memory", left=room, refused=type(error).__name__, kept_bytes=kept, goes_on=after is None, ok=ok)


def first_without_memory(device: str, say: Say, left: Iterator[int] | None = None) -> None:
    """A process that has computed nothing yet, on a device that others fill: its libraries ask for memory at the first
    product, and what they say where there is none must be known for that."""
    where = torch.device(device)
    if not memory_of_device(where):
        say("first product", left_out="the device has no memory of its own")
        return
    matrix: Tensor = torch.ones(1024, 1024).to(where, torch.bfloat16)
    for room in left or iter(LEFT_FIRST):
        free_cached_memory(device)
        taken: Any = torch.empty(max(0, memory_of_device(where)["free"] - room), dtype=torch.uint8, device=where)
        _, error = attempt(lambda: float(torch.mm(matrix, matrix).sum()))
        del taken
        said = str(error or "")[:200]
        say("first product", left=room, refused=type(error).__name__, said=said, ok=isinstance(error, NoMemory | None))
