"""Whatever a stage does on its device it does with tensors that are there, and it reads none of them as it trains.

There is no GPU here. torch's meta device is one that every machine has. As on a GPU, tensors of it and of the host do
not meet in an operation, and nothing can be read of them. What torch lets pass there and not on a GPU is refused here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from noloco_node.config.run_spec import RunSpec
from noloco_node.document_marks import BEGINS, inputs_and_labels, positions_of
from noloco_node.model.stage import build_stage
from noloco_node.training.frozen_state import FrozenState
from noloco_node.training.host_copies import HostCopies
from noloco_node.training.stage_trainer import StageTrainer
from noloco_node.training.trainer import ForwardContext, Precision
from tests.model.families import spec_of
from tests.training.made_trainers import moments_of
from tests.worlds import micro_spec, window_rows

READS = {"_local_scalar_dense", "nonzero", "equal", "bincount", "_unique2", "masked_select"}


class Apart(TorchDispatchMode):
    """Refuses what a GPU would refuse or be waited for; knows what crosses otherwise than by `HostCopies`."""

    def __init__(self) -> None:
        super().__init__()
        self.by_copies = False
        self.crossed: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, named = func.overloadpacket.__name__, kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, Tensor)]
        to = named.get("device") if name == "_to_copy" else tensors[0].device if name == "copy_" else None
        if to is not None and torch.device(to).type != tensors[-1].device.type:
            return self._cross(func, torch.device(to), args, named)
        there = {tensor.device.type for tensor in tensors if tensor.dim()}
        assert len(there) < 2, f"{name} of {[(tensor.device.type, tuple(tensor.shape)) for tensor in tensors]}"
        assert name not in READS or {"cpu"} == {tensor.device.type for tensor in tensors}, f"{name} reads the device"
        return func(*args, **named)

    def _cross(self, func: Any, to: torch.device, args: Any, named: Any) -> Tensor:
        if not self.by_copies:
            self.crossed.append(to.type)
        if func.overloadpacket.__name__ == "copy_":
            return args[0]
        return func(*args, **named) if to.type == "meta" else torch.ones(args[0].shape, dtype=named.get("dtype"))

    def freely(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """What crosses in `work` crosses as it should."""

        def wrapped(*args: Any, **named: Any) -> Any:
            self.by_copies = True
            try:
                return work(*args, **named)
            finally:
                self.by_copies = False

        return wrapped


def computing(_precision: Precision, _device: torch.device) -> AbstractContextManager[object]:
    """There is no autocast on the meta device."""
    return nullcontext()


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> Generator[Apart]:
    """A device for `StageTrainer` whose numbers, where they are read by `HostCopies`, are all 1."""
    mode = Apart()

    def to_host(copies: HostCopies, *tensors: Tensor) -> tuple[Tensor, ...]:
        copies.waits += 1
        assert {tensor.device.type for tensor in tensors} == {"meta"}
        return tuple(torch.ones(tensor.shape, dtype=tensor.dtype) for tensor in tensors)

    monkeypatch.setattr(HostCopies, "to_host", to_host)
    for name in ("to_device", "bring", "begin_to_host"):
        monkeypatch.setattr(HostCopies, name, mode.freely(getattr(HostCopies, name)))
    monkeypatch.setattr(Precision, "computing", computing)
    monkeypatch.setattr(sys.modules["torch.optim.adam"], "_device_dtype_check_for_fused", lambda *_: None)
    with mode:
        yield mode


def made(spec: RunSpec) -> list[StageTrainer]:
    """All stages on the device."""
    stages = (build_stage(spec.model, index) for index in range(spec.stages))
    return [StageTrainer(stage, spec.inner, device="meta", wire_dtype=torch.float32) for stage in stages]


def carry(trainers: list[StageTrainer], *, documents: bool) -> None:
    """One microbatch there and back, and an inner step of each stage."""
    inputs, labels = inputs_and_labels(window_rows(range(4)))
    if documents:
        labels[:, 3] |= BEGINS
    *before, last = trainers
    passages = [ForwardContext("peer" if index else "", positions=positions_of(labels)) for index in range(len(before))]
    carried, chosen = inputs, [1] * last.router.experts if last.router else []
    for trainer, passage in zip(before, passages, strict=True):
        carried = trainer.forward(carried, passage)
    result = last.loss(carried, labels, source="peer" if before else "", chosen=chosen)
    gradient, back = result.input_gradient, (result.loss_sum, result.tokens)
    for trainer, passage in zip(reversed(before), reversed(passages), strict=True):
        assert gradient is not None
        gradient = trainer.backward(passage, gradient, *back, source="peer", chosen=chosen)
    for trainer in trainers:
        trainer.step(1e-3)


def specs() -> dict[str, RunSpec]:
    """Every kind of way that a microbatch goes, by a first, a middle and a last stage; and a whole model as one."""
    inner = {
        "keep": {},
        "recompute": {"backward": "recompute", "precision": "bf16"},
        "checkpoint": {"backward": "checkpoint", "precision": "bf16-pure"},
    }
    ways = {name: micro_spec(stages=3, layers=3, inner=dict(changes)) for name, changes in inner.items()}
    experts = spec_of("qwen3_moe", stages=2, output_router_logits=True)
    return {
        **ways,
        "documents": micro_spec(stages=1, layers=1),
        "experts": micro_spec(inner={"precision": "bf16"}).model_copy(update={"model": experts}),
    }


@pytest.mark.parametrize("kind", list(specs()))
def test_microbatches_and_inner_steps_stay_on_the_device(kind: str, apart: Apart) -> None:
    """transformers would look at the positions as each forward begins: whether rows hold several documents."""
    trainers = made(specs()[kind])
    apart.crossed.clear()
    carry(trainers, documents=kind == "documents")
    assert not apart.crossed


def test_an_outer_step_crosses_by_copies_beside_the_computing_only(apart: Apart) -> None:
    (trainer,) = made(micro_spec(stages=1, layers=1))
    room = torch.zeros(trainer.layout.size)
    apart.crossed.clear()
    trainer.begin_copy(room[:1024], slice(0, 1024))
    trainer.add_to_weights(trainer.bring(room[:1024]), slice(0, 1024))
    assert not apart.crossed


@pytest.mark.parametrize("precision", ["fp32", "bf16-pure"])
def test_states_and_evaluations_mix_nothing(precision: str, apart: Apart) -> None:
    """Given and taken, with and without one that is there already."""
    trainers = made(micro_spec(stages=2, layers=2, inner={"precision": precision}))
    carried, labels = inputs_and_labels(window_rows(range(4)))
    for trainer in trainers:
        state = moments_of(trainer)
        frozen = FrozenState()
        frozen.freeze(trainer.state_vectors(), trainer.copies.piece_to_host)
        room = frozen.collect()
        for _ in range(2):
            trainer.load(room["fast"], state)
            trainer.load_gradient(room["gradient"], 8, 1.0)
            trainer.step(1e-3)
        trainer.copies.to_host = lambda *tensors: tuple(torch.ones(each.shape, dtype=each.dtype) for each in tensors)
    for trainer in trainers[:-1]:
        carried = trainer.evaluate(carried, positions_of(labels))
    trainers[-1].evaluate_loss(carried, labels)


@pytest.mark.parametrize(
    "leak",
    [
        lambda there: there + torch.zeros(4),
        lambda there: there @ torch.zeros(4, 4),
        lambda there: torch.nn.functional.cross_entropy(there, torch.zeros(4, dtype=torch.int64)),
        lambda there: torch._foreach_add_([there], [torch.zeros(4, 4)]),  # pyright: ignore
        lambda there: float(there.sum()),
        lambda there: bool(there.isfinite().all()),
    ],
)
def test_a_leak_is_noticed(leak: Callable[[Tensor], object], apart: Apart) -> None:
    """Some of these torch lets pass on its meta device, and a GPU would not."""
    there = torch.empty(4, 4, device="meta")
    assert not apart.crossed
    with pytest.raises((AssertionError, RuntimeError)):
        leak(there)
