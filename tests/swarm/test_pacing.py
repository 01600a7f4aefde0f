"""A node's bound on its line: what it keeps in virtual time, what goes first, and which bounds are refused."""

from __future__ import annotations

import asyncio
import random
import socket
from pathlib import Path
from typing import Literal

import pytest
import torch

from noloco_node.config.load import Config, load_config
from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import LimitsSpec
from noloco_node.errors import ExitCode, UserError
from noloco_node.identity.peer_id import PeerId
from noloco_node.placement.balancing import Supply, choose_stage
from noloco_node.simulator.loop import in_virtual_time
from noloco_node.sizing.footprint import footprint_of
from noloco_node.sizing.preflight import plan
from noloco_node.sizing.traffic import LineNeed, check_line, check_uplink, line_needs, traffic_of
from noloco_node.transport.calls import floor_of
from noloco_node.transport.libp2p import Libp2pTransport
from noloco_node.transport.messages import JsonObject, Message, TensorSpec
from noloco_node.transport.pacing import (
    ANSWER_SHARE,
    BODIES_AT_ONCE,
    SMALL_BYTES,
    TURN_SECONDS,
    WIRE_SHARE,
    Line,
    LineRate,
    at_once,
    line_of,
)
from noloco_node.transport.pool import Ends, StreamHandler
from noloco_node.transport.streams import FramedStream, StreamEnded
from tests.support import alongside
from tests.swarm.worlds import NoHost
from tests.worlds import micro_spec

PIECE = 10_000
SECONDS = 60.0


def test_many_streams_get_the_bound_together_and_small_messages_wait_for_none_of_them() -> None:
    """Eight streams take all they get for a minute, and a heartbeat comes every second. Both are within the bound."""

    async def minute() -> tuple[int, float]:
        loop = asyncio.get_running_loop()
        line, sent, worst = Line(up=LineRate(1e5, loop.time)), 0, 0.0

        async def stream() -> None:
            nonlocal sent
            while True:
                await line.send(PIECE)
                sent += PIECE

        async with alongside(*(stream() for _ in range(8))):
            for _ in range(int(SECONDS)):
                await asyncio.sleep(1.0)
                before = loop.time()
                line.sent(1000)
                sent += 1000
                worst = max(worst, loop.time() - before)
        return sent, worst

    sent, worst = in_virtual_time(minute)
    assert worst == 0.0
    assert 0.98 * 1e5 * SECONDS < WIRE_SHARE * sent < 1.02 * 1e5 * SECONDS


async def test_a_message_to_who_has_gone_takes_no_more_of_the_line() -> None:
    """An answer of 4 MiB to a peer that had hung up kept a line of 8 Mbit/s for 4 s, with nothing on it."""
    ends = [await asyncio.open_unix_connection(sock=end) for end in socket.socketpair()]
    stream = FramedStream(*ends[0], line_of(8.0, None))
    writing = asyncio.create_task(stream.write_message(b"{}", (torch.zeros(4 << 20, dtype=torch.uint8),), 5.0))
    await ends[1][0].readexactly(20_000)
    ends[1][1].transport.abort()
    with pytest.raises(StreamEnded):
        await writing
    stream.abort()


def test_a_line_that_was_idle_is_not_overdrawn_later() -> None:
    """An hour without traffic earns a quarter of a second of it, and no more."""

    async def burst() -> float:
        loop = asyncio.get_running_loop()
        pace = LineRate(1e5, loop.time)
        await asyncio.sleep(3600.0)
        began = loop.time()
        for _ in range(10):
            await pace.take(PIECE)
        return loop.time() - began

    assert 0.6 < in_virtual_time(burst) < 1.0


def test_what_comes_costs_the_way_back_its_confirmations() -> None:
    """A full downlink takes some of the uplink."""

    async def down() -> float:
        loop = asyncio.get_running_loop()
        line = Line(up=LineRate(1e4, loop.time))
        await asyncio.sleep(1.0)
        await line.receive(10**6)
        began = loop.time()
        await line.send(1)
        return loop.time() - began

    assert in_virtual_time(down) == pytest.approx(ANSWER_SHARE * 1e6 / 1e4 - 0.25, abs=0.01)


def test_only_what_holds_the_swarm_together_goes_first() -> None:
    """Microbatches are small where the model is, and must not pass the bound by."""
    assert [at_once(method) for method in ("hello", "hello.access", "records", "microbatch", "state.chunk")] == [
        SMALL_BYTES,
        SMALL_BYTES,
        SMALL_BYTES,
        0,
        0,
    ]
    assert line_of(None, None) == Line()


