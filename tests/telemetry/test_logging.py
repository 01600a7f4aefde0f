"""Log lines name their node, and other libraries log through the same handler."""

from __future__ import annotations

import json
import logging
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from noloco_node.cli.commands import parser
from noloco_node.cli.main import main
from noloco_node.cli.printing import print_run, print_seed, teller
from noloco_node.config.load import load_config
from noloco_node.directory.summary import SwarmSummary
from noloco_node.errors import ExitCode
from noloco_node.telemetry.events import Evaluation
from noloco_node.telemetry.logging import NodeLog, configure_logging
from tests.telemetry import made_events as made

MICRO = Path(__file__).parent.parent / "configs" / "micro.yaml"


@pytest.fixture
def untouched_logging() -> Iterator[None]:
    """Puts the process's logging back as it was."""
    loggers = [logging.getLogger(name) for name in (None, "noloco_node", "hivemind")]
    before = [(logger, list(logger.handlers), logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, handlers, level, propagate in before:
        logger.handlers[:] = handlers
        logger.setLevel(level)
        logger.propagate = propagate


@pytest.mark.usefixtures("untouched_logging")
def test_each_line_carries_short_peer_id_stage_and_round(capsys: pytest.CaptureFixture[str]) -> None:
    """The node is known from its own events."""
    log = NodeLog()
    configure_logging("INFO", log)
    logging.getLogger("noloco_node.directory").info("looking for peers")
    log.observe(made.started("s1-r0"))
    log.observe(made.outer_step(3, "s1-r1"))
    logging.getLogger("noloco_node.directory").info("still there")
    for step in (3, 4):
        log.observe(made.inner_step(step))
    log.observe(made.moved(time=1100.0, from_stage=1, stage=0))
    logging.getLogger("noloco_node.directory").info("at another")
    lines = capsys.readouterr().err.splitlines()
    assert "[starting] looking for peers" in lines[0]
    assert " stage 0," in next(line for line in lines if line.endswith("at another"))
    assert any("others join with: noloco-node join /ip4/127.0.0.1/tcp/4001/p2p/" in line for line in lines)
    assert any("[…-s1-r0 stage 1, outer step 3] still there" in line for line in lines)
    assert not any("inner step 4:" in line for line in lines)


@pytest.mark.usefixtures("untouched_logging")
def test_a_collector_gets_each_record_as_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    """That holds also for one of several lines, with what is no text, or with a traceback; the node is named once
    known."""
    log = NodeLog()
    configure_logging("INFO", log, style="json")
    speaker = logging.getLogger("noloco_node.directory")
    speaker.info("looking for %s", "peers")
    log.observe(made.started("s1-r0"))
    log.observe(made.outer_step(3, "s1-r1"))
    try:
        raise ValueError("\x1b[2J\u2028")
    except ValueError:
        speaker.exception("odd \n words")
    rows = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    first, odd = rows[0], rows[-1]
    assert (first["level"], first["logger"], first["message"]) == ("INFO", "noloco_node.directory", "looking for peers")
    assert "stage" not in first
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first["time"])
    assert "others join with" in rows[1]["message"]
    assert (odd["peer_id"], odd["stage"], odd["outer_steps_taken"]) == (made.peer_of("s1-r0"), 1, 3)
    assert odd["message"] == "odd \n words"
    assert "ValueError: \x1b[2J" in odd["exception"]


@pytest.mark.usefixtures("untouched_logging")
def test_beside_a_log_of_json_a_command_says_nothing_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    """What it joins, that a seed is up, and why it ends: each a line of JSON, and nothing on stdout."""
    configure_logging("INFO", NodeLog(), style="json")
    run, say = load_config(MICRO).run, teller("json")
    print_run(run, SwarmSummary(0.0, 49_152, (1, 1), 1.0), say)
    print_seed(run, ["/ip4/127.0.0.1/tcp/1/p2p/QmX"], "anew", False, model=Path("model"), say=say)
    assert main(["join", "nonsense", "--log-format", "json"]) == ExitCode.CONFIG
    captured = capsys.readouterr()
    rows = [json.loads(line) for line in captured.err.splitlines()]
    assert captured.out == ""
    assert [row["level"] for row in rows] == ["INFO", "INFO", "ERROR"]
    for row, words in zip(rows, ("run micro", "others join with", "no address of a peer"), strict=True):
        assert words in row["message"]


@pytest.mark.usefixtures("untouched_logging")
def test_who_founds_a_swarm_says_so_and_how_a_seed_comes_into_it(capsys: pytest.CaptureFixture[str]) -> None:
    """A run that two founded trained in halves, and nobody was told. A seed that came in by a node founds nothing."""
    log, run, address = NodeLog(), load_config(MICRO).run, "/ip4/203.0.113.7/tcp/31337/p2p/QmX"
    configure_logging("INFO", log)
    for founded in (True, False):
        log.observe(made.started("s0-r0").model_copy(update={"founded": founded, "addresses": [address]}))
        seeds = re.findall(r"noloco-node (seed CONFIG .*)", capsys.readouterr().err)
        assert len(seeds) == founded
        if founded:
            assert parser().parse_args(shlex.split(seeds[0])).initial_peers == [address]
    for begins, told in (("anew", True), ("among_others", False), ("after_the_end", False)):
        print_seed(run, [address], begins, told, model=Path("model"))
        printed = capsys.readouterr().out
        assert ("BEGINS A NEW SWARM" in printed, "the run's model will be in model" in printed) == (told, told)


@pytest.mark.usefixtures("untouched_logging")
def test_what_is_shown_follows_the_level(capsys: pytest.CaptureFixture[str]) -> None:
    """INFO shows evaluations and hides inner steps and aborted exchanges; DEBUG shows all."""
    log = NodeLog()
    for event in (made.inner_step(1), made.outer_step(1, "s0-r1")):
        log.observe(event)
    events = [
        made.inner_step(1),
        made.outer_step(1, "s0-r1", kind="aborted", reason="busy"),
        Evaluation(clock=5.0, step=1, loss=2.0, tokens=10, final=True),
    ]
    for level, shown in (("INFO", 1), ("DEBUG", 3), ("ERROR", 0)):
        configure_logging(level, log)
        for event in events:
            log.observe(event)
        assert len(capsys.readouterr().err.splitlines()) == shown


@pytest.mark.usefixtures("untouched_logging")
def test_a_node_that_trains_is_silent_for_a_minute_at_most(capsys: pytest.CaptureFixture[str]) -> None:
    """At a low pace there were minutes between two outer steps, and nothing but these was shown. The first inner step
    of each life is told at once: now it really trains."""
    log, began = NodeLog(), made.started("s0-r0").time
    configure_logging("INFO", log)
    log.observe(made.started("s0-r0"))
    for step in range(1, 40):
        log.observe(made.inner_step(step, time=began + 10.0 * step))
    log.observe(made.started("s0-r0").model_copy(update={"time": began + 400.0}))
    log.observe(made.inner_step(40, time=began + 401.0))
    shown = re.findall(r"inner step (\d+): ", capsys.readouterr().err)
    assert [int(step) for step in shown] == [1, 7, 13, 19, 25, 31, 37, 40]


@pytest.mark.usefixtures("untouched_logging")
def test_hivemind_speaks_through_our_handler_and_only_of_trouble(capsys: pytest.CaptureFixture[str]) -> None:
    """Its own handler is taken off; its everyday lines are not shown."""
    own = logging.StreamHandler()
    logging.getLogger("hivemind").addHandler(own)
    logging.getLogger("hivemind").propagate = False
    configure_logging("INFO", NodeLog())
    logging.getLogger("hivemind.dht").info("chatter")
    logging.getLogger("hivemind.dht").warning("trouble")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].endswith("[starting] trouble")
