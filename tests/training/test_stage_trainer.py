"""The trainer on its own: shared weights, and state that is loaded where the weights are."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from noloco_node.model.stage import build_stage
from noloco_node.training.stage_trainer import StageTrainer
from tests.inside import optimizer_of
from tests.training.made_trainers import flat_gradient, make_trainer, moments_of
from tests.worlds import WINDOWS, micro_spec, window_batch


def test_a_stage_with_tied_embeddings_trains_like_the_plain_module() -> None:
    """Embedding and head are one matrix: the loss and the step on the sum of both gradients are the module's own."""
    spec = micro_spec(stages=1)
    model = spec.model.model_copy(update={"config": {**spec.model.config, "tie_word_embeddings": True}})
    spec = spec.model_copy(update={"model": model})
    trainer, module = make_trainer(spec, 0), build_stage(model, 0)
    assert len(list(module.parameters())) < len(list(module.named_parameters(remove_duplicate=False)))
    windows = torch.randint(0, module.vocab_size, (2, 9), generator=torch.Generator().manual_seed(1))
    inputs, labels = windows[:, :-1], windows[:, 1:]
    loss = F.cross_entropy(module(inputs).flatten(0, 1), labels.flatten(), reduction="sum")
    loss.backward()
    result = trainer.loss(inputs, labels)
    assert abs(result.loss_sum - loss.item()) < 1e-4
    norm = float(torch.linalg.vector_norm(flat_gradient(trainer, module))) / labels.numel()
    before = trainer.master.clone()
    assert abs(trainer.step(1e-2).gradient_norm - norm) < 1e-5
    parameters = dict(module.named_parameters())
    clip = min(1.0, spec.inner.clip_norm / norm) / labels.numel()
    for parameter in parameters.values():
        assert parameter.grad is not None
        parameter.grad.mul_(clip)
    inner = spec.inner
    groups = [
        {"params": [p for p in parameters.values() if p.dim() >= 2], "weight_decay": inner.weight_decay},
        {"params": [p for p in parameters.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    torch.optim.AdamW(groups, lr=1e-2, betas=(inner.beta1, inner.beta2), eps=inner.eps).step()
    torch.testing.assert_close(trainer.master, trainer.layout.flatten(parameters), rtol=1e-4, atol=1e-5)
    assert not torch.equal(trainer.master, before)


def test_the_optimizers_state_lies_on_the_stages_device() -> None:
    """The step count as well: fused AdamW refuses one that lies elsewhere."""
    spec = micro_spec(stages=1)
    device = "meta"  # one that every machine has and that is not the host's
    trainer = StageTrainer(build_stage(spec.model, 0), spec.inner, device=device, wire_dtype=torch.float32)
    parts = [part for parameter_state in optimizer_of(trainer).state.values() for part in parameter_state.values()]
    assert len(parts) == 6
    assert {part.device.type for part in parts} == {"meta"}


def test_another_state_takes_the_place_of_the_one_that_was_trained() -> None:
    """A device that is full of the one has no memory for both."""
    spec = micro_spec(stages=1)
    trainer, other = make_trainer(spec, 0), make_trainer(spec, 0)
    for each, first in ((trainer, 0), (other, WINDOWS), (other, 2 * WINDOWS)):
        each.loss(*window_batch(range(first, first + WINDOWS)))
        each.step(1e-3)
    places = [part.data_ptr() for state in optimizer_of(trainer).state.values() for part in state.values()]
    trainer.load(other.master, moments_of(other))
    parts = [part for state in optimizer_of(trainer).state.values() for part in state.values()]
    assert [part.data_ptr() for part in parts] == places
    loaded, wanted = moments_of(trainer), moments_of(other)
    assert loaded["optimizer_steps"] == 2
    assert all(torch.equal(loaded[name], wanted[name]) for name in wanted)
