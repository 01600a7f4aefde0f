"""How often the host waits for a device in each kind of call that trains a stage: a part of `benchmarks.gpu`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from noloco_node.config.run_spec import RunSpec
from noloco_node.model.stage import build_stage
from noloco_node.training.host_copies import HostCopies
from noloco_node.training.stage_trainer import StageTrainer
from noloco_node.training.trainer import ForwardContext

READS = "aten::_local_scalar_dense"
LOOKED_AT = 4
"""Calls of each kind whose waits are counted."""
MOST_STAGES = 3
"""A first, a middle and a last one."""


def random_batch(run: RunSpec) -> tuple[Tensor, Tensor]:
    """Inputs and labels of a microbatch, drawn at random."""
    generator = torch.Generator().manual_seed(1)
    shape = (run.inner.microbatch_windows, run.data.sequence_length + 1)
    rows = torch.randint(int(cast(int, run.model.config["vocab_size"])), shape, generator=generator)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


class Reads(TorchDispatchMode):
    """Counts numbers that the host reads off tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        self.count += func.name() == READS
        return func(*args, **(kwargs or {}))


def waits(device: torch.device, copies: HostCopies, work: Callable[[], object]) -> int:
    """How often the host waits for the device in it: for its `copies`, since torch does not warn of waits for events,
    and otherwise. On the processor, how often it would."""
    before = copies.waits
    if device.type != "cuda":
        with Reads() as reads:
            work()
        return copies.waits - before + reads.count
    torch.set_warn_always(True)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.set_warn_always(False)
    return copies.waits - before + sum("synchroniz" in str(each.message) for each in told)


def waits_of_stages(run: RunSpec, device: str) -> dict[str, float]:
    """For each call of a model that is cut as `run` says: waits a microbatch."""
    return {call: count for stage in range(run.stages) for call, count in _waits_of_stage(run, stage, device).items()}


def _waits_of_stage(run: RunSpec, number: int, device: str) -> dict[str, float]:
    """No peer is named as a source: the norms of what peers send are taken on the host, and wait for nothing."""
    stage = build_stage(run.model, number)
    trainer = StageTrainer(stage, run.inner, device=device, wire_dtype=torch.float32)
    ids, labels = random_batch(run)
    inputs = ids if stage.cut.is_first else torch.randn(*ids.shape, stage.cut_width)
    if stage.cut.is_last:
        return {"last stage, loss": _a_call(trainer, lambda: trainer.loss(inputs, labels))}
    name = "first stage" if stage.cut.is_first else "middle stage"
    passages = [ForwardContext() for _ in range(LOOKED_AT + 1)]
    going, coming = iter(passages), iter(passages)
    forward = _a_call(trainer, lambda: trainer.forward(inputs, next(going)))
    gradient = 1e-3 * torch.randn(*ids.shape, stage.cut_width)
    tokens = labels.numel()
    backward = _a_call(trainer, lambda: trainer.backward(next(coming), gradient, 5.0 * tokens, tokens))
    return {f"{name}, forward": forward, f"{name}, backward": backward}


def _a_call(trainer: StageTrainer, work: Callable[[], object]) -> float:
    """After one that sets up what the first one of its kind does."""
    work()
    return waits(trainer.device, trainer.copies, lambda: [work() for _ in range(LOOKED_AT)]) / LOOKED_AT
