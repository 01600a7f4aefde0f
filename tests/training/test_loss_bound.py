"""What loses as much as guessing has a sixteenth of the training at most, and no honest text is ever held up."""

from __future__ import annotations

import math
import random

import pytest
import torch

from noloco_node.directory.clocks import median_clock
from noloco_node.training.bounds import SHARE, WINDOW, LossBound
from noloco_node.transport.messages import Message
from tests.swarm.test_pipeline import ask, request, serving_world
from tests.training.made_trainers import make_trainer
from tests.worlds import LENGTH, MICROBATCH, VOCABULARY, WINDOWS, micro_spec, peer_name, trainer_of, window_batch

BYTES, LARGE = 256, 50_257
UNIGRAMS = {BYTES: 0.6, LARGE: 0.7}
"""The loss of a model that knows frequencies only, as a share of ln(vocabulary)."""


def holding(vocabulary: int) -> LossBound:
    """After the warm-up."""
    bound = LossBound(vocabulary)
    bound.holds = True
    return bound


@pytest.mark.parametrize("vocabulary", [BYTES, LARGE])
def test_text_of_very_different_difficulty_is_taken_in_from_the_first_step_to_the_last(vocabulary: int) -> None:
    """Three sources: easy text, usual text, text of which only the frequencies can be learnt; in the end beside as much
    that is learnt by heart."""
    rng, bound, guessing = random.Random(1), LossBound(vocabulary), math.log(vocabulary)
    floors = (0.15, 0.35, UNIGRAMS[vocabulary])
    for step in range(3000):
        bound.holds = step >= 150
        for floor in floors:
            learnt = floor + (1 - floor) * math.exp(-step / 150)
            assert bound.takes_in(guessing * learnt * math.exp(rng.gauss(0.0, 0.03)), 128)
    for number in range(3000):
        assert bound.takes_in(0.01 if number % 2 else guessing * UNIGRAMS[vocabulary], 128)


@pytest.mark.parametrize("nonsense_for_each", [1, 2, 10])
def test_random_labels_have_a_sixteenth_of_the_training_and_cost_the_others_nothing(nonsense_for_each: int) -> None:
    """Up to ten elevenths of what comes, from keys without number: nothing here knows a name. By what a quarter of the
    last ones lost, more than three quarters were taken for what is usual."""
    rng, bound = random.Random(2), holding(BYTES)
    taken = {"text": 0, "nonsense": 0}
    for _ in range(2000):
        assert bound.takes_in(2.1 * math.exp(rng.gauss(0.0, 0.1)), 128)
        taken["text"] += 128
        for _ in range(nonsense_for_each):
            taken["nonsense"] += 128 * bound.takes_in(rng.uniform(5.4, 6.5), 128)
    assert 0.9 * SHARE < taken["nonsense"] / taken["text"] <= SHARE
    assert bound.left_out == 2000 * nonsense_for_each - taken["nonsense"] // 128


def test_a_model_that_has_forgotten_everything_is_taught_again_at_once() -> None:
    """After a spike every text loses what guessing costs; then none is nonsense."""
    bound = holding(BYTES)
    assert all(bound.takes_in(2.0, 128) for _ in range(500))
    after = [bound.takes_in(6.0, 128) for _ in range(2 * WINDOW)]
    assert not all(after[: WINDOW // 2])
    assert all(after[WINDOW:])


def test_what_is_left_out_moves_nothing_and_is_answered_like_any_other() -> None:
    """The gradient that goes back is the same bit for bit; gradient, tokens and loss of the stage stay as they were."""
    trainer, stage_peer = (make_trainer(micro_spec(stages=2), 1) for _ in range(2))
    trainer.loss_bound = holding(2)  # to guess one of two costs less than any text here
    activations, (_, labels) = torch.randn(WINDOWS, LENGTH, 32), window_batch(range(WINDOWS))
    for _ in range(WINDOW):
        trainer.loss_bound.takes_in(0.1, 1)
    before = trainer.gradient.clone()
    answer, wanted = (each.loss(activations, labels, source="somebody") for each in (trainer, stage_peer))
    assert answer.input_gradient is not None
    assert wanted.input_gradient is not None
    assert (answer.taken_in, wanted.taken_in) == (False, True)
    assert torch.equal(answer.input_gradient, wanted.input_gradient)
    assert answer.loss_sum == wanted.loss_sum
    assert torch.equal(trainer.gradient, before)
    assert (trainer.tokens_accumulated, trainer.loss_accumulated) == (0, 0.0)
    assert stage_peer.tokens_accumulated == MICROBATCH
    assert trainer.loss(activations, labels).taken_in, "this node's own text is never left out"


async def test_nonsense_shows_no_work_of_its_sender() -> None:
    """It is answered and served, and neither makes its sender a peer that has worked nor tells of origins."""
    async with serving_world() as made:
        tail = made.replicas[1]
        bound = trainer_of(tail.worker).loss_bound = holding(2)
        labels = torch.randint(VOCABULARY, (WINDOWS, LENGTH), dtype=torch.int32)
        for _ in range(WINDOW):
            bound.takes_in(0.1, 1)
        await ask(made, Message(request(made).header, (torch.randn(WINDOWS, LENGTH, 32), labels)))
        assert bound.left_out == 1
        assert tail.pipeline.ledger.served == 1
        assert tail.worker.trained_tokens == 0
        assert median_clock(tail.pipeline.server.origins_seen.latest()) is None
        assert tail.context.transport.peer_stats.of(peer_name(0, 0)).tokens == 0
        tail.books.write()
        assert tail.worker.bounded["losses"] == 1


def test_a_stream_that_is_half_random_labels_ends_where_the_text_alone_does() -> None:
    """A whole training, with the warm-up in which all is taken in; without the bound it ends far above."""

    def trained(*, noise: bool, bounded: bool) -> float:
        trainer, generator = make_trainer(micro_spec(layers=2), 1), torch.Generator().manual_seed(5)
        embedding = torch.randn(VOCABULARY, 32, generator=generator)
        for step in range(160):
            trainer.loss_bound.holds = bounded and step >= 40
            inputs, labels = window_batch(range(step * WINDOWS, (step + 1) * WINDOWS))
            trainer.loss(embedding[inputs], labels, source="honest")
            if noise:
                ids = torch.randint(VOCABULARY, (2, WINDOWS, LENGTH), generator=generator)
                trainer.loss(embedding[ids[0]], ids[1], source="hostile")
            trainer.step(3e-3)
        inputs, labels = window_batch(range(10**6, 10**6 + 40))
        return trainer.evaluate_loss(embedding[inputs], labels) / labels.numel()

    clean = trained(noise=False, bounded=True)
    assert trained(noise=True, bounded=True) < 1.03 * clean
    assert trained(noise=True, bounded=False) > 1.1 * clean
