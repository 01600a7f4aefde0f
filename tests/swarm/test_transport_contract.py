"""What every transport promises, tested alike in memory, between nodes of one machine and on real p2pd processes, on
uvloop as nodes run it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
import uvloop

from noloco_node.identity.peer_id import PeerId
from noloco_node.transport.errors import (
    BrokenStream,
    DeadlinePassed,
    PeerUnreachable,
    ProtocolViolation,
    Refusal,
    Refused,
)
from noloco_node.transport.messages import WIRE_DTYPES, JsonObject, Message, TensorSpec
from tests.support import eventually, nothing_left_behind
from tests.swarm.worlds import Daemons, World, memory_world, nearby_world, real_world, two_daemons, world_on

pytestmark = pytest.mark.asyncio(loop_scope="module")
SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (0,), (3, 0, 2), (5, 7), (2, 3, 4, 5), (300_001,))


@pytest.fixture(scope="module")
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    """Read by pytest-asyncio."""
    return uvloop.EventLoopPolicy()


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["memory", "nearby", pytest.param("p2pd", marks=pytest.mark.daemons)]
)
async def place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[str | Daemons]:
    """Where transports are: in memory, on one machine, or on two p2pds, which all tests share but that which kills."""
    if request.param != "p2pd":
        yield request.param
        return
    folder = tmp_path_factory.mktemp("keys")
    with nothing_left_behind():
        async with two_daemons(folder) as daemons:
            yield daemons


@pytest_asyncio.fixture(loop_scope="module")
async def world(request: pytest.FixtureRequest, tmp_path: Path, place: str | Daemons) -> AsyncIterator[World]:
    """The three worlds, with transports of a test's own."""
    if isinstance(place, str):
        async with memory_world() if place == "memory" else nearby_world() as made:
            yield made
    elif request.function is test_a_peer_killed_while_it_works_breaks_the_call:
        with nothing_left_behind():
            async with real_world(tmp_path) as made:
                yield made
    else:
        async with world_on(place) as made:
            yield made


def welcome(peer: PeerId, header: JsonObject, specs: tuple[TensorSpec, ...]) -> None:
    """Admits everyone."""


class Handler:
    """Answers with what it got, once `gate` is open; notes what happened."""

    def __init__(self, *, open_gate: bool = True) -> None:
        self.gate = asyncio.Event()
        if open_gate:
            self.gate.set()
        self.begun = 0
        self.finished = 0
        self.cancelled = 0

    async def __call__(self, peer: PeerId, message: Message) -> Message:
        self.begun += 1
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        self.finished += 1
        return message


async def refused(awaitable: Any) -> Refused:
    """The refusal that a call ends with."""
    with pytest.raises(Refused) as caught:
        await awaitable
    return caught.value


async def test_every_dtype_and_shape_comes_back_bit_for_bit(world: World) -> None:
    """Scalars, empty tensors and tensors of several frames included; the header passes unchanged."""
    world.server.serve("echo", welcome, Handler(), max_concurrent_per_peer=4)
    header = {"text": "größer ☃", "number": -(2**53), "float": 0.1, "none": None, "list": [1, [2, {"a": True}]]}
    for dtype in WIRE_DTYPES.values():
        tensors = tuple((torch.rand(shape) * 200).to(dtype) for shape in SHAPES)
        answer = await world.call("echo", *tensors, header=header)
        assert answer.header == header
        assert [tensor.shape for tensor in answer.tensors] == [tensor.shape for tensor in tensors]
        for got, sent in zip(answer.tensors, tensors, strict=True):
            assert got.dtype == dtype
            assert torch.equal(got.reshape(-1).view(torch.uint8), sent.reshape(-1).view(torch.uint8))
            assert got.numel() == 0 or got.data_ptr() != sent.data_ptr(), "the answer shares the request's memory"


