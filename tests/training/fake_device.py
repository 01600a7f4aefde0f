"""A device that is none: neither the host nor torch's meta device, and it counts the memory that lives on it.

    python -m tests.training.fake_device '[["consumer-24gb", 0, []]]'

Each case is a configuration, a stage and changes of settings; each gives a line of JSON. torch knows one such device a
process, so tests start a process for it. Tensors have shapes and devices and no numbers: a stage of billions of weights
takes milliseconds. Two devices in one operation are an error, as on a GPU. torch takes SiLU's backward apart there,
which is one kernel of a GPU, so that a layer's highest is up to an inner width or two above a GPU's.
"""

from __future__ import annotations

import json
import sys
import weakref
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils import backend_registration as backends
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from noloco_node.config.load import load_config
from noloco_node.model.stage import stage_without_weights
from noloco_node.sizing.footprint import footprint_of
from noloco_node.sizing.memory import held_microbatches, memory_of
from noloco_node.training import stage_trainer
from noloco_node.training.frozen_state import FrozenState
from noloco_node.training.host_copies import HostCopies
from noloco_node.training.stage_trainer import StageTrainer
from noloco_node.training.trainer import ForwardContext, carried_dtype
from tests.training.made_trainers import moments_of

NAME = "fakegpu"
ALIGNED = 512
"""Bytes of which an allocator gives out multiples."""
READ = 4096
"""What the host reads of the device up to so many numbers are ones; the rest has no numbers."""


class Living(TorchDispatchMode):
    """Bytes of the storages that live on the device, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, FakeTensor):
                leaf.constant = None  # else the device would be asked for this number
                if leaf.device.type == NAME:
                    self._count(leaf.untyped_storage())
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, -(-storage.nbytes() // ALIGNED) * ALIGNED
        if key not in self._known:
            self._known.add(key)
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def flash(query: Tensor, key: Tensor, value: Tensor, *_: Any, scale: float | None = None, **__: Any) -> Tensor:
    """Attention as a GPU has it: no table of all pairs is held, and heads share their keys and values as they are. In
    fp32 it is the memory-efficient one, which wants them for each head."""
    if query.dtype == torch.float32:
        groups = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(groups, 1) if groups > 1 else each for each in (key, value))
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        return efficient(query, key, value, None, True, 0.0, True, scale=scale)[0]
    return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True, False, scale=scale)[0]


def read(copies: HostCopies, *tensors: Tensor) -> tuple[Tensor, ...]:
    """In place of `HostCopies.to_host`."""
    copies.waits += 1
    assert {tensor.device.type for tensor in tensors} == {NAME}
    with unset_fake_temporarily():
        return tuple(torch.ones(each.shape if each.numel() <= READ else 0, dtype=each.dtype) for each in tensors)


def put(stage: nn.Module, device: torch.device | str) -> nn.Module:
    """As `Module.to` does, which cannot with such tensors: one after the other, and shared ones stay shared."""
    made: dict[Tensor, Tensor] = {}
    for module in stage.modules():
        for tensors in (module._parameters, module._buffers):
            for name, old in tensors.items():
                if old is not None and old not in made:
                    there = torch.empty(old.shape, dtype=old.dtype, device=device)
                    made[old] = nn.Parameter(there) if isinstance(old, nn.Parameter) else there
                tensors[name] = None if old is None else made[old]  # pyright: ignore[reportArgumentType]
    return stage


def set_up() -> None:
    """Once a process."""
    module = backends._DummyBackendModule()
    module.get_amp_supported_dtype = lambda: [torch.bfloat16]  # pyright: ignore
    backends._setup_privateuseone_for_python_backend(NAME, backend_module=module)
    F.scaled_dot_product_attention = flash  # pyright: ignore
    HostCopies.to_host = read  # pyright: ignore[reportAttributeAccessIssue]
    nn.Module.to = put  # pyright: ignore
    stage_trainer.positions_of = lambda _labels: None  # pyright: ignore


def refuses_to_mix() -> None:
    """As a GPU does: else nothing that passes here would say anything."""
    try:
        torch.add(torch.ones(4, device=NAME), torch.ones(4))
    except RuntimeError:
        return
    raise AssertionError("two devices meet in an operation")


def case(name: str, index: int, changes: list[str]) -> dict[str, Any]:
    """As many microbatches as may be under way, each with weights of its own, and newer ones beside them; and an inner
    step. Then a state is read and loaded, an evaluation, and a correction is added."""
    config = load_config(Path(name), changes)
    run, node = config.run, config.node
    need = memory_of(run, node, footprint_of(run), run.most_sharing)[index]
    held = held_microbatches(node, node.most_in_flight(run.microbatches_a_step(1)), index, run.stages)
    stage = stage_without_weights(run.model, index)
    put(stage, "cpu")
    wire = carried_dtype(run.pipeline.activations)
    shape = (run.inner.microbatch_windows, run.data.sequence_length)
    ids, carried = torch.zeros(shape, dtype=torch.int64), torch.zeros(*shape, stage.cut_width, dtype=wire)
    inputs = ids if stage.cut.is_first else carried
    later = None if stage.cut.is_first or stage.subspace is None else ids
    with Living() as living:
        refuses_to_mix()
        trainer = StageTrainer(stage, run.inner, device=f"{NAME}:0", wire_dtype=wire)
        built = living.most = living.now
        passages = [ForwardContext(ids=later) for _ in range(held)]
        for passage in passages:
            trainer.forward(inputs, passage)
            trainer.versions.publish(trainer.master)
        for passage in passages:
            trainer.backward(passage, carried, 1.0, ids.numel())
        if stage.cut.is_last:
            trainer.loss(inputs, ids, later)
        trainer.step(1e-4)
        peak = living.most
        frozen = FrozenState()
        frozen.freeze(trainer.state_vectors(), trainer.copies.piece_to_host)
        room = frozen.collect()
        assert {tensor.device.type for tensor in room.values()} == {"cpu"}
        trainer.add_to_weights(trainer.bring(room["fast"]))
        trainer.load(room["fast"], moments_of(trainer))
        if stage.cut.is_last:
            trainer.evaluate_loss(inputs, ids, later)
        else:
            trainer.evaluate(inputs, ids=later)
    planned = need.on_device - need.arriving
    return {"config": name, "stage": index, "changes": changes, "built": built, "peak": peak, "planned": planned}


def main(cases: list[tuple[str, int, list[str]]]) -> None:
    """All of them."""
    set_up()
    for each in cases:
        with FakeTensorMode(allow_non_fake_inputs=True):
            print(json.dumps(case(*each)), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
