"""Every answer goes through one place, which holds it to what was asked for and books it where it is not that."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest
import torch

from noloco_node.accounting.receipts import RECEIPT, open_receipts
from noloco_node.accounting.statements import Receipt, statement_text
from noloco_node.averaging import session as exchange
from noloco_node.bootstrap import hello, reachability, spec_fetch
from noloco_node.config.run_spec import OuterSpec
from noloco_node.identity.peer_id import PeerId
from noloco_node.node.replica import Replica
from noloco_node.outer.codec import CODECS
from noloco_node.pipeline import messages as microbatch
from noloco_node.training.progress import Progress
from noloco_node.transport.calls import NOTHING, BadAnswer, Method, Nothing, ask, judging
from noloco_node.transport.errors import BrokenStream, ProtocolViolation, Refusal, Refused
from noloco_node.transport.interface import Transport
from noloco_node.transport.memory import Fault, FaultKind, MemoryNetwork, MemoryTransport
from noloco_node.transport.messages import JsonObject, Message, TensorSpec, WireModel, parse
from tests.worlds import World, micro_spec, peer_name, trainer_of, world

HOSTILE = PeerId("a-hostile-stage peer")

Turn = Callable[[Message], Awaitable[Message]]


def anything(_peer: PeerId, _header: JsonObject, _specs: tuple[TensorSpec, ...]) -> None:
    """Admits every request."""


@asynccontextmanager
async def beside_a_hostile_stage_peer(codec: str, turns: dict[str, Turn]) -> AsyncIterator[tuple[World, Replica]]:
    """A replica that has trained, and a peer that answers its methods by `turns`."""
    spec = micro_spec(stages=1, outer=OuterSpec(inner_steps=2, min_inner_steps=1, codec=codec))  # type: ignore[arg-type]
    async with world(spec) as made:
        hostile = MemoryTransport(made.network, HOSTILE)
        for method, turn in turns.items():

            async def handle(_peer: PeerId, message: Message, turn: Turn = turn) -> Message:
                return await turn(message)

            hostile.serve(method, anything, handle, max_concurrent_per_peer=64)
        (replica,) = made.replicas
        assert replica.pipeline.origin is not None
        await replica.pipeline.origin.train_one()
        try:
            yield made, replica
        finally:
            await hostile.close()


async def no_acceptance(_message: Message) -> Message:
    """Tokens below zero."""
    return Message({"tokens": -1})


async def acceptance(_message: Message) -> Message:
    """A sound yes."""
    return Message({"tokens": 64})


async def no_opening(message: Message) -> Message:
    """A clock that no model allows."""
    return Message({**message.header, "clock": -1.0}, message.tensors)


async def same_again(message: Message) -> Message:
    """What came goes back: a partner with the same weights."""
    return message


async def zeros(message: Message) -> Message:
    """A sound body."""
    return Message(message.header, tuple(torch.zeros_like(tensor) for tensor in message.tensors))


async def poisoned(message: Message) -> Message:
    """The body is NaN, or as near to it as its precision comes."""
    bad = [torch.full_like(t, math.nan) if t.is_floating_point() else torch.full_like(t, 255) for t in message.tensors]
    return Message(message.header, tuple(bad))


TURNS: dict[str, dict[str, Turn]] = {
    "proposals": {exchange.PROPOSE.name: no_acceptance},
    "openings": {exchange.PROPOSE.name: acceptance, exchange.OPEN.name: no_opening},
    "gauges": {exchange.PROPOSE.name: acceptance, exchange.OPEN.name: poisoned},
    "chunks": {exchange.PROPOSE.name: acceptance, exchange.OPEN.name: same_again, exchange.CHUNK.name: poisoned},
}


@pytest.mark.parametrize("what", list(TURNS))
async def test_thirty_answers_that_break_the_protocol_of_an_exchange_are_a_ban(what: str) -> None:
    """Each is an offence, the eleventh brings the ban, and this replica's weights stay as they are."""
    async with beside_a_hostile_stage_peer("fp32", TURNS[what]) as (made, replica):
        conduct = replica.context.transport.conduct  # pyright: ignore[reportPrivateUsage]
        _, before = await replica.worker.joiner_state()
        for _ in range(30):
            assert not await replica.averaging.dial(HOSTILE)
        assert conduct.offences["bad_answer"] == 30
        assert conduct.banned(HOSTILE)
        _, after = await replica.worker.joiner_state()
        assert all(torch.equal(after[name], before[name]) for name in before)
        assert made.replicas[0].averaging.under_way is False


