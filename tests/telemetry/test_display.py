"""The display shows the swarm's figures, on one screen or in one line."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from noloco_node.telemetry import display
from noloco_node.telemetry.display import Display, LocalSwarmView, plain_line, screen
from tests.telemetry import made_events as made
from tests.telemetry.made_swarm import drawn

NOW = 1061.5


def whole_view() -> LocalSwarmView:
    """The made-up run, to its end."""
    view = LocalSwarmView(run_name="made-up", stages=2, target=100_000, nodes=made.NAMES)
    for name, events in made.whole_run().items():
        for event in events:
            view.observe(name, event)
    return view


def half_view() -> LocalSwarmView:
    """The made-up run at step 30."""
    view = LocalSwarmView(run_name="made-up", stages=2, target=61_440, nodes=made.NAMES)
    for name, events in made.whole_run().items():
        for event in events:
            if event.time <= 1030.0:
                view.observe(name, event)
    return view


def test_the_figures_are_those_of_the_events() -> None:
    """Clock, rate, time left, live nodes and rounds at the middle of the run."""
    view = half_view()
    swarm = view.swarm(1030.0)
    assert (view.step(1030.0), swarm.clock) == (30, 30 * 1024.0)
    assert [stage.nodes["training"] for stage in swarm.stages] == [2, 2]
    assert swarm.tokens_per_second == pytest.approx(1024, rel=0.05)
    assert swarm.seconds_left == pytest.approx(30, rel=0.05)
    assert view.outer_steps(1030.0) == "12"
    assert swarm.replica_divergence is not None
    assert swarm.replica_divergence.value == pytest.approx(made.SPREADS[2])
    assert swarm.training_loss is not None
    assert swarm.training_loss.value == pytest.approx(sum(made.loss_at(step * 1024) for step in range(26, 31)) / 5)


def test_a_node_that_died_is_no_longer_counted_and_is_reported() -> None:
    """Its stage shows one node less, and the screen says so."""
    view = half_view()
    view.lost("s1-r1", "killed by SIGKILL")
    assert [stage.present for stage in view.swarm(1030.0).stages] == [2, 1]
    assert "s1-r1 DIED: killed by SIGKILL" in drawn(screen(view, 1030.0, 40), 40)


def test_a_node_that_goes_on_in_a_new_life_is_no_ended_one() -> None:
    """A swarm that is started again reads what its nodes wrote before."""
    view = half_view()
    view.observe("s0-r0", made.stopped("s0-r0"))
    assert "s0-r0" not in [node.name for node in view.swarm(1030.0).nodes]
    view.observe("s0-r0", made.started("s0-r0"))
    assert {node.name: node.state for node in view.swarm(1030.0).nodes}["s0-r0"] == "starting"


def test_the_screen_shows_what_a_person_wants_to_know_and_fits() -> None:
    """Every promised figure, within the 40 lines of a common terminal."""
    text = drawn(screen(whole_view(), NOW, 40), 40)
    assert len(text.splitlines()) <= 40
    for words in (
        *("inner step", "loss", "validation loss", "tokens/s", "outer steps", "24", "divergence", "learning rate"),
        *("61,440 of 100,000 tokens", "left", "made-up", "last averaged", "s1-r1 with s1-r0", "s1-r1 ended"),
    ):
        assert words in text
    half = drawn(screen(half_view(), 1030.0, 40), 40)
    (row,) = (line.split() for line in half.splitlines() if "s1-r1 …-s1-r1" in line)
    assert row[3:7] == ["1", "starting", "512", "0"]


def test_a_screen_takes_no_longer_for_what_it_does_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """All notes of a run were made into lines at each refresh, five times a second."""
    view, made_lines = half_view(), list[float]()
    for step in range(2000):
        view.note(f"line {step}", 1030.0)
    monkeypatch.setattr(display, "as_clock_time", lambda when: made_lines.append(when) or "now")  # pyright: ignore
    assert "line 1999" in drawn(screen(view, 1030.0, 40), 40)
    assert len(made_lines) <= 40


def test_without_a_terminal_lines_are_plain_and_not_too_many() -> None:
    """One line of figures for many refreshes, each notable event once, no escape codes."""
    printed = io.StringIO()
    with Display(whole_view(), Console(file=printed, width=80)) as display:
        for _ in range(50):
            display.refresh()
    lines = printed.getvalue().splitlines()
    assert "\x1b" not in printed.getvalue()
    assert sum("tokens/s" in line for line in lines) == 2
    assert sum("s0-r0 is up" in line for line in lines) == 1


def test_a_view_without_events_can_be_shown() -> None:
    """Before the first node is up there is nothing to divide by."""
    view = LocalSwarmView(run_name="empty", stages=2, target=1000, nodes=made.NAMES)
    assert plain_line(view, NOW).startswith(f"starting: 0 of {len(made.NAMES)} nodes are up")
    assert drawn(screen(view, NOW, 40), 40)
