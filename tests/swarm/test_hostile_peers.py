"""Races and lies that a peer can bring about, each found by reading or by fuzzing."""

from __future__ import annotations

import asyncio

import pytest
import torch

from noloco_node import finite
from noloco_node.aio import cancel_and_wait
from noloco_node.averaging import session as exchange
from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import PipelineSpec
from noloco_node.identity.peer_id import PeerId
from noloco_node.node.replica import Replica
from noloco_node.pipeline.admission import MicrobatchLimiter
from noloco_node.pipeline.messages import MicrobatchAnswer, MicrobatchHeader, read_answer
from noloco_node.transport import calls
from noloco_node.transport.calls import Answer, BadAnswer, Reply
from noloco_node.transport.errors import Refusal, Refused
from noloco_node.transport.interface import Release
from noloco_node.transport.memory import MemoryTransport
from noloco_node.transport.messages import Message, specs_of
from tests.support import eventually, one_turn
from tests.swarm.test_exchange import outer_steps, state_of, two_replicas, unchanged
from tests.swarm.test_pipeline import ask, request, serving_world
from tests.worlds import LENGTH, WINDOWS, micro_spec, world

STRANGER = PeerId("a-stranger")
NAME = "a" * 32


async def propose(replica: Replica) -> None:
    """A stranger's proposal, accepted."""
    replica.averaging.side.begin_last_round()
    progress, worker = replica.worker.progress, replica.worker
    proposal = exchange.Proposal(
        exchange=NAME,
        run=replica.context.spec.run_id,
        stage=0,
        contract=worker.contract,
        clock=progress.clock,
        tokens=64,
    )
    await replica.averaging.responder.handle_propose(STRANGER, proposal)


def opening(replica: Replica) -> tuple[exchange.Opening, tuple[torch.Tensor, ...]]:
    """The stranger's header and gauge."""
    header = exchange.Opening(exchange=NAME, clock=replica.worker.progress.clock)
    specs = replica.averaging.side.opening_specs()
    return header, tuple(torch.zeros(spec.shape) for spec in specs)


def chunk(replica: Replica, index: int) -> tuple[exchange.ChunkHeader, tuple[torch.Tensor, ...]]:
    """One of the stranger's chunks."""
    header = exchange.ChunkHeader(exchange=NAME, index=index)
    return header, (torch.zeros(replica.worker.outer.chunk_size(index)),)


async def test_a_place_is_kept_before_the_body_comes() -> None:
    """Of bodies that are announced together only max_pending are let in at all; what comes to nothing frees its place.
    One peer leaves a quarter of the places to others."""
    async with world(micro_spec(stages=3), settings=NodeSettings(max_pending=4)) as made:
        server = made.replicas[1].pipeline.server
        made.replicas[1].pipeline.open()
        requests = [request(made, id=f"{number:032x}", budget_ms=100) for number in range(9)]

        def admit(peer: PeerId, each: Message) -> Release:
            header = MicrobatchHeader.model_validate({**each.header, "origin": peer})
            return server.admit(peer, header, each.specs)

        places = [admit(STRANGER, each) for each in requests[:3]]
        for each in requests[3:]:
            with pytest.raises(Refused) as refused:
                admit(STRANGER, each)
            assert refused.value.reason is Refusal.BUSY
        other = admit(PeerId("another-stranger"), requests[4])
        with pytest.raises(Refused):
            admit(PeerId("a-third-stranger"), requests[5])
        assert server.pending == 4
        other()
        for place in places:
            place()
        assert server.pending == 0


def test_places_that_others_found_taken_are_kept_for_them_and_else_for_nobody() -> None:
    """One peer may have three quarters of all places while nobody else wants one. Once others were refused it gets no
    more than its part, until they have had theirs or no longer ask."""
    now = 0.0
    places, greedy, honest, late = MicrobatchLimiter(8, lambda: now), PeerId("greedy"), PeerId("honest"), PeerId("late")
    held = [places.take(greedy) for _ in range(6)] + [places.take(honest) for _ in range(2)]
    with pytest.raises(Refused):
        places.take(late)
    held.pop(0)()
    with pytest.raises(Refused):
        places.take(greedy)
    places.take(late)
    held.pop(0)()
    assert places.take(greedy)
    with pytest.raises(Refused):
        places.take(late)
    held.pop(0)()
    with pytest.raises(Refused):
        places.take(greedy)
    now = 2.0
    assert places.take(greedy)


