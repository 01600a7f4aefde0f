"""What one hostile answer of three does to a stage's inner steps, with either optimizer."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from noloco_node.config.run_spec import OptimizerName
from noloco_node.training.trainer import ForwardContext
from tests.training.made_trainers import make_trainer
from tests.worlds import IN_SUBSPACE, micro_spec, window_batch

STEPS, HOSTILE_FROM, RATE = 8, 5, 3e-3


@cache
def motion(optimizer: OptimizerName, times: float, in_subspace: bool) -> Tensor:
    """The way [weights] of stage 0 in its last steps, in which the third of three peers answers with `times` its
    gradient."""
    spec = micro_spec(layers=2, inner={"optimizer": optimizer}, subspace=IN_SUBSPACE if in_subspace else None)
    head, tail = make_trainer(spec, 0), make_trainer(spec, 1)
    way = torch.zeros_like(head.master)
    for step in range(STEPS):
        before = head.master.clone()
        for number, peer in enumerate("abc"):
            first = 4 * (3 * step + number)
            inputs, labels = window_batch(range(first, first + 4))
            passage = ForwardContext()
            result = tail.loss(head.forward(inputs, passage), labels, inputs)
            gradient = result.input_gradient
            assert gradient is not None
            if peer == "c" and step >= HOSTILE_FROM:
                gradient = times * gradient
            head.backward(passage, gradient, result.loss_sum, result.tokens, source=peer)
        head.step(RATE)
        tail.step(RATE)
        if step >= HOSTILE_FROM:
            way += head.master - before
    return way


@pytest.mark.parametrize(("optimizer", "in_subspace"), [("adamw", False), ("muon", False), ("muon", True)])
@pytest.mark.parametrize(
    ("times", "least", "in_subspace_least"), [(-100.0, 0.85, 0.85), (-5.0, 0.35, 0.1), (0.0, 0.85, 0.85)]
)
def test_one_hostile_answer_of_three_leaves_most_of_the_honest_way(
    optimizer: OptimizerName, in_subspace: bool, times: float, least: float, in_subspace_least: float
) -> None:
    """An answer beyond the bound counts next to nothing. One just below it, turned around, costs about half: a step of
    Muon has the rate's size whatever the gradient is, and its direction is what is left of the honest one. In a
    subspace of eight numbers a token honest answers are more alike, and such a one costs more than four fifths."""
    honest, attacked = (motion(optimizer, each, in_subspace) for each in (1.0, times))
    along = float(torch.dot(attacked, honest) / honest.square().sum())
    assert (in_subspace_least if in_subspace else least) <= along <= 1.05, along
