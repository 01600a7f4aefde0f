"""The event file: what was written can be read, whatever the figures."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path

import pytest

from noloco_node.telemetry.events import (
    OLD_NAMES,
    OLD_VALUES,
    EventFile,
    EventReader,
    InnerStep,
    NodeReassigned,
    Warned,
    read_events,
)
from tests.telemetry import made_events as made


@pytest.mark.parametrize("norm", [math.nan, math.inf, 0.5])
def test_figures_that_are_not_finite_are_read_back(tmp_path: Path, norm: float) -> None:
    """A skipped step has a gradient norm of NaN or infinity; each line is ordinary JSON all the same."""
    event = InnerStep(
        step=1, clock=64.0, tokens=64, loss=2.0, learning_rate=1e-3, gradient_norm=norm, skipped=True, live_replicas=1
    )
    path = tmp_path / "events.jsonl"
    file = EventFile(path)
    file.write(event)
    file.close()

    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    json.loads(path.read_text(), parse_constant=no_constant)
    (read,) = read_events(path)
    assert isinstance(read, InnerStep)
    assert read.gradient_norm == norm or (math.isnan(read.gradient_norm) and math.isnan(norm))
    assert read.step == 1


def test_a_line_that_a_killed_node_left_half_written_does_not_spoil_the_next_life(tmp_path: Path) -> None:
    """It is cut off; what stands before it stays, however long the torn line is."""
    path = tmp_path / "events.jsonl"
    events = [
        InnerStep(step=s, clock=1, tokens=1, loss=1, learning_rate=1, gradient_norm=1, skipped=False, live_replicas=1)
        for s in (1, 2)
    ]
    for torn in ('{"time": 1, "event": "inner', "x" * 200_000, ""):
        path.unlink(missing_ok=True)
        first = EventFile(path)
        first.write(events[0])
        first.close()
        with path.open("a") as file:
            file.write(torn)
        second = EventFile(path)
        second.write(events[1])
        second.close()
        assert read_events(path) == events


def test_a_file_name_that_is_not_utf8_is_told(tmp_path: Path) -> None:
    """A damaged shard of such a name ended the node that passed it over."""
    path = tmp_path / "events.jsonl"
    EventFile(path).write(Warned(what="text_damaged", detail=os.fsdecode(b"caf\xe9.txt is passed over")))
    assert [event.detail for event in read_events(path) if isinstance(event, Warned)] == ["caf?.txt is passed over"]


def test_a_folder_that_goes_away_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a network's disk each call may fail; what comes afterwards is whole."""
    file = EventFile(tmp_path / "events.jsonl")

    def gone(_: int) -> None:
        raise OSError(errno.ENOTCONN, "gone")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fstat", gone)
        patched.setattr(file, "_file", (tmp_path / "events.jsonl").open("rb"))
        file.write(made.inner_step(1))
    file.write(made.inner_step(2))
    assert [event.step for event in read_events(tmp_path / "events.jsonl") if isinstance(event, InnerStep)] == [2]


def test_what_is_no_event_is_passed_over(tmp_path: Path) -> None:
    """A line may be of another version, torn, hostile, or longer than memory should hold; the events around it are
    read."""
    path = tmp_path / "events.jsonl"
    file = EventFile(path)
    file.write(made.inner_step(1))
    file.close()
    sound = path.read_bytes()
    hostile = (b"{}", b"[" * 100_000, b'{"event":"from_tomorrow"}', b"\xff\x00", b"x" * (3 << 20), b'"' + b"1" * 5000)
    path.write_bytes(b"\n".join((sound.strip(), *hostile, b"")) + sound)
    assert [event.event for event in read_events(path)] == ["inner_step", "inner_step"]


def test_a_file_of_the_release_before_is_read_by_todays_names() -> None:
    """Events, fields and values that were renamed keep what they said; `report` and `status` read such folders."""
    path = Path(__file__).parents[1] / "fixtures" / "events-0.1.0.jsonl"
    reader = EventReader(path)
    events = list(reader.new_events())
    assert not reader.passed_over
    assert len(events) == len(path.read_text(encoding="utf-8").splitlines())
    (moved,) = [event for event in events if isinstance(event, NodeReassigned)]
    assert moved.origin == "standby"
    text = path.read_text(encoding="utf-8")
    assert all(f'"{name}"' in text for name in (*OLD_NAMES, *(value for _, value in OLD_VALUES)))


def test_a_disk_that_says_at_the_end_that_it_took_no_more_is_no_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A node that had come to its end in order was told as failed."""
    file = EventFile(tmp_path / "events.jsonl")
    file.write(made.inner_step(1))
    own = Path("/proc/self/fd")
    [opened] = [int(fd) for fd in os.listdir(own) if os.path.realpath(own / fd) == str(tmp_path / "events.jsonl")]
    os.close(opened)
    file.close()
    assert "the last events may be lost" in caplog.text