@pytest.mark.parametrize("codec", [name for name, codec in CODECS.items() if codec.wire_dtype is torch.uint8])
async def test_bytes_that_decode_to_nothing_finite_are_an_offence_or_harmless(codec: str) -> None:
    """Codes have no NaN to look at: what comes of them is looked at where they are decoded."""
    async with beside_a_hostile_stage_peer(codec, TURNS["chunks"]) as (_, replica):
        committed = await replica.averaging.dial(HOSTILE)
        offences = replica.context.transport.conduct.offences.total()  # pyright: ignore[reportPrivateUsage]
        assert offences == (0 if committed else 1)
        _, state = await replica.worker.joiner_state()
        assert bool(torch.isfinite(state["fast"]).all())


async def test_a_replica_whose_own_weights_are_not_finite_blames_nobody() -> None:
    """The exchange comes to nothing, and no honest partner is booked for it."""
    turns = {exchange.PROPOSE.name: acceptance, exchange.OPEN.name: zeros, exchange.CHUNK.name: zeros}
    async with beside_a_hostile_stage_peer("fp32", turns) as (_, replica):
        trainer_of(replica.worker).master[:] = math.nan
        assert not await replica.averaging.dial(HOSTILE)
        assert replica.context.transport.conduct.offences.total() == 0  # pyright: ignore[reportPrivateUsage]


async def test_an_honest_receipt_after_a_restart_is_no_offence(tmp_path: Path) -> None:
    """The node that was served has counted work of the earlier life; the one that served has forgotten it."""
    network = MemoryNetwork()
    served, server = (MemoryTransport(network, PeerId(name)) for name in ("served-of-stage-0", "server-of-stage-1"))
    ledger = microbatch.Ledger()
    await open_receipts(tmp_path / "file", "r" * 32, 1, server, ledger, Progress)
    statement = Receipt(
        run="r" * 32, since=1.0, until=2.0, server=server.peer_id, session="0" * 16, serial=0, microbatches=3, tokens=60
    )
    text = statement_text(statement)
    header = {"statement": text, "seal": served.sign(text.encode()).hex()}
    for _ in range(30):
        with pytest.raises(Refused) as refused:
            await served.call(server.peer_id, RECEIPT.name, Message(header), timeout=5, progress=5, max_answer_bytes=0)
        assert refused.value.reason is Refusal.NOT_COUNTED
    assert server.conduct.offences.total() == 0
    await server.close()
    await served.close()


# What the one place refuses


class Numbered(WireModel):
    """An answer of a test."""

    number: int


NUMBERED = Method("method", Nothing, Numbered)


@pytest.mark.parametrize(
    ("answer", "sound"),
    [
        (Message({"number": 1, "newer": True}, (torch.zeros(2),)), True),
        (Message({"number": "x"}, (torch.zeros(2),)), False),
        (Message({}, (torch.zeros(2),)), False),
        (Message({"number": 1}), False),
        (Message({"number": 1}, (torch.zeros(2), torch.zeros(0))), False),
        (Message({"number": 1}, (torch.zeros(2, 1),)), False),
        (Message({"number": 1}, (torch.zeros(4, dtype=torch.float16),)), False),
        (Message({"number": 1}, (torch.zeros(3),)), False),
        (Message({"number": 1}, (torch.tensor([0.0, math.inf]),)), False),
        (Message({"number": 1}, (torch.tensor([0.0, 1e30]),)), False),
    ],
)
async def test_an_answer_is_what_was_asked_for_or_an_offence(answer: Message, sound: bool) -> None:
    """Header, number, shape and precision of tensors, and finite numbers in them; unknown fields are passed over."""
    network = MemoryNetwork()
    asking, answering = MemoryTransport(network, peer_name(0, 0)), MemoryTransport(network, HOSTILE)

    async def handle(_peer: PeerId, _message: Message) -> Message:
        return answer

    answering.serve("method", anything, handle, max_concurrent_per_peer=1)
    asked = ask(asking, HOSTILE, NUMBERED, NOTHING, specs=(TensorSpec("fp32", (2,)),), seconds=5)
    if sound:
        assert (await asked).header.number == 1
    else:
        with pytest.raises(ProtocolViolation):
            await asked
    assert asking.conduct.offences.total() == (0 if sound else 1)
    await asking.close()
    await answering.close()


