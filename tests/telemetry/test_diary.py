"""What a node's file keeps of its events over a month, by made-up ones: nobody waits."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from noloco_node.telemetry.diary import AT_LAST_SECONDS, Diary
from noloco_node.telemetry.events import Account, EventFile, NodeMoved, NodeStopped, read_events
from tests.telemetry import made_events as made

BEGIN, EVERY, HOUR = 1_000_000.0, 2.0, 3600.0
BOOKS = made.account()


class Life:
    """A node's diary in the making."""

    def __init__(self, folder: Path) -> None:
        self.path, self.last = folder / "events.jsonl", BOOKS
        self.diary = Diary(EventFile(self.path))

    def go_on(self, since: float, until: float, nodes: list[int] | None = None) -> None:
        """Books every two seconds from one time since the start to another."""
        for tick in range(int(since / EVERY), int(until / EVERY)):
            told = {"time": BEGIN + EVERY * tick, "nodes_per_stage": nodes or [4, 4]}
            self.last = BOOKS.model_copy(update=told)
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
    life.go_on(0.0, 31 * HOUR)
    before = life.path.stat().st_size
    life.go_on(31 * HOUR, 37 * HOUR)
    step = made.inner_step(7, time=BEGIN + 37 * HOUR)
    life.diary.write(step)
    late = [at for at in life.kept() if at > 31 * HOUR]
    gaps = [after - before for before, after in pairwise(late)]
    assert set(gaps) == {AT_LAST_SECONDS}
    assert life.path.stat().st_size - before < 1.4e6 * 6 / 24
    assert read_events(life.path)[-1] == step


def test_who_is_there_is_kept_sooner(tmp_path: Path) -> None:
    """Also where it changes all the time, as estimates do."""
    life = Life(tmp_path)
    life.go_on(0.0, HOUR)
    life.go_on(39 * HOUR, 40 * HOUR)
    life.go_on(40 * HOUR, 40 * HOUR + 20.0, [4, 3])
    assert any(40 * HOUR <= at <= 40 * HOUR + 10.0 for at in life.kept())
    for second in range(20, 1000, 2):
        life.go_on(40 * HOUR + second, 40 * HOUR + second + 2.0, [4, second])
    assert 90 < len([at for at in life.kept() if at >= 40 * HOUR]) < 110


def test_the_books_are_whole_at_its_end(tmp_path: Path) -> None:
    """The last account comes before the event that it stopped, or moved, and is there where it ends without one."""
    life = Life(tmp_path)
    life.go_on(0.0, 2 * HOUR)
    moved = NodeMoved(
        time=BEGIN + 2 * HOUR, from_stage=0, stage=1, clock=1.0, why="poor", origin="peer", parameters=1, seconds=1.0
    )
    life.diary.write(moved)
    assert read_events(life.path)[-2:] == [life.last, moved]
    life.go_on(2 * HOUR, 3 * HOUR)
    life.diary.close()
    assert read_events(life.path)[-1] == life.last
    assert not any(isinstance(event, NodeStopped) for event in read_events(life.path))


def test_a_clock_that_is_set_back_keeps_no_account_out(tmp_path: Path) -> None:
    """By a day, after two."""
    life = Life(tmp_path)
    life.go_on(0.0, HOUR)
    life.go_on(47 * HOUR, 48 * HOUR)
    before = len(life.kept())
    life.go_on(24 * HOUR, 25 * HOUR)
    assert len(life.kept()) > before + 50