def test_two_bodies_go_at_a_time_and_one_that_nobody_reads_holds_the_line_for_a_while_only() -> None:
    """Bodies that take three seconds each leave two by two; one that never ends lets the next go after its time."""

    async def leave(seconds: list[float]) -> list[float]:
        loop = asyncio.get_running_loop()
        line, begun = Line(up=LineRate(1e5, loop.time)), list[float]()

        async def body(takes: float) -> None:
            turn = line.turn(waits=True)
            await turn.come()
            begun.append(loop.time())
            await asyncio.sleep(takes)
            turn.over()
            turn.over()

        await asyncio.gather(*map(body, seconds))
        return begun

    assert in_virtual_time(lambda: leave([3.0] * 5)) == pytest.approx([0.0, 0.0, 3.0, 3.0, 6.0])
    late = in_virtual_time(lambda: leave([1000.0, 1000.0, 1.0, 1.0]))
    assert late == pytest.approx([0.0, 0.0, TURN_SECONDS, TURN_SECONDS])


class Wires(NoHost):
    """Streams between transports of one process."""

    def __init__(self, own_id: PeerId, hosts: dict[PeerId, Wires]) -> None:
        super().__init__(own_id)
        hosts[own_id] = self
        self._hosts = hosts
        self._handler: StreamHandler | None = None
        self.served: list[asyncio.Task[None]] = []

    async def serve_streams(self, protocol: str, handler: StreamHandler) -> None:
        """See `StreamHost.serve_streams`."""
        self._handler = handler

    async def open_stream(self, peer: PeerId, protocol: str) -> Ends:
        """See `StreamHost.open_stream`."""
        handler = self._hosts[peer]._handler
        assert handler is not None
        near, far = [await asyncio.open_unix_connection(sock=end) for end in socket.socketpair()]

        async def serve() -> None:
            await handler(self.own_id, *far)

        self.served.append(asyncio.create_task(serve()))
        return near


@pytest.mark.parametrize("asks_first", [True, False])
async def test_microbatches_that_ask_first_cross_a_bounded_line_one_after_another(asks_first: bool) -> None:
    """Only those whose turn it is have a place at their peer: the others ask later. The answers' line is alike."""
    hosts, course = dict[PeerId, Wires](), list[str]()
    one, two = (Wires(PeerId(f"{name}-on-a-wire"), hosts) for name in ("caller", "server"))
    caller = Libp2pTransport(one, line=line_of(80.0, None))
    server = Libp2pTransport(two, line=line_of(80.0, None))
    body = torch.zeros(1 << 18)

    def admit(peer: PeerId, header: JsonObject, specs: tuple[TensorSpec, ...]) -> None:
        del peer, header, specs
        course.append("asked")

    async def handle(peer: PeerId, message: Message) -> Message:
        del peer
        course.append("whole")
        return Message({}, message.tensors)

    server.serve("large", admit, handle, max_concurrent_per_peer=8)
    await server.start()
    try:
        request = Message({}, (body,), asks_first=asks_first)
        calls = [
            caller.call(two.own_id, "large", request, timeout=30.0, progress=10.0, max_answer_bytes=body.nbytes)
            for _ in range(5)
        ]
        for answer in await asyncio.gather(*calls):
            assert torch.equal(answer.tensors[0], body)
    finally:
        await caller.close()
        await server.close()
        await asyncio.gather(*one.served)
    assert course.count("whole") == 5
    asked_before_one_was_whole = course.index("whole")
    assert asked_before_one_was_whole <= BODIES_AT_ONCE + 1 if asks_first else asked_before_one_was_whole == 5


def test_a_bound_below_what_a_microbatch_needs_is_refused_with_the_arithmetic() -> None:
    """Setting, value, bytes, seconds and the least that would do are named."""
    run = micro_spec(stages=4)
    needs = line_needs(run, footprint_of(run))
    middle = needs[1]
    assert middle.sent == pytest.approx(needs[0].sent + needs[3].sent)
    assert middle.received == pytest.approx(needs[0].received + needs[3].received)
    check_line(run, NodeSettings(uplink_mbit=middle.least_up), middle, 1)
    little = 0.9 * middle.least_up
    assert not middle.borne_by(little, None)
    with pytest.raises(UserError) as refused:
        check_line(run, NodeSettings(uplink_mbit=little), middle, 1)
    assert refused.value.exit_code is ExitCode.CONFIG
    for words in (f"node.uplink_mbit is {little:g}", "stage 1", "have 20 s" if not middle.chunk else "MB"):
        assert words in refused.value.message
    with pytest.raises(UserError, match="downlink_mbit"):
        check_line(run, NodeSettings(downlink_mbit=0.9 * middle.least_down), middle, 1)


