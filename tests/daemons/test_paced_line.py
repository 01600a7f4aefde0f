"""What a node's bound on its line keeps, as the line itself counts it: real p2pds in two network namespaces."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import time
from asyncio.subprocess import PIPE
from functools import partial
from pathlib import Path

import pytest

from noloco_node.telemetry.events import Account, Doing, InnerStep, NodeStarted
from tests.chaos.namespaces import Halves, ip, two_halves, why_impossible
from tests.daemons.test_relayed import MICRO, events_of, inside, node
from tests.support import eventually, patience

pytestmark = [pytest.mark.daemons, pytest.mark.timeout(900)]

MBIT, NARROW = 8.0, 0.5
ENDLESS = ("--set", "run.inner.target_tokens=100_000_000")
BEGINS, SHORT, LONG = 2.0, 10.0, 600.0
"""The line is counted so long after the taker has begun, and for so many seconds."""
FREE, QUIET = 2.0, 0.05
"""Seconds after which a paused node has left its line, and Mbit/s of what it still says to be found again."""
BURST = 8e-6 * (1 << 18)
"""Megabits that come on top where the count ends while the machine's buffer of one connection fills at once."""


async def peer(net: Halves, half: int, role: str, *arguments: str) -> asyncio.subprocess.Process:
    """`paced_peer` in one half of the network."""
    return await asyncio.create_subprocess_exec(
        *(*net.place(half).prefix, sys.executable, "-m", "tests.daemons.paced_peer", role, net.address(half)),
        *arguments,
        stdin=PIPE,
        stdout=PIPE,
    )


async def carried(net: Halves, half: int, what: str) -> tuple[float, int]:
    """The time in seconds, and the bytes that the interface of a half has carried until then (`tx` or `rx`)."""
    files = ("/proc/uptime", f"/sys/class/net/eth0/statistics/{what}_bytes")
    looking = ("ip", "netns", "exec", net.names[half], "cat", *files)
    process = await asyncio.create_subprocess_exec(*looking, stdout=PIPE)
    told, _ = await process.communicate()
    now, _, count = told.split()
    return float(now), int(count)


async def rate_of(net: Halves, half: int, what: str, seconds: float = SHORT) -> float:
    """What the interface of a half carries, in Mbit/s, over so many seconds."""
    began, before = await carried(net, half, what)
    await asyncio.sleep(seconds)
    ended, after = await carried(net, half, what)
    return 8e-6 * (after - before) / (ended - began)


@pytest.mark.skipif(bool(why_impossible()), reason=why_impossible() or "possible")
@pytest.mark.parametrize("lasts", [SHORT, pytest.param(LONG, marks=pytest.mark.long)])
@pytest.mark.parametrize(("giver", "taker", "what"), [((MBIT, 0.0), (0.0, 0.0), "tx"), ((0.0, 0.0), (0.0, MBIT), "rx")])
async def test_a_line_carries_what_it_may_and_small_messages_do_not_wait(
    giver: tuple[float, float], taker: tuple[float, float], what: str, lasts: float
) -> None:
    """Four streams take all they get, through the bound of the giver or of the taker. By the interface's own count the
    rate is at most 5 % above the bound, and near it. A small answer does not wait for what the four have under way."""
    half = 0 if what == "tx" else 1
    async with two_halves() as net:
        for name in net.names:  # each packet has its headers, as on a cable
            await ip("-n", name, "link", "set", "eth0", "gso_max_segs", "1")
        giving = await peer(net, 0, "give", *map(str, giver))
        assert giving.stdout is not None
        try:
            address = (await giving.stdout.readline()).decode().strip()
            taking = await peer(net, 1, "take", *map(str, taker), str(BEGINS + lasts + 1.0), address)
            assert taking.stdout is not None
            await taking.stdout.readline()
            await asyncio.sleep(BEGINS)
            rate = await rate_of(net, half, what, lasts)
            told, _ = await asyncio.wait_for(taking.communicate(), 120)
        finally:
            giving.terminate()
            await giving.communicate()
    waits = json.loads(told)["waits"]
    print(
        f"{rate:.2f} of {MBIT:g} Mbit/s; small answers: median {waits[len(waits) // 2]:.3f} s, worst {waits[-1]:.3f} s"
    )
    # A busy machine does not fill the line; in virtual time it is filled.
    assert 0.7 * MBIT <= rate <= 1.05 * MBIT + BURST / lasts
    assert waits[len(waits) // 2] < 0.6  # else one of them, 0.26 s, and those that were there before it


@pytest.mark.skipif(bool(why_impossible()), reason=why_impossible() or "possible")
async def test_a_daemon_with_a_bound_trains_within_it_and_a_paused_one_frees_its_line(
    tmp_path: Path, temporary: Path
) -> None:
    """Its microbatches alone would take many times as much. The bound holds by the interface's count, and the account
    closes. Two seconds after it is told to pause, the line of a node whose peer has work for it is quiet both ways."""
    folders = tmp_path / "origin", tmp_path / "tail"
    async with two_halves() as net, contextlib.AsyncExitStack() as stack:
        place = [inside(name) for name in net.names]
        for name in net.names:
            await ip("-n", name, "link", "set", "eth0", "gso_max_segs", "1")
        where = [("--host", net.address(half), "--stage", str(half), "--set", "node.map_port=false") for half in (0, 1)]
        rests = await stack.enter_async_context(node(place[1], folders[1], "run", str(MICRO), *ENDLESS, *where[1]))
        up = await eventually(partial(events_of, folders[1], NodeStarted), 120, "the tail is up")
        joining = ("run", str(MICRO), *ENDLESS, *where[0], "--initial-peers", up[0].addresses[0])
        bound = ("--set", f"node.uplink_mbit={NARROW}")
        await stack.enter_async_context(node(place[0], folders[0], *joining, *bound))
        await eventually(lambda: len(events_of(folders[0], InnerStep)) > 3, 120, "it trains")
        rate = await rate_of(net, 0, "tx")
        rests.send_signal(signal.SIGUSR1)
        told, free = time.time(), patience(FREE)
        await asyncio.sleep(free)
        quiet = await asyncio.gather(*(rate_of(net, 1, what) for what in ("tx", "rx")))
        said = [event for event in events_of(folders[1], Doing) if event.what == "paused"]
    print(f"{rate:.3f} of {NARROW} Mbit/s; paused after {said[0].time - told:.2f} s, then {quiet} Mbit/s")
    assert said[0].time <= told + free
    assert max(quiet) < QUIET
    assert 0.5 * NARROW < rate <= 1.1 * NARROW  # what p2pd says by itself comes on top, and counts on so narrow a line
    account = events_of(folders[0], Account)[-1]
    assert (account.dropped, account.drawn) == (0, account.trained + account.held_at_end)
    assert {"microbatches", "directory"} <= account.bytes_sent.keys()
