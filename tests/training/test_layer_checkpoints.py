"""`inner.backward: checkpoint`: the same numbers, and nothing of a layer is held but its input."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from noloco_node.model.stage import build_stage
from noloco_node.training.stage_trainer import StageTrainer
from noloco_node.training.trainer import ForwardContext
from tests.model.families import FAMILIES, LAYERS, VOCABULARY, spec_of
from tests.worlds import micro_spec


def trainer_of(family: str, stage: int, backward: str, precision: str = "fp32") -> StageTrainer:
    """One of two stages."""
    inner = micro_spec(inner={"backward": backward, "precision": precision}).inner
    return StageTrainer(build_stage(spec_of(family, 2), stage), inner, device="cpu", wire_dtype=torch.float32)


def there_and_back(trainers: list[StageTrainer]) -> list[Tensor]:
    """Outputs of the first stage and all gradients after one microbatch."""
    windows = torch.randint(0, VOCABULARY, (2, 13), generator=torch.Generator().manual_seed(1))
    passage = ForwardContext()
    outputs = trainers[0].forward(windows[:, :-1], passage)
    result = trainers[1].loss(outputs, windows[:, 1:])
    assert result.input_gradient is not None
    trainers[0].backward(passage, result.input_gradient, result.loss_sum, result.tokens)
    return [outputs, result.input_gradient, *(trainer.gradient for trainer in trainers)]


@pytest.mark.parametrize(
    ("family", "precision"),
    [*((family, "fp32") for family in FAMILIES), ("llama", "bf16-mixed"), ("llama", "bf16-pure")],
)
def test_checkpointed_layers_give_the_same_bits(family: str, precision: str) -> None:
    """Activations and every gradient, also under autocast, which the second computation must find again."""
    kept, checkpointed = (
        there_and_back([trainer_of(family, stage, backward, precision) for stage in range(2)])
        for backward in ("keep", "checkpoint")
    )
    assert all(torch.equal(one, other) for one, other in zip(kept, checkpointed, strict=True))
    assert float(kept[-1].abs().max()) > 0.0


def test_the_graph_holds_nothing_of_a_layer_but_its_input() -> None:
    """Bytes that autograd keeps between forward and backward, by storage."""
    held: dict[str, int] = {}
    for backward in ("keep", "checkpoint"):
        trainer, storages, own = trainer_of("llama", 0, backward), dict[int, int](), set[int]()
        own = {trainer.master.data_ptr(), trainer.versions.current.flat.untyped_storage().data_ptr()}

        def keep(tensor: Tensor, storages: dict[int, int] = storages) -> Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            trainer.forward(torch.zeros((2, 12), dtype=torch.int64), ForwardContext())
        held[backward] = sum(size for place, size in storages.items() if place not in own)
    ids, one_input = 2 * 12 * 8, 2 * 12 * 32 * 4
    assert held["checkpoint"] == ids + LAYERS // 2 * one_input
    assert held["keep"] > 10 * held["checkpoint"]
