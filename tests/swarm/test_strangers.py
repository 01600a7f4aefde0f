"""Strangers that mean harm: refused, bounded or left alone, and named in the metrics; the others go on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from noloco_node.averaging import session as exchange
from noloco_node.averaging.session import LeaveExchange
from noloco_node.identity.peer_id import PeerId
from noloco_node.peers import scorecard as conduct
from noloco_node.peers.scorecard import Offence
from noloco_node.pipeline.messages import MicrobatchAnswer
from noloco_node.tallies import BANS, NO_REST
from noloco_node.telemetry.events import Account
from noloco_node.telemetry.metrics import Metrics
from noloco_node.transport.calls import Reply
from noloco_node.transport.errors import Refusal, Refused
from noloco_node.transport.interface import RequestDesk, TransportLimits, Withdraw
from noloco_node.transport.memory import Fault, FaultKind
from noloco_node.transport.messages import (
    Envelope,
    Message,
    TensorSpec,
)
from tests.support import eventually
from tests.swarm.test_exchange import outer_steps, two_replicas
from tests.swarm.test_hostile_peers import NAME, STRANGER, propose
from tests.swarm.test_pipeline import ask, request, serving_world
from tests.worlds import LENGTH, WINDOWS, all_train, micro_spec, peer_name, trainer_of, world


async def test_a_dialler_that_gives_up_frees_its_partner_at_once() -> None:
    """It says so, and the partner need not wait for its deadline."""
    async with two_replicas() as (made, left, right):
        made.network.inject(Fault(FaultKind.LOSE_REQUEST, method=exchange.CHUNK.name))
        assert not await left.averaging.dial(peer_name(0, 1))
        assert not right.averaging.under_way
        assert outer_steps(made, 1, "aborted")[0].reason == "left: the partner left"
        assert made.network.fired[FaultKind.LOSE_REQUEST] > 0


async def test_only_the_dialler_itself_can_leave_an_exchange() -> None:
    """Nobody else can break it off, though he knows its name."""
    async with two_replicas() as (_, _, right):
        await propose(right)
        goodbye = LeaveExchange(exchange=NAME)
        with pytest.raises(Refused) as refused:
            await right.averaging.responder.handle_leave(PeerId("another-stranger"), goodbye)
        assert refused.value.reason is Refusal.UNKNOWN_EXCHANGE
        assert right.averaging.under_way
        await right.averaging.responder.handle_leave(STRANGER, goodbye)
        assert not right.averaging.under_way


async def test_a_stranger_that_proposes_and_abandons_again_and_again_is_left_alone() -> None:
    """The second time in a row brings a rest; stage peers of seen work are served meanwhile, and it is no offence."""
    async with two_replicas() as (made, left, right):
        right.context.transport.peer_stats.worked(peer_name(0, 0))
        for _ in range(2):
            await propose(right)
            right.averaging.responder.give_up_if_stalled(-1.0)
        with pytest.raises(Refused) as refused:
            await propose(right)
        assert refused.value.reason is Refusal.BUSY
        assert await left.averaging.dial(peer_name(0, 1))
        await eventually(lambda: outer_steps(made, 1, "paired"), what="the stage peer is averaged with")
        assert right.context.transport.conduct.offences.total() == 0


async def test_a_banned_peer_is_not_answered_routed_to_paired_with_or_counted() -> None:
    """From the moment of the ban, and until its end."""
    async with world(micro_spec(), replicas=2) as made:
        await all_train(made)
        head, stage_peer, tail = made.replicas[0], peer_name(0, 1), peer_name(1, 0)
        clock = [0.0]
        book = head.context.transport.conduct
        book.clock = lambda: clock[0]
        for peer in (stage_peer, tail):
            for _ in range(int(conduct.TOLERATED) + 1):
                book.offended(peer, Offence.NOT_FINITE)
        assert head.membership.stage_peers() == []
        assert head.membership.nodes_per_stage() == [1, 1]
        assert {head.pipeline.balancer.choose() for _ in range(20)} == {peer_name(1, 1)}
        assert head.outer_steps.pairing_state(0.0).stage_peers() == []
        caller = made.replicas[2].context.transport
        with pytest.raises(Refused, match="for not_finite, 60 s more") as refused:
            await caller.call(
                head.context.transport.peer_id,
                exchange.PROPOSE.name,
                Message(),
                timeout=5,
                progress=5,
                max_answer_bytes=0,
            )
        assert refused.value.reason is Refusal.BANNED
        clock[0] = BANS.first
        assert head.membership.stage_peers() == [stage_peer]


async def test_activations_out_of_all_scale_are_refused_before_the_model_and_are_no_offence() -> None:
    """Judged by what this node has seen, which may be little: so nobody is banned for it."""
    async with serving_world() as made:
        tail = made.replicas[1]
        for number in range(3):
            usual = torch.randn(WINDOWS, LENGTH, 32)
            await ask(made, Message(request(made, id=f"{number:032x}").header, (usual, request(made).tensors[1])))
        before = await tail.worker.joiner_state()
        gathered = trainer_of(tail.worker).tokens_accumulated
        huge = torch.randn(WINDOWS, LENGTH, 32) * 1e4
        with pytest.raises(Refused) as refused:
            await ask(made, Message(request(made, id="b" * 32).header, (huge, request(made).tensors[1])))
        assert refused.value.reason is Refusal.OUT_OF_SCALE
        assert trainer_of(tail.worker).tokens_accumulated == gathered
        after = await tail.worker.joiner_state()
        assert all(torch.equal(before[1][name], after[1][name]) for name in before[1])
        assert tail.context.transport.conduct.offences.total() == 0
        tail.books.write()
        account = [e for e in made.events[1] if isinstance(e, Account)][-1]
        assert account.strangers.bounded["activations"] == 1


async def test_first_activations_beyond_all_scale_are_refused_and_set_no_measure() -> None:
    """Each is finite, but fp32 does not hold their squares: an infinite scale would be usual from then on."""
    async with serving_world() as made:
        tail = made.replicas[1]
        labels = request(made).tensors[1]
        beyond = torch.full((WINDOWS, LENGTH, 32), 1e30)
        with pytest.raises(Refused) as refused:
            await ask(made, Message(request(made, id="a" * 32).header, (beyond, labels)))
        assert refused.value.reason is Refusal.OUT_OF_SCALE
        usual = torch.randn(WINDOWS, LENGTH, 32)
        await ask(made, Message(request(made, id="b" * 32).header, (usual, labels)))
        assert tail.pipeline.server._scales.usual < 2.0


async def test_a_next_stage_whose_answers_break_the_protocol_is_banned_and_the_samples_go_elsewhere() -> None:
    """Poisoned gradients at every answer: after a few it is asked no more; no sample is lost."""
    async with serving_world() as made:
        head, tail = made.replicas
        true = tail.pipeline.server.answer
        poisoned = 0

        async def poison(*given: Any) -> Reply[MicrobatchAnswer]:
            nonlocal poisoned
            poisoned += 1
            answer = await true(*given)
            return Reply(answer.header, tuple(torch.full_like(t, float("nan")) for t in answer.tensors))

        tail.pipeline.server.answer = poison  # type: ignore[method-assign]
        await head.membership.refresh()
        head.pipeline.balancer.update([tail.context.transport.peer_id], 0)
        assert head.pipeline.origin is not None
        async with asyncio.timeout(60):
            while not head.context.transport.conduct.banned(tail.context.transport.peer_id):
                head.context.transport.peer_stats.book.hop(tail.context.transport.peer_id).rest = NO_REST
                assert not await head.pipeline.origin.train_one()
        assert 0 < poisoned <= int(conduct.TOLERATED) + 1
        assert head.context.transport.conduct.bans == {"bad_answer": 1}
        assert trainer_of(head.worker).tokens_accumulated == 0
        assert head.pipeline.ledger.drawn == head.pipeline.ledger.dropped + head.pipeline.origin.held


def test_bans_and_bounds_are_in_the_metrics_by_reason() -> None:
    """Prometheus sees offences, bans, the number banned now, what was scaled down, and what audits found."""
    metrics = Metrics()
    strangers = {"offences": {"forged": 12}, "bans": {"forged": 1}, "banned_now": 1, "bounded": {"returned": 3}}
    strangers |= {"audits": {"agreed": 40, "contradicted": 3}, "set_aside_now": 1}
    wanted = {name for name, field in Account.model_fields.items() if field.is_required()}
    account = dict.fromkeys(wanted - {"strangers"}, 0)
    empty: dict[str, object] = {name: {} for name in ("refused", "bytes_sent", "bytes_received")}
    lists: dict[str, object] = {"nodes_per_stage": [], "missing_stages": []}
    metrics.observe(Account.model_validate({**account, **empty, **lists, "strangers": strangers}))
    value = metrics.registry.get_sample_value
    assert value("noloco_offences_total", {"reason": "forged"}) == 12
    assert value("noloco_bans_total", {"reason": "forged"}) == 1
    assert value("noloco_banned_peers") == 1
    assert value("noloco_bounded_total", {"what": "returned"}) == 3
    assert value("noloco_audits_total", {"finding": "contradicted"}) == 3
    assert value("noloco_set_aside_peers") == 1


def test_bytes_under_way_are_limited_for_each_peer() -> None:
    """One large body is always admitted, more at once only up to the limit; others are not concerned."""
    desk = RequestDesk(TransportLimits(max_body_bytes=100, max_bytes_per_peer=150))

    async def handle(_peer: PeerId, message: Message) -> Message:
        return message

    desk.serve("work", lambda *_: None, handle, max_concurrent_per_peer=9)
    large = Envelope("work", {}, (TensorSpec("u8", (100,)),))
    with desk.admitted(STRANGER, large):
        with pytest.raises(Refused) as refused, desk.admitted(STRANGER, large):
            pass
        assert refused.value.reason is Refusal.BUSY
        with desk.admitted(PeerId("another"), large):
            pass
    with desk.admitted(STRANGER, large):
        pass
    assert not desk._bytes_under_way


async def test_what_one_stage_admitted_is_not_answered_by_the_next() -> None:
    """A node leaves its stage while a body is on its way, and serves a method of this name for another stage."""
    desk, handled = RequestDesk(TransportLimits()), list[str]()

    def serve(stage: str) -> Withdraw:
        async def handle(_peer: PeerId, message: Message) -> Message:
            handled.append(stage)
            return message

        return desk.serve("work", lambda *_: None, handle, max_concurrent_per_peer=1)

    withdraw = serve("former")
    with desk.admitted(STRANGER, Envelope("work", {}, ())) as place:
        withdraw()
        serve("next")
        withdraw()
        with pytest.raises(Refused) as refused:
            await desk.answer(STRANGER, "work", Message(), place)
    assert refused.value.reason is Refusal.DRAINING
    with desk.admitted(STRANGER, Envelope("work", {}, ())) as place:
        await desk.answer(STRANGER, "work", Message(), place)
    assert handled == ["next"]
