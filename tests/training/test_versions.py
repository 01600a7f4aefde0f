"""Published weights: a backward uses those of its forward, whatever was published and reused in between."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from noloco_node.training.layout import FlatLayout
from noloco_node.training.trainer import ForwardContext, Version, VersionStore
from tests.training.made_trainers import flat_gradient, make_trainer, stage_with_weights
from tests.worlds import LENGTH, VOCABULARY, WINDOWS, micro_spec, window_batch

LAYOUT = FlatLayout.of({"matrix": torch.zeros(3, 2), "vector": torch.zeros(4)})
HIDDEN = 32


def publish(store: VersionStore, value: float) -> None:
    """Publish weights that all equal `value`."""
    store.publish(torch.full((LAYOUT.size,), value))


@settings(max_examples=200, deadline=None)
@given(actions=st.lists(st.sampled_from(("publish", "acquire", "release first", "release last")), max_size=60))
def test_a_held_version_is_never_overwritten_and_live_versions_are_bounded(actions: list[str]) -> None:
    """Under any order of publishing, taking and giving back: contents stay, memory is reused, none is lost."""
    store = VersionStore(LAYOUT, torch.float32)
    publish(store, 0.0)
    held: list[tuple[Version, float]] = []
    value, most_held, places = 0.0, 0, set[int]()
    for action in actions:
        if action == "publish":
            value += 1
            publish(store, value)
        elif action == "acquire":
            held.append((store.acquire(), value))
        elif held:
            store.release(held.pop(0 if action == "release first" else -1)[0])
        most_held = max(most_held, len({id(version) for version, _ in held}))
        places.add(store.current.flat.data_ptr())
        assert bool((store.current.flat == value).all())
        for version, expected in held:
            assert bool((version.flat == expected).all())
            assert bool((version.parameters["matrix"] == expected).all())
        assert store.live == len({version.number for version, _ in held} | {store.current.number})
    assert len(places) <= most_held + 2, "memory must be reused"


def test_giving_back_more_than_was_taken_is_a_programming_error() -> None:
    """It would let a version be overwritten under a microbatch."""
    store = VersionStore(LAYOUT, torch.float32)
    publish(store, 0.0)
    version = store.acquire()
    store.release(version)
    with pytest.raises(AssertionError):
        store.release(version)


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("backward", ["keep", "recompute", "checkpoint"])
def test_a_late_backward_gives_the_gradient_of_its_forwards_weights(backward: str, stage: int) -> None:
    """Five versions are published between forward and backward: equal to plain autograd on the weights of the
    forward, and different from that on the present ones."""
    spec = micro_spec(stages=3, layers=3, inner={"backward": backward})
    trainer = make_trainer(spec, stage)
    weights = trainer.master.clone()
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(VOCABULARY, (WINDOWS, LENGTH), generator=generator)
    inputs = tokens if stage == 0 else torch.randn(WINDOWS, LENGTH, HIDDEN, generator=generator)
    output_gradient = torch.randn(WINDOWS, LENGTH, HIDDEN, generator=generator)
    late = ForwardContext()
    outputs = trainer.forward(inputs, late)
    for number in range(5):
        other = ForwardContext()
        trainer.forward(inputs, other)
        trainer.discard(other)
        trainer.add_to_weights(torch.randn(trainer.layout.size, generator=generator) * 0.05 * (number + 1))
    assert trainer.versions.live == 2
    input_gradient = trainer.backward(late, output_gradient, 1.0, WINDOWS * LENGTH)
    assert trainer.versions.live == 1

    expected = []
    for flat in (weights, trainer.master):
        module = stage_with_weights(spec, stage, trainer, flat)
        leaf = inputs if stage == 0 else inputs.clone().requires_grad_()
        plain = module(leaf)
        plain.backward(output_gradient)
        expected.append((plain.detach(), flat_gradient(trainer, module), None if stage == 0 else leaf.grad))
    plain_outputs, gradient, plain_input_gradient = expected[0]
    torch.testing.assert_close(outputs, plain_outputs, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(trainer.gradient, gradient, atol=1e-5, rtol=1e-5)
    assert float((gradient - expected[1][1]).norm()) > 0.1 * float(gradient.norm()), "the versions must have differed"
    if stage > 0:
        assert input_gradient is not None
        assert plain_input_gradient is not None
        torch.testing.assert_close(input_gradient, plain_input_gradient, atol=1e-5, rtol=1e-5)


def test_the_last_stage_gives_the_gradient_of_the_summed_loss() -> None:
    """Loss, parameter gradients and input gradient equal plain autograd; two microbatches add up."""
    spec = micro_spec(stages=2)
    trainer = make_trainer(spec, 1)
    module = stage_with_weights(spec, 1, trainer, trainer.master)
    _, labels = window_batch(range(WINDOWS))
    activations = torch.randn(WINDOWS, LENGTH, HIDDEN)
    for _ in range(2):
        leaf = activations.clone().requires_grad_()
        loss = F.cross_entropy(module(leaf).flatten(0, 1), labels.flatten(), reduction="sum")
        loss.backward()
        result = trainer.loss(activations, labels.to(torch.int32))
        assert result.loss_sum == pytest.approx(float(loss.detach()), rel=1e-6)
        assert result.tokens == labels.numel()
        assert result.input_gradient is not None
        torch.testing.assert_close(result.input_gradient, leaf.grad, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(trainer.gradient, flat_gradient(trainer, module), atol=1e-5, rtol=1e-5)
    assert trainer.tokens_accumulated == 2 * labels.numel()
