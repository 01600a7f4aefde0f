"""A clock that becomes wrong while the node runs: the user is told, and told when it is right again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from noloco_node import ambient
from noloco_node.aio import cancel_and_wait
from noloco_node.bootstrap import hello as hello_module
from noloco_node.bootstrap.hello import Hello, serve_hello
from noloco_node.diagnostics.status import status_lines
from noloco_node.identity.peer_id import PeerId
from noloco_node.node import checks
from noloco_node.node.checks import ClockWatch
from noloco_node.storage.run_folder import RunFolder
from noloco_node.telemetry.events import EventFile, Warned
from noloco_node.transport.memory import MemoryNetwork, MemoryTransport
from tests.support import eventually
from tests.telemetry import made_events
from tests.worlds import micro_spec

OWN, OTHERS = PeerId("whose-clock-is-set"), [PeerId(f"another-node-{number}") for number in range(3)]


@asynccontextmanager
async def watched(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[ClockWatch, list[float], list[Warned]]]:
    """A watch among three that answer; by how much its machine's clock is ahead; and what it has said."""
    ahead, said, network = [0.0], list[Warned](), MemoryNetwork()
    asking, *others = (MemoryTransport(network, peer) for peer in (OWN, *OTHERS))
    real = ambient.wall
    monkeypatch.setattr(ambient, "wall", lambda: real() + ahead[0])

    def right(**what: object) -> Hello:
        return Hello.model_validate({**what, "time": real()})

    monkeypatch.setattr(hello_module, "Hello", right)
    async with contextlib.AsyncExitStack() as stack:
        for transport in (asking, *others):
            stack.push_async_callback(transport.close)
        for transport in others:
            serve_hello(transport, micro_spec(), lambda: 0)
            asking.peer_stats.answered(transport.peer_id)
        yield ClockWatch(asking, said.append), ahead, said


async def test_a_clock_that_is_set_wrong_is_said_once_and_once_that_it_is_right_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with watched(monkeypatch) as (watch, ahead, said):
        await watch.look()
        ahead[0] = 1.0
        await watch.look()
        assert not said
        for ahead[0] in (-3600.0, 3600.0):
            await watch.look()
        assert [warning.what for warning in said] == ["clock_wrong"]
        assert "3600.00 s behind 3 peers" in said[0].detail
        ahead[0] = 0.0
        await watch.look()
        await watch.look()
        assert caplog.text.count("right again") == 1
        ahead[0] = 60.0
        await watch.look()
        assert "60.00 s ahead of 3 peers" in said[1].detail


async def test_a_step_of_the_clock_is_looked_into_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it runs evenly nobody is asked for ten minutes."""
    monkeypatch.setattr(checks, "LOOK_SECONDS", 0.01)
    async with watched(monkeypatch) as (watch, ahead, said):
        keeping = asyncio.create_task(watch.keep())
        await asyncio.sleep(0.05)
        ahead[0] = 3600.0
        await eventually(lambda: bool(said), what="it says so")
        await cancel_and_wait((keeping,))


async def test_where_nobody_answers_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    async with watched(monkeypatch) as (_, ahead, said):
        ahead[0] = 3600.0
        alone = MemoryTransport(MemoryNetwork(), OWN)
        await ClockWatch(alone, said.append).look()
        await alone.close()
        assert not said


def test_it_stands_in_the_status(tmp_path: Path) -> None:
    with RunFolder(tmp_path).lock():
        diary = EventFile(tmp_path / "events.jsonl")
        for event in (made_events.started("s0-r0"), Warned(time=1060.0, what="clock_wrong", detail="it is wrong")):
            diary.write(event)
        diary.close()
        assert "  clock             60 s ago: it is wrong" in status_lines(tmp_path, 1120.0)