async def test_the_peer_id_that_a_handler_sees_is_the_callers(world: World) -> None:
    """Admission and handler are told the caller's id."""
    seen: list[PeerId] = []

    async def handle(peer: PeerId, message: Message) -> Message:
        seen.append(peer)
        return Message()

    world.server.serve("who", lambda peer, header, specs: seen.append(peer), handle, max_concurrent_per_peer=1)
    await world.call("who")
    assert seen == [world.caller.peer_id] * 2


async def test_a_refusal_before_the_body_spares_handler_and_body(world: World) -> None:
    """Admission sees header and specs, and turns a small and a huge body away; the stream serves the next call."""
    handler = Handler()
    asked: list[tuple[TensorSpec, ...]] = []

    def admit(peer: PeerId, header: JsonObject, specs: tuple[TensorSpec, ...]) -> None:
        asked.append(specs)
        if header.get("refuse"):
            raise Refused(Refusal.WRONG_CONTRACT, "not these shapes")

    world.server.serve("picky", admit, handler, max_concurrent_per_peer=2)
    for count in (10, 1 << 18, 8 << 20):
        error = await refused(world.call("picky", torch.zeros(count), header={"refuse": True}))
        assert (error.reason, error.detail) == (Refusal.WRONG_CONTRACT, "not these shapes")
        assert asked[-1] == (TensorSpec("fp32", (count,)),)
        assert handler.begun == 0
        assert (await world.call("picky", torch.ones(3))).tensors[0].sum() == 3
        handler.begun = 0
    assert world.server.refusals_given == {Refusal.WRONG_CONTRACT: 3}
    assert world.server.traffic.received["picky"] < 8 << 20, "the huge body was read although it was refused"


async def test_a_request_that_asks_first_sends_its_tensors_once_it_is_admitted(world: World) -> None:
    """A refusal costs none of their bytes, and the stream serves the next call."""

    def admit(peer: PeerId, header: JsonObject, specs: tuple[TensorSpec, ...]) -> None:
        del peer, specs
        if header.get("refuse"):
            raise Refused(Refusal.BUSY, "full")

    world.server.serve("asked", admit, Handler(), max_concurrent_per_peer=2)
    bodies = 0
    for count in (10, 1 << 18):
        tensor = torch.rand(count)
        for _ in range(2):
            told = await refused(world.call("asked", tensor, header={"refuse": True}, asks_first=True))
            assert (told.reason, told.detail) == (Refusal.BUSY, "full")
        answer = await world.call("asked", tensor, asks_first=True)
        assert torch.equal(answer.tensors[0], tensor)
        bodies += tensor.nbytes
    sent, received = world.caller.traffic.sent["asked"], world.server.traffic.received["asked"]
    assert bodies < sent < bodies + 1000
    assert received == sent


async def test_a_refusal_by_the_handler_comes_back_typed(world: World) -> None:
    """A late refusal keeps reason and detail, and the stream."""

    async def handle(peer: PeerId, message: Message) -> Message:
        raise Refused(Refusal.NOT_FINITE, "row 3")

    world.server.serve("late", welcome, handle, max_concurrent_per_peer=1)
    for _ in range(3):
        error = await refused(world.call("late", torch.zeros(100)))
        assert (error.reason, error.detail) == (Refusal.NOT_FINITE, "row 3")
    assert world.server.refusals_given == {Refusal.NOT_FINITE: 3}


async def test_an_unknown_method_is_refused(world: World) -> None:
    """Strangers cannot grow the traffic table with invented names, nor speak to the terminal by them."""
    told = await refused(world.call("nobody-serves\n\x1bthis"))
    assert (told.reason, told.detail) == (Refusal.UNKNOWN_METHOD, "nobody-serves ?this")
    assert "nobody-serves\n\x1bthis" not in world.server.traffic.received


