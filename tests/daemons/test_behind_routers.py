"""Volunteers behind routers that translate addresses, without a setting of their own."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path

import pytest

from noloco_node.telemetry.events import NodeStarted, OuterStep, Reachability
from tests.chaos.paced_node import OPERATION_SECONDS
from tests.chaos.routers import PORT, SERVERS, houses_behind_routers, inside, why_no_routers
from tests.daemons.test_relayed import MICRO, events_of, node, printed, seed_address
from tests.support import eventually

ENDLESS = ("--set", "run.inner.target_tokens=100_000_000")
pytestmark = [pytest.mark.daemons, pytest.mark.timeout(240)]


@pytest.mark.skipif(bool(why_no_routers()), reason=why_no_routers() or "possible")
async def test_behind_a_router_a_node_learns_its_address_where_the_port_is_forwarded_and_asks_for_a_relay_where_not(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two replicas of stage 0 in two houses have nothing but the seed's address. The first tells others the address
    that the world sees it at, since it was dialled there. The second tells the seed's, which relays. They average."""
    monkeypatch.setenv(OPERATION_SECONDS, "0.05")
    folders = [tmp_path / name for name in ("world", "forwarded", "closed")]
    try:
        async with houses_behind_routers(2) as net, contextlib.AsyncExitStack() as stack:
            await net.forward(0)
            serving = ("seed", str(MICRO), "--port", str(PORT), "--host", SERVERS[0], *ENDLESS, "--relay-for-others")
            await stack.enter_async_context(node(inside(net.world), tmp_path / "seed", *serving))
            joining = ("run", str(MICRO), *ENDLESS, "--initial-peers", await seed_address(tmp_path / "seed"), "--stage")
            for place, folder, stage, port in (
                (net.world, folders[0], "1", 0),
                (net.houses[0], folders[1], "0", PORT),
                (net.houses[1], folders[2], "0", PORT),
            ):
                where = (stage, "--host", "0.0.0.0", "--port", str(port))
                await stack.enter_async_context(node(inside(place), folder, *joining, *where))
            for folder in folders:
                await eventually(partial(events_of, folder, NodeStarted), 120, f"{folder.name} is up")
            await eventually(lambda: all(partners(folder) for folder in folders[1:]), 60, "they have averaged")
            seen_at = net.outside(0)
    except AssertionError:
        print(printed([*folders, tmp_path / "seed"]))
        raise
    reached = [[event.words for event in events_of(folder, Reachability)] for folder in folders]
    assert [words.startswith("reachable directly at 11.") for words in reached[0]] == [True]
    assert reached[1] == [f"reachable directly at {seen_at} port {PORT}"]
    assert f"/ip4/{seen_at}/tcp/{PORT}/p2p/{started(folders[1]).peer_id}" in started(folders[1]).addresses
    assert [words.startswith("reachable by relay 12D3") for words in reached[2]] == [True]
    assert any(f"/ip4/{SERVERS[0]}/tcp/{PORT}/" in text for text in started(folders[2]).addresses if "circuit" in text)
    assert partners(folders[1]) == {started(folders[2]).peer_id}


def partners(folder: Path) -> set[str | None]:
    """The partners with which that node has averaged."""
    return {step.partner for step in events_of(folder, OuterStep) if step.kind == "paired"}


def started(folder: Path) -> NodeStarted:
    """How that node came up."""
    return events_of(folder, NodeStarted)[0]
