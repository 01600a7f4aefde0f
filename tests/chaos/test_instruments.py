"""The instruments of the chaos suite measure what they say: the proxy shapes, the figures follow from the events."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from noloco_node.launch.local_swarm import Observer, SwarmNode
from noloco_node.telemetry.events import InnerStep
from tests.chaos.observe import rate, seconds_to_recover
from tests.chaos.proxy import CLEAR, Shape, shaping_proxies
from tests.chaos.slower import Looks, slower
from tests.chaos.vitals import Vitals, growths


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()


async def _round_trip(port: int, size: int) -> float:
    loop = asyncio.get_running_loop()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    began = loop.time()
    payload = random.Random(0).randbytes(size)
    writer.write(payload)
    assert await reader.readexactly(size) == payload, "nothing is lost or changed on the way"
    took = loop.time() - began
    writer.close()
    return took


@pytest.mark.parametrize(
    ("shape", "size", "at_least"),
    [
        (Shape(delay=0.1), 100, 0.2),
        (Shape(bits_per_second=1e6), 50_000, 0.4),
        (Shape(delay=0.05, loss=0.9), 20_000, 0.4),
    ],
    ids=["delay", "bandwidth", "loss"],
)
async def test_a_link_is_as_slow_as_its_shape(shape: Shape, size: int, at_least: float) -> None:
    """It is as fast as the machine once it is clear."""
    server = await asyncio.start_server(_echo, "127.0.0.1", 0)
    target = server.sockets[0].getsockname()[1]
    async with asyncio.timeout(60), shaping_proxies([target], random.Random(1)) as [proxy]:
        clear = await _round_trip(proxy.port, size)
        assert clear < at_least
        proxy.shape = shape
        assert await _round_trip(proxy.port, size) >= at_least - 0.01  # a loop's clock counts whole milliseconds
        assert proxy.delayed_pieces > 0
        proxy.shape = CLEAR
        assert await _round_trip(proxy.port, size) < at_least
    server.close()


def _node(*tokens_at: tuple[float, int]) -> SwarmNode:
    node = SwarmNode("s0-n0", 0, Path("nowhere"), Observer())
    node.events += [
        InnerStep(
            time=time, step=1, clock=0, tokens=tokens, loss=1, learning_rate=1, gradient_norm=1, skipped=False,
            live_replicas=1,
        )
        for time, tokens in tokens_at
    ]  # fmt: skip
    return node


def test_throughput_and_recovery_follow_from_the_events() -> None:
    """A hundred tokens a second, nothing for four seconds, then a hundred again."""
    node = _node(*((float(second), 100) for second in range(20) if not 10 <= second < 14))
    assert rate([node], 0, 10) == 100
    assert seconds_to_recover([node], 10.0, 20.0, wanted=90) == pytest.approx(3.25)
    assert seconds_to_recover([node], 10.0, 16.0, wanted=90) is None


def test_what_creeps_is_not_flat() -> None:
    """One descriptor a look is a leak; a fixed number is none, and what warms up at first is forgiven."""
    steady = [Vitals(time, 100 + 50 * (time > 2), 40, 10, 30, 50, 20) for time in range(50)]
    assert all(growth.flat for growth in growths(steady))
    leaking = [Vitals(time, 100, 40 + time, 10, 30, 50, 20) for time in range(50)]
    assert [growth.name for growth in growths(leaking) if not growth.flat] == ["descriptors"]


def _drawn(seed: int, times: float) -> Looks:
    """Eight nodes, thirty looks in either span, after it so many times as long; each node and look has its own luck."""
    rng = random.Random(seed)
    own = [0.005 * rng.lognormvariate(0.0, 0.1) for _ in range(8)]
    before, after = (
        [[seconds * more * rng.lognormvariate(0.0, 0.5) for _ in range(30)] for seconds in own] for more in (1.0, times)
    )
    return Looks(before, after)


@pytest.mark.parametrize(("attacked", "clean", "found"), [(1.0, 1.0, False), (1.6, 1.0, True), (1.6, 1.6, False)])
def test_who_looks_longer_is_told_from_chance(attacked: float, clean: float, found: bool) -> None:
    """It is told from what befell the machine, too; by the mere ratio some of ten would look slower for nothing."""
    answers = [slower(_drawn(2 * seed, attacked), _drawn(2 * seed + 1, clean)) for seed in range(10)]
    assert sum(least > 1.05 for _, least in answers) == (10 if found else 0)
    if not found and clean == 1.0:
        assert any(times > 1.05 for times, _ in answers)
