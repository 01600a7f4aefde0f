"""What must not become dear unseen, as ratios within one run: a decision by the size of the swarm, a hop beside what
p2pd itself takes for it."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import torch

from benchmarks.hop import Processes
from noloco_node.directory.buckets import TARGET, StageLevel
from noloco_node.identity.peer_id import PeerId
from noloco_node.pipeline.admission import MicrobatchLimiter
from noloco_node.pipeline.routing import LoadBalancer
from noloco_node.transport.messages import Message
from tests.support import nothing_left_behind
from tests.swarm.worlds import real_world

FEW, MANY = 100, 100_000
MOST_BY_SIZE = 5.0
"""The most that a decision for each microbatch, or look, takes among a hundred thousand beside a hundred. It was 0.9 to
1.3 when this was written. A look at everybody would take 1,000 times as long."""
MOST_OF_A_HOP = 2.0
"""CPU time of a hop of a mebibyte over that of the same bytes on a bare stream of p2pd: 0.9 to 1.2."""
BYTES, ROUNDS, HOPS = 1 << 20, 3, 12


def least_us(call: Callable[[], object]) -> float:
    """Microseconds of CPU of one call, the least of some turns, since others use the machine."""
    took: list[float] = []
    for _ in range(20):
        began = time.process_time()
        for _ in range(50):
            call()
        took.append(1e6 * (time.process_time() - began) / 50)
    return min(took)


def decisions(count: int) -> dict[str, Callable[[], object]]:
    """What a node does for every microbatch and every look, that knows so many peers."""
    peers = [PeerId(f"12D3KooW{number:044d}") for number in range(count)]
    balancer, limiter = LoadBalancer("balanced", random.Random(7), lambda: 1000.0), MicrobatchLimiter(8, lambda: 1000.0)
    balancer.update(peers, 0)
    for peer in peers[:2048]:
        place = limiter.take(peer)
        limiter.answered(peer)
        place()
    level = max(0, round(math.log2(count / TARGET)))
    stage, rng, turn = StageLevel(random.Random(5), level), random.Random(6), itertools.count()
    shift = 32 - level
    held = [[(bucket << shift) + rng.getrandbits(shift) for _ in range(count >> level)] for bucket in range(16)]

    def look() -> None:
        bucket = next(turn) % min(16, 1 << level)
        stage.took(level, bucket, held[bucket])
        assert stage.number

    return {"route": balancer.choose, "admit": lambda: limiter.take(peers[next(turn) % count])(), "look": look}


def test_decisions_for_each_microbatch_cost_the_same_among_many() -> None:
    """A look at everybody would take a thousand times as long."""
    few, many = decisions(FEW), decisions(MANY)
    for name, call in few.items():
        one, other = least_us(call), least_us(many[name])
        assert other < MOST_BY_SIZE * one, f"{name}: {one:.1f} µs among {FEW}, {other:.1f} µs among {MANY}"


async def test_a_hop_takes_little_more_than_p2pd_does(tmp_path: Path) -> None:
    """It goes there and back on real p2pd, by turns on the transport and on a bare stream. The CPU of this process and
    both p2pd counts, the least of some rounds each."""
    with nothing_left_behind():
        async with real_world(tmp_path) as world:
            server, caller = world.daemons

            async def echo(_peer: PeerId, message: Message) -> Message:
                return Message({}, message.tensors)

            async def bare(_peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                writer.write(await reader.readexactly(BYTES))
                await writer.drain()

            async def by_stream() -> None:
                reader, writer = await caller.open_stream(server.own_id, "bare/1")
                writer.write(bytes(BYTES))
                await reader.readexactly(BYTES)
                writer.transport.abort()

            async def by_transport() -> None:
                await world.call("echo", torch.zeros(BYTES // 4))

            world.server.serve("echo", lambda *_: None, echo, max_concurrent_per_peer=1)
            await server.serve_streams("bare/1", bare)
            cpu = Processes((psutil.Process().pid, server.pid, caller.pid))
            ways: tuple[Callable[[], Awaitable[None]], ...] = (by_transport, by_stream)
            taken: list[list[float]] = [[], []]
            for turn in range(ROUNDS + 1):
                for way, costs in zip(ways, taken, strict=True):
                    before = cpu.seconds()
                    for _ in range(HOPS if turn else 1):
                        await way()
                    if turn:
                        costs.append(cpu.seconds() - before)
            await server.stop_serving("bare/1")
    ours, theirs = map(min, taken)
    assert ours < MOST_OF_A_HOP * theirs, f"{ours:.2f} s of CPU on the transport, {theirs:.2f} s on bare streams"
