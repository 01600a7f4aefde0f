"""Whose turn it is: fair while several wait, and nobody's time is lost to it."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noloco_node.tallies import FEW_PEERS, FairQueue


@dataclass(frozen=True)
class Source:
    """One that keeps so many microbatches under way, and needs so long for each of them by itself."""

    name: str
    in_flight: int
    seconds: float
    path: tuple[str, ...] = ()


def simulate(sources: list[Source], service: float, until: float, *, fair: bool = True) -> Counter[str]:
    """Microbatches of each source that one later stage has trained, in virtual time. A source is one device that makes
    them ready, one after another, as fast as it can and as its number under way allows. The stage takes `service`
    seconds for one, by turns or in the order of arrival."""
    queue, line, done = FairQueue[Source](), deque[Source](), Counter[str]()
    events: list[tuple[float, int, str, Source]] = []
    making, idle, order = dict.fromkeys((s.name for s in sources), 0), True, 0

    def at(when: float, what: str, source: Source) -> None:
        nonlocal order
        order += 1
        heapq.heappush(events, (when, order, what, source))

    def make(now: float, source: Source) -> None:
        making[source.name] += 1
        if making[source.name] == 1:
            at(now + source.seconds, "ready", source)

    for source in sources:
        for _ in range(source.in_flight):
            make(0.0, source)
    while events and events[0][0] < until:
        now, _, what, source = heapq.heappop(events)
        if what == "ready":
            queue.push(source.path or (source.name,), 64.0, source) if fair else line.append(source)
            making[source.name] -= 1
            if making[source.name]:
                at(now + source.seconds, "ready", source)
        else:
            done[source.name], idle = done[source.name] + 1, True
            make(now, source)
        if idle and (len(queue) or line):
            idle = False
            at(now + service, "trained", queue.pop() if fair else line.popleft())
    return done


HONEST = [Source(f"honest {number}", 3, 1.0) for number in range(3)]


def test_one_source_gets_no_more_than_its_part_while_the_others_wait() -> None:
    """One of four keeps 24 under way and makes them in no time; the stage can do what four ordinary ones ask for. In
    the order of arrival it had most of the work; by turns everybody else has what it asks for."""
    sources = [Source("greedy", 24, 0.01), *HONEST]
    alone = simulate(HONEST, 0.25, 1000.0)
    by_arrival, by_turns = (simulate(sources, 0.25, 1000.0, fair=fair) for fair in (False, True))
    assert by_arrival["greedy"] > 0.6 * by_arrival.total()
    assert by_turns["greedy"] < 0.27 * by_turns.total()
    for source in HONEST:
        assert by_turns[source.name] > 0.98 * alone[source.name]
    assert by_turns.total() >= by_arrival.total() - 1


@pytest.mark.parametrize("service", [1 / 25, 1 / 19], ids=["room", "just enough"])
def test_an_honest_source_sixteen_times_as_fast_loses_less_than_two_percent(service: float) -> None:
    """An origin on a better machine, or a node of an earlier stage that relays for many, at a stage that can do what is
    asked of it. Where it cannot, nobody's time is lost either."""
    sources = [Source("fast", 48, 1 / 16), *HONEST]
    by_arrival, by_turns = (simulate(sources, service, 500.0, fair=fair) for fair in (False, True))
    most = min(16.0 * 500.0, by_arrival["fast"])
    assert by_turns.total() >= by_arrival.total() - 1
    assert by_turns["fast"] > 0.98 * most
    overloaded = [simulate(sources, 1 / 12, 500.0, fair=fair).total() for fair in (False, True)]
    assert overloaded[1] >= overloaded[0] - 1


def test_a_node_that_relays_for_many_is_one_source_and_takes_turns_among_its_origins() -> None:
    """Two nodes relay: the one has a greedy origin and an honest one, the other an honest one. The greedy one gets what
    the others leave, of its own relay's part."""
    greedy = Source("greedy", 24, 0.01, ("one", "greedy"))
    beside, apart = Source("beside", 3, 0.5, ("one", "beside")), Source("apart", 3, 0.5, ("other", "apart"))
    done = simulate([greedy, beside, apart], 0.3, 900.0)
    assert done["apart"] > 0.3 * done.total()
    assert done["beside"] > 0.3 * done.total() * 0.7
    assert simulate([greedy, beside, apart], 0.3, 900.0, fair=False)["greedy"] > 0.7 * done.total()


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2), st.floats(0.0, 100.0)), max_size=60))
def test_nothing_is_lost_and_the_order_within_a_source_stays(items: list[tuple[int, int, float]]) -> None:
    """Whatever is pushed comes out once."""
    queue = FairQueue[tuple[int, int, int]]()
    for number, (source, part, cost) in enumerate(items):
        queue.push((str(source), str(part)), cost, (source, part, number))
    assert len(queue) == len(items)
    out = [queue.pop() for _ in items]
    assert sorted(number for _, _, number in out) == list(range(len(items)))
    for name in {each[:2] for each in out}:
        numbers = [each[2] for each in out if each[:2] == name]
        assert numbers == sorted(numbers)
    with pytest.raises(IndexError):
        queue.pop()


def test_who_was_away_neither_saved_up_nor_owes_and_names_are_forgotten() -> None:
    """A source that comes back takes turns at once; invented names do not make the queue grow."""
    queue = FairQueue[str]()
    for number in range(50):
        queue.push(("busy",), 1.0, f"busy {number}")
        assert queue.pop() == f"busy {number}"
    for source in ("busy", "new", "busy", "new", "new"):
        queue.push((source,), 1.0, source)
    assert sorted(queue.pop() for _ in range(2)) == ["busy", "new"]
    assert sorted(queue.pop() for _ in range(2)) == ["busy", "new"]
    assert queue.pop() == "new"
    for number in range(1_000):
        queue.push((f"name {number}",), 1.0, "")
        queue.pop()
    assert len(queue._stood) <= FEW_PEERS


def test_who_has_had_more_than_others_stands_behind_them_while_somebody_waits() -> None:
    """That holds also if it had nothing waiting in between."""
    queue = FairQueue[str]()
    queue.push(("a",), 10.0, "a")
    queue.push(("b",), 1.0, "b")
    queue.push(("b",), 1.0, "b again")
    assert queue.pop() == "a"
    queue.push(("a",), 1.0, "a again")
    assert [queue.pop() for _ in range(3)] == ["b", "b again", "a again"]