@pytest.mark.parametrize("stage", ["auto", 1])
def test_a_plan_is_refused_with_a_bound_that_no_node_of_the_run_could_train_with(stage: int | Literal["auto"]) -> None:
    """`config validate` said that all was well, and the node then did not start."""
    run = micro_spec(stages=4)
    plan(Config(run=run, node=NodeSettings(stage=stage, uplink_mbit=100.0)))
    with pytest.raises(UserError, match=r"node\.uplink_mbit is 0\.001, too little for stage") as refused:
        plan(Config(run=run, node=NodeSettings(stage=stage, uplink_mbit=0.001)))
    assert refused.value.exit_code is ExitCode.CONFIG


def test_a_run_may_ask_its_nodes_for_a_least_uplink() -> None:
    """A node whose own bound is below it is told before it copies anything; one without a bound may come."""
    asks = micro_spec().model_copy(update={"limits": LimitsSpec(least_uplink_mbit=20.0)})
    check_uplink(asks, NodeSettings(uplink_mbit=20.0))
    check_uplink(asks, NodeSettings())
    check_uplink(micro_spec(), NodeSettings(uplink_mbit=0.1))
    with pytest.raises(UserError, match=r"node.uplink_mbit is 19.*asks its nodes for 20") as refused:
        check_uplink(asks, NodeSettings(uplink_mbit=19.0))
    assert refused.value.exit_code is ExitCode.CONFIG


def test_a_line_on_which_every_outer_step_would_be_given_up_is_too_thin() -> None:
    """With a chunk in its time alone 0.84 Mbit/s were enough for any stage; 281 MB in ten minutes take more."""
    run = load_config(Path("consumer-24gb")).run
    footprint = footprint_of(run)
    for need, own in zip(line_needs(run, footprint), traffic_of(run, footprint), strict=True):
        limits = run.limits
        floor = floor_of(own.outer_step, limits.chunk_bytes, limits.exchange_progress_seconds)
        assert need.least_up == need.least_down == pytest.approx(8e-6 * floor)
        with pytest.raises(UserError, match=r"an outer step has 2\d\d MB"):
            check_line(run, NodeSettings(uplink_mbit=0.9 * need.least_up), need, 0)


def test_the_need_is_the_larger_of_microbatch_and_chunk() -> None:
    """By hand: 2 MB in 20 s, and 1 MB in 10 s, are 0.8 Mbit/s."""
    need = LineNeed(sent=2e6, received=4e6, seconds=20.0, chunk=1_000_000, chunk_seconds=10.0)
    assert (need.least_up, need.least_down) == (pytest.approx(0.8), pytest.approx(1.6))
    assert need.line_seconds(8.0, None) == pytest.approx(2.0)
    assert need.line_seconds(None, None) == 0.0
    assert need.borne_by(0.8, 1.6)
    assert not need.borne_by(0.79, None)


@pytest.mark.parametrize(
    ("throughput", "line_seconds", "chosen"),
    [
        ((0.0, 0.0, 0.0), (1.0, 2.0, 1.0), {0, 2}),
        ((1.0, 1.2, 0.9), (2.0, 1.0, 2.0), {2}),
        ((1.0, 1.1, 0.9), (2.0, 1.0, 2.0), {1}),
        ((1.0, 1.1, 0.9), (), {2}),
        ((1.0, 1.1, 0.9), (0.0, 0.0, 0.0), {2}),
    ],
)
def test_a_joiner_with_a_narrow_line_takes_of_the_poorest_stages_that_which_costs_its_line_least(
    throughput: tuple[float, ...], line_seconds: tuple[float, ...], chosen: set[int]
) -> None:
    """A stage that is clearly poorer comes first all the same; without a bound nothing changes."""
    supply = Supply(throughput, (1.0, 1.0, 1.0))
    found = {choose_stage(supply, range(3), random.Random(seed), line_seconds) for seed in range(20)}
    assert found == chosen
