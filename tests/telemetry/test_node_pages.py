"""What a node shows of itself, over real sockets: liveness, readiness and its state, to honest and to rude clients."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import itertools
import json
import logging
import threading
import time
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from noloco_node import ambient
from noloco_node.aio import Heartbeat
from noloco_node.config.node_settings import NodeSettings
from noloco_node.errors import ExitCode, UserError
from noloco_node.simulator.loop import in_virtual_time
from noloco_node.telemetry.events import Doing, Warned
from noloco_node.telemetry.logging import LogTail
from noloco_node.telemetry.metrics import Metrics
from noloco_node.telemetry.node_pages import STUCK_SECONDS, Curve, NodePages, early_pages
from noloco_node.telemetry.node_state import LETTERS, MOST_NODES, POINTS, NodeSeen, NodeView, Surroundings
from noloco_node.telemetry.of_node import Telemetry, telemetry_of
from noloco_node.telemetry.web import WebServer
from tests.telemetry import made_events as made

RUDE = "<script>alert(1)</script>\x1b[2J\u202e\r\nX: y"


def seen(**changes: Any) -> NodeSeen:
    """A peer of stage 1."""
    values: dict[str, Any] = {
        "peer_id": "12D3KooWmade-up-s1-r0",
        "stage": 1,
        "state": "training",
        "version": "0.1.0",
        "clock": 900.0,
        "lag": 100.0,
        "tokens_per_second": 512.0,
        "capacity": 600.0,
        "outer_steps_taken": 3,
        "newcomer": False,
        "answers": True,
        "together": 4096,
        "under_way": 2,
        "load": 1,
        "left_alone": "",
    }
    return NodeSeen(**(values | changes))


def doing(what: str, detail: str = "training") -> Doing:
    """Since a while."""
    return Doing.model_validate({"what": what, "detail": detail, "since": 1000.0})


def get(address: str, path: str, headers: Mapping[str, str] | None = None) -> tuple[int, bytes, Mapping[str, str]]:
    """Status, body and headers."""
    connection = http.client.HTTPConnection(address, timeout=10)
    with contextlib.closing(connection):
        connection.request("GET", path, headers=dict(headers or {}))
        answer = connection.getresponse()
        return answer.status, answer.read(), {name.lower(): value for name, value in answer.getheaders()}


async def ask(address: str, path: str) -> tuple[int, bytes]:
    """As a client in another process would: the loop goes on meanwhile."""
    status, body, _ = await asyncio.to_thread(get, address, path)
    return status, body


@contextlib.asynccontextmanager
async def shown(tmp_path: Path, web: WebServer | None = None) -> AsyncIterator[tuple[Telemetry, str]]:
    """A node's telemetry with its pages on some port, or on `web`; the log is as before afterwards."""
    root = logging.getLogger()
    ours, handlers, level = logging.getLogger("noloco_node"), list(root.handlers), root.level
    before = ours.level
    try:
        with telemetry_of(tmp_path / "events.jsonl", NodeSettings(metrics_port=0), web) as telemetry:
            assert telemetry.address is not None
            yield telemetry, telemetry.address
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        ours.setLevel(before)


async def test_readiness_follows_a_node_from_its_start_to_its_end(tmp_path: Path) -> None:
    """Before it has a stage, while it waits and while it leaves: 503 with the reason in a line. It is alive all the
    time."""
    async with shown(tmp_path) as (telemetry, address):

        async def state() -> tuple[int, str, str]:
            assert await ask(address, "/healthz") == (200, b"ok\n")
            status, line = await ask(address, "/readyz")
            telemetry.pages.shown.made = None
            return status, line.decode().strip(), json.loads((await ask(address, "/api/state"))[1])["state"]

        assert await state() == (503, "starting: not in the swarm yet", "starting")
        telemetry.emit(doing("joining", "looking for the nodes of the run"))
        assert await state() == (503, "looking for the nodes of the run", "joining")
        telemetry.emit(made.started("s0-r0"))
        telemetry.emit(doing("training"))
        assert await state() == (200, "training", "training")
        telemetry.emit(doing("waiting_for_peers", "a replica of stage 1:\n none"))
        assert await state() == (503, "waiting for a replica of stage 1: none", "waiting_for_peers")
        telemetry.emit(doing("training"))
        telemetry.ends()
        assert await state() == (503, "leaving: finishing what is under way, and saving", "ending")
        telemetry.emit(made.stopped("s0-r0"))
        assert await state() == (503, "ended: target reached", "ended")