@pytest.mark.parametrize(("faults", "answered"), [(0, True), (2, True), (3, False)])
async def test_a_broken_link_is_tried_again_as_often_as_was_said(faults: int, answered: bool) -> None:
    """Three times in all. A refusal is an answer, and asked for once."""
    network = MemoryNetwork()
    asking, answering = MemoryTransport(network, peer_name(0, 0)), MemoryTransport(network, HOSTILE)
    handled: list[int] = []

    async def handle(_peer: PeerId, _message: Message) -> Message:
        handled.append(1)
        if len(handled) > 1:
            raise Refused(Refusal.BUSY)
        return Message({"number": 1})

    answering.serve("method", anything, handle, max_concurrent_per_peer=1)
    network.inject(Fault(FaultKind.LOSE_REQUEST, times=faults))
    asked = ask(asking, HOSTILE, NUMBERED, NOTHING, seconds=5, attempts=3)
    if answered:
        assert (await asked).header.number == 1
        with pytest.raises(Refused):
            await ask(asking, HOSTILE, NUMBERED, NOTHING, seconds=5, attempts=3)
        assert len(handled) == 2
    else:
        with pytest.raises(BrokenStream):
            await asked
        assert not handled
    await asking.close()
    await answering.close()


def test_a_strangers_mistake_is_named_in_one_printable_line() -> None:
    """That holds also if the name of its place is the stranger's own."""
    header = {"seen_at": [], "results": {"\x1b[2J\n12:00:00 E [node] all is lost": "reached"}}
    with pytest.raises(Refused, match=r"results\..\[2J 12:00:00 E \[node\] all is lost") as refused:
        parse(reachability.Dialled, header)
    assert refused.value.detail.isprintable()


async def test_judging_books_once_and_only_bad_answers() -> None:
    """Cancellation, refusals and failures of this node pass through unbooked."""
    transport = MemoryTransport(MemoryNetwork(), peer_name(0, 0))
    for error in (Refused(Refusal.MALFORMED), asyncio.CancelledError(), RuntimeError()):
        with pytest.raises(type(error)), judging(transport, HOSTILE, "test"):
            raise error
    assert transport.conduct.offences.total() == 0
    with (
        pytest.raises(ProtocolViolation, match="test of a-hostile-stage peer: why"),
        judging(transport, HOSTILE, "test"),
    ):
        raise BadAnswer("why")
    assert transport.conduct.offences == {"bad_answer": 1}
    await transport.close()


METHODS: dict[str, Callable[[Transport], Awaitable[object]]] = {
    hello.HELLO.name: lambda transport: hello.ask_hello(transport, HOSTILE),
    reachability.DIAL_BACK.name: lambda transport: reachability.ask_dial_back(transport, HOSTILE, [1]),
    spec_fetch.SPEC.name: lambda transport: spec_fetch._fetch(transport, HOSTILE, cast("hello.Hello", None)),
}


@pytest.mark.parametrize("method", list(METHODS))
async def test_rubbish_of_a_stranger_is_booked_whoever_asked(method: str) -> None:
    """That holds also before this node belongs to a run."""
    network = MemoryNetwork()
    asking, answering = MemoryTransport(network, peer_name(0, 0)), MemoryTransport(network, HOSTILE)

    async def handle(_peer: PeerId, _message: Message) -> Message:
        return Message({"run": 5, "results": 5}, (torch.zeros(3, dtype=torch.uint8),))

    answering.serve(method, anything, handle, max_concurrent_per_peer=1)
    with pytest.raises(ProtocolViolation):
        await METHODS[method](asking)
    assert asking.conduct.offences == {"bad_answer": 1}
    await asking.close()
    await answering.close()