@pytest.mark.parametrize("failing", ["admission", "handler", "answer"])
async def test_a_failure_inside_shows_nothing_to_the_caller(
    world: World, failing: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged with its traceback here, and is `internal` there."""

    def admit(peer: PeerId, header: JsonObject, specs: tuple[TensorSpec, ...]) -> None:
        if failing == "admission":
            raise ValueError("a secret of admission")

    async def handle(peer: PeerId, message: Message) -> Message:
        if failing == "handler":
            raise KeyError("a secret of handler")
        return Message({"a secret of answer": float("nan")})

    world.server.serve("broken", admit, handle, max_concurrent_per_peer=1)
    error = await refused(world.call("broken"))
    assert error.reason is Refusal.INTERNAL
    assert "secret" not in error.detail
    logged = [record for record in caplog.records if record.exc_info and record.levelname == "ERROR"]
    assert len(logged) == 1


async def test_a_body_over_the_receivers_limit_is_refused_early(world: World) -> None:
    """`too_large`, from the specs alone."""
    handler = Handler()
    world.server.serve("echo", welcome, handler, max_concurrent_per_peer=1)
    big = torch.empty((97 << 20), dtype=torch.uint8)
    assert (await refused(world.call("echo", big))).reason is Refusal.TOO_LARGE
    assert handler.begun == 0


async def test_an_answer_over_the_callers_limit_is_a_violation(world: World) -> None:
    """Checked before its body is read; a following call works."""
    world.server.serve("echo", welcome, Handler(), max_concurrent_per_peer=1)
    with pytest.raises(ProtocolViolation):
        await world.call("echo", torch.zeros(1000), max_answer_bytes=3999)
    await world.call("echo", torch.zeros(1000), max_answer_bytes=4000)


async def test_what_cannot_be_sent_is_the_callers_mistake(world: World) -> None:
    """Strided tensors, NaN in a header and headers over the limit raise ValueError before anything is sent."""
    for request in (
        Message({}, (torch.zeros(4, 4).t(),)),
        Message({"x": float("inf")}),
        Message({"x": "y" * 70_000}),
        Message({}, tuple(torch.zeros(1) for _ in range(17))),
    ):
        with pytest.raises(ValueError):
            await world.caller.call(world.server.peer_id, "echo", request, timeout=5, progress=5, max_answer_bytes=100)


async def test_time_runs_out_for_caller_and_handler(world: World) -> None:
    """`DeadlinePassed` in time, and the handler is cancelled."""
    handler = Handler(open_gate=False)
    world.server.serve("slow", welcome, handler, max_concurrent_per_peer=1)
    started = time.monotonic()
    with pytest.raises(DeadlinePassed):
        await world.call("slow", timeout=0.5)
    assert time.monotonic() - started > 0.4
    await eventually(lambda: handler.cancelled == 1, what="the handler is cancelled")


async def test_work_may_take_longer_than_bytes_may_rest(world: World) -> None:
    """The progress deadline is for peers that are silent: one that is at work says so, and is waited for."""
    handler = Handler(open_gate=False)
    world.server.serve("slow", welcome, handler, max_concurrent_per_peer=1)
    call = asyncio.create_task(world.call("slow", torch.arange(1000), progress=1.5))
    await eventually(lambda: handler.begun == 1)
    done, _ = await asyncio.wait((call,), timeout=4.0)
    assert not done, "it is still waiting, well beyond the deadline for silence"
    handler.gate.set()
    assert torch.equal((await call).tensors[0], torch.arange(1000))
    assert (await world.call("slow")).tensors == (), "and the next request finds a clean stream"


async def test_cancelling_a_call_cancels_the_handler(world: World) -> None:
    """Promptly, and its place is free again."""
    handler = Handler(open_gate=False)
    world.server.serve("slow", welcome, handler, max_concurrent_per_peer=1)
    call = asyncio.create_task(world.call("slow", torch.zeros(1000)))
    await eventually(lambda: handler.begun == 1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await eventually(lambda: handler.cancelled == 1, what="the handler is cancelled")
    handler.gate.set()
    await world.call("slow")


async def test_a_peer_killed_while_it_works_breaks_the_call(world: World) -> None:
    """Every call under way ends in `BrokenStream`, the next finds nobody."""
    handler = Handler(open_gate=False)
    world.server.serve("slow", welcome, handler, max_concurrent_per_peer=3)
    calls = [asyncio.create_task(world.call("slow", torch.zeros(1000))) for _ in range(3)]
    await eventually(lambda: handler.begun == 3)
    await world.kill_server()
    results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 60)
    assert [type(result) for result in results] == [BrokenStream] * 3
    with pytest.raises(PeerUnreachable):
        await world.call("slow", timeout=10)


async def test_an_unknown_peer_is_unreachable(world: World) -> None:
    """Certainly not carried out."""
    for peer in ("12D3KooWAL5zALa3ZR1piSRmK8WGNFojeALVyS3vgSZQYawt1PGF", "no peer id at all 0OIl"):
        with pytest.raises(PeerUnreachable):
            await world.caller.call(PeerId(peer), "echo", Message(), timeout=10, progress=10, max_answer_bytes=100)


async def test_more_than_a_peers_share_is_busy(world: World) -> None:
    """At most `max_concurrent_per_peer` at a time; the others are refused at once, never queued."""
    handler = Handler(open_gate=False)
    world.server.serve("few", welcome, handler, max_concurrent_per_peer=3)
    calls = [asyncio.create_task(world.call("few", torch.zeros(10))) for _ in range(3)]
    await eventually(lambda: handler.begun == 3)
    for _ in range(4):
        assert (await refused(world.call("few", torch.zeros(10)))).reason is Refusal.BUSY
    assert handler.begun == 3
    handler.gate.set()
    await asyncio.gather(*calls)
    await world.call("few")
    assert world.server.refusals_given == {Refusal.BUSY: 4}


async def test_many_calls_at_once_do_not_mix_answers(world: World) -> None:
    """200 calls of different sizes, each gets its own answer."""
    world.server.serve("echo", welcome, Handler(), max_concurrent_per_peer=200)

    async def one(number: int) -> None:
        sent = torch.full((number * 97 + 1,), float(number))
        answer = await world.call("echo", sent, header={"number": number})
        assert answer.header == {"number": number}
        assert torch.equal(answer.tensors[0], sent)

    await asyncio.gather(*(one(number) for number in range(200)))


async def test_both_sides_count_the_same_bytes(world: World) -> None:
    """Bodies and headers, by method."""
    world.server.serve("echo", welcome, Handler(), max_concurrent_per_peer=1)
    await world.call("echo", torch.zeros(100_000), header={"a": 1})
    caller, server = world.caller.traffic, world.server.traffic
    assert 400_000 < caller.sent["echo"] < 400_100
    assert caller.sent["echo"] == server.received["echo"]
    assert caller.received["echo"] == server.sent["echo"] > 400_000


async def test_the_event_loop_stays_responsive_while_much_streams(world: World) -> None:
    """64 MiB there and back: the loop never computes for long between two beats of a heart that it shares."""
    world.server.serve("echo", welcome, Handler(), max_concurrent_per_peer=1)
    lags: list[float] = []

    async def heartbeat() -> None:
        while True:
            before = time.thread_time()
            await asyncio.sleep(0.005)
            lags.append(time.thread_time() - before)

    body = torch.ones(16 << 20)
    beating = asyncio.create_task(heartbeat())
    answer = await world.call("echo", body)
    beating.cancel()
    assert torch.equal(answer.tensors[0], body)
    if world.real:
        assert len(lags) >= 10, "the heartbeat did not run beside the stream"
        assert sorted(lags)[len(lags) * 9 // 10] < 0.05
        assert max(lags) < 0.5


async def test_closing_ends_calls_and_handlers(world: World) -> None:
    """A caller that closes breaks its own calls; a server that closes breaks its callers'; later calls find nobody."""
    handler = Handler(open_gate=False)
    world.server.serve("slow", welcome, handler, max_concurrent_per_peer=4)
    first = asyncio.create_task(world.call("slow"))
    await eventually(lambda: handler.begun == 1)
    await world.server.close()
    assert handler.cancelled == 1
    with pytest.raises(BrokenStream):
        await first
    with pytest.raises((PeerUnreachable, BrokenStream)):
        await world.call("slow", timeout=5)
    await world.caller.close()
    with pytest.raises(PeerUnreachable):
        await world.call("slow", timeout=5)
