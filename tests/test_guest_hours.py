"""The hours in which a node works, and what a person's word does to its rest: pure functions of (setting, now)."""

from __future__ import annotations

import time

import pytest

from noloco_node import ambient
from noloco_node.config.node_settings import NodeSettings, as_time, inside, next_begin, parse_hours
from noloco_node.node.interrupts import PauseState, PauseSwitch, looked, told


def minute(text: str) -> int:
    """Of the day."""
    hour, minute = text.split(":")
    return 60 * int(hour) + int(minute)


@pytest.mark.parametrize(
    ("hours", "works", "rests"),
    [
        ("22:00-07:00", ("22:00", "23:59", "00:00", "06:59"), ("07:00", "12:00", "21:59")),
        ("9:30-17:00", ("09:30", "16:59"), ("09:29", "17:00", "00:00")),
        ("22:00-07:00, 12:30-13:30", ("12:30", "13:29", "03:00"), ("13:30", "12:29", "07:00")),
        ("20:00-24:00", ("20:00", "23:59"), ("00:00", "19:59")),
        ("", ("00:00", "12:00"), ()),
    ],
)
def test_a_node_works_in_its_hours(hours: str, works: tuple[str, ...], rests: tuple[str, ...]) -> None:
    """Ranges may go over midnight; the end is no part of them."""
    ranges = parse_hours(hours)
    assert [inside(ranges, minute(text)) for text in (*works, *rests)] == [True] * len(works) + [False] * len(rests)


def test_the_next_begin_is_that_which_comes_first() -> None:
    """Also over midnight."""
    ranges = parse_hours("22:00-07:00, 12:30-13:30")
    assert [as_time(next_begin(ranges, minute(text))) for text in ("08:00", "14:00", "12:30")] == [
        "12:30",
        "22:00",
        "22:00",
    ]


@pytest.mark.parametrize(
    ("hours", "words"),
    [
        ("22:00-07:00, 06:00-08:00", "overlap"),
        ("06:00-08:00, 22:00-07:00", "overlap"),
        ("08:00-09:00,08:00-09:00", "overlap"),
        ("07:00-07:00", "never comes"),
        ("00:00-24:00", "the whole day"),
        ("07:00-19:00, 19:00-07:00", "the whole day"),
        ("25:00-07:00", "no time of the day"),
        ("22:60-07:00", "no time of the day"),
        ("24:01-07:00", "no time of the day"),
        ("at night", "no range of hours"),
        ("22:00-07:00,", "no range of hours"),
    ],
)
def test_other_hours_are_refused_with_a_word(hours: str, words: str) -> None:
    """The setting and its value are named."""
    with pytest.raises(ValueError, match=words) as refused:
        NodeSettings(hours=hours)
    assert "node.hours" in str(refused.value)


def test_a_pause_by_hand_outlasts_the_hours_and_a_resume_holds_until_they_have_come_and_gone() -> None:
    """The last word of a person stands; the clock takes over again where it would have said the same."""
    state = looked(told(PauseState(), "pause"), inside=False)
    assert state.rests
    assert looked(state, inside=True).rests
    state = told(state, "resume")
    assert not state.rests
    assert not looked(state, inside=False).rests
    state = looked(state, inside=True)
    assert not state.rests
    assert looked(state, inside=False).rests


def test_a_pause_says_in_which_zone_its_hours_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container they are UTC, and its owner's clock shows another time."""
    monkeypatch.setattr(ambient, "wall", lambda: 0.0)
    with monkeypatch.context() as patched:
        patched.setenv("TZ", "XYZ-5")
        time.tzset()
        said = PauseSwitch(parse_hours("04:00-05:00")).why()
        works = not PauseSwitch(parse_hours("05:00-06:00")).rests
    time.tzset()
    assert said.startswith("paused until 04:00 XYZ (node.hours)")
    assert works
