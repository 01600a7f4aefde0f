"""Nodes that cannot dial each other train with each other through a seed that relays."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest

from noloco_node.config.load import load_config
from noloco_node.errors import ExitCode
from noloco_node.telemetry.events import (
    Account,
    AnyEvent,
    NodeStarted,
    NodeStopped,
    OuterStep,
    StateDownload,
    StateSourceFailed,
    read_events,
)
from tests.chaos.namespaces import ip, why_impossible
from tests.chaos.paced_node import OPERATION_SECONDS
from tests.chaos.swarm import program
from tests.support import eventually, printed_file

pytestmark = [pytest.mark.daemons, pytest.mark.timeout(420)]

MICRO = Path(__file__).parent.parent / "configs" / "micro.yaml"
E = TypeVar("E", bound=AnyEvent)

RELAY = "10.78.0.1"
SHORT = ("--set", "run.inner.target_tokens=24_576")
"""Four outer steps."""
PORT = 31337


def inside(name: str) -> tuple[str, ...]:
    """Runs what follows in that network namespace."""
    return ("nsenter", f"--net=/run/netns/{name}")


@contextlib.asynccontextmanager
async def two_houses_and_a_relay() -> AsyncIterator[tuple[str, str, str]]:
    """Namespaces: two houses, each with a cable to the relay's address and a route to nothing else, and the relay."""
    houses, middle = [f"nlr{os.getpid()}{letter}" for letter in "ab"], f"nlr{os.getpid()}m"
    try:
        await ip("netns", "add", middle)
        await ip("-n", middle, "addr", "add", f"{RELAY}/32", "dev", "lo")
        await ip("-n", middle, "link", "set", "lo", "up")
        for number, house in enumerate(houses, 1):
            await ip("netns", "add", house)
            await ip("-n", house, "link", "set", "lo", "up")
            cable = ("type", "veth", "peer", "name", "eth0", "netns", house)
            await ip("-n", middle, "link", "add", f"cable{number}", *cable)
            await ip("-n", middle, "addr", "add", f"10.78.{number}.1/24", "dev", f"cable{number}")
            await ip("-n", middle, "link", "set", f"cable{number}", "up")
            await ip("-n", house, "addr", "add", f"10.78.{number}.2/24", "dev", "eth0")
            await ip("-n", house, "link", "set", "eth0", "up")
            await ip("-n", house, "route", "add", RELAY, "via", f"10.78.{number}.1")
        yield houses[0], houses[1], middle
    finally:
        for name in (*houses, middle):
            with contextlib.suppress(OSError):
                await ip("netns", "del", name)


async def answer_of(house: str, host: str, port: int) -> int:
    """What the kernel says to a connection from there: an errno, 0 where it is taken."""
    code = f"import socket; s = socket.socket(); s.settimeout(3); exit(s.connect_ex(('{host}', {port})))"
    asked = await asyncio.create_subprocess_exec(*inside(house), sys.executable, "-c", code)
    return await asked.wait()


@contextlib.asynccontextmanager
async def node(place: Sequence[str], folder: Path, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """`noloco-node`, started there; ended with the block."""
    with printed_file(folder) as printed:
        process = await asyncio.create_subprocess_exec(
            *(*place, *program(), *arguments, "--run-folder", str(folder)), stdout=printed, stderr=printed
        )
    try:
        yield process
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, TimeoutError):
                process.send_signal(number)
                await asyncio.wait_for(process.wait(), 60)


def events_of(folder: Path, kind: type[E]) -> list[E]:
    """A node's events of this kind so far."""
    path = folder / "events.jsonl"
    return [event for event in read_events(path) if isinstance(event, kind)] if path.exists() else []


async def seed_address(folder: Path) -> str:
    """What the seed prints for others."""
    said = folder / "printed"
    words = await eventually(lambda: said.read_text().partition(" is up\n")[2], 120, "the seed is up")
    return next(word for word in words.split() if "/p2p/" in word)


def printed(folders: Sequence[Path]) -> str:
    """What all of them said last, for the case that the test fails."""
    return "\n".join(f"--- {folder.name}\n{(folder / 'printed').read_text()[-2000:]}" for folder in folders)


