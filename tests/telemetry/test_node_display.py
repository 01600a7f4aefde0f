"""The user that runs one node sees how far its run is: a live screen on a terminal, a line an outer step elsewhere."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys

import pytest
from rich.console import Console

from noloco_node import ambient
from noloco_node.telemetry.events import AnyEvent, Doing, StateDownload, Warned
from noloco_node.telemetry.logging import NodeLog
from noloco_node.telemetry.node_state import NodeView
from noloco_node.telemetry.terminal import NodeDisplay, node_screen
from noloco_node.telemetry.words import as_nodes
from tests.telemetry import made_events as made
from tests.telemetry.made_swarm import drawn

HALF = 1030.0


def half(*more: AnyEvent) -> list[AnyEvent]:
    """What a node of the made-up run has told at step 30 of 60."""
    rows = [event for event in made.node_events("s0-r0") if event.time <= HALF]
    return [*rows, made.account(time=HALF, clock=30 * 1024.0), *more]


def view_of(*events: AnyEvent) -> NodeView:
    """A node that has told these events."""
    view = NodeView()
    for event in events:
        view.observe(event)
    return view


def half_way(*more: AnyEvent) -> NodeView:
    """That node."""
    return view_of(*half(*more))


def screen_of(view: NodeView) -> str:
    """The screen as text."""
    return drawn(node_screen(view.state(), "foot"), 40)


def test_speed_loss_and_time_left_are_those_of_the_events() -> None:
    """The swarm's speed by the clock, the node's own by its tokens, the time left by the swarm's."""
    figures = half_way().state(HALF)
    assert (figures.inner_steps, figures.clock, figures.target, figures.share) == (30, 30_720.0, 61_440, 0.5)
    assert figures.swarm_tokens_per_second == pytest.approx(1024)
    assert figures.tokens_per_second == pytest.approx(512)
    assert figures.seconds_left == pytest.approx(30)
    assert figures.training_loss == pytest.approx(sum(made.loss_at(step * 1024) for step in range(26, 31)) / 5)
    assert figures.outer_steps == {"paired": 3, "no_partner": 0, "caught_up": 0, "aborted": 0}


def test_a_clock_that_goes_back_is_no_speed_and_no_end_in_sight() -> None:
    """A partner that is behind takes it back: `-78 tokens/s · 0 s left` stood in a log."""
    view = half_way()
    for step in range(31, 34):
        view.observe(made.inner_step(step, clock=step))
    figures = view.state(1033.0)
    assert (figures.swarm_tokens_per_second, figures.seconds_left) == (None, None)
    assert figures.tokens_per_second is not None


def test_a_jump_of_the_clock_is_no_speed() -> None:
    """A node that takes over a stage peer's state has not trained what lies between. One that goes on from a checkpoint
    has not trained while it was away."""
    view = half_way(made.outer_step(4, "s0-r1", kind="caught_up", time=1031.0, clock=90_000.0))
    for step in range(32, 37):
        view.observe(made.inner_step(step, clock=90_000.0 + (step - 31) * 1024.0))
    assert view.state(1036.0).swarm_tokens_per_second == pytest.approx(1024)
    view.observe(made.started("s0-r0").model_copy(update={"time": 2000.0}))
    for step in range(37, 40):
        view.observe(made.inner_step(step, time=1964.0 + step))
    assert view.state(2003.0).swarm_tokens_per_second == pytest.approx(1024)


def test_a_stall_lowers_the_speed_and_lengthens_the_time_left() -> None:
    """Nobody is told a minute for an hour."""
    before, after = (half_way().state(now) for now in (HALF, HALF + 300.0))
    assert before.swarm_tokens_per_second is not None
    assert after.swarm_tokens_per_second is not None
    assert after.swarm_tokens_per_second < 0.2 * before.swarm_tokens_per_second


def test_the_screen_shows_what_the_owner_of_a_node_wants_to_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress, speed, loss, time left, nodes by stage, the last partner, and what it waits for; in few lines."""
    waits = Doing(time=HALF, what="waiting_for_peers", detail="a replica of stage 1: none is known", since=HALF - 65)
    monkeypatch.setattr(ambient, "wall", lambda: HALF)
    text = screen_of(view_of(*half(waits, Warned(what="stage_lost", detail="the stage begins anew"))))
    for words in (
        *("made-up · stage 0 of 2", "30,720 of 61,440 tokens", "30 s left", "1,024", "512", "outer steps"),
        *("training loss", "stage 0: 2, stage 1: 2", "with …-s0-r1", "the stage begins anew"),
        "waiting for a replica of stage 1: none is known, for 65 s",
    ):
        assert words in text
    assert len(text.splitlines()) <= 18
    assert re.search(r"exchange +[\d.]+ .?B, [\d.]+ .?B/h", text), text


def test_a_view_without_events_can_be_shown_and_names_are_never_markup() -> None:
    """Before the first account there is nothing to divide by; a stranger's run may be called anything."""
    assert "starting" in screen_of(view_of())
    assert "[/bold]" in screen_of(view_of(made.started("s0-r0").model_copy(update={"run_name": "[/bold]"})))


