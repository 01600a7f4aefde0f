"""Stage trainers and workers of the tiny model, for tests that need no swarm."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import torch

from noloco_node.config.run_spec import RunSpec
from noloco_node.model.stage import Stage
from noloco_node.training.compute_thread import ComputeThread
from noloco_node.training.host_copies import HostCopies
from noloco_node.training.placing import outer_of
from noloco_node.training.stage_trainer import StageTrainer
from noloco_node.training.stage_worker import CheckpointState, InnerReport, StageWorker
from tests.worlds import fresh_stage


def make_trainer(spec: RunSpec, stage: int) -> StageTrainer:
    """The trainer of one stage, fp32 on the wire."""
    return StageTrainer(fresh_stage(spec.model, stage), spec.inner, device="cpu", wire_dtype=torch.float32)


def stage_with_weights(spec: RunSpec, stage: int, trainer: StageTrainer, flat: torch.Tensor) -> Stage:
    """An ordinary module with the weights that `flat` holds: for plain autograd."""
    module = fresh_stage(spec.model, stage)
    views = trainer.layout.views(flat)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(views[name])
    return module


def flat_gradient(trainer: StageTrainer, module: Stage) -> torch.Tensor:
    """The gradients of an ordinary module in the trainer's order."""
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return trainer.layout.flatten(gradients)


def moments_of(trainer: StageTrainer) -> dict[str, torch.Tensor]:
    """Copies of its optimizer's moments, and of the count of steps."""
    return trainer._optimizer.state()  # pyright: ignore[reportPrivateUsage]


async def checkpoint_of(worker: StageWorker) -> CheckpointState:
    """What a checkpoint holds, in memory."""
    async with worker.frozen() as state:
        counts = state.progress, state.credit, state.tokens_accumulated, state.loss_accumulated
        return CheckpointState(*counts, state.collect())


@asynccontextmanager
async def lone_worker(
    spec: RunSpec, copies: HostCopies | None = None
) -> AsyncIterator[tuple[StageWorker, StageTrainer, list[InnerReport]]]:
    """A worker of the only stage on a compute thread of its own, and its reports. `copies`: in place of its own."""
    thread = ComputeThread()
    trainer = make_trainer(spec, 0)
    trainer.copies = copies or trainer.copies
    reports: list[InnerReport] = []
    try:
        yield StageWorker(spec, trainer, outer_of(spec, trainer), thread, reports.append), trainer, reports
    finally:
        await thread.close()
