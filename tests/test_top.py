"""`noloco-node top`: a node on a terminal, from its own pages over a real socket; rude words and nobody there."""

from __future__ import annotations

import io
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from noloco_node.cli import main as cli
from noloco_node.diagnostics.top import Follower, NoState, ask_state, follow, screen
from noloco_node.errors import ExitCode, UserError
from noloco_node.telemetry import web
from noloco_node.telemetry.node_state import NodeState, Surroundings
from noloco_node.telemetry.swarm_state import SwarmView, document
from noloco_node.telemetry.web import Page, WebServer
from tests.telemetry.made_swarm import drawn
from tests.telemetry.test_node_pages import RUDE, seen, shown
from tests.telemetry.test_page import whole_life


@contextmanager
def answering(body: bytes) -> Iterator[int]:
    """Something that gives this answer for a node's state; its port."""
    server = WebServer({"/api/state": lambda _: Page(body)})
    try:
        yield int(server.start("127.0.0.1", 0).rpartition(":")[2])
    finally:
        server.stop()


def told(**changes: object) -> NodeState:
    """What a node of which little is known says."""
    return NodeState.model_validate({"time": 10.0, "state": "starting", "detail": "no stage", "since": 5.0} | changes)


def refusal(port: int, host: str = "127.0.0.1") -> UserError:
    """What is said where no node answers."""
    with pytest.raises(UserError) as caught:
        follow(host, port, Console(file=io.StringIO()), once=True)
    return caught.value


async def test_a_node_is_seen_in_a_terminal_with_its_peers_and_its_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All that a real node's pages say, once, where there is no terminal; words of strangers do not speak to it."""
    import asyncio

    peers = (seen(), seen(peer_id=f"peer-{RUDE}", version=RUDE, answers=False))
    async with shown(tmp_path) as (telemetry, address):
        for event in whole_life():
            telemetry.emit(event)
        host, _, port = address.rpartition(":")
        with telemetry.showing(lambda: Surroundings(peers, 2, 2, 0)):
            line = ["top", "--metrics-host", host, "--metrics-port", port]
            assert await asyncio.to_thread(cli.main, line) == ExitCode.OK
    text = capsys.readouterr().out
    for words in ("made-up", "stage 0 of 2", "30,720 of 30,720", "training loss", "1.5", "2e-06", "silent", "100"):
        assert words in text.replace("61,440 of 61,440", "30,720 of 30,720").replace("2.00e-06", "2e-06"), words
    assert "final validation loss" in text
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_what_is_not_known_yet_is_a_dash_and_a_small_screen_holds_it() -> None:
    """A node that starts."""
    text = drawn(screen(Follower(told, "here", told()), 20))
    assert "no stage, for 5 s" in text
    assert "–" in text
    many = tuple({"peer_id": f"peer-{n:04}", "stage": n % 3, "answers": True} for n in range(200))
    text = drawn(screen(Follower(told, "here", told(peers=many, stage=1, stages=3, peer_id="p" * 20)), 20))
    assert "and 197 more" in text
    assert len(text.splitlines()) < 26


def test_what_stayed_on_this_machine_is_told_apart() -> None:
    """It is part of what was sent and received, and crossed no line."""
    given = {"bytes_sent": {"state": 9_000_000}, "bytes_nearby": 7_000_000}
    text = drawn(screen(Follower(told, "here", told(contribution=given)), 50))
    assert "of both, on this machine" in text
    assert "7.0 MB" in text


def test_why_a_peer_is_left_alone_is_told_below_the_peers() -> None:
    """Of three at most, in words that cannot speak to the terminal."""
    alone = [{"peer_id": f"peer-{n:04}", "stage": 1, "left_alone": f"it is on trial, {n} s more\x1b"} for n in range(9)]
    text = drawn(screen(Follower(told, "here", told(peers=alone, stage=0, stages=2, peer_id="p" * 20)), 50))
    assert [n for n in range(9) if f"it is on trial, {n} s more" in text] == [0, 1, 2]
    assert "\x1b" not in text


def test_a_peer_whose_record_says_that_it_is_paused_is_not_shown_as_silent() -> None:
    """Nobody asks it while it rests. A stage that waits for its owner's word is told apart from one without nodes."""
    peers = [{"peer_id": "rests", "stage": 1, "state": "paused"}, {"peer_id": "died", "stage": 2, "state": "training"}]
    here = {"stage": 0, "stages": 3, "peer_id": "p" * 20, "missing_stages": [1, 2]}
    rows = drawn(screen(Follower(told, "here", told(peers=peers, **here)), 50)).splitlines()
    assert [("paused" in row, "silent" in row) for row in rows if "…rests" in row or "…died" in row] == [
        (True, False),
        (False, True),
    ]
    text = "\n".join(rows)
    assert "only paused nodes have stage 1" in text
    assert "nobody serves stage 2" in text


def test_a_node_that_falls_silent_is_shown_as_it_was() -> None:
    """With since when; one that nobody has ever heard of is an error with a remedy."""
    answers = iter([told(), NoState("connection refused")])

    def ask() -> NodeState:
        answer = next(answers)
        if isinstance(answer, NoState):
            raise answer
        return answer

    follower = Follower(ask, "here")
    follower.look()
    follower.look()
    text = drawn(screen(follower, 50))
    assert "no answer since" in text
    assert "no stage" in text


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[1]",
        b"\xff\xfe",
        b"[" * 100_000,
        json.dumps({"time": "x", "state": 1, "detail": None, "since": 2}).encode(),
        b'{"time":1,"state":"a","detail":"b","since":1,"peers":[{"peer_id":1}]}',
    ],
    ids=["empty", "no fields", "a list", "no text", "deep", "wrong types", "a bad peer"],
)
def test_what_is_no_state_is_refused_in_one_line(body: bytes) -> None:
    """Whatever answers at that port."""
    with answering(body) as port:
        refused = refusal(port)
    assert "no state of a node" in refused.message
    assert refused.exit_code is ExitCode.CHECK_FAILED
    assert "--metrics-port" in refused.remedy


def test_at_a_seed_one_is_sent_to_watch() -> None:
    """It has pages, and no state of a node: another port would not help."""
    seen = json.dumps(document(SwarmView(time=1.0, run_id="r", run_name="n", target=1, stages=()))).encode()
    with answering(seen) as port:
        refused = refusal(port)
    assert "a seed answers there" in refused.message
    assert "noloco-node watch ADDRESS" in refused.remedy


def test_a_node_that_hangs_is_not_taken_for_another_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a process that is stopped: the remedy is about that one."""
    monkeypatch.setattr(web, "ANSWER_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        refused = refusal(stopped.getsockname()[1])
    assert "something listens there and does not answer" in refused.message
    assert "kill -CONT" in refused.remedy


def test_what_another_version_says_besides_is_passed_over() -> None:
    """Unknown fields, and fields that are missing."""
    body = {"time": 1.0, "state": "training", "detail": "training", "since": 0.5, "new": {"a": [1]}, "peers": []}
    with answering(json.dumps(body).encode()) as port:
        assert ask_state("127.0.0.1", port).state == "training"


def test_a_port_where_nobody_listens_is_named() -> None:
    """So is an address that is none."""
    for host, port in (("127.0.0.1", 1), ("no-such-host.invalid", 1), ("a b", 1)):
        assert f"no node shows itself at {host} port {port}" in refusal(port, host).message