async def test_who_asks_while_libraries_are_loaded_or_after_the_last_word_is_answered(tmp_path: Path) -> None:
    """On one port from the command's first second to its last; the page of a browser has all that it reads."""
    with early_pages(NodeSettings(metrics_port=0)) as web:
        assert web is not None
        assert web.address is not None
        address = web.address
        assert await ask(address, "/healthz") == (200, b"ok\n")
        assert await ask(address, "/readyz") == (503, b"starting: not in the swarm yet\n")
        assert await ask(address, "/metrics") == (200, b"# TYPE noloco_up gauge\nnoloco_up 0.0\n")
        early = json.loads((await ask(address, "/api/state"))[1])
        async with shown(tmp_path, web) as (telemetry, same):
            assert same == address
            assert json.loads((await ask(address, "/api/state"))[1]).keys() == early.keys()
            telemetry.emit(made.stopped("s0-r0"))
        assert await ask(address, "/readyz") == (503, b"ended: target reached\n")
        assert (await ask(address, "/metrics"))[0] == 200
    with pytest.raises(OSError, match="refused"):
        get(address, "/healthz")
    with early_pages(NodeSettings()) as web:
        assert web is None


async def test_a_node_whose_loop_hangs_is_told_apart_from_one_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pages are still answered, each at once; the peers that it saw last stand."""
    heartbeat = Heartbeat(asyncio.get_running_loop())
    view = NodeView()
    pages = NodePages(view, LogTail(), Metrics().page, heartbeat)
    pages.look = lambda: Surroundings((seen(),), 1, 0, 0)
    for event in (made.started("s0-r0"), doing("training")):
        view.observe(event)
    answers = pages.answers()
    first = await asyncio.to_thread(answers["/api/state"], {})
    assert len(json.loads(first.body)["peers"]) == 1
    later = time.monotonic() + STUCK_SECONDS
    monkeypatch.setattr(ambient, "monotonic", lambda: later)
    pages.shown.made, began = None, time.monotonic()
    hung = [answers[path]({}) for path in ("/healthz", "/readyz")]  # on the loop's own thread: it cannot come round
    assert [page.status for page in hung] == [503, 503]
    assert all(page.body.startswith(b"the event loop has not come round for 10 s") for page in hung)
    assert len(json.loads(answers["/api/state"]({}).body)["peers"]) == 1
    assert time.monotonic() - began < 8.0
    heartbeat.stop()


def test_a_heart_beats_until_it_is_stopped() -> None:
    """Once a second, and each beat is counted but the first, which is its making."""

    async def work() -> tuple[list[int], float, float]:
        beats: list[int] = []
        heartbeat = Heartbeat(asyncio.get_running_loop(), beats.append)
        await asyncio.sleep(3.5)
        beating = heartbeat.age
        heartbeat.stop()
        await asyncio.sleep(60.0)
        return beats, beating, heartbeat.age

    assert in_virtual_time(work) == ([1, 2, 3], pytest.approx(0.5), pytest.approx(60.5))


async def test_the_state_says_what_the_events_say(tmp_path: Path) -> None:
    """A whole run is there: position, losses, curves, exchanges, books, faults, the log's tail, and the peers that the
    node sees."""
    async with shown(tmp_path) as (telemetry, address):
        for event in made.node_events("s0-r0"):
            telemetry.emit(event)
        telemetry.emit(made.checkpoint(error="disk full"))
        telemetry.emit(made.outer_step(7, "s0-r1", kind="aborted", reason="busy"))
        telemetry.emit(made.inner_step(61, loss=float("nan"), skipped=True))
        with telemetry.showing(lambda: Surroundings((seen(),), 5, in_hand=2, queued=1)):
            status, body, headers = await asyncio.to_thread(get, address, "/api/state")
    said = json.loads(body)
    assert (status, headers["content-type"]) == (200, "application/json")
    assert (said["stage"], said["stages"], said["run"]["name"], said["parameters"]) == (0, 2, "made-up", 1_600_000)
    assert (said["trained_tokens"], said["target"]) == (61 * 2.0 * made.TOKENS, made.STEPS * 2 * made.TOKENS)
    assert len(said["curves"]["tokens_per_second"]) == 1
    assert said["curves"]["tokens_per_second"][0][1] == pytest.approx(made.TOKENS)
    assert len(said["curves"]["loss"]) == 60, "NaN is no JSON"
    assert said["validation_loss"] == pytest.approx(made.loss_at(60 * 1024) + 0.1)
    assert said["replica_divergence"] == made.SPREADS[-1]
    assert said["outer_steps"] == {"paired": 6, "no_partner": 0, "caught_up": 0, "aborted": 1}
    assert [step["outer_steps_taken"] for step in said["exchanges"]] == [1, 2, 3, 4, 5, 6]
    assert [value for _, value in said["curves"]["replica_divergence"]] == list(made.SPREADS)
    assert said["contribution"]["trained"] == 58
    faults = said["faults"]
    assert (faults["failed_checkpoints"], faults["skipped_steps"]) == (1, 1)
    assert (faults["requeued"], faults["refused"]) == (3, {"busy": 5})
    assert (said["introduced"], said["in_hand"], said["queued"]) == (5, 2, 1)
    assert said["peers"] == [seen().model_dump(by_alias=True)]
    assert any("inner step 61 skipped" in line["text"] for line in said["log"])


async def test_in_a_pause_a_node_shows_no_peers_and_speeds_of_before(tmp_path: Path) -> None:
    """Whoever looks would take them for what is there now."""
    async with shown(tmp_path) as (telemetry, address):
        for event in list(made.node_events("s0-r0"))[:-1]:
            telemetry.emit(event)
        with telemetry.showing(lambda: Surroundings((seen(),), 5, in_hand=2, queued=1)):
            before = json.loads((await ask(address, "/api/state"))[1])
        telemetry.pages.shown.made = None
        telemetry.emit(doing("paused", "paused: for this test"))
        rests = json.loads((await ask(address, "/api/state"))[1])
    assert (len(before["peers"]), before["tokens_per_second"] is None) == (1, False)
    assert (rests["peers"], rests["introduced"], rests["in_hand"]) == ([], 0, 0)
    assert rests["tokens_per_second"] is rests["swarm_tokens_per_second"] is rests["seconds_left"] is None


async def test_the_log_of_the_page_holds_whole_addresses_and_ends_behind_a_word(tmp_path: Path) -> None:
    """A node that is up names the addresses by which others join; half of one is worth nothing."""
    address = "/ip4/203.0.113.7/tcp/31337/p2p/12D3KooWNYN6iTq3GqAsa5R2DcGAUMwETgmE5QAA11nEACSHCMVP"
    async with shown(tmp_path) as (telemetry, at):
        telemetry.emit(made.started("s0-r0").model_copy(update={"addresses": [address] * 6}))
        logging.getLogger("noloco_node.test").warning("%s", "word " * 1000)
        said = json.loads((await ask(at, "/api/state"))[1])
    texts = [line["text"] for line in said["log"]]
    assert any(text.count(f"noloco-node join {address}") == 6 for text in texts)
    (long,) = (text for text in texts if text.startswith("word word"))
    assert (len(long) <= LETTERS, long.endswith("word…")) == (True, True)


async def test_what_peers_and_logs_say_reaches_a_browser_as_data_only(tmp_path: Path) -> None:
    """JSON that no browser takes for a page, escaped; a status line holds no line of its own."""
    async with shown(tmp_path) as (telemetry, address):
        telemetry.emit(Warned(what="stage_lost", detail=RUDE * 1000))
        telemetry.emit(doing("waiting_for_work", RUDE))
        with telemetry.showing(lambda: Surroundings((seen(version=RUDE),), 1, 0, 0)):
            status, body, headers = await asyncio.to_thread(get, address, "/api/state")
        line = await ask(address, "/readyz")
    assert (status, line[0]) == (200, 503)
    assert body.isascii()
    assert len(body) < 30_000
    assert json.loads(body)["peers"][0]["version"] == RUDE
    assert headers["x-content-type-options"] == "nosniff"
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "x" not in headers
    assert line[1].count(b"\n") == 1


async def test_a_hundred_clients_at_once_are_all_answered_and_cost_the_node_one_look(tmp_path: Path) -> None:
    """The state is made once a second, however many ask."""
    looks: list[float] = []

    def look() -> Surroundings:
        looks.append(time.monotonic())
        return Surroundings(tuple(seen(peer_id=f"peer-{n:04}-{'x' * 40}") for n in range(MOST_NODES)), MOST_NODES, 0, 0)

    async with shown(tmp_path) as (telemetry, address):
        with telemetry.showing(look), ThreadPoolExecutor(100) as clients:
            gate = threading.Barrier(100)

            def client() -> int:
                gate.wait()
                status, body, _ = get(address, "/api/state")
                return status if len(json.loads(body)["peers"]) == MOST_NODES else 0

            loop = asyncio.get_running_loop()
            began = time.monotonic()
            answers = await asyncio.gather(*(loop.run_in_executor(clients, client) for _ in range(100)))
            assert answers == [200] * 100
            assert len(looks) <= 1 + (time.monotonic() - began)


async def test_only_this_machines_names_are_answered_on_loopback(tmp_path: Path) -> None:
    """Otherwise a website could read a visitor's node through a name of its own that leads here."""
    async with shown(tmp_path) as (_, address):
        port = address.rpartition(":")[2]

        async def status(host: str) -> int:
            return (await asyncio.to_thread(get, address, "/api/state", {"Host": host}))[0]

        good = (address, f"localhost:{port}", "localhost", "LOCALHOST.", f"[::1]:{port}")
        assert [await status(host) for host in good] == [200] * 5
        bad = (f"evil.example:{port}", "evil.example", "127.0.0.1.evil.example", "", "localhost@evil.example", "[::2]")
        assert [await status(host) for host in bad] == [421] * 6


