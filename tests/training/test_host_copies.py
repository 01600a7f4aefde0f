"""The device is waited for once on each microbatch's way through a stage, and once for each inner step.

There is no GPU here. The trainer's copies therefore go by memory of their own on the processor too. What is computed
from what they brought to the device counts as being there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from noloco_node.config.run_spec import RunSpec
from noloco_node.document_marks import inputs_and_labels, positions_of
from noloco_node.training.bounds import NormBound
from noloco_node.training.host_copies import HostCopies
from noloco_node.training.stage_trainer import StageTrainer
from noloco_node.training.trainer import ForwardContext
from tests.model.families import spec_of
from tests.training.late_streams import CPU, late_copies
from tests.training.made_trainers import make_trainer
from tests.worlds import micro_spec, window_rows

OPERATIONS = {"_local_scalar_dense", "is_nonzero", "nonzero", "bincount", "equal", "unique_consecutive", "_unique2"}
"""That wait for a GPU, seen below autograd."""
METHODS = {"tolist", "numpy", "cpu"}
"""Names of the methods that are not seen there."""


class Device(TorchDispatchMode):
    """Knows which memory is the device's, and counts what reads it otherwise than by `HostCopies`."""

    def __init__(self, *there: Tensor) -> None:
        super().__init__()
        self._kept: list[Tensor] = []  # so that no memory is used anew while the test looks
        self._memory: set[int] = set()
        self.crossing = False
        self.read: list[str] = []
        self.holds(there)

    def holds(self, tensors: Any) -> None:
        """These are on the device from now on."""
        for tensor in tensors:
            self._kept.append(tensor)
            self._memory.add(tensor.untyped_storage().data_ptr())

    def has(self, values: Any) -> bool:
        """Whether any of these tensors is there."""
        tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.numel())
        return any(tensor.untyped_storage().data_ptr() in self._memory for tensor in tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self.crossing and self.has((args, kwargs)):
            if func.overloadpacket.__name__ in OPERATIONS:
                self.read.append(func.overloadpacket.__name__)
            self.holds(leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.numel())
        return out


class Methods(TorchFunctionMode):
    """Sees what reads a tensor without an operation."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        moved = name == "to" and any(where == "cpu" for where in (*args[1:], *(kwargs or {}).values()))
        if not self._device.crossing and (moved or name in METHODS) and self._device.has(args[0]):
            self._device.read.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def watched(trainer: StageTrainer, monkeypatch: pytest.MonkeyPatch) -> Generator[Device]:
    """The trainer with a device apart from the host, and what is read of that device."""
    copies, _ = late_copies(monkeypatch)
    trainer.copies = copies
    device = Device(trainer.master, trainer.gradient, trainer.versions.current.flat)
    to_device, to_host = copies.to_device, copies.to_host

    def there(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        device.crossing = True
        made = to_device(tensor, dtype)
        device.crossing = False
        device.holds([made])
        return made

    def here(*tensors: Tensor) -> tuple[Tensor, ...]:
        device.crossing = True
        made = to_host(*tensors)
        device.crossing = False
        return made

    monkeypatch.setattr(copies, "to_device", there)
    monkeypatch.setattr(copies, "to_host", here)
    with Methods(device), device:
        yield device


def waits(trainer: StageTrainer, work: Callable[[], object]) -> int:
    """How often `work` waits for the device."""
    before = trainer.copies.waits
    work()
    return trainer.copies.waits - before


def specs() -> dict[str, RunSpec]:
    """Every kind of way that a microbatch goes."""
    plain = micro_spec(layers=4)
    experts = plain.model_copy(update={"model": spec_of("qwen3_moe", stages=2, output_router_logits=True)})
    return {
        **{kind: micro_spec(layers=4, inner={"backward": kind}) for kind in ("keep", "recompute", "checkpoint")},
        "experts": experts,
    }


def looks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leak: a look at every gradient."""
    total_norm = torch.nn.utils.get_total_norm

    def leaking(gradients: Any) -> Tensor:
        assert all(bool(torch.isfinite(each).all()) for each in gradients)
        return total_norm(gradients)

    monkeypatch.setattr(torch.nn.utils, "get_total_norm", leaking)


@pytest.mark.parametrize("leaks", [False, True])
@pytest.mark.parametrize("kind", list(specs()))
def test_the_device_is_waited_for_once_for_each_part_of_a_microbatch_and_once_a_step(
    kind: str, leaks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward, loss with its backward, backward, inner step; nothing else reads the device, and a look is noticed."""
    spec = specs()[kind]
    if leaks:
        looks_again(monkeypatch)
    inputs, labels = inputs_and_labels(window_rows(range(4)))
    head, tail = (make_trainer(spec, stage) for stage in (0, 1))
    passage = ForwardContext(positions=positions_of(labels))
    with watched(head, monkeypatch) as there, watched(tail, monkeypatch) as beyond:
        sent: list[Tensor] = []
        assert waits(head, lambda: sent.append(head.forward(inputs, passage))) == 1
        results = [tail.loss(sent[0], labels, source="head", chosen=passage.chosen)]
        assert tail.copies.waits == 1
        gradient = results[0].input_gradient
        assert gradient is not None
        back = results[0].loss_sum, results[0].tokens
        assert waits(head, lambda: head.backward(passage, gradient, *back, source="t", chosen=results[0].chosen)) == 1
        assert waits(head, lambda: head.step(1e-3)) == 1
        assert waits(tail, lambda: tail.step(1e-3)) == 1
    assert bool(there.read or beyond.read) is leaks, (there.read, beyond.read)


def test_what_crosses_has_memory_of_its_own_and_keeps_its_precision_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device apart; on the processor itself nothing is copied that need not be."""
    (apart, _), here = late_copies(monkeypatch), HostCopies(CPU)
    tensor = torch.randn(3, 4).half()
    there = apart.to_device(tensor, torch.float32)
    back, number = apart.to_host(there, there.sum())
    assert torch.equal(there, tensor.float())
    assert torch.equal(back, there)
    assert number == there.sum()
    assert len({t.untyped_storage().data_ptr() for t in (tensor, there, back)}) == 3
    assert here.to_device(tensor, torch.float16) is tensor
    assert here.to_host(tensor)[0] is tensor
    assert (apart.waits, here.waits) == (1, 1)


def test_what_the_device_is_still_working_out_is_not_read_before_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what a microbatch needs of it, nor a long vector that crosses beside the computing."""
    copies, streams = late_copies(monkeypatch)
    numbers, there, room = torch.randn(3, 4), torch.zeros(3, 4), copies.room(torch.Size((3, 4)), torch.float32)
    streams.computes(there, numbers)
    assert torch.equal(copies.to_host(there)[0], numbers)
    streams.computes(there, numbers + 1)
    under_way = copies.begin_to_host(room, there)
    assert under_way is not None
    assert there.isnan().all(), "nobody has waited for it yet"
    under_way()
    assert torch.equal(room, numbers + 1)


def test_nothing_that_a_microbatch_needs_holds_the_thread_that_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the wait for what the device has worked out holds it. All is copied beside the host, from and to memory that
    is never paged out."""
    copies, streams = late_copies(monkeypatch)
    ahead = copies.ahead(sent := torch.randn(3, 4))
    assert ahead is not None
    ahead.begin()
    there = [copies.to_device(each, torch.float32) for each in (sent, torch.randn(3, 4).half())]
    copies.to_host(*there)
    assert len(streams.copies) == 4
    assert streams.held == 0
    assert all(copy.non_blocking and copy.pinned for copy in streams.copies)


def test_the_norm_of_a_returned_gradient_is_taken_only_where_its_scale_is_not_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is held to what is usual either way: a pass over it costs the device's thread milliseconds."""
    trainer, norm_of, factor = make_trainer(micro_spec(), 0), torch.linalg.vector_norm, NormBound.factor
    held: list[float] = []
    looked: list[Tensor] = []

    def looking(tensor: Tensor, *order: Any, **how: Any) -> Tensor:
        looked.append(tensor)
        return norm_of(tensor, *order, **how)

    def holding(self: NormBound, source: str, norm: float) -> float:
        if self is trainer.returned_bound:
            held.append(norm)
        return factor(self, source, norm)

    monkeypatch.setattr(torch.linalg, "vector_norm", looking)
    monkeypatch.setattr(NormBound, "factor", holding)
    inputs, _ = inputs_and_labels(window_rows(range(4)))
    for scale in (None, 0.25):
        passage = ForwardContext()
        gradient = torch.full_like(trainer.forward(inputs, passage), 0.25)
        looked.clear()
        trainer.backward(passage, gradient, float(inputs.numel()), inputs.numel(), source="tail", scale=scale)
        assert any(tensor is gradient for tensor in looked) is (scale is None)
    assert held == pytest.approx([0.25 * math.sqrt(gradient.numel()) / inputs.numel()] * 2)