def test_a_pause_is_no_slow_training() -> None:
    """The first step afterwards was shown as 149 tokens a second, with four hours left of four minutes. A node that
    rests has no speed."""
    view = half_way(Doing(time=HALF, what="paused", detail="paused: device and line are free", since=HALF))
    resting = view.state(HALF + 1.0)
    assert (resting.tokens_per_second, resting.swarm_tokens_per_second, resting.seconds_left) == (None, None, None)
    for step in (31, 32):
        view.observe(made.inner_step(step, time=HALF + 3600.0 + step))
    figures = view.state(HALF + 3632.0)
    assert figures.tokens_per_second == pytest.approx(512)
    assert figures.swarm_tokens_per_second == pytest.approx(1024)


def test_a_node_that_comes_home_goes_on_with_its_outer_rounds() -> None:
    """Each line of its log said `round 0` until its next outer step."""
    home = made.started("s0-r0").model_copy(update={"outer_steps_taken": 77, "resumed": True})
    assert view_of(home).state().outer_steps_taken == 77


def test_speeds_are_right_again_after_this_machines_clock_was_set_back() -> None:
    """By a day."""
    view = NodeView()
    for number in range(100):
        view.observe(made.inner_step(number, time=200_000.0 + number))
    for number in range(30):
        view.observe(made.inner_step(number, time=100_000.0 + 2 * number))
    assert view.state(100_058.0).tokens_per_second == pytest.approx(made.inner_step(1).tokens / 2)


def test_a_download_shows_until_it_is_whole_and_log_lines_stand_above_the_screen() -> None:
    """Megabytes and time left; a log line never shares a line with the screen, and is not broken."""
    console = Console(file=io.StringIO(), force_terminal=True, width=60)
    part, whole = (
        StateDownload(source="12D3KooWdonor", received=received, total=40_000_000, seconds=10.0)
        for received in (10_000_000, 40_000_000)
    )
    display = NodeDisplay(view_of(part), console)
    display.observe(part)
    line = "others join with: noloco-node join " + "/ip4/127.0.0.1/tcp/4001/p2p/" + "Q" * 52
    display.line(line)
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "10.0 of 40.0 MB of …Wdonor" in screen_of(view_of(part))
    assert "30 s left" in screen_of(view_of(part))
    assert "\x1b[2K" + line + "\n" in shown
    assert "of 40.0 MB" not in screen_of(view_of(part, whole))
    display.close()


def test_without_a_terminal_a_line_an_outer_round_says_how_far_the_run_is(caplog: pytest.LogCaptureFixture) -> None:
    """Share, speed, loss and time left behind every outer step; nothing of it behind a try that came to nothing."""
    log = NodeLog()
    with caplog.at_level("DEBUG", "noloco_node"):
        for event in made.node_events("s0-r0"):
            if event.time == HALF and event.event == "outer_step":
                log.observe(made.account(time=HALF, clock=30 * 1024.0))
            log.observe(event)
        log.observe(made.outer_step(7, "s0-r1", kind="aborted", reason="busy"))
    words = " · 50 % of 61,440 tokens · 1,024 tokens/s · loss 2."
    third = next(line for line in caplog.messages if line.startswith("outer step 3 paired"))
    assert words in third
    assert third.endswith("30 s left")
    assert any(line == "outer step came to nothing: busy" for line in caplog.messages)


def test_only_the_terminal_that_a_process_is_in_front_of_is_drawn_on() -> None:
    """Not a terminal that others write to as well, nor one that has sent the process to the background."""
    code = (
        "import os, sys; from noloco_node.telemetry.terminal import own_terminal\n"
        "assert own_terminal() is None\n"  # several nodes of one machine share a terminal like that
        "os.close(os.open(os.ttyname(2), os.O_RDWR))\n"
        "assert own_terminal() is not None\n"
    )
    ours, theirs = pty.openpty()
    try:
        answer = subprocess.run(
            [sys.executable, "-c", code], stderr=theirs, start_new_session=True, timeout=60, check=False
        )
        assert answer.returncode == 0, os.read(ours, 4096).decode()
    finally:
        os.close(ours)
        os.close(theirs)


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ((2, 0), "2 (stage 0: 2, stage 1: 0)"),
        ((4,), "4 (stage 0: 4)"),
        ((1,) * 9, "9 at 9 stages, each has some"),
        ((1, 1, 0, 1, 1, 1, 0, 1, 1), "7 at 9 stages, none at stages 2 and 6"),
    ],
)
def test_nodes_are_counted_by_stage_in_words(counts: tuple[int, ...], words: str) -> None:
    """`2 + 0` says nothing to a user that has not read the code."""
    assert as_nodes(counts) == words


def test_a_terminal_that_is_gone_ends_no_node() -> None:
    """A node whose user hung up left in order, and then said that it had failed."""
    ours, theirs = pty.openpty()
    display = NodeDisplay(half_way(), Console(file=os.fdopen(theirs, "w", encoding="utf-8"), force_terminal=True))
    os.close(ours)
    display.observe(made.started("s0-r0"))
    display.close()
