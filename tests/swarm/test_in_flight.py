"""How many microbatches an origin keeps under way by itself: in queues of devices and links that are simulated here."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any, Literal

import pytest

from noloco_node.config.node_settings import AUTO_AIM, AUTO_MOST, NodeSettings
from noloco_node.config.run_spec import ActivationCodec
from noloco_node.pipeline import admission
from noloco_node.pipeline.admission import ENOUGH_WAITING, InFlight, Rate, holds_back, next_limit, of_use
from noloco_node.pipeline.messages import Trained
from noloco_node.pipeline.server import PipelineServer
from noloco_node.simulator.links import Attachment, Links, SharedWay
from noloco_node.simulator.loop import in_virtual_time
from noloco_node.simulator.node import peer_of
from noloco_node.simulator.quadratic import Quadratic
from noloco_node.simulator.world import World
from noloco_node.training.compute_thread import Priority
from tests.worlds import micro_spec


@dataclass
class Station:
    """Serves one after another, each for about so many seconds."""

    seconds: float
    free_at: float = 0.0
    busy: float = 0.0

    def serve(self, now: float, rng: random.Random, jitter: float) -> tuple[float, float]:
        """When one that comes now is done, and for how long it waits before."""
        taken = self.seconds * rng.uniform(1.0 - jitter, 1.0 + jitter)
        begins = max(self.free_at, now)
        self.free_at = begins + taken
        self.busy += taken
        return self.free_at, begins - now


@dataclass
class Origin:
    """One of the nodes that send to the next stage: its device, and its own drawers."""

    device: Station
    in_flight: InFlight
    idle: list[int] = field(default_factory=list[int])
    under_way: int = 0
    own_step: int = 0
    """Gradients of the weights that they changed."""
    trained: int = 0


@dataclass
class Way:
    """Origins' devices, a round trip, and the next stage's one device: forward here, there and back, backward here.

    `until` ends with the share of the time that the first origin's device and the next stage's have worked since
    `settled`."""

    own: float
    other: float
    round_trip: float
    share: int = 100
    jitter: float = 0.1
    setting: int | Literal["auto"] = "auto"
    count: int = 1
    now: float = 0.0
    origins: list[Origin] = field(default_factory=list[Origin])

    def __post_init__(self) -> None:
        self.next = Station(self.other)
        self.rng = random.Random(1)
        for number in range(self.count):
            flight = InFlight(self.setting, lambda: self.share, partial(self.missing, number), lambda: self.now)
            self.origins.append(Origin(Station(self.own / 2), flight))

    def missing(self, number: int) -> int:
        """Microbatches until the next step of an origin."""
        return self.share - self.origins[number].trained % self.share

    @property
    def limit(self) -> int:
        """The limit of the first origin."""
        return self.origins[0].in_flight.limit

    def until(self, end: float, settled: float) -> tuple[float, float]:
        events: list[tuple[float, int, str, int, int, float, float, int]] = []
        order = itertools.count()
        marks: tuple[float, float] | None = None

        def put(at: float, what: str, *told: Any) -> None:
            heapq.heappush(events, (at, next(order), what, *told))

        def draw(number: int) -> None:
            origin = self.origins[number]
            for slot in sorted(origin.idle):
                if origin.in_flight.open_to(slot, origin.under_way):
                    origin.idle.remove(slot)
                    origin.under_way += 1
                    done, _ = origin.device.serve(self.now, self.rng, self.jitter)
                    put(done, "sent", number, slot, self.now, 0.0, origin.trained // self.share)

        for number, origin in enumerate(self.origins):
            origin.idle, origin.under_way = list(range(origin.in_flight.most)), 0
            draw(number)
        while events and self.now < end:
            self.now, _, what, number, slot, drawn_at, waited, step = heapq.heappop(events)
            origin = self.origins[number]
            if marks is None and self.now >= settled:
                marks = self.origins[0].device.busy, self.next.busy
                for each in self.origins:
                    each.own_step = 0
            if what == "sent":
                there, wait = self.next.serve(self.now + self.round_trip / 2, self.rng, self.jitter)
                put(there + self.round_trip / 2, "back", number, slot, drawn_at, wait, step)
            elif what == "back":
                done, wait = origin.device.serve(self.now, self.rng, self.jitter)
                put(done, "done", number, slot, drawn_at, waited + wait, step)
            else:
                origin.own_step += step == origin.trained // self.share
                origin.trained += 1
                origin.under_way -= 1
                origin.idle.append(slot)
                origin.in_flight.carried(self.now - drawn_at, waited)
                draw(number)
        assert marks is not None
        passed = self.now - settled
        return (self.origins[0].device.busy - marks[0]) / passed, (self.next.busy - marks[1]) / passed


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
    assert way.limit <= bound + ENOUGH_WAITING + 1.0


@pytest.mark.parametrize("count", [2, 4, 8])
def test_origins_that_share_a_device_do_not_fill_it_with_what_only_waits(count: int) -> None:
    """Each alone would win by every one more, at the cost of the others, until all keep as many as they may."""
    way = Way(0.1, 0.4, 0.1, count=count)
    _, worked = way.until(2000.0, 1000.0)
    assert worked >= 0.98
    assert max(origin.in_flight.limit for origin in way.origins) <= 4
    trained = [origin.trained for origin in way.origins]
    assert min(trained) >= 0.6 * max(trained)


def test_what_would_only_wait_is_drawn_with_the_next_steps_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """More gradients land in the step that they were drawn for, and the device that limits works as much."""
    held = Way(0.1, 0.4, 0.1, share=12, setting=6)
    _, worked = held.until(1000.0, 200.0)
    monkeypatch.setattr(admission, "holds_back", lambda *_: False)
    free = Way(0.1, 0.4, 0.1, share=12, setting=6)
    _, worked_before = free.until(1000.0, 200.0)
    assert held.origins[0].own_step >= 1.25 * free.origins[0].own_step
    assert worked >= 0.99 * worked_before


def test_nothing_is_held_back_that_the_next_step_needs_or_that_would_come_back_later_for_it() -> None:
    assert holds_back(1, 3, 0.5)
    assert not holds_back(2, 3, 0.5), "it would be back later"
    assert not holds_back(3, 2, 1.0), "the step needs it"
    assert not holds_back(0, 2, 1.0), "the step is being taken"
    assert not holds_back(1, 0, 1.0), "nobody would wake it"
    assert not holds_back(1, 1, 0.0)


def test_no_more_are_under_way_than_a_step_of_this_replica_has() -> None:
    way = Way(0.1, 0.1, 1.0, share=3)
    way.until(300.0, 10.0)
    assert way.limit == 3
    way.share = 1
    assert way.limit == 1
    assert not way.origins[0].in_flight.open_to(1, 1)


def test_a_link_that_grows_slower_gets_more_and_one_that_grows_quicker_fewer() -> None:
    way = Way(0.2, 0.1, 0.05)
    way.until(100.0, 10.0)
    few = way.limit
    way.round_trip = 0.6
    way.until(300.0, 110.0)
    many = way.limit
    way.round_trip = 0.05
    way.until(700.0, 310.0)
    assert few <= 3 < many
    assert way.limit <= 3


def test_a_number_that_is_set_is_kept_to() -> None:
    fixed = InFlight(5, lambda: 1, lambda: 9, lambda: 0.0)
    for _ in range(100):
        fixed.carried(10.0, 9.0)
    assert (fixed.limit, fixed.most) == (5, 5)
    assert [fixed.open_to(number, number) for number in (4, 5)] == [True, False]


@pytest.mark.parametrize(("seconds", "waited"), [(1e9, 0.0), (1e9, 1e12), (0.0, 0.0)])
def test_the_limit_stays_within_its_bounds_whatever_is_measured(seconds: float, waited: float) -> None:
    endless = InFlight("auto", lambda: 1000, lambda: 1000, lambda: 0.0)
    for _ in range(100):
        endless.carried(seconds, waited)
    assert 1 <= endless.limit <= AUTO_MOST


def test_the_least_number_that_brings_enough_is_kept_and_its_neighbours_are_tried_now_and_then() -> None:
    rates = {2: Rate(1.0, 101), 3: Rate(1.5, 102), 4: Rate(1.52, 103)}
    assert next_limit({}, 1, 5) == 5
    assert next_limit(rates, 104, 8) == 3
    assert next_limit(rates | {2: Rate(1.0, 60)}, 104, 8) == 2
    assert next_limit(rates | {4: Rate(1.52, 60)}, 104, 8) == 4
    assert next_limit(rates | {4: Rate(1.52, 60)}, 104, 3) == 3
    assert next_limit({3: Rate(1.0, 1)}, 1, 1) == 1


def test_what_was_seen_when_all_began_is_not_believed_for_long() -> None:
    rates = {2: Rate(1.0, 1), 3: Rate(1.5, 3), 4: Rate(1.5, 3)}
    assert next_limit(rates, 2, 8) == 3
    assert next_limit(rates, 3, 8) == 2


def test_who_waits_at_devices_takes_no_more_places() -> None:
    assert [of_use(4, waiting) for waiting in (1.9, 2.0, 3.0, 3.1)] == [5, 4, 4, 3]
    assert of_use(1, 3.1) == 1


def test_at_the_end_nobody_waits_for_a_place() -> None:
    auto = InFlight("auto", lambda: 1, lambda: 1, lambda: 0.0)
    assert not auto.open_to(7, 1)
    auto.release()
    assert auto.open_to(7, 1)


SLOW = 0.3


def full_uplinks(count: int) -> Links:
    """Each takes activations or a gradient away in `SLOW` seconds, one at a time."""
    way = SharedWay([[0.02]])
    for number in range(count):
        way.attach(peer_of(number), Attachment(0, 1e5, 1e9))
    return Links(way, lambda parcel: 1e5 * SLOW if parcel.specs else 0.0)


async def waits_of(
    layout: Sequence[int], in_flight: int, claim: float | None, *, links: bool = False
) -> list[tuple[float, float]]:
    """Seconds of each microbatch of a swarm whose last stage is slow, or with `links` whose uplinks are, and for how
    many of them it waited. Its last stage `claim`s so many where that is not None."""
    seen: list[tuple[float, float]] = []
    carried, answer = InFlight.carried, PipelineServer.answer
    spec = micro_spec(stages=max(layout) + 1, steps=100000, microbatches_a_step=8)

    async def lying(self: PipelineServer, trained: Trained, codec: ActivationCodec, began: float) -> Any:
        assert claim is not None
        return await answer(self, replace(trained, waited=claim), codec, began)

    def noted(self: InFlight, seconds: float, waited: float, link_wait: float = 0.0) -> None:
        seen.append((seconds, link_wait if links else waited))
        carried(self, seconds, waited, link_wait)

    def device(number: int) -> Callable[[Priority], float]:
        rng = random.Random(number)
        operation = SLOW if layout[number] == max(layout) and not links else SLOW / 10
        return lambda work: 0.001 if work is Priority.STEP else operation * rng.uniform(0.9, 1.1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InFlight, "carried", noted)
        if claim is not None:
            patch.setattr(PipelineServer, "answer", lying)
        settings = NodeSettings(in_flight=in_flight)
        way = full_uplinks(len(layout)) if links else None
        async with World(spec, settings, learning=Quadratic(1), device=device, links=way, seed=1) as swarm:
            for stage in layout:
                swarm.start(stage)
            await asyncio.sleep(8.0)
    return seen


def test_an_origin_is_told_for_how_long_its_microbatches_wait_for_devices_further_on() -> None:
    """The last of three stages is slow."""
    layout = (0, 1, 2)
    alone = in_virtual_time(lambda: waits_of(layout, 1, None), seed=1)
    many = in_virtual_time(lambda: waits_of(layout, 4, None), seed=1)
    quiet, nothing = (median(each) for each in zip(*alone, strict=True))
    seconds, waited = (median(each) for each in zip(*many, strict=True))
    assert nothing < 0.1 * SLOW < SLOW < waited
    assert waited == pytest.approx(seconds - quiet, rel=0.1)


def test_an_origin_sees_that_its_microbatches_wait_for_a_full_link() -> None:
    """Four of its own are on the way to links that take one at a time; alone one waits for none."""
    alone = in_virtual_time(lambda: waits_of((0, 1), 1, None, links=True), seed=1)
    many = in_virtual_time(lambda: waits_of((0, 1), 4, None, links=True), seed=1)
    nothing, waited = (median(wait for _, wait in each) for each in (alone, many))
    assert nothing < 0.1 * SLOW < SLOW < waited


def test_what_waits_for_a_link_is_drawn_after_the_step_and_keeps_its_place() -> None:
    """It could have been drawn later; its place is no other origin's."""
    now = 0.0
    by_link, by_device, neither = (InFlight("auto", lambda: 9, lambda: 1.0, lambda: now) for _ in range(3))
    for _ in range(60):
        now += 1.0
        by_link.carried(10.0, 0.0, 9.0)
        by_device.carried(10.0, 9.0)
        neither.carried(10.0, 0.0)
    assert [each.open_to(0, 2) for each in (by_link, by_device, neither)] == [False, False, True]
    assert by_link.limit == neither.limit


def test_nobody_is_believed_to_have_waited_for_longer_than_its_answer_took() -> None:
    seen = in_virtual_time(lambda: waits_of((0, 1), 1, 1e6), seed=1)
    assert len(seen) > 10
    assert all(waited <= seconds for seconds, waited in seen)
