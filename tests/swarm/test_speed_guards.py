"""For how long an exchange holds the device, counted exactly: leaks by small steps are seen here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.inside import thread_of
from tests.swarm.test_exchange import both_committed, two_replicas
from tests.test_cpu_per_token import Counted
from tests.worlds import peer_name

MOST_CALLS = 2
"""The device's thread has at most so many calls for an exchange, of each side: the snapshot and the commit."""
MOST_PASSES = 15.5
"""Over a stage's weights in fp32, of operations that read or write them or show them in another form: 15.0 when this
was written. One more copy makes it 17."""
ROUNDS, CALLS, OCTETS = 9, 20, 64 << 10


async def test_an_exchange_holds_the_device_for_two_short_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in calls and in bytes, of both sides together. One more copy of the weights would be seen."""
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
    assert calls <= 2 * MOST_CALLS
    assert count.bytes <= 2 * 4 * size * MOST_PASSES
