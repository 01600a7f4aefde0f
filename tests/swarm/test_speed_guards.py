"""What one hop costs beside a bare stream, and for how long an exchange holds the device: guards of what was won.

A benchmark says how fast either is on a quiet machine. Leaks by small steps are seen here. What the device's thread
does for an exchange is counted, exactly. What a hop costs is measured in CPU time beside bare bytes over the same p2pd,
in turns with them. The cheapest round of each is compared: others' work on the machine only adds.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from noloco_node.training.stage_worker import StageWorker
from noloco_node.transport.messages import Message
from tests.inside import thread_of
from tests.support import nothing_left_behind
from tests.swarm.test_exchange import both_committed, two_replicas
from tests.swarm.worlds import real_world
from tests.test_cpu_per_token import Counted
from tests.worlds import peer_name

MOST_CALLS = 2
"""The device's thread has at most so many calls for an exchange, of each side: the snapshot and the commit."""
MOST_PASSES = 15.5
"""Over a stage's weights in fp32, of operations that read or write them or show them in another form: 15.0 when this
was written. One more copy makes it 17."""
MOST_OF_BARE = 18.0
"""The most CPU time of both sides' Python for 64 KiB there and back, as a multiple of that of the bare bytes. It is 6.3
to 9.2 in four turns on a quiet machine, 13.1 on one whose cores were both full."""
ROUNDS, CALLS, OCTETS = 9, 20, 64 << 10
SUMS = 75
"""Over the bytes of a call: the leak, which costs three to five times what the hop does: 34 to 60 with it."""


@pytest.mark.parametrize("leaks", [False, True])
async def test_an_exchange_holds_the_device_for_two_short_calls(leaks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in calls and in bytes, of both sides together. One more copy of the weights would be seen."""
    if leaks:
        snapshot = StageWorker.snapshot

        async def leaking(self: StageWorker, fragment: int | None = None) -> Any:
            await self.slow_weights()
            return await snapshot(self, fragment)

        monkeypatch.setattr(StageWorker, "snapshot", leaking)
    async with two_replicas() as (made, left, right):
        size = left.worker.outer.slow.numel()
        thread, calls, count = thread_of(left.worker), 0, Counted()
        assert thread is thread_of(right.worker)
        run = thread.run

        async def counting(priority: Any, work: Callable[[], Any], *arguments: Any) -> Any:
            def counted() -> Any:
                nonlocal calls
                calls += 1
                with count:
                    return work()

            return await run(priority, counted, *arguments)

        monkeypatch.setattr(thread, "run", counting)
        assert await left.averaging.dial(peer_name(0, 1))
        await both_committed(made)
    assert (calls > 2 * MOST_CALLS) is leaks
    assert (count.bytes > 2 * 4 * size * MOST_PASSES) is leaks


async def cheapest(*works: Callable[[], Awaitable[object]]) -> list[float]:
    """CPU seconds of this process for `CALLS` of each, by turns; each one's cheapest round."""
    least = [float("inf")] * len(works)
    for _ in range(ROUNDS):
        for number, work in enumerate(works):
            before = time.process_time()
            for _ in range(CALLS):
                await work()
            least[number] = min(least[number], time.process_time() - before)
    return least


@pytest.mark.daemons
async def test_a_hop_costs_a_few_times_what_bare_bytes_do(tmp_path: Path) -> None:
    """Both sides of either are in this process, each with a p2pd of its own, whose time does not count. A hop that
    took four times as much, here by sums over its bytes that nobody needs, would be seen."""
    with nothing_left_behind():
        async with real_world(tmp_path) as world:
            server, caller = world.daemons
            tensor, body = torch.zeros(OCTETS // 4), bytes(OCTETS)

            async def echo(_peer: str, message: Message) -> Message:
                return message

            async def leaking(_peer: str, message: Message) -> Message:
                for _ in range(SUMS):
                    hashlib.sha256(body).digest()
                return message

            async def give_back(_peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                try:
                    while True:
                        writer.write(await reader.readexactly(OCTETS))
                        await writer.drain()
                except asyncio.IncompleteReadError:
                    writer.close()

            await server.serve_streams("bare/1", give_back)
            for name, handler in (("echo", echo), ("leak", leaking)):
                world.server.serve(name, lambda *_: None, handler, max_concurrent_per_peer=1)
            reader, writer = await caller.open_stream(world.server.peer_id, "bare/1")

            async def bare() -> None:
                writer.write(body)
                await reader.readexactly(OCTETS)

            least, hop, leak = await cheapest(
                bare, lambda: world.call("echo", tensor), lambda: world.call("leak", tensor)
            )
            writer.close()
    assert hop < MOST_OF_BARE * least < leak