@pytest.mark.skipif(bool(why_impossible()), reason=why_impossible() or "possible")
async def test_nodes_that_cannot_dial_each_other_train_and_average_through_a_relay(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two replicas of stage 0 are in two networks without a route between them, and stage 1 in one of these. Every
    microbatch of the first, and every average, crosses the relay. All reach the target."""
    monkeypatch.setenv(OPERATION_SECONDS, "0.02")  # on a quick machine, too, the run outlasts what they ask each other
    folders = [tmp_path / name for name in ("first", "second", "last")]
    try:
        async with two_houses_and_a_relay() as (one, other, middle), contextlib.AsyncExitStack() as stack:
            serving = ("seed", str(MICRO), *SHORT, "--port", str(PORT), "--announce", RELAY, "--relay-for-others")
            seed = await stack.enter_async_context(
                node(inside(middle), tmp_path / "seed", *serving, "--host", "0.0.0.0")
            )
            address = await seed_address(tmp_path / "seed")
            joining = ("run", str(MICRO), *SHORT, "--initial-peers", address, "--relay", "--host", "0.0.0.0", "--stage")
            assert await answer_of(one, RELAY, PORT) == 0
            assert await answer_of(one, "10.78.2.2", PORT) == errno.ENETUNREACH
            assert await answer_of(other, "10.78.1.2", PORT) == errno.ENETUNREACH
            nodes: list[asyncio.subprocess.Process] = []
            started: list[NodeStarted] = []
            for house, folder, stage in zip((one, other, other), folders, "001", strict=True):
                nodes.append(await stack.enter_async_context(node(inside(house), folder, *joining, stage)))
                started += await eventually(partial(events_of, folder, NodeStarted), 120, f"{folder.name} is up")
            assert [await asyncio.wait_for(each.wait(), 240) for each in nodes] == [ExitCode.OK] * 3
            assert seed.returncode is None
    except AssertionError:
        print(printed([*folders, tmp_path / "seed"]))
        raise
    assert all("/p2p-circuit/p2p/" in address for event in started for address in event.addresses)
    events = [read_events(folder / "events.jsonl") for folder in folders]
    for each in events:
        assert next(e for e in each if isinstance(e, NodeStopped)).reason == "target_reached"
    paired = {e.partner for each in events for e in each if isinstance(e, OuterStep) and e.partner}
    assert paired == {started[0].peer_id, started[1].peer_id}, "the replicas of stage 0 have averaged"
    assert max(e.nodes_per_stage for e in events[0] if isinstance(e, Account)) == [2, 1]


async def test_a_hidden_node_that_comes_late_copies_the_state_over_a_connection_of_its_own(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It tells others nothing but its address at the relay, and can dial them. No state crosses a relay, so it has made
    a direct connection to the donor, whichever dialled first. Then it averages with it."""
    folders = [tmp_path / name for name in ("veteran", "last", "hidden")]
    monkeypatch.setenv(OPERATION_SECONDS, "0.08")  # a swarm without end leaves the others of this machine something
    endless = ("--set", "run.inner.target_tokens=100_000_000")
    try:
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(
                node((), tmp_path / "seed", "seed", str(MICRO), *endless, "--relay-for-others")
            )
            joining = ("run", str(MICRO), *endless, "--initial-peers", await seed_address(tmp_path / "seed"), "--stage")
            for folder, stage in zip(folders, "01", strict=False):
                await stack.enter_async_context(node((), folder, *joining, stage))

            def has_told_of_it() -> bool:
                steps = events_of(folders[0], OuterStep)
                return bool(steps) and steps[-1].time - steps[0].time > load_config(MICRO).run.limits.record_seconds

            await eventually(has_told_of_it, 120, "the run is under way, and the veteran's record says so")
            await stack.enter_async_context(node((), folders[2], *joining, "0", "--relay"))
            veteran = events_of(folders[0], NodeStarted)[0].peer_id
            await eventually(
                lambda: any(step.partner == veteran for step in events_of(folders[2], OuterStep)), 120, "an average"
            )
    except AssertionError:
        print(printed([*folders, tmp_path / "seed"]))
        raise
    [own] = events_of(folders[2], NodeStarted)
    assert all("/p2p-circuit/p2p/" in address for address in own.addresses)
    last = events_of(folders[2], StateDownload)[-1]
    assert (last.source, last.received) == (veteran, last.total)
    assert not events_of(folders[2], StateSourceFailed)