def test_who_listens_for_everybody_is_asked_by_any_name() -> None:
    """A container is scraped by its service's name."""
    server = WebServer({"/metrics": Metrics().page})
    address = server.start("0.0.0.0", 0)
    try:
        port = address.rpartition(":")[2]
        assert get(f"127.0.0.1:{port}", "/metrics", {"Host": "node-1.swarm:9100"})[0] == 200
    finally:
        server.stop()


def test_an_address_without_a_port_is_refused_by_name() -> None:
    """It would show nothing."""
    with pytest.raises(ValueError, match=r"node\.metrics_host is '0\.0\.0\.0', but node\.metrics_port is not set"):
        NodeSettings(metrics_host="0.0.0.0")
    assert NodeSettings(metrics_host="0.0.0.0", metrics_port=0).metrics_port == 0


async def test_pages_that_cannot_be_served_leave_nothing_behind(tmp_path: Path) -> None:
    """No thread, no heartbeat, and the log as it was; the error names setting, value and remedy."""
    before, handlers = set(threading.enumerate()), list(logging.getLogger().handlers)
    try:
        with (
            pytest.raises(UserError, match=r"node\.metrics_host: cannot listen on '192\.0\.2\.1'") as caught,
            telemetry_of(tmp_path / "events.jsonl", NodeSettings(metrics_host="192.0.2.1", metrics_port=0)),
        ):
            pytest.fail("it was served")
    finally:
        logging.getLogger().handlers[:] = handlers
    assert caught.value.exit_code is ExitCode.CONFIG
    assert "--metrics-host" in caught.value.remedy
    assert set(threading.enumerate()) == before


def test_a_curve_covers_a_whole_life_in_few_points() -> None:
    """A hundred thousand values: evenly spread, first and last among them, what is not finite left out."""
    curve = Curve()
    assert curve.points() == []
    for second in range(100_000):
        curve.add(float(second), float(second))
    curve.add(5e5, float("inf"))
    points = curve.points()
    assert POINTS / 4 < len(points) <= POINTS + 1
    assert (points[0], points[-1]) == ((0.0, 0.0), (99_999.0, 99_999.0))
    apart = [b[0] - a[0] for a, b in itertools.pairwise(points[:-1])]
    assert max(apart) <= 2.5 * min(apart)


def test_a_curve_goes_on_after_a_clock_was_set_back() -> None:
    """It stood still for as long as the clock was set back by."""
    curve = Curve()
    for second in range(100_000):
        curve.add(float(second), 1.0)
    for second in range(50_000, 90_000):
        curve.add(float(second), 2.0)
    assert sum(value == 2.0 for _, value in curve.points()) > POINTS / 16
