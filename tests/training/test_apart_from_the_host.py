"""Whatever a stage does on its device it does with tensors that are there, and it reads none of them as it trains.

There is no GPU here, so the device is an `Apart`. It comes to the numbers of the processor, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

import pytest
import torch
from torch import Tensor

from noloco_node.config.run_spec import RunSpec
from noloco_node.document_marks import BEGINS, inputs_and_labels, positions_of
from noloco_node.model.stage import build_stage
from noloco_node.training.frozen_state import FrozenState
from noloco_node.training.stage_trainer import StageTrainer
from noloco_node.training.trainer import ForwardContext
from tests.model.families import spec_of
from tests.outer.card import NAME, OnCard
from tests.training.apart import Apart, apart_from_the_host
from tests.training.made_trainers import moments_of
from tests.worlds import micro_spec, window_rows


@pytest.fixture
def apart() -> Generator[Apart]:
    """What is done in the test may be given to the device."""
    with apart_from_the_host() as card, card:
        yield card


def made(spec: RunSpec, device: str = NAME) -> list[StageTrainer]:
    """All stages there."""
    stages = (build_stage(spec.model, index) for index in range(spec.stages))
    return [StageTrainer(stage, spec.inner, device=device, wire_dtype=torch.float32) for stage in stages]


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


def same_weights(trainers: list[StageTrainer], plain: list[StageTrainer]) -> bool:
    """Whether all have moved alike, the first on the device and the others on the processor."""
    assert all(isinstance(each.master, OnCard) for each in trainers)
    pairs = zip(trainers, plain, strict=True)
    return all(torch.equal(there.master.to("cpu"), here.master) for there, here in pairs)


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
    spec = specs()[kind]
    trainers, plain = made(spec), made(spec, "cpu")
    apart.crossed.clear()
    carry(trainers, documents=kind == "documents")
    assert not apart.crossed
    carry(plain, documents=kind == "documents")
    assert same_weights(trainers, plain)


def test_an_outer_step_crosses_by_copies_beside_the_computing_only(apart: Apart) -> None:
    (trainer,) = made(micro_spec(stages=1, layers=1))
    room = torch.zeros(trainer.layout.size)
    apart.crossed.clear()
    trainer.begin_copy(room)
    trainer.add_to_weights(trainer.bring(room))
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
