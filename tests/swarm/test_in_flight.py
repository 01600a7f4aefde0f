"""How many microbatches an origin keeps under way by itself: in queues of devices and links that are simulated here."""

from __future__ import annotations

import heapq
import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from noloco_node.config.node_settings import AUTO_AIM, AUTO_MOST
from noloco_node.pipeline.in_flight import InFlight, Rate, next_limit


@dataclass
class Station:
    """Serves one after another, each for about so many seconds."""

    seconds: float
    free_at: float = 0.0
    busy: float = 0.0

    def serve(self, now: float, rng: random.Random, jitter: float) -> float:
        taken = self.seconds * rng.uniform(1.0 - jitter, 1.0 + jitter)
        self.free_at = max(self.free_at, now) + taken
        self.busy += taken
        return self.free_at


@dataclass
class Way:
    """An origin's device, a round trip, and the device of the next stage: forward here, there and back, backward here.

    `until` ends with the share of the time that the origin's device has worked since `settled`."""

    own: float
    other: float
    round_trip: float
    share: int = 100
    jitter: float = 0.1
    now: float = 0.0
    device: Station = field(init=False)

    def __post_init__(self) -> None:
        self.device, self.next = Station(self.own / 2), Station(self.other)
        self.in_flight = InFlight("auto", lambda: self.share, lambda: self.device.busy, lambda: self.now)
        self.rng = random.Random(1)

    def until(self, end: float, settled: float) -> tuple[float, float]:
        """Share of the time that the origin's device and the next stage's work between `settled` and `end`."""
        events: list[tuple[float, int, str, float]] = []
        waiting = deque(range(self.in_flight.most))
        marks: tuple[float, float] | None = None

        def draw() -> None:
            for number in [n for n in waiting if self.in_flight.open_to(n)]:
                waiting.remove(number)
                heapq.heappush(events, (self.device.serve(self.now, self.rng, self.jitter), number, "sent", 0.0))

        draw()
        while events and self.now < end:
            self.now, number, what, sent_at = heapq.heappop(events)
            if marks is None and self.now >= settled:
                marks = self.device.busy, self.next.busy
            if what == "sent":
                there = self.next.serve(self.now + self.round_trip / 2, self.rng, self.jitter)
                heapq.heappush(events, (there + self.round_trip / 2, number, "back", self.now))
            elif what == "back":
                away = self.now - sent_at
                done = self.device.serve(self.now, self.rng, self.jitter)
                heapq.heappush(events, (done, number, "done", away))
            else:
                self.in_flight.carried(sent_at)
                waiting.append(number)
                draw()
        assert marks is not None
        passed = self.now - settled
        return (self.device.busy - marks[0]) / passed, (self.next.busy - marks[1]) / passed


@pytest.mark.parametrize(
    ("own", "other", "round_trip"),
    [(1.0, 0.5, 0.02), (1.0, 0.9, 0.1), (0.2, 0.1, 0.1), (0.2, 0.2, 0.4), (0.1, 0.3, 0.1), (0.3, 0.1, 1.5)],
)
def test_the_slower_device_works_nearly_always_and_no_more_are_under_way_than_that_takes(
    own: float, other: float, round_trip: float
) -> None:
    way = Way(own, other, round_trip)
    worked = max(way.until(2000 * max(own, other), 1000 * max(own, other)))
    bound = (own + other + round_trip) / max(own, other)
    assert worked >= AUTO_AIM - 0.05
    assert way.in_flight.limit <= bound + 1.5


def test_no_more_are_under_way_than_a_step_of_this_replica_has() -> None:
    way = Way(0.1, 0.1, 1.0, share=3)
    way.until(300.0, 10.0)
    assert way.in_flight.limit == 3
    way.share = 1
    assert way.in_flight.limit == 1
    assert not way.in_flight.open_to(1)


def test_a_link_that_grows_slower_gets_more_and_one_that_grows_quicker_fewer() -> None:
    way = Way(0.2, 0.1, 0.05)
    way.until(100.0, 10.0)
    few = way.in_flight.limit
    way.round_trip = 0.6
    way.until(300.0, 110.0)
    many = way.in_flight.limit
    way.round_trip = 0.05
    way.until(700.0, 310.0)
    assert few <= 3 < many
    assert way.in_flight.limit <= 3


def test_a_number_that_is_set_is_kept_to() -> None:
    fixed = InFlight(5, lambda: 1, lambda: 0.0, lambda: 0.0)
    for _ in range(100):
        fixed.carried(10.0)
    assert (fixed.limit, fixed.most) == (5, 5)
    assert [fixed.open_to(number) for number in (4, 5)] == [True, False]


def test_the_limit_stays_within_its_bounds_whatever_is_measured() -> None:
    assert next_limit({}, 1, 5) == 5
    assert next_limit({3: Rate(1.0, 1)}, 1, 1) == 1
    endless = InFlight("auto", lambda: 1000, lambda: 0.0, lambda: 0.0)
    for _ in range(100):
        endless.carried(1e9)
    assert 1 <= endless.limit <= AUTO_MOST


def test_the_least_number_that_brings_enough_is_kept_and_its_neighbours_are_tried_now_and_then() -> None:
    rates = {2: Rate(1.0, 1), 3: Rate(1.5, 2), 4: Rate(1.52, 3)}
    assert next_limit(rates, 4, 8) == 3
    assert next_limit(rates | {2: Rate(1.0, -100)}, 4, 8) == 2
    assert next_limit(rates | {4: Rate(1.52, -100)}, 4, 8) == 4
    assert next_limit(rates | {4: Rate(1.52, -100)}, 4, 3) == 3


def test_at_the_end_nobody_waits_for_a_place() -> None:
    auto = InFlight("auto", lambda: 1, lambda: 0.0, lambda: 0.0)
    assert not auto.open_to(7)
    auto.release()
    assert auto.open_to(7)
