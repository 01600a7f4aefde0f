"""Which microbatch is a repeat: an id is the word of its sender, and opens nobody else's answers."""

from __future__ import annotations

import pytest
import torch

from noloco_node import tallies
from noloco_node.config.node_settings import NodeSettings
from noloco_node.directory.records import PeerState
from noloco_node.identity.peer_id import PeerId
from noloco_node.pipeline import messages as microbatch
from noloco_node.pipeline import server as repeats
from noloco_node.pipeline.messages import MicrobatchAnswer
from noloco_node.pipeline.server import MicrobatchName, Repeats
from noloco_node.transport.calls import Reply
from noloco_node.transport.errors import Refused
from noloco_node.transport.memory import Fault, FaultKind
from noloco_node.transport.messages import Message
from tests.inside import remembered
from tests.swarm.test_pipeline import QUICK, request
from tests.worlds import LENGTH, WINDOWS, World, micro_spec, peer_name, trainer_of, world

SPEC = micro_spec(stages=3, microbatches_a_step=1000, pipeline=QUICK)
"""No inner step falls due, so that the same activations have the same gradient throughout."""


def activations(seed: int, rows: int = WINDOWS) -> torch.Tensor:
    """The activations of a microbatch for a later stage."""
    return torch.randn(rows, LENGTH, 32, generator=torch.Generator().manual_seed(seed))


async def ask(made: World, sender: int, content: torch.Tensor, name: str = "a") -> Message:
    """One replica of stage 1 has the last stage train a microbatch of that name."""
    header = request(made, id=name * 32, stage=2).header
    labels = torch.zeros(content.shape[:2], dtype=torch.int32)
    return await made.of_stage(1)[sender].context.transport.call(  # pyright: ignore[reportPrivateUsage]
        peer_name(2, 0), microbatch.MICROBATCH.name, Message(header, (content, labels)),
        timeout=5, progress=5, max_answer_bytes=1 << 20,
    )  # fmt: skip


@pytest.mark.parametrize("rows", [WINDOWS, 1], ids=["same shape", "another shape"])
async def test_a_garbled_copy_sent_first_does_not_become_the_answer_to_the_honest_one(rows: int) -> None:
    """A peer that knows an id may send something else under it. The honest sender gets the gradient of its own
    microbatch, bit for bit, and the replica counts that it trained the id twice."""
    async with world(SPEC, replicas=2) as made:
        last = made.of_stage(2)[0]
        last.pipeline.open()
        hostile = await ask(made, 1, 3.0 * activations(1, rows))
        honest = await ask(made, 0, activations(2))
        alone = await ask(made, 0, activations(2), name="b")
        assert torch.equal(honest.tensors[0], alone.tensors[0])
        assert not torch.equal(honest.tensors[0][:rows], hostile.tensors[0])
        assert (last.pipeline.ledger.served, last.pipeline.ledger.repeated) == (3, 1)


async def test_the_same_id_from_other_weights_is_another_microbatch() -> None:
    """A node of a middle stage that is asked again has new activations, and gets their gradient; what is the same to
    the last bit is trained once."""
    async with world(SPEC, replicas=2) as made:
        last = made.of_stage(2)[0]
        last.pipeline.open()
        first, again, other = [await ask(made, 0, activations(seed)) for seed in (1, 1, 2)]
        alone = await ask(made, 0, activations(2), name="b")
        assert torch.equal(first.tensors[0], again.tensors[0])
        assert torch.equal(other.tensors[0], alone.tensors[0])
        assert (last.pipeline.ledger.served, last.pipeline.ledger.repeated) == (3, 1)


async def test_a_retry_by_another_way_gets_the_gradient_of_its_own_activations() -> None:
    """The first of two middle nodes loses its answer to the origin, which asks the other one under the same id: the
    last stage works for both."""
    async with world(SPEC, replicas=2, settings=NodeSettings(in_flight=1)) as made:
        last = made.of_stage(2)[0]
        serving = [*made.of_stage(0)[:1], *made.of_stage(1), last]
        for replica in serving:
            replica.pipeline.open()
            await replica.membership.announce(PeerState.TRAINING)
        for replica in serving:
            await replica.membership.refresh()
        for middle, factor in zip(made.of_stage(1), (1.0, 1.5), strict=True):
            trainer = trainer_of(middle.worker)
            trainer.add_to_weights((factor - 1.0) * trainer.master)
        made.network.inject(
            Fault(FaultKind.LOSE_ANSWER, source=peer_name(0, 0), method=microbatch.MICROBATCH.name, times=1)
        )
        origin = serving[0].pipeline.origin
        assert origin is not None
        assert await origin.train_one()
        assert [middle.pipeline.ledger.served for middle in made.of_stage(1)] == [1, 1]
        assert (last.pipeline.ledger.served, last.pipeline.ledger.repeated) == (2, 1)


def name(number: int, sender: str = "sender", content: int = 0) -> MicrobatchName:
    """One of many."""
    return MicrobatchName(PeerId(sender), "train", f"{number:032x}", (content,))


def test_the_books_are_bounded_and_what_came_to_nothing_may_be_trained_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under invented ids, senders and contents."""
    monkeypatch.setattr(tallies, "MOST_PEERS", 50)
    books = Repeats()
    for number in range(200):
        books.begin_training(name(number % 7, f"sender {number % 5}", number))
        books.keep(name(number), Reply(MicrobatchAnswer(loss_sum=0.0, tokens=1, load=0), (torch.zeros(8),)))
    assert (len(remembered(books)[0]), len(remembered(books)[1])) == (50, repeats.FEW_PEERS)
    assert remembered(books)[2].total() == 50
    last = name(199 % 7, "sender 4", 199)
    assert books.has_begun(last)
    with pytest.raises(Refused):
        books.answer_to(last)
    books.forget(last)
    assert books.answer_to(last) is None
