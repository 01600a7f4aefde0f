"""The page of a node: its policy and weight, and how a real browser shows it where this machine has one."""

from __future__ import annotations

import asyncio
import hashlib
import re
from base64 import b64encode
from pathlib import Path

import pytest

from noloco_node.telemetry.events import AnyEvent, Doing, Warned
from noloco_node.telemetry.node_state import Surroundings
from noloco_node.telemetry.web import state_page
from tests.telemetry import made_events as made
from tests.telemetry.browser import MISSING, browser
from tests.telemetry.test_node_pages import RUDE, seen, shown

MOST_BYTES = 40_000


def test_the_page_is_one_light_file_that_loads_nothing() -> None:
    """Its script and its style run by their hashes; no address, no markup made of data."""
    page = state_page()
    text = page.body.decode()
    assert len(page.body) < MOST_BYTES
    for kind in ("script", "style"):
        (own,) = re.findall(rf"<{kind}>(.*?)</{kind}>", text, re.DOTALL)
        assert f"'sha256-{b64encode(hashlib.sha256(own.encode()).digest()).decode()}'" in page.policy
    assert "unsafe" not in page.policy
    assert set(re.findall(r"https?://[^\s\"']+", text)) == {"http://www.w3.org/2000/svg"}
    for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(", 'style="'):
        assert sink not in text


def whole_life() -> list[AnyEvent]:
    """A node that trains in a swarm where somebody is rude."""
    doing = Doing.model_validate({"what": "training", "detail": RUDE, "since": 1000.0})
    return [*list(made.node_events("s0-r0"))[:-1], doing, Warned(what="stage_lost", detail=RUDE)]


@pytest.mark.skipif(bool(MISSING), reason=f"no {' and no '.join(MISSING)} on this machine: apt-get install them")
async def test_a_browser_shows_a_node_at_any_width_and_what_peers_say_as_text_only(tmp_path: Path) -> None:
    """At 1280 and 390 pixels: nothing beyond the edge, no complaint, every peer a dot, and words of strangers words."""
    own = made.peer_of("s0-r0")
    peers = tuple(
        seen(peer_id=f"peer-{number:03}-{RUDE}", stage=number % 2, version=RUDE, answers=number % 5 > 0)
        for number in range(30)
    )
    profile = tmp_path / "profile"
    async with shown(tmp_path) as (telemetry, address):
        for event in whole_life():
            telemetry.emit(event)
        with telemetry.showing(lambda: Surroundings(peers, 40, 2, 0)):

            def look() -> None:
                with browser(profile) as chrome:
                    for width in (1280, 390):
                        chrome.open(f"http://{address}/", width, dark=width == 390)
                        chrome.wait_for("document.querySelectorAll('#swarm title').length === 31")
                        assert chrome.ask("document.documentElement.scrollWidth <= innerWidth")
                        assert chrome.ask("document.scripts.length") == 1
                        assert (
                            chrome.ask(
                                "document.querySelectorAll('#loss polyline, #replica_divergence polyline').length"
                            )
                            == 2
                        )
                        assert chrome.ask("document.querySelectorAll('#members tr').length") == 31
                        assert chrome.ask("document.querySelectorAll('section[hidden]').length") == 5
                        words = str(chrome.ask("document.body.textContent"))
                        assert words.count("<script>alert(1)</script>") >= 32
                        assert own[-6:] in words
                        assert "10 more nodes are known" in words
                        assert chrome.complaints() == []

            await asyncio.to_thread(look)
