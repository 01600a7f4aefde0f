"""The pages of a seed: what they say of a swarm, what a scraper reads there, and how a real browser shows it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from noloco_node.aio import Heartbeat
from noloco_node.telemetry.metrics import SEED_TABLE
from noloco_node.telemetry.node_state import MOST_NODES
from noloco_node.telemetry.swarm_metrics import SwarmPages
from noloco_node.telemetry.swarm_state import Middle
from noloco_node.telemetry.web import WebServer
from tests.telemetry.browser import MISSING, browser
from tests.telemetry.made_swarm import node, stage, swarm
from tests.telemetry.test_node_pages import RUDE, ask


@contextlib.asynccontextmanager
async def shown() -> AsyncIterator[tuple[SwarmPages, str]]:
    """A seed's pages on some port."""
    heartbeat = Heartbeat(asyncio.get_running_loop())
    pages = SwarmPages(heartbeat)
    web = WebServer(pages.answers())
    try:
        yield pages, web.start("127.0.0.1", 0)
    finally:
        web.stop()
        heartbeat.stop()


async def scraped(address: str) -> dict[str, dict[tuple[str, ...], float]]:
    """Each metric of the table by its labels' values, as a scraper reads it."""
    _, body = await ask(address, "/metrics")
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            if not sample.name.startswith("process_"):
                labels = tuple(sample.labels[name] for name in SEED_TABLE[sample.name].labels)
                found.setdefault(sample.name, {})[labels] = sample.value
    return found


async def test_a_seed_says_what_it_sees_and_a_scraper_reads_every_metric_of_the_table() -> None:
    """Before it has seen anything, it says that it has not: no swarm of zeros."""
    async with shown() as (pages, address):
        assert (await ask(address, "/healthz")) == (200, b"ok\n")
        told = json.loads((await ask(address, "/api/state"))[1])
        assert (told["state"], told["seed"]["detail"]) == ("no_swarm", "starting: not in the network yet")
        assert (await scraped(address)).keys() == {"noloco_seed_info", "noloco_seed_records"}
        pages.records = lambda: 7
        pages.saw(swarm())
        pages.shown.made = None
        told = json.loads((await ask(address, "/api/state"))[1])
        assert (told["state"], told["missing_stages"], told["nodes_answering"]) == ("missing_stage", [1], 2)
        assert told["departures"] == {"left": 0, "lost": 1}
        assert told["seconds_left"] is None, "it stands still"
        found = await scraped(address)
        assert found.keys() == SEED_TABLE.keys()
        assert found["noloco_swarm_nodes"]["0", "training"] == 2
        assert found["noloco_swarm_unreachable_nodes"] == {("0",): 0, ("1",): 1}
        assert found["noloco_swarm_stage_missing"] == {("0",): 0, ("1",): 1}
        assert found["noloco_swarm_tokens_per_second"] == {(): 640.0}
        assert found["noloco_swarm_departures_total"] == {("left",): 0, ("lost",): 1}
        assert found["noloco_seed_records"] == {(): 7}
        pages.saw(swarm(speed_from="records"))
        assert "noloco_swarm_tokens_per_second" not in await scraped(address), "what nodes say is no measurement"
        assert (await ask(address, "/readyz"))[0] == 404


@pytest.mark.skipif(bool(MISSING), reason=f"no {' and no '.join(MISSING)} on this machine: apt-get install them")
async def test_a_browser_shows_a_swarm_of_rude_strangers_at_any_width(tmp_path: Path) -> None:
    """At 1280 and 390 pixels: nothing beyond the edge, no complaint, a dot for each node, words as words."""
    nodes = tuple(
        node(n, n % 2, version=RUDE, peer_id=f"{n:03}-{RUDE}", answers=n < 20, name=RUDE) for n in range(MOST_NODES)
    )
    view = swarm(nodes=nodes, introduced=400, stages=(stage(10, unreachable=190), stage(10, unreachable=190)))
    async with shown() as (pages, address):
        pages.saw(view)
        pages.saw(replace(view, time=view.time + 60.0, training_loss=Middle(2.0, 2)))

        def look() -> None:
            with browser(tmp_path / "profile") as chrome:
                for width in (1280, 390):
                    chrome.open(f"http://{address}/", width, dark=width == 390)
                    chrome.wait_for(f"document.querySelectorAll('#swarm title').length === {MOST_NODES}")
                    assert chrome.ask("document.documentElement.scrollWidth <= innerWidth")
                    assert chrome.ask("document.scripts.length") == 1
                    words = str(chrome.ask("document.body.textContent"))
                    assert words.count("<script>alert(1)</script>") >= MOST_NODES
                    assert "144 more are known from records" in words
                    assert "vanished from stage 1" in words
                    assert "validation loss, of one node" in words
                    assert "gone fishing …000009" in words
                    assert chrome.ask("document.querySelectorAll('#loss polyline').length") == 1
                    assert chrome.ask("document.querySelectorAll('#stages tr').length") == 3
                    assert chrome.complaints() == []

        await asyncio.to_thread(look)
