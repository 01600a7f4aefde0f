"""`noloco-node watch` on a terminal: what a swarm looks like there, and what is said where there is none."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from noloco_node.cli import main as cli
from noloco_node.config.node_settings import NodeSettings
from noloco_node.diagnostics import watch as watching
from noloco_node.errors import ExitCode
from noloco_node.observer import nothing_seen
from noloco_node.telemetry.swarm_state import Happening
from noloco_node.telemetry.terminal import swarm_screen
from tests.telemetry.made_swarm import drawn, node, stage, swarm
from tests.telemetry.test_node_pages import RUDE
from tests.worlds import micro_spec


def test_a_swarm_is_seen_with_its_stages_nodes_and_what_is_missing() -> None:
    """A peer that only claims to be there is silent."""
    text = drawn(swarm_screen(swarm(), 50))
    for words in ("made-up · 2 nodes of 2 stages", "no node that answers serves stage 1", "1,000 of 30,720 tokens"):
        assert words in text
    assert "? left" in text, "nothing moves while a stage is missing"
    assert "640 (measured)" in text
    assert [line.split("…000002")[1].split()[:2] for line in text.splitlines() if "…000002" in line] == [
        ["1", "silent"]
    ]
    assert "…000009 vanished from stage 1" in text
    for words in ("2.2500 (2 nodes)", "2.3750 (1 node)", "1.50e-05", "volunteer 0 …000000"):
        assert words in text
    (gone,) = (line for line in text.splitlines() if "gone fishing …000009" in line)
    assert gone.split("…000009")[1].split()[:2] == ["1", "gone"]
    assert gone.split()[-4:-1] == ["2,048", "45", "s"]
    (head,) = (line for line in text.splitlines() if "trained" in line and "seen" in line)
    assert "outer steps" in head
    rest = drawn(swarm_screen(swarm(nodes=(node(0), node(1, 1, state="paused"))), 50))
    assert "only paused nodes have stage 1" in rest
    assert "no node that answers" not in rest
    assert "as they say" in drawn(swarm_screen(swarm(speed_from="records"), 50))
    ended = drawn(swarm_screen(swarm(clock=0.0, over=True), 50))
    assert "the run is over" in ended
    assert "30,720 of 30,720 tokens" in ended
    nothing = drawn(swarm_screen(nothing_seen(micro_spec()), 50))
    assert "looking for the nodes of the run" in nothing
    assert "serves stage" not in nothing, "nobody has looked yet"


def test_nodes_that_have_not_been_heard_yet_are_neither_missing_nor_ahead() -> None:
    """At the first looks there are records only, and no clock to hold theirs against."""
    silent = tuple(node(n, n, answers=False, lag=-300_000.0) for n in (0, 1))
    stages = (stage(0, missing=True, unreachable=1), stage(0, missing=True, unreachable=1))
    text = drawn(swarm_screen(swarm(stages=stages, nodes=silent, introduced=2), 50))
    assert "2 records found, and no node of them has answered yet" in text
    assert "serves stage" not in text
    assert "300,000" not in text


def test_many_stages_nodes_and_rude_words_leave_the_terminal_as_it_is() -> None:
    """What is missing is shown before what is well; nothing speaks to the terminal."""
    stages = tuple(stage(2, missing=number == 60) for number in range(64))
    nodes = tuple(node(n, n % 64, version=RUDE, peer_id=f"{RUDE}{n:06}") for n in range(200))
    happened = (Happening(1e300, "joined", RUDE, 3),) * 16
    view = swarm(stages=stages, nodes=nodes, introduced=1000, versions={RUDE: 200}, happenings=happened)
    text = drawn(swarm_screen(view, 40), 40)
    assert len(text.splitlines()) <= 40
    assert "serves stage 60" in text
    assert "and 997 more" in text
    assert "and 60 more stages" in text
    assert "an unknown time" in text
    assert not set("\x1b\u202e\r") & set(text)


def test_what_is_no_address_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """As `join` says it."""
    assert cli.main(["watch", "nonsense"]) == ExitCode.CONFIG
    assert "this is no address of a peer" in capsys.readouterr().err


async def test_a_reader_that_has_gone_is_no_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--json --follow` into `head` ended with a traceback: the error came in a group of errors."""

    async def beside(work: Coroutine[Any, Any, None], *_: object) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(work)

    @contextlib.asynccontextmanager
    async def looking_on(_: NodeSettings) -> AsyncGenerator[SimpleNamespace]:
        door = SimpleNamespace(transport=None, daemon=SimpleNamespace(joined_peers=()))
        supervisor = SimpleNamespace(beside=beside)
        yield SimpleNamespace(door=door, directory=None, spec=micro_spec(), supervisor=supervisor)

    def gone(_: object) -> None:
        raise BrokenPipeError

    seen = SimpleNamespace(last=nothing_seen(micro_spec()), run=lambda: None)
    for name, made in {"looking_on": looking_on, "Onlooker": lambda *_, **__: seen, "document": gone}.items():
        monkeypatch.setattr(watching, name, made)
    monkeypatch.setattr(watching, "configure_logging", lambda *_: None)
    with pytest.raises(BrokenPipeError):
        await watching.watch(NodeSettings(), Console(), as_json=True, follows=True)


def test_warnings_of_who_looks_on_stand_on_the_screen_in_a_line_each() -> None:
    """They are not written into what is drawn there."""
    text = drawn(swarm_screen(swarm(), 50))
    warned = drawn(swarm_screen(swarm(), 50, ["p2pd died (status 9); starting it again " * 9, RUDE]))
    assert "p2pd died" in warned
    assert len(warned.splitlines()) == len(text.splitlines()) + 2
    assert not set("\x1b\u202e\r") & set(warned)
