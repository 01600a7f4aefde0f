"""What a node's file keeps of its events over a month, by made-up ones: nobody waits."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from noloco_node.telemetry.events import (
    TOLD_SECONDS,
    Account,
    Diary,
    Doing,
    EventFile,
    NodeReassigned,
    NodeStopped,
    read_events,
)
from tests.telemetry import made_events as made

BEGIN, EVERY, HOUR = 1_000_000.0, 2.0, 3600.0
BOOKS = made.account()


class Life:
    """A node's diary in the making."""

    def __init__(self, folder: Path) -> None:
        self.path, self.last = folder / "events.jsonl", BOOKS
        self.diary = Diary(EventFile(self.path))

    def go_on(self, since: float, until: float, every: float = EVERY) -> None:
        """Books every two seconds, or as said, from one time since the start to another."""
        for tick in range(int(since / every), int(until / every)):
            self.last = BOOKS.model_copy(update={"time": BEGIN + every * tick})
            self.diary.write(self.last)

    def kept(self) -> list[float]:
        """Seconds after the start of the accounts in the file."""
        return [event.time - BEGIN for event in read_events(self.path) if isinstance(event, Account)]


def test_within_the_first_hour_all_is_kept(tmp_path: Path) -> None:
    """What tests, benchmarks and people look at."""
    life = Life(tmp_path)
    life.go_on(0.0, HOUR)
    assert life.kept() == [EVERY * tick for tick in range(int(HOUR / EVERY))]


def test_the_longer_it_runs_the_fewer_accounts_are_kept(tmp_path: Path) -> None:
    """After thirty hours one a minute, 1.4 MB a day and not 41; other events all."""
    life = Life(tmp_path)
    life.go_on(0.0, 31 * HOUR, every=20.0)
    before = life.path.stat().st_size
    life.go_on(31 * HOUR, 37 * HOUR, every=20.0)
    step = made.inner_step(7, time=BEGIN + 37 * HOUR)
    life.diary.write(step)
    late = [at for at in life.kept() if at > 31 * HOUR]
    gaps = [after - before for before, after in pairwise(late)]
    assert set(gaps) == {TOLD_SECONDS}
    assert life.path.stat().st_size - before < 1.4e6 * 6 / 24
    assert read_events(life.path)[-1] == step


def test_the_books_are_whole_at_its_end(tmp_path: Path) -> None:
    """The last account comes before the event that it stopped, or moved, and is there where it ends without one."""
    life = Life(tmp_path)
    life.go_on(0.0, 2 * HOUR)
    moved = NodeReassigned(
        time=BEGIN + 2 * HOUR, from_stage=0, stage=1, clock=1.0, why="poor", origin="peer", parameters=1, seconds=1.0
    )
    life.diary.write(moved)
    assert read_events(life.path)[-2:] == [life.last, moved]
    life.go_on(2 * HOUR, 3 * HOUR)
    life.diary.close()
    assert read_events(life.path)[-1] == life.last
    assert not any(isinstance(event, NodeStopped) for event in read_events(life.path))


def test_a_clock_that_is_set_back_keeps_no_account_out(tmp_path: Path) -> None:
    """By a day after two, and to a time before its start."""
    life = Life(tmp_path)
    life.go_on(0.0, 48 * HOUR, every=20.0)
    before = len(life.kept())
    life.go_on(24 * HOUR, 25 * HOUR)
    assert len(life.kept()) > before + 50
    before = len(life.kept())
    life.go_on(-10 * HOUR, -8 * HOUR)
    assert len(life.kept()) - before < 500, "behind its start it lets a few in, and not all"


def test_the_books_of_a_stage_come_before_a_node_goes_to_another_and_the_worst_lag_is_kept(tmp_path: Path) -> None:
    """A report adds up from account to account what a node did meanwhile."""
    life = Life(tmp_path)
    life.go_on(0.0, 40 * HOUR, every=20.0)
    life.go_on(40 * HOUR, 40 * HOUR + 6.0)
    life.diary.write(BOOKS.model_copy(update={"time": BEGIN + 40 * HOUR + 6.0, "loop_lag_seconds": 3.0}))
    life.go_on(40 * HOUR + 8.0, 40 * HOUR + 20.0)
    doing = Doing(time=BEGIN + 40 * HOUR + 21.0, what="joining", detail="", since=BEGIN)
    life.diary.write(doing)
    books, last = read_events(life.path)[-2:]
    assert last == doing
    assert isinstance(books, Account)
    assert (books.time, books.loop_lag_seconds) == (life.last.time, 3.0)
