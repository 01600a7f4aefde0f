"""What a node says it does: never idle without naming what it waits for."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from noloco_node import ambient
from noloco_node.accounting.stats import CUT_OFF, Activity, Facts, doing
from noloco_node.directory.records import PeerState
from noloco_node.telemetry.events import Doing
from noloco_node.telemetry.logging import describe
from noloco_node.telemetry.metrics import Metrics

BUSY = Facts(PeerState.TRAINING, 1, 3, idle_seconds=1.0, step_seconds=0.5, before=2, after=2, in_hand=1)
IDLE = replace(BUSY, idle_seconds=60.0)
NONE_OF_2 = "a replica of stage 2: none is known"


@pytest.mark.parametrize(
    ("facts", "what", "words"),
    [
        (BUSY, "training", "training"),
        (replace(IDLE, step_seconds=20.0), "training", "training"),
        (replace(BUSY, missing=(2,), nodes=3), "waiting_for_peers", "a replica of stage 2: none is known"),
        (IDLE, "waiting_for_work", "answers from stage 2, which has 2 replicas: 1 microbatches are under way"),
        (replace(IDLE, in_hand=0), "waiting_for_work", "microbatches from stage 0, which has 2 replicas"),
        (replace(IDLE, after=0), "waiting_for_peers", NONE_OF_2),
        (replace(IDLE, before=0), "waiting_for_peers", "a replica of stage 0: none is known"),
        (replace(IDLE, stage=2, in_hand=3), "waiting_for_work", "the device: 3 microbatches are in hand"),
        (replace(IDLE, stage=2, in_hand=0), "waiting_for_work", "microbatches from stage 1, which has 2 replicas"),
        (replace(IDLE, stage=0, stages=1, after=0), "waiting_for_work", "the device: 1 microbatches are in hand"),
        (
            replace(IDLE, stage=2, missing=(0,), nodes=2),
            "waiting_for_peers",
            "a replica of stage 0: none is known, and 2 of the 3 nodes that it takes are there",
        ),
        (replace(IDLE, stage=2, missing=(0,), nodes=3), "waiting_for_peers", "a replica of stage 0: none is known"),
        (
            replace(IDLE, missing=(2,), paused={2}),
            "waiting_for_peers",
            "a replica of stage 2: only paused nodes have it",
        ),
        (
            replace(IDLE, missing=(2,), introduced={0, 2}, nodes=3),
            "waiting_for_peers",
            "a replica of stage 2: those that are known have not answered this node",
        ),
        (replace(IDLE, missing=(0, 2), paused={2}, nodes=3), "waiting_for_peers", "a replica of stage 0, 2: none is"),
        (replace(IDLE, after=0, paused={2}), "waiting_for_peers", "a replica of stage 2: only paused nodes have it"),
        (replace(IDLE, before=0, paused={0}), "waiting_for_peers", "a replica of stage 0: only paused nodes have it"),
        (replace(BUSY, deserted=True), "training", f"training alone{CUT_OFF}"),
        (
            replace(IDLE, missing=(2,), deserted=True),
            "waiting_for_peers",
            f"a replica of stage 2: none is known{CUT_OFF}",
        ),
        (replace(IDLE, state=PeerState.DRAINING), "draining", "leaving: finishing what is under way"),
        (replace(IDLE, state=PeerState.FINISHING), "finishing", "its training is over"),
    ],
)
def test_what_a_node_does_follows_from_the_facts(facts: Facts, what: str, words: str) -> None:
    """The nearest cause is named: a stage without replicas before an answer that does not come."""
    kind, line = doing(facts)
    assert kind == what
    assert line.startswith(words)
    level, logged = describe(Doing(what=kind, detail=line, since=0.0))
    assert logged.endswith(line)
    assert (level == logging.WARNING) is (kind.startswith("waiting") or facts.deserted)


def test_a_change_is_said_once_and_its_beginning_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeated state is no news; other details of the same wait are, now and then, with the old beginning."""
    now = [100.0]
    monkeypatch.setattr(ambient, "wall", lambda: now[0])
    said: list[Doing] = []
    follower = Activity(said.append)
    for second, what, detail in (
        (0, "training", "training"),
        (2, "training", "training"),
        (4, "waiting_for_work", "answers: 3"),
        (6, "waiting_for_work", "answers: 2"),
        (20, "waiting_for_work", "answers: 1"),
        (-3600, "waiting_for_work", "answers: 5"),  # a clock that was set back
        (22, "training", "training"),
        (90, "training", "training alone"),
    ):
        now[0] = 100.0 + second
        follower.say(what, detail)  # type: ignore[arg-type]
    assert [(e.what, e.detail, e.since) for e in said] == [
        ("training", "training", 100.0),
        ("waiting_for_work", "answers: 3", 104.0),
        ("waiting_for_work", "answers: 1", 104.0),
        ("waiting_for_work", "answers: 5", 104.0),
        ("training", "training", 122.0),
        ("training", "training alone", 190.0),
    ]


def test_idle_time_begins_with_the_watch_and_anew_whenever_something_was_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That holds also if that was between two looks."""
    now = [100.0]
    monkeypatch.setattr(ambient, "monotonic", lambda: now[0])
    follower = Activity(lambda _: None)
    seen: list[float] = []
    for second, last_trained in ((5, 0.0), (8, 0.0), (9, 108.5), (30, 108.5)):
        now[0] = 100.0 + second
        seen.append(follower.idle_seconds(last_trained))
    assert seen == [5.0, 8.0, 0.5, 21.5]


def test_the_gauges_say_what_it_does_and_how_long_it_has_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    """One kind is 1 at a time; the waiting time grows until the wait is over."""
    metrics = Metrics()

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(name, labels)

    monkeypatch.setattr(ambient, "wall", lambda: 150.0)
    metrics.observe(Doing(what="waiting_for_work", detail="", since=120.0))
    assert value("noloco_doing", what="waiting_for_work") == 1.0
    assert value("noloco_waiting_seconds") == 30.0
    metrics.observe(Doing(what="training", detail="", since=140.0))
    assert value("noloco_doing", what="waiting_for_work") == 0.0
    assert value("noloco_doing", what="training") == 1.0
    assert value("noloco_waiting_seconds") == 0.0