async def test_a_budget_of_a_day_holds_a_place_no_longer_than_the_runs_own() -> None:
    """Or one stranger could fill a node whose next stage is away."""
    pipeline = PipelineSpec(budget_seconds=0.4, progress_seconds=0.2)
    async with serving_world(stages=3, pipeline=pipeline) as made:
        async with asyncio.timeout(60):
            with pytest.raises(Refused) as refused:
                await ask(made, request(made, budget_ms=86_400_000))
        assert refused.value.reason is Refusal.OUT_OF_REACH
        assert made.replicas[1].pipeline.server.pending == 0


@pytest.mark.parametrize("mode", ["train", "evaluate"])
def test_an_answer_may_not_invent_tokens(mode: str) -> None:
    """A next stage that claims more than it was sent would push this replica's clock and dilute its gradient."""
    activations = torch.zeros(WINDOWS, LENGTH, 32)
    tensors, scales = ((activations,), (0.0,)) if mode == "train" else ((), ())
    for tokens in (1, WINDOWS * LENGTH - 1, 1 << 32):
        header = MicrobatchAnswer(loss_sum=1.0, tokens=tokens, load=0)
        with pytest.raises(BadAnswer, match="tokens"):
            read_answer(Answer(header, tensors, scales), activations)
    header = MicrobatchAnswer(loss_sum=1.0, tokens=WINDOWS * LENGTH, load=0)
    assert read_answer(Answer(header, tensors, scales), activations).tokens == WINDOWS * LENGTH


async def test_chunks_admitted_for_one_exchange_do_not_count_for_its_namesake() -> None:
    """The first exchange ends while its chunks are on their way; the same name is proposed again and not opened."""
    async with two_replicas() as (made, _, right):
        await propose(right)
        await right.averaging.responder.handle_open(STRANGER, *opening(right))
        chunks = [chunk(right, index) for index in range(right.worker.outer.chunks)]
        for header, tensors in chunks:
            right.averaging.responder.admit_chunk(STRANGER, header, specs_of(tensors))
        right.averaging.responder.give_up_if_stalled(-1.0)
        assert not right.averaging.under_way
        before = await state_of(right)
        right.averaging.side.partners.committed(STRANGER)
        await propose(right)
        for each in chunks:
            with pytest.raises(Refused) as refused:
                await right.averaging.responder.handle_chunk(STRANGER, *each)
            assert refused.value.reason is Refusal.MALFORMED
        await eventually(lambda: not right.averaging.under_way, what="the second is given up too")
        assert unchanged(before, await state_of(right))
        assert not outer_steps(made, 1, "paired")


async def test_an_exchange_is_opened_once_however_often_it_is_asked() -> None:
    """Two openings at once: one is refused, or it would wipe out what the other has added."""
    async with two_replicas() as (_, _, right):
        await propose(right)
        results = await asyncio.gather(
            *(right.averaging.responder.handle_open(STRANGER, *opening(right)) for _ in range(3)),
            return_exceptions=True,
        )
        assert len([result for result in results if isinstance(result, Reply)]) == 1
        refused = [result for result in results if isinstance(result, Refused)]
        assert [each.reason for each in refused] == [Refusal.MALFORMED] * 2


async def test_nobody_else_can_speak_in_an_exchange() -> None:
    """That holds even for a peer that has learnt its name."""
    async with two_replicas() as (_, _, right):
        await propose(right)
        other = PeerId("another-stranger")
        first = chunk(right, 0)
        with pytest.raises(Refused) as refused:
            await right.averaging.responder.handle_open(other, *opening(right))
        assert refused.value.reason is Refusal.UNKNOWN_EXCHANGE
        await right.averaging.responder.handle_open(STRANGER, *opening(right))
        with pytest.raises(Refused) as refused:
            right.averaging.responder.admit_chunk(other, first[0], specs_of(first[1]))
        assert refused.value.reason is Refusal.UNKNOWN_EXCHANGE
        with pytest.raises(Refused) as refused:
            right.averaging.responder.admit_open(other, opening(right)[0], specs_of(opening(right)[1]))
        assert refused.value.reason is Refusal.UNKNOWN_EXCHANGE
        with pytest.raises(Refused) as refused:
            await right.averaging.responder.handle_chunk(other, *first)
        assert refused.value.reason is Refusal.UNKNOWN_EXCHANGE
        await right.averaging.responder.handle_chunk(STRANGER, *first)


