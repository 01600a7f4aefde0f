"""Signs of a stage's gradients, by which the answers of different peers are compared."""

from __future__ import annotations

import torch

from noloco_node.training.bounds import PLACES, GradientSigns
from noloco_node.training.layout import FlatLayout
from noloco_node.training.trainer import ForwardContext
from tests.training.made_trainers import make_trainer
from tests.worlds import LENGTH, VOCABULARY, WINDOWS, micro_spec


def test_they_are_those_of_the_gradients_at_places_that_another_node_does_not_look_at() -> None:
    """In any order of strides, as autograd gives matrices; always the same places of one node."""
    shapes = {"wide": (40, 90), "long": (3000,), "experts": (4, 30, 20)}
    layout = FlatLayout.of({name: torch.zeros(shape) for name, shape in shapes.items()})
    flat = torch.arange(layout.size, dtype=torch.float32) % 7 - 3.0
    looks = [GradientSigns(layout, torch.device("cpu")) for _ in range(2)]
    gradients = list(layout.views(flat).values())
    turned = [each.mT.contiguous().mT if each.dim() > 1 else each for each in gradients]
    first, second = (look.of(gradients) for look in looks)
    assert first.shape == (PLACES,)
    assert first.dtype == torch.int8
    assert set(first.tolist()) == {-1, 0, 1}
    assert torch.equal(first, looks[0].of(turned))
    assert torch.equal(-first, looks[0].of([-each for each in gradients]))
    assert not torch.equal(first, second)


def test_a_passage_has_them_where_a_peer_answered() -> None:
    """With the answer's sign turned they are turned; an answer of nobody has none."""
    trainer = make_trainer(micro_spec(), 0)
    inputs = torch.randint(VOCABULARY, (WINDOWS, LENGTH))
    answer = torch.randn(WINDOWS, LENGTH, 32)
    signs: list[torch.Tensor | None] = []
    for source, given in (("a", answer), ("b", -answer), ("", answer)):
        passage = ForwardContext()
        trainer.forward(inputs, passage)
        trainer.backward(passage, given, 1.0, inputs.numel(), source=source)
        signs.append(passage.signs)
    first, second, own = signs
    assert first is not None
    assert second is not None
    assert own is None
    assert torch.equal(first, -second)
    assert first.count_nonzero() > 0