async def test_a_chunk_that_comes_again_is_no_progress() -> None:
    """A dialler that repeats one is given up as one that says nothing, and cannot hold the replica without end."""
    async with two_replicas() as (_, _, right):
        await propose(right)
        responder = right.averaging.responder
        await responder.handle_open(STRANGER, *opening(right))
        await responder.handle_chunk(STRANGER, *chunk(right, 0))
        session = right.averaging.side.engagement.session
        assert session is not None
        assert session.added < right.worker.outer.chunks
        moved = (session.sent, session.received, session.last_progress)
        await responder.handle_chunk(STRANGER, *chunk(right, 0))
        assert (session.sent, session.received, session.last_progress) == moved


async def test_an_opening_that_was_given_up_meanwhile_touches_no_buffer() -> None:
    """The snapshot took longer than the exchange lived: the buffers may belong to another outer step by then."""
    async with two_replicas() as (_, _, right):
        await propose(right)
        handling = asyncio.create_task(right.averaging.responder.handle_open(STRANGER, *opening(right)))
        await one_turn()
        right.averaging.responder.give_up_if_stalled(-1.0)
        right.worker.outer._weight = 7.0
        with pytest.raises(Refused) as refused:
            await handling
        assert refused.value.reason is Refusal.UNKNOWN_EXCHANGE
        assert right.worker.outer._weight == 7.0


async def test_an_opening_that_was_given_up_while_its_gauge_was_looked_at_takes_no_snapshot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A large gauge is looked at beside the event loop: the next outer step may have its snapshot by then."""
    monkeypatch.setattr(finite, "INLINE_ELEMENTS", 0)
    async with two_replicas() as (_, _, right):
        await propose(right)
        handling = asyncio.create_task(right.averaging.responder.handle_open(STRANGER, *opening(right)))
        await one_turn()
        right.averaging.responder.give_up_if_stalled(-1.0)
        right.worker.outer.snapshot.fill_(7.0)
        with pytest.raises(Refused) as refused:
            await handling
        assert refused.value.reason is Refusal.UNKNOWN_EXCHANGE
        assert bool((right.worker.outer.snapshot == 7.0).all())


async def test_who_has_left_knows_no_exchange_any_more(caplog: pytest.LogCaptureFixture) -> None:
    """One that was dialled and not complete: its partner is refused, which is no failure here and nobody's fault."""
    async with world(micro_spec(stages=1), replicas=1) as made:
        left, partner = made.replicas[0], MemoryTransport(made.network, STRANGER)
        averaging, here = left.averaging, left.context.transport
        left.averaging.open()
        running = asyncio.create_task(averaging.run())
        await one_turn()
        await propose(left)
        header, tensors = opening(left)
        await cancel_and_wait((running,))
        assert not averaging.under_way
        with pytest.raises(Refused) as refused:
            await calls.ask(partner, here.peer_id, exchange.OPEN, header, tensors=tensors, seconds=5.0)
        assert refused.value.reason is Refusal.UNKNOWN_EXCHANGE
        assert here.peer_stats.of(STRANGER).asks == 0
        await partner.close()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_chunk_whose_caller_left_during_the_arithmetic_counts_when_it_comes_again() -> None:
    """Its work was done: the repeat adds nothing twice, and the exchange comes to its end."""
    async with two_replicas() as (made, _, right):
        await propose(right)
        await right.averaging.responder.handle_open(STRANGER, *opening(right))
        session = right.averaging.side.engagement.session
        assert session is not None
        abandoned = asyncio.create_task(right.averaging.responder.handle_chunk(STRANGER, *chunk(right, 0)))
        await one_turn()
        right.averaging.side.arithmetic._pool.submit(int).result(5)
        abandoned.cancel()
        await asyncio.wait((abandoned,))
        assert abandoned.cancelled()
        for index in range(right.worker.outer.chunks):
            await right.averaging.responder.handle_chunk(STRANGER, *chunk(right, index))
        await eventually(lambda: outer_steps(made, 1, "paired"), what="the step is committed")
